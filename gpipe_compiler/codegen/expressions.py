"""Calls and arguments of the graph as Python expressions."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.utils.checkpoint import checkpoint

from gpipe_compiler.codegen.constants import write_constant, write_nest
from gpipe_compiler.codegen.functions import BINARY, PLAIN_OF_AUGMENTED, UNARY, UNTYPED, spell
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.keywords import by_keyword
from gpipe_compiler.codegen.layout import Binding, Expression, call, method_call, name
from gpipe_compiler.frontend.own_statements import UnwritableError
from gpipe_compiler.ir import (
    Argument,
    Autocast,
    ByMode,
    Call,
    FunctionCall,
    MethodCall,
    ModuleCall,
    Ref,
    StateRef,
)
from gpipe_compiler.ir.arguments import parts
from gpipe_compiler.ir.ops import Context
from gpipe_compiler.ir.value_splits import split_by_values

_FACTORIES = frozenset(
    {
        *(torch.zeros, torch.ones, torch.full, torch.empty, torch.eye, torch.tensor),
        *(torch.arange, torch.linspace, torch.logspace, torch.tril_indices, torch.triu_indices),
        *(torch.rand, torch.randn, torch.randint, torch.randperm),
    }
)
"""Functions that make tensors out of numbers: on the CPU, unless given a device."""

_SLICE_OPERAND = re.compile(r"-?([A-Za-z_]\w*|\d+)")
_POWER_OPERAND = re.compile(r"-?\d[\d.]*(e[+-]?\d+)?|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class RawText:
    """As an argument of a call: an expression as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class OwnModule:
    """As an argument of a call: the module of the model at this path."""

    path: str


@dataclass(frozen=True, slots=True)
class Counted:
    """As an argument of a call: the number of the round of a loop, plus a constant."""

    loop: str
    offset: int


def again(called: object, arguments: Iterable[object]) -> FunctionCall:
    """A call that runs a second time in the backward."""
    return FunctionCall(checkpoint, (called, *arguments), {"use_reentrant": False})


def runs_again(made: Call) -> bool:
    """Whether a call is one of `again`."""
    return isinstance(made, FunctionCall) and made.function is checkpoint


def outer_argument(state: str) -> str:
    """The name of an argument by which a block is given a state from outside."""
    return f"@{state}"


