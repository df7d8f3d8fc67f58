"""From a torch.fx graph to a Graph.

The fx graph is that of an `Entry`: placeholders in the order of the signature's inputs, and one
output, the list that `Entry.forward` returns. Nodes may carry `meta["source"]` (a SourceLocation)
or `meta["stack_trace"]`, `meta["nn_module_stack"]` and `meta["val"]`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from gpipe_compiler.errors import SourceLocation, TraceError
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.locate import line_of_trace, lines_of_calls
from gpipe_compiler.frontend.modules import rebuild
from gpipe_compiler.frontend.recompute import CHECKPOINT
from gpipe_compiler.frontend.simplify_graph import simplify_graph
from gpipe_compiler.frontend.state import named_state
from gpipe_compiler.frontend.untraced import transformed
from gpipe_compiler.frontend.user_code import line_of_forward
from gpipe_compiler.ir import (
    Argument,
    Autocast,
    Call,
    Context,
    FunctionCall,
    Graph,
    Loss,
    MethodCall,
    ModuleCall,
    ModuleSpec,
    NoGrad,
    Op,
    Reduction,
    Ref,
    RegionBody,
    RegionCall,
    State,
    StateKind,
    StateRef,
)
from gpipe_compiler.ir.legality import check
from gpipe_compiler.ir.own_functions import OwnFunction

_MODEL = "model"


def lower(graph: fx.Graph, root: nn.Module, entry: Entry) -> Graph:
    """The Graph that a torch.fx graph of an entry stands for.

    Args:
        graph: as above.
        root: where the graph's `get_attr` targets are found; what is missing there is looked up in
            the entry, and so are the targets of `call_module`.
        entry: what was traced.

    Raises:
        TraceError: for a node that no Graph can hold.
    """
    lowering = _Lowering(root, entry)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, source in zip(placeholders, entry.signature.inputs, strict=True):
        lowering.arguments[node] = Ref(source.name)
    ops, returned = lowering.nodes(graph)
    copies = {leaf: _copied(leaf) for leaf in returned[0] if isinstance(leaf, StateRef)}
    ops = [*ops, *copies.values()]
    leaves = [Ref(copies[leaf].name) if leaf in copies else leaf for leaf in returned[0]]
    loss = None
    if entry.has_loss:
        first = leaves.pop(0)
        if not isinstance(first, Ref):
            raise TraceError(
                "the loss does not depend on the inputs",
                hint="loss_fn(output, target) must compute it from the output",
            )
        # How losses combine matters in training only.
        reduction = entry.reduction if entry.training else Reduction.MEAN
        loss = Loss(first.name, reduction, returned=entry.returns_loss)
    raw = Graph(
        name=entry.name,
        inputs=entry.signature.inputs,
        ops=tuple(ops),
        outputs=entry.outputs(leaves),
        classes=entry.known.classes,
        state={**entry.states.states, **lowering.constants},
        modules=lowering.modules,
        batch_size=entry.signature.batch_size,
        loss=loss,
        tensors={**entry.states.tensors, **lowering.constant_tensors},
        example=dict(entry.signature.named()),
    )
    return check(simplify_graph(raw), after="the frontend")


def _copied(state: StateRef) -> Op:
    """What stands for a parameter or buffer that the model returns: a stage makes its outputs."""
    own = f"{state.name.replace('.', '_')}_returned"
    return Op(own, MethodCall("clone", (state,)), own)


def local_path(path: str) -> str:
    """A path inside the entry as the user's model calls it: `model.layer1` is `layer1`."""
    if path == _MODEL:
        return ""
    return path.removeprefix(f"{_MODEL}.")


