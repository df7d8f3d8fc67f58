"""Takes a loss apart: into terms that are added, and what each term's own mean is taken over.

From the loss the walk goes backwards through what only scales or adds: casts, views of a scalar,
numbers, and factors that are the same for every micro-batch. It ends at the loss functions of
torch, at divisions, and at everything that it does not know.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch

from gpipe_compiler.ir import (
    Argument,
    ByMode,
    FunctionCall,
    Graph,
    Mode,
    Op,
    Reduction,
    Ref,
    StateRef,
    Value,
    ValueKind,
)
from gpipe_compiler.ir.arguments import choices
from gpipe_compiler.ir.ops import in_one_mode, records_gradients
from gpipe_compiler.ir.sizes import BATCH, grows_with_batch
from gpipe_compiler.passes.duplicate import shape_values
from gpipe_compiler.passes.joined_outputs import kind_of
from gpipe_compiler.passes.loss_functions import (
    LAST,
    ConstantTerm,
    Division,
    Guarded,
    Other,
    Selected,
    Step,
    Summand,
    done_elsewhere,
    mask_of_mean,
    mean_over_targets,
)
from gpipe_compiler.passes.verbs import (
    MOVES,
    SAME,
    asks_for_number,
    counted_above_zero,
    number_of,
    verb,
)
from gpipe_compiler.runtime.sizes import Expression

_Divisor: TypeAlias = tuple[str, tuple[tuple[str, Argument], ...]]


@dataclass
class Terms:
    """The terms of the loss of an annotated graph.

    Attributes:
        adding: the ops that only add terms up, or scale sums of them; known once `summands` is.
    """

    graph: Graph
    adding: list[Op] = field(default_factory=list)

    @cached_property
    def summands(self) -> tuple[Summand, ...]:
        """The terms, in the order in which they are written."""
        assert self.graph.loss is not None
        return tuple(self._summands(self.graph.loss.value))

    @cached_property
    def _shapes(self) -> Mapping[str, Argument]:
        return shape_values(self.graph)

    def same_for_all(self, argument: Argument) -> bool:
        """Whether an argument is one and the same for every micro-batch."""
        match argument:
            case bool() | int() | float() | StateRef():
                return True
            case ByMode(train, evaluation):
                return self.same_for_all(train) and self.same_for_all(evaluation)
            case Ref(name=name) if name not in self.graph.batched:
                return True
            case Ref(name=name):
                number = self._number(name)
                free = isinstance(number, Expression) and BATCH not in number.sizes()
                return free or isinstance(number, int | float)
            case _:
                return False

    def grows_with_batch(self, argument: Argument) -> bool:
        """Whether an argument is a number that is a fixed multiple of the samples."""
        return isinstance(argument, Ref) and grows_with_batch(self._number(argument.name))

    def _number(self, name: str) -> Argument:
        known = self.graph.values.get(name)
        is_number = known is not None and known.kind is ValueKind.SCALAR
        return self._shapes.get(name) if is_number else None

    def value(self, argument: Argument) -> Value | None:
        return self.graph.values.get(argument.name) if isinstance(argument, Ref) else None

    def keeps(self, op: Op) -> bool:
        """Whether an op makes a scalar of a scalar that differs in no more than type and shape, or
        in what a hook makes of its gradient."""
        return verb(op) in SAME and self.is_scalar(op.call.args[0])

    def is_scalar(self, argument: Argument) -> bool:
        """Whether an argument is a tensor of one element, however many samples there are."""
        known = self.value(argument)
        return (
            known is not None
            and known.kind is ValueKind.TENSOR
            and known.batch_dim is None
            and known.splittable
            and torch.Size(known.shape).numel() == 1
        )

    def kind(self, value: str) -> Reduction | None:
        """Whether a scalar is a sum over samples or their mean; None where that is not known."""
        return kind_of(self.graph, value)

    def _times(self, kind: Reduction | None, name: str, factor: Argument) -> Reduction | None:
        """The kind of a scalar of some kind times a factor, or divided by it."""
        if self.same_for_all(factor):
            return kind
        if kind is None or not self.grows_with_batch(factor):
            return None
        turned = {("mul", Reduction.MEAN): Reduction.SUM, ("div", Reduction.SUM): Reduction.MEAN}
        return turned.get((name, kind))

    def _summands(self, value: str) -> Iterator[Summand]:
        op = self.graph.producer.get(value)
        if value not in self.graph.batched:
            yield Summand(ConstantTerm(), value)
        elif op is None or op.result != value:
            yield Summand(Other(op, None), value)
        elif not records_gradients(op):
            yield self._other(op)
        elif any(map(self._chooses_scalars, choices(op.call.args))):
            yield from self._by_mode(op)
        else:
            yield from self._made_by(op)

    def _made_by(self, op: Op) -> Iterator[Summand]:
        (value,), args = op.outputs, op.call.args
        match verb(op):
            case "clone" if self.graph.op_of[op.name].has_choices:
                self.adding.append(op)
                yield from self._summands_of(args[0])
            case _ if self.keeps(op):
                yield from self._scaled(op, args[0])
            case "neg":
                yield from self._scaled(op, args[0])
            case "add" | "sub" if self._adds_scalars(op):
                yield from self._added(op, *args)
            case "mul" if len(args) == 2 and self.same_for_all(args[1]):
                yield from self._scaled(op, args[0])
            case "mul" if len(args) == 2 and self.same_for_all(args[0]):
                yield from self._scaled(op, args[1])
            case "mul" if len(args) == 2 and (found := self._times_share(op, *args)) is not None:
                yield found
            case "div" if len(args) == 2 and not op.call.kwargs:
                yield from self._divided(op, *args)
            case "sum" | "mean" if isinstance(args[0], Ref):
                yield from self._reduced(op, args[0].name)
            case "dot" | "matmul" if len(args) == 2:
                yield from self._multiplied(op, args)
            case "where" if len(args) == 3:
                yield self._guarded(op, *args)
            case "nan_to_num" if args[1:] in ((), (0,)) and not op.call.kwargs:
                yield self._counting(op, None, args[0]) or self._other(op)
            case _:
                term = mean_over_targets(self.graph, op)
                if term is None or not (term.weights is None or self.same_for_all(term.weights)):
                    yield self._other(op)
                else:
                    yield Summand(term, value)

    def _other(self, op: Op) -> Summand:
        (made,) = op.outputs
        mask = mask_of_mean(self.graph, op)
        return Summand(Other(op, self.kind(made)) if mask is None else Selected(op, mask), made)

    def _guarded(self, op: Op, condition: Argument, one: Argument, other: Argument) -> Summand:
        """`where(n > 0, term, 0)`, or `where(n == 0, 0, term)`."""
        found = asks_for_number(self.graph, condition, one, other) or counted_above_zero(
            self.graph, condition
        )
        if found is not None:
            counted, is_above = found
            term, nothing = (one, other) if is_above else (other, one)
            if number_of(self.graph, nothing) == 0:
                return self._counting(op, counted, term) or self._other(op)
        return self._other(op)

    def _counting(self, op: Op, counted: str | None, term: Argument) -> Summand | None:
        """A term that counts where something is counted; None where it is several."""
        before = len(self.adding)
        inner = tuple(self._summands(term.name)) if self.is_scalar(term) else ()
        if len(inner) == 1 and not inner[0].scale:
            return Summand(Guarded(op, counted, inner[0]), op.outputs[0])
        del self.adding[before:]
        return None

    def _adds_scalars(self, op: Op) -> bool:
        """Whether an op adds two scalars, without options that depend on tensors (`alpha=`)."""
        numbers = not any(isinstance(item, Ref) for item in op.call.kwargs.values())
        scalars = [self.is_scalar(x) or not isinstance(x, Ref) for x in op.call.args]
        return numbers and scalars == [True, True]

    def _added(self, op: Op, left: Argument, right: Argument) -> Iterator[Summand]:
        self.adding.append(op)
        yield from self._summands_of(left)
        steps = [] if verb(op) == "add" else [_NEGATED]
        factor = op.call.kwargs.get("alpha", 1)
        if factor != 1:
            steps.append(FunctionCall(operator.mul, (LAST, factor)))
        for summand in self._summands_of(right):
            yield dataclasses.replace(summand, scale=(*summand.scale, *steps))

    def _chooses_scalars(self, choice: ByMode) -> bool:
        """Whether a choice is between scalars that the terms may differ in."""
        sides = choice.train, choice.evaluation
        scalars = [self.is_scalar(side) or self.same_for_all(side) for side in sides]
        return all(scalars) and not self.same_for_all(choice)

    def _by_mode(self, op: Op) -> Iterator[Summand]:
        """The terms of what is made of other scalars in each mode; those of both come once."""
        own: dict[Mode, list[Summand]] = {}
        for mode in (Mode.TRAIN, Mode.EVAL):
            found = self._made_by(in_one_mode(op, training=mode is Mode.TRAIN))
            own[mode] = [item for item in found if item.mode in (Mode.ALWAYS, mode)]
        rest = own[Mode.EVAL]
        for summand in own[Mode.TRAIN]:
            if summand in rest:
                rest.remove(summand)
                yield summand
            else:
                yield dataclasses.replace(summand, mode=Mode.TRAIN)
        yield from (dataclasses.replace(summand, mode=Mode.EVAL) for summand in rest)

    def _summands_of(self, argument: Argument) -> Iterator[Summand]:
        if isinstance(argument, Ref):
            yield from self._summands(argument.name)
        elif argument:
            yield Summand(ConstantTerm(), argument)

    def _scaled(self, op: Op, factor: Argument) -> Iterator[Summand]:
        if not self.is_scalar(factor):
            yield self._other(op)
            return
        found = tuple(self._summands(factor.name))
        alone = len(found) == 1 and not isinstance(found[0].term, Guarded)
        if alone and found[0].value == factor.name and not found[0].scale:
            yield dataclasses.replace(found[0], value=op.outputs[0])
            return
        self.adding.append(op)
        for summand in found:
            step = done_elsewhere(op, factor)
            yield dataclasses.replace(summand, scale=(*summand.scale, step))

    def _divided(self, op: Op, dividend: Argument, divisor: Argument) -> Iterator[Summand]:
        if self.same_for_all(divisor):
            yield from self._scaled(op, dividend)
        elif self.is_scalar(dividend) and self.is_scalar(divisor):
            kind = self.kind(dividend.name)
            total = None if kind is None else kind is Reduction.SUM
            yield Summand(Division(op, divisor.name, total), op.outputs[0])
        else:
            yield self._other(op)

    def _times_share(self, op: Op, left: Argument, right: Argument) -> Summand | None:
        """A scalar times `1 / n`, for a scalar n; None for another product."""
        for dividend, share in ((left, right), (right, left)):
            maker = self.graph.producer.get(getattr(share, "name", ""))
            if maker is None or verb(maker) != "div" or maker.call.kwargs:
                continue
            number, divisor = maker.call.args
            scalars = self.is_scalar(dividend) and self.is_scalar(divisor)
            if scalars and self.same_for_all(number) and not self.same_for_all(divisor):
                kind = self.kind(dividend.name)
                total = None if kind is None else kind is Reduction.SUM
                return Summand(Division(op, divisor.name, total), op.outputs[0])
        return None

    def _reduced(self, op: Op, value: str) -> Iterator[Summand]:
        """The sum or the mean of a scalar, of scalars in a row, or of a quotient."""
        maker = self.graph.producer.get(value)
        if self.is_scalar(Ref(value)):
            yield from self._scaled(op, Ref(value))
        elif maker is None:
            yield self._other(op)
        elif (row := self._row(Ref(value))) is not None:
            share = FunctionCall(operator.truediv, (LAST, len(row)))
            yield from self._all_of(op, row, () if verb(op) == "sum" else (share,))
        else:
            kind = Reduction.SUM if verb(op) == "sum" else Reduction.MEAN
            yield self._quotient(op, kind, [*self._divisors(value)])

    def _multiplied(self, op: Op, args: Sequence[Argument]) -> Iterator[Summand]:
        """The sum of the products of two rows."""
        if (row := self._each("mul", *args)) is not None:
            yield from self._all_of(op, row)
        else:
            yield self._quotient(op, Reduction.SUM, [*self._divisors_among("mul", args)])

    def _quotient(self, op: Op, kind: Reduction | None, divided: Sequence[_Divisor]) -> Summand:
        """A sum or a mean of what is divided by one scalar as a whole."""
        if len(divided) != 1 or not divided[0][0]:
            return self._other(op)
        ((divisor, factors),) = divided
        for name, factor in factors:
            kind = self._times(kind, name, factor)
        total = None if kind is None else kind is Reduction.SUM
        return Summand(Division(op, divisor, total), op.outputs[0])

    def _divisors(self, value: str) -> Iterator[_Divisor]:
        """The scalars by which rows are divided as a whole, each with the other numbers by which
        all of them are scaled; "" for a scalar by which they are multiplied."""
        op = self.graph.producer.get(value)
        if op is None or not op.call.args:
            return
        args, name = op.call.args, verb(op)
        if name in MOVES and isinstance(args[0], Ref):
            yield from self._divisors(args[0].name)
        if name in ("mul", "div") and len(args) == 2 and not op.call.kwargs:
            yield from self._divisors_among(name, args)

    def _divisors_among(self, name: str, args: Sequence[Argument]) -> Iterator[_Divisor]:
        """The same of a product or a quotient of these."""
        own: list[tuple[str, Argument]] = []
        inner: list[_Divisor] = []
        for place, item in enumerate(args):
            known = self.value(item)
            if known is None or known.kind is ValueKind.SCALAR:
                own.append((name, item))
            elif self.is_scalar(item) and not self.same_for_all(item):
                inner.append((item.name if (name, place) == ("div", 1) else "", ()))
            elif (name, place) != ("div", 1):
                inner.extend(self._divisors(item.name))
        yield from ((divisor, (*factors, *own)) for divisor, factors in inner)

    def _all_of(
        self, op: Op, row: Sequence[Sequence[Summand]], steps: tuple[Step, ...] = ()
    ) -> Iterator[Summand]:
        """The terms of the sum that an op makes of scalars in a row, each with more steps."""
        self.adding.append(op)
        for summand in itertools.chain(*row):
            yield dataclasses.replace(summand, scale=(*summand.scale, *steps))

    def _row(self, argument: Argument) -> list[list[Summand]] | None:
        """The terms of each of some scalars in a row, scaled and shifted by what is the same for
        every micro-batch; None for anything else."""
        op = self.graph.producer.get(argument.name) if isinstance(argument, Ref) else None
        if op is None:
            return None
        before, found = len(self.adding), None
        self.adding.append(op)
        match verb(op), op.call.args:
            case "stack" | "cat", (tuple() | list() as items, *_) if all(
                map(self.is_scalar, items)
            ):
                found = [list(self._summands(item.name)) for item in items]
            case "neg", (inner,):
                found = self._each("mul", inner, -1)
            case "add" | "sub" | "mul" | "div" as name, (left, right) if not op.call.kwargs:
                found = self._each(name, left, right)
        if found is None:
            del self.adding[before:]
        return found

    def _each(self, name: str, left: Argument, right: Argument) -> list[list[Summand]] | None:
        """The same for what is done, element by element, to such a row and to what is the same for
        every micro-batch; None where these are something else."""
        row, other = self._row(left), right
        first = row is not None
        if row is None:
            row, other = self._row(right), left
        length = self._length(other)
        if row is None or length not in (0, 1, len(row)) or not (first or name != "div"):
            return None
        made = []
        for place, summands in enumerate(row):
            at = place if length == len(row) else 0
            taken = (FunctionCall(operator.getitem, (LAST, at)),) if length else ()
            steps: tuple[Step, ...] = ()
            if name in ("mul", "div"):
                steps = (FunctionCall(_FUNCTIONS[name], (LAST, other)), *taken)
            elif name == "sub" and not first:
                steps = (_NEGATED,)
            scaled = [dataclasses.replace(s, scale=(*s.scale, *steps)) for s in summands]
            if name in ("add", "sub"):
                value = other.name if isinstance(other, Ref) else other
                turned = (_NEGATED,) if name == "sub" and first else ()
                scaled.append(Summand(ConstantTerm(), value, (*taken, *turned)))
            made.append(scaled)
        return made

    def _length(self, argument: Argument) -> int | None:
        """Of what is the same for every micro-batch: its elements in a row, 0 for a scalar; None
        for anything else."""
        known = self.value(argument)
        if isinstance(argument, ByMode) or not self.same_for_all(argument):
            return None
        shape: Sequence[int] = ()
        if isinstance(argument, StateRef):
            shape = self.graph.state[argument.name].shape
        elif known is not None and known.kind is ValueKind.TENSOR:
            shape = known.shape
        return None if len(shape) > 1 else sum(shape)


_FUNCTIONS: Mapping[str, Callable[..., object]] = {"mul": operator.mul, "div": operator.truediv}
_NEGATED = FunctionCall(operator.neg, (LAST,))