@dataclass
class ExpressionWriter:
    """Writes expressions of one method.

    Attributes:
        variables: for every value, the variable that holds it, or the expression that makes it.
        states: for every parameter, buffer and constant, the expression for it (`self.scale`).
        modules: for every module path, the expression for it (`self.layers["2"].conv1`).
        anchor: a tensor of the method; a device that was fixed by tracing becomes its device.
        given_device: an argument that is the device, where there is no such tensor.
        counters: the variables that number the rounds of loops.
        lists: the variables of lists, by the values in them.
    """

    imports: Imports
    states: Mapping[str, str]
    modules: Mapping[str, str]
    anchor: str = ""
    given_device: str = ""
    variables: dict[str, Expression] = field(default_factory=dict)
    counters: dict[str, str] = field(default_factory=dict)
    lists: dict[tuple[str, ...], str] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """The expression for the device; "" where there is none to read it off."""
        return f"{self.anchor}.device" if self.anchor else self.given_device

    def rename(self, old: str, new: str, but: Collection[str]) -> None:
        """Reads what a variable held off another one, but for some values."""
        word = re.compile(rf"(?<![\w.]){re.escape(old)}\b")
        for value, expression in self.variables.items():
            if value not in but and word.search(expression.flat):
                self.variables[value] = name(word.sub(new, expression.flat))
        if self.anchor == old:
            self.anchor = new

    def move(self, places: Mapping[str, str]) -> None:
        """Reaches some modules or states, and all in them, by other expressions from here on."""
        known = {**self.states, **self.modules}
        moved = {known[path]: own for path, own in places.items()}

        def place(text: str) -> str:
            old = next((old for old in moved if f"{text}.".startswith((f"{old}.", f"{old}["))), "")
            return moved[old] + text.removeprefix(old) if old else text

        self.modules = {path: place(text) for path, text in self.modules.items()}
        self.states = {path: place(text) for path, text in self.states.items()}

    def follow(self, anchor: str) -> None:
        """Reads the device off another tensor from here on."""
        before = self.device
        for value, expression in self.variables.items():
            if expression.flat == before:
                self.variables[value] = name(f"{anchor}.device")
        self.anchor = anchor

    def call(self, made: FunctionCall | MethodCall | ModuleCall) -> Expression:
        """A call.

        Raises:
            UnwritableError: when a function or constant has no spelling.
        """
        match made:
            case FunctionCall(function=function) if function is split_by_values:
                tensor, sizes, *rest = map(self.argument, made.args)
                listed = method_call(sizes, "tolist", [])
                others = self.arguments((), made.kwargs)
                return method_call(tensor, "split", [listed, *rest, *others])
            case FunctionCall():
                return self._function(made)
            case MethodCall("size", (of, int() as dim)):
                return Expression(f"{self.argument(of).within(Binding.ATOM)}.shape[{dim}]")
            case MethodCall(method=method):
                (receiver, *args), kwargs = by_keyword(method, None, made.args, made.kwargs)
                if method not in UNTYPED:
                    return method_call(
                        self.argument(receiver), method, self.arguments(args, kwargs)
                    )
                self.imports.module("torch")
                return call(f"torch.{method}", self.arguments((receiver, *args), kwargs))
            case ModuleCall():
                return call(self.modules[made.module], self.arguments(made.args, made.kwargs))

    def arguments(
        self, args: Iterable[Argument], kwargs: Mapping[str, Argument]
    ) -> list[Expression]:
        """The inside of a call's parentheses."""
        return [
            *(self.argument(item) for item in args),
            *(self.argument(item).prefixed(f"{key}=") for key, item in kwargs.items()),
        ]

    def argument(self, argument: Argument) -> Expression:
        if self.lists and isinstance(argument, list):
            names = [item.name if isinstance(item, Ref) else "" for item in argument]
            groups = [*grouped(names, self.lists)]
            if len(groups) == 1 < len(argument):
                return name(self.lists[groups[0]])
            places = itertools.accumulate(map(len, groups), initial=0)
            argument = [
                RawText(f"*{self.lists[group]}") if group in self.lists else argument[place]
                for place, group in zip(places, groups, strict=False)
            ]
        return write_nest(argument, self._leaf)

    def subscript(self, container: Argument, index: Argument) -> Expression:
        """`container[index]`."""
        opening = f"{self.argument(container).within(Binding.ATOM)}["
        inside = self._index(index)
        return Expression(
            f"{opening}{inside}]",
            opening=opening,
            items=(name(inside),),
            closing="]",
            fills=True,
            comma="",
        )

    def _leaf(self, leaf: object) -> Expression:
        match leaf:
            case Ref(name=value):
                return self.variables[value]
            case StateRef(name=state):
                return self.variables.get(outer_argument(state)) or name(self.states[state])
            case RawText(text=text):
                return name(text)
            case OwnModule(path=path):
                return name(self.modules[path])
            case Counted(loop=loop, offset=offset):
                own = self.counters[loop]
                sign = "+" if offset > 0 else "-"
                return (
                    Expression(f"{own} {sign} {abs(offset)}", Binding.SUM) if offset else name(own)
                )
            case ByMode():
                return self._by_mode(leaf)
            case torch.device() if self.device:
                return name(self.device)
            case _:
                return write_constant(leaf, self.imports)

    def _by_mode(self, choice: ByMode) -> Expression:
        if choice.train is True and choice.evaluation is False:
            return name("self.training")
        if choice.train is False and choice.evaluation is True:
            return Expression("not self.training", Binding.NOT)
        train, evaluation = self.argument(choice.train), self.argument(choice.evaluation)
        if choice.evaluation is False and isinstance(choice.train, Ref):
            both = f"self.training and {train.within(Binding.NOT)}"
            return Expression(both, Binding.CONDITIONAL)
        if train.flat == evaluation.flat:
            return train
        text = f"{train.within(Binding.NOT)} if self.training else {evaluation.flat}"
        return Expression(text, Binding.CONDITIONAL)

    def _function(self, made: FunctionCall) -> Expression:
        function = PLAIN_OF_AUGMENTED.get(made.function, made.function)
        args = made.args
        if not made.kwargs:
            match len(args):
                case 2 if function in BINARY:
                    return self._binary(*BINARY[function], *args)
                case 1 if function in UNARY:
                    sign, binding = UNARY[function]
                    operand = self.argument(args[0])
                    # ruff spells -(x**2) with the parentheses that Python does not need
                    loosest = Binding.ATOM if operand.binding is Binding.POWER else binding
                    return Expression(f"{sign}{operand.within(loosest)}", binding)
                case 2 if function is operator.getitem:
                    return self.subscript(*args)
                case 2 if function is getattr and str(args[1]).isidentifier():
                    return Expression(f"{self.argument(args[0]).within(Binding.ATOM)}.{args[1]}")
        spelling = spell(function, self.imports)
        if spelling is None:
            raise UnwritableError(f"the function {_describe(function)} is no part of torch")
        own = spelling.rpartition(".")[2]
        given, kwargs = by_keyword(own, made.function, args, made.kwargs)
        if self.device and made.function in _FACTORIES and kwargs.get("device") is None:
            # Tracing happened on one device; the stage runs on whichever it is given.
            kwargs["device"] = torch.device("cpu")
        return call(spelling, self.arguments(given, kwargs))

    def _binary(self, sign: str, binding: Binding, left: Argument, right: Argument) -> Expression:
        first, second = self.argument(left), self.argument(right)
        if binding is Binding.POWER:
            base, exponent = first.within(Binding.ATOM), second.within(Binding.UNARY)
            tight = _POWER_OPERAND.fullmatch(base) and _POWER_OPERAND.fullmatch(exponent)
            return Expression(f"{base}**{exponent}" if tight else f"{base} ** {exponent}", binding)
        tighter = Binding(binding + 1)
        loosest = tighter if binding is Binding.COMPARISON else binding
        start = f"{first.within(loosest)} {sign} "
        if second.binding < tighter:
            return Expression(f"{start}({second.flat})", binding)
        whole = replace(second.prefixed(start), binding=binding, instead=None)
        return whole if first.flat.isidentifier() else Expression(whole.flat, binding)

    def _index(self, index: Argument) -> str:
        if isinstance(index, tuple) and index:
            return ", ".join(map(self._index_part, index))
        return self._index_part(index)

    def _index_part(self, part: Argument) -> str:
        if not isinstance(part, slice):
            return self.argument(part).flat
        texts = [
            "" if bound is None else self.argument(bound).flat for bound in (part.start, part.stop)
        ]
        if part.step is not None:
            texts.append(self.argument(part.step).flat)
        if all(not text or _SLICE_OPERAND.fullmatch(text) for text in texts):
            return ":".join(texts)
        return " : ".join(texts).strip().replace(":  :", "::")