@dataclass
class _Lowering:
    """Turns nodes into ops; names are still those of the nodes."""

    root: nn.Module
    entry: Entry
    arguments: dict[fx.Node, Argument] = field(default_factory=dict)
    modules: dict[str, ModuleSpec] = field(default_factory=dict)
    constants: dict[str, State] = field(default_factory=dict)
    constant_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    prefix: str = ""

    def __post_init__(self) -> None:
        table = self.entry.states
        self._names = {id(tensor): name for name, tensor in table.tensors.items()}
        for name, tensor in named_state(self.entry.model):
            if name not in table.canonical:
                raise TraceError(
                    f"forward makes {name}, a parameter or buffer that the model did not have "
                    "before: no stage can begin with it",
                    location=line_of_forward(self.entry.model),
                    hint="call the model once in build_model(), or make it in the constructor",
                )
            self._names[id(tensor)] = table.canonical[name]
        self._taken = {source.name for source in self.entry.signature.inputs}

    def nodes(self, graph: fx.Graph) -> tuple[list[Op], Any]:
        """The ops of a graph, and the arguments of its output node."""
        ops: list[Op] = []
        returned: Any = ((),)
        for node in graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                returned = self.argument(node.args)
            elif node.op == "get_attr":
                attribute = self._look_up(str(node.target))
                if isinstance(attribute, torch.Tensor):
                    self.arguments[node] = StateRef(self._state(str(node.target), attribute))
            else:
                ops.append(self._op(node))
        return ops, returned

    def _op(self, node: fx.Node) -> Op:
        # In-place ops may return their argument, so that a name may not stand for an input twice.
        name = f"%{self.prefix}{node.name}"
        call = self._call(node)
        self.arguments[node] = Ref(name)
        region = call.body.ops[0].checkpoint if isinstance(call, RegionCall) else ""
        checkpoint = str(node.meta.get(CHECKPOINT, region))
        return Op(
            name,
            call,
            name,
            source_of(node),
            module_of(node),
            checkpoint=checkpoint,
            turns=_turns_of(node),
            origin=node,
        )

    def _call(self, node: fx.Node) -> Call:
        own = isinstance(node.target, OwnFunction)
        if isinstance(node.target, torch._ops.HigherOrderOperator) and not own:
            return self._region(node)
        args = tuple(self.argument(item) for item in node.args)
        kwargs = {key: self.argument(item) for key, item in node.kwargs.items()}
        match node.op:
            case "call_function":
                args, kwargs = _attention_by_keyword(node.target, args, kwargs)
                assert callable(node.target)  # fx guarantees it
                if is_transform(node):
                    raise transformed(source_of(node))
                return FunctionCall(node.target, args, _without_defaults(node.target, kwargs))
            case "call_method":
                return MethodCall(str(node.target), args, kwargs)
            case _:
                return ModuleCall(self._module(str(node.target), node), args, kwargs)

    def argument(self, item: Any) -> Argument:
        """A node's argument as one of the graph."""
        match item:
            case fx.Node():
                if item not in self.arguments:
                    raise TraceError(f"{item.target} is used as a value", location=source_of(item))
                return self.arguments[item]
            case tuple():
                return tuple(self.argument(part) for part in item)
            case list():
                return [self.argument(part) for part in item]
            case dict():
                return {key: self.argument(part) for key, part in item.items()}
            case slice(start=start, stop=stop, step=step):
                return slice(self.argument(start), self.argument(stop), self.argument(step))
            case range():
                return list(item)
            case _:
                return item

    def _look_up(self, path: str) -> object:
        for root in (self.root, self.entry):
            found: object = root
            for name in path.split("."):
                found = getattr(found, name, None)
            if found is not None:
                return found
        raise TraceError(f"the traced graph reads {path}, which the model does not have")

    def _state(self, path: str, tensor: torch.Tensor) -> str:
        """The canonical name of a parameter or buffer; a new constant for any other tensor."""
        known = self._names.get(id(tensor)) or self.entry.states.canonical.get(local_path(path))
        if known is not None:
            return known
        wish = local_path(path)
        base = "constant" if "tensor_constant" in wish else wish
        name, number = base, 0
        while name in self.constants or name in self.entry.states.canonical:
            number += 1
            name = f"{base}_{number}"
        kind = StateKind.PARAMETER if isinstance(tensor, nn.Parameter) else StateKind.CONSTANT
        self.constants[name] = State(
            name,
            kind,
            tuple(tensor.shape),
            tensor.dtype,
            requires_grad=tensor.requires_grad,
            persistent=kind is StateKind.PARAMETER,
            initial=self.entry.states.initial.get(wish, ()) if tensor.is_meta else (),
        )
        self.constant_tensors[name] = tensor
        self._names[id(tensor)] = name
        return name

    def _module(self, target: str, node: fx.Node) -> str:
        path = local_path(target)
        if path not in self.modules:
            module = self.entry.get_submodule(target)
            spec = rebuild(path, module)
            if spec is None:
                raise TraceError(
                    f"the module {path} ({type(module).__name__}) cannot be constructed anew",
                    location=source_of(node),
                )
            state = {
                local: self._state(f"{target}.{local}", tensor)
                for local, tensor in named_state(module)
            }
            self.modules[path] = dataclasses.replace(spec, state=state)
        return path

    def _region(self, node: fx.Node) -> RegionCall:
        """A `no_grad` or autocast region with the graph inside it."""
        context, body_node, inputs = _region_parts(node)
        body = self._look_up(str(body_node.target))
        if not isinstance(body, fx.GraphModule):
            raise TraceError(f"the body of {node.target} is no graph", location=source_of(node))
        outer, self.prefix = self.prefix, f"{self.prefix}{node.name}."
        root, self.root = self.root, body
        placeholders = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
        names = tuple(f"%{self.prefix}{inner.name}" for inner in placeholders)
        self.arguments.update(zip(placeholders, map(Ref, names), strict=True))
        ops, returned = self.nodes(body.graph)
        self.prefix, self.root = outer, root
        outputs = returned[0] if isinstance(returned[0], tuple | list) else returned
        args = tuple(self.argument(item) for item in inputs)
        return RegionCall(context, RegionBody(names, tuple(ops), tuple(outputs)), args)


def _attention_by_keyword(
    function: object, args: tuple[Argument, ...], kwargs: dict[str, Argument]
) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
    """Attention's options by keyword, as people write them and as both modes can share them."""
    if function is not torch.nn.functional.scaled_dot_product_attention:
        return args, kwargs
    named = dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False))
    defaults = {"attn_mask": None, "is_causal": False}
    options = {**named, **kwargs}
    return args[:3], {k: v for k, v in options.items() if k not in defaults or v != defaults[k]}


def _without_defaults(
    function: Callable[..., object], kwargs: dict[str, Argument]
) -> dict[str, Argument]:
    """Keyword arguments of torch.nn.functional without those that only repeat the default.

    Functions written in Python pass all of theirs on when they are traced. What the mode decides
    stays, so that both modes pass it.
    """
    if getattr(function, "__module__", "") != "torch.nn.functional":
        return kwargs
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return kwargs
    return {
        key: value
        for key, value in kwargs.items()
        if key in ("training", "use_input_stats", "dropout_p")
        or key not in parameters
        or repr(parameters[key].default) != repr(value)
    }


def _region_parts(node: fx.Node) -> tuple[Context, fx.Node, tuple[Any, ...]]:
    """Context, body and inputs of a higher-order op."""
    name = str(node.target)
    args: tuple[Any, ...] = tuple(node.args)
    match name:
        case "wrap_with_set_grad_enabled":
            return NoGrad(bool(args[0])), args[1], args[2:]
        case "wrap_with_autocast":
            return Autocast(args[0], args[1], bool(args[2])), args[4], args[5:]
        case _:
            raise TraceError(
                f"the higher-order operator {name} is not supported",
                location=source_of(node),
                hint="replace torch.cond, scan or while_loop by torch.where or a plain loop",
            )


def is_transform(node: fx.Node) -> bool:
    """Whether a node begins or ends a transform of torch.func."""
    return getattr(node.target, "__module__", "") == "torch._functorch.predispatch"


def source_of(node: fx.Node) -> SourceLocation | None:
    """The user's line that a node comes from, with those that called the modules around it."""
    known = node.meta.get("source")
    source = known if isinstance(known, SourceLocation) else line_of_trace(node.stack_trace)
    own = ("torch.", "gpipe_compiler.")
    users = [path for path, made, _ in _modules_around(node) if not made.startswith(own)]
    lines = lines_of_calls(node.stack_trace)
    if source is None or source.calls or len(users) != len(lines) + 1:
        return source
    calls = zip((path.count(".") + 1 for path in users[1:]), lines, strict=True)
    return dataclasses.replace(source, calls=tuple(calls))


def module_of(node: fx.Node) -> str:
    """The path of the module whose forward makes the call."""
    return next((path for path, *_ in reversed([*_modules_around(node)])), "")


def _turns_of(node: fx.Node) -> tuple[tuple[str, int], ...]:
    """Of the modules around that were called before, how often."""
    return tuple((path, turn) for path, _, turn in _modules_around(node) if turn)


def _modules_around(node: fx.Node) -> Iterator[tuple[str, str, int]]:
    """The modules whose forwards make the call, outermost first: paths, classes and how many calls
    of each came before, which torch tells as in `block@1`."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    own = local_path(str(node.target)) if node.op == "call_module" else None
    for key, value in stack.items():
        path, made = value if isinstance(value, tuple) else (value, "")
        path = local_path(str(path))
        if path != own and not path.startswith("_empty_nn_module_stack"):  # torch's own stopgap
            known = made if isinstance(made, str) else f"{made.__module__}.{made.__qualname__}"
            _, _, turn = str(key).rpartition("@")
            yield path, known, int(turn) if turn.isdecimal() else 0