def grouped(
    values: Sequence[str], lists: Mapping[tuple[str, ...], str]
) -> Iterator[tuple[str, ...]]:
    """Values one by one, but those together that stand in one of the lists, by their values."""
    place = 0
    while place < len(values):
        around = (known for known in lists if (*values[place : place + len(known)],) == known)
        group = next(around, (values[place],))
        yield group
        place += len(group)


def reads_in_order(argument: Argument) -> Iterator[str]:
    """The values that an argument reads, in the order in which Python evaluates them.

    Without those in a choice between modes, of which only one side is evaluated.
    """
    if isinstance(argument, Ref):
        yield argument.name
    elif not isinstance(argument, ByMode):
        for item in parts(argument) or ():
            yield from reads_in_order(item)


def _describe(function: object) -> str:
    module = getattr(function, "__module__", None)
    own = getattr(function, "__qualname__", None) or str(function)
    return f"{module}.{own}" if module else own


def context_of(context: Context, writer: ExpressionWriter) -> Expression:
    """`torch.no_grad()` and the like; autocast on the device of the method's first tensor."""
    writer.imports.module("torch")
    if not isinstance(context, Autocast):
        return name("torch.enable_grad()" if context.enabled else "torch.no_grad()")
    device = context.device_type
    followed = device in ("cpu", "meta") and bool(writer.device)
    options = [name(f"{writer.device}.type" if followed else f'"{device}"')]
    if not context.enabled:
        options.append(name("enabled=False"))
    elif context.dtype is not None:
        options.append(name(f"dtype={context.dtype}"))
    return call("torch.autocast", options)
