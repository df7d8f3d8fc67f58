"""Finds what the mean of a loss is taken over, so that micro-batches weigh in it as they should.

The loss of a mini-batch is the mean of its micro-batches' losses only where each weighs as much as
its own mean is taken over: the targets that are not ignored, the sum of a mask. This pass finds the
ops that compute it from the inputs alone; the runtime runs them before every step.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from gpipe_compiler.ir import (
    Argument,
    FunctionCall,
    Graph,
    LossWeight,
    MethodCall,
    Mode,
    Op,
    Reduction,
    Ref,
    RegionCall,
    ValueKind,
)
from gpipe_compiler.ir.arguments import choices, map_argument, state_names, value_names
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.loss_functions import Targets
from gpipe_compiler.passes.loss_terms import (
    LAST,
    ConstantTerm,
    Division,
    Other,
    Step,
    Summand,
    Term,
    Terms,
    elements_of,
    put,
    verb,
)
from gpipe_compiler.passes.random_ops import random_ops
from gpipe_compiler.passes.split_loss import TermGroup, with_terms


def weigh_loss(graph: Graph) -> Graph:
    """The graph, its loss with the weight that its mean asks for.

    A loss that is divided by what depends on the batch is no sum over micro-batches, whatever it
    looks like on the example. One that adds up means over different things gets a term for each,
    made by ops at the end of the graph.

    Args:
        graph: annotated by `passes.shapes`.
    """
    if graph.loss is None or graph.loss.over_batch:
        return graph
    groups, adding = terms_of_loss(graph)
    if len(groups) > 1:
        return with_terms(graph, groups, adding) or graph
    loss = graph.loss
    for group in groups:
        reduction = group.reduction or loss.reduction
        loss = dataclasses.replace(loss, reduction=reduction, weight=group.weight)
    return graph if loss == graph.loss else graph.replace(loss=loss)


def different_means(graph: Graph) -> tuple[Op, ...]:
    """The ops of a loss that adds up means over different things, one for each; () for others.

    Also () where the loss has a term for each.
    """
    groups = [] if graph.loss is None or graph.loss.terms else terms_of_loss(graph)[0]
    ops = [
        summand.term.op
        for group in groups
        for summand in group.summands[:1]
        if not isinstance(summand.term, ConstantTerm) and summand.term.op is not None
    ]
    return tuple(ops) if len(ops) > 1 else ()


def terms_of_loss(graph: Graph) -> tuple[list[TermGroup], tuple[Op, ...]]:
    """The terms of the loss, those together that are means over the same; and what adds them up.

    Recognised are torch's losses of class numbers with reduction "mean", and divisions by sums of
    what follows from the inputs alone. Anything else counts as a mean over samples, unless it is
    known to be a sum.
    """
    terms, numbers = Terms(graph), _Numbers(graph)
    found: dict[object, TermGroup] = {}
    constants = []
    taken = {name for op in graph.ops for name in (op.name, *op.outputs)}
    for summand in terms.summands:
        if isinstance(summand.term, ConstantTerm):
            constants.append(summand)
            continue
        count = _count(terms, summand.term)
        key: object = None if count is None else numbers.of(count)
        weight = found[key].weight if key in found else None
        if count is not None and weight is None:
            weight = _weight(graph, count, taken)
        kind: Reduction | None = Reduction.MEAN
        if weight is None:
            kind = summand.term.kind if isinstance(summand.term, Other) else None
            key = kind if kind is Reduction.SUM else None
        known = found.get(key, TermGroup(kind, weight, ()))
        found[key] = dataclasses.replace(
            known,
            reduction=known.reduction if known.reduction is kind else None,
            summands=(*known.summands, summand),
        )
    if constants and found:
        _put_in(found, tuple(constants))
    return list(found.values()), tuple(terms.adding)


def _put_in(groups: dict[object, TermGroup], constants: tuple[Summand, ...]) -> None:
    """Adds the constant terms to a mean whose shares add up to one, so that they count once."""
    key = next((key for key, group in groups.items() if group.adds_up), None)
    known = groups.get(key, TermGroup(Reduction.MEAN, None, ()))
    groups[key] = dataclasses.replace(known, summands=(*known.summands, *constants))


@dataclass(frozen=True, slots=True)
class _Count:
    """What a term of the loss is a mean over.

    Attributes:
        reader: the op of the loss before which it is counted.
        base: what the first step is done to.
        steps: what is done, each to the result of the one before.
        floor, offset: as in `LossWeight`.
    """

    reader: Op
    what: str
    base: Argument
    steps: tuple[Step, ...]
    floor: float = -math.inf
    offset: float = 0.0


def _count(terms: Terms, term: Term) -> _Count | None:
    """The count of a term; None for samples."""
    match term:
        case Targets():
            return _targets(terms.graph, term)
        case Division():
            return _divisor(terms, term)
        case _:
            return None


def _targets(graph: Graph, term: Targets) -> _Count:
    """`(targets != -100).sum()`, or `weights[targets[targets != -100]].sum()`."""
    targets = elements_of(graph, term.targets)
    counted = FunctionCall(operator.ne, (LAST, term.ignored))
    what = f"the targets other than {term.ignored}"
    if term.weights is None:
        return _Count(term.op, what, targets, (counted, MethodCall("sum", (LAST,))))
    steps = (
        counted,
        FunctionCall(operator.getitem, (targets, LAST)),
        FunctionCall(operator.getitem, (term.weights, LAST)),
        MethodCall("sum", (LAST,)),
    )
    return _Count(term.op, f"{what}, each with the weight of its class", targets, steps)


# --- divisors -------------------------------------------------------------------------------------


@dataclass
class _Guard:
    """A divisor as `factor * (max(sum, floor) + offset)`: what stands between it and the sum."""

    factor: float = 1.0
    floor: float = -math.inf
    offset: float = 0.0

    def then(self, step: str, number: float) -> None:
        """Takes one more step in: `add`, `mul`, or `max`, the larger of the two."""
        match step:
            case "mul":
                self.factor *= number
            case "add":
                self.offset += number / self.factor
            case "max":
                self.floor = max(self.floor, number / self.factor - self.offset)


def _divisor(terms: Terms, term: Division) -> _Count | None:
    """What a divisor adds up; None where it is no sum over samples."""
    value, steps = term.divisor, list[tuple[str, float]]()
    while (op := terms.graph.producer.get(value)) is not None:
        step = _guard_step(terms, op)
        if step is None:
            break
        value, name, number = step
        steps.append((name, number))
    if op is None or not _is_over_samples(terms, op):
        return None
    guard = _Guard()
    for name, number in reversed(steps):
        if name == "mul" and not 0 < number < math.inf:
            return None
        guard.then(name, number)
    if term.total not in (None, verb(op) != "mean"):
        return None
    what = "the sum by which it is divided"
    base, *options = op.call.args
    total = _as_sum(op, (LAST, *options))
    return _Count(term.op, what, base, (total,), guard.floor, guard.offset)


def _guard_step(terms: Terms, op: Op) -> tuple[str, str, float] | None:
    """The scalar that an op takes, what it does to it, and with what number; None for others."""
    args, kwargs = op.arguments
    if not args or not terms.is_scalar(args[0]):
        return None
    source: str = args[0].name
    if terms.keeps(op):
        return source, "mul", 1.0
    match verb(op), args[1:]:
        case "add", (int() | float() as number,) if not kwargs:
            return source, "add", float(number)
        case "sub", (int() | float() as number,) if not kwargs:
            return source, "add", -float(number)
        case "mul", (int() | float() as number,):
            return source, "mul", float(number)
        case "div", (int() | float() as number,) if not kwargs and number:
            return source, "mul", 1 / number
        case "clamp" | "clip" | "clamp_min", rest:
            options = dict(zip(("min", "max"), rest, strict=False)) | kwargs
            least = options.pop("min", None)
            if isinstance(least, int | float) and set(options.values()) <= {None}:
                return source, "max", float(least)
    return None


def _is_over_samples(terms: Terms, op: Op) -> bool:
    """Whether an op adds up, or averages, something of all samples."""
    if verb(op) not in ("sum", "mean", "count_nonzero") or not op.call.args:
        return False
    known = terms.value(op.call.args[0])
    return known is not None and known.splittable and known.batch_dim is not None


def _as_sum(op: Op, args: tuple[Argument, ...]) -> Step:
    """The call on other arguments, a mean as a sum: of means of parts no whole can be made."""
    match op.call:
        case MethodCall(method=method, kwargs=kwargs):
            return MethodCall("sum" if method == "mean" else method, args, kwargs)
        case FunctionCall(function=function, kwargs=kwargs):
            return FunctionCall(torch.sum if function is torch.mean else function, args, kwargs)
        case _:
            raise AssertionError(op)


# --- the ops --------------------------------------------------------------------------------------


@dataclass
class _Numbers:
    """Numbers values so that equal ones are what is computed alike."""

    graph: Graph
    _known: dict[str, int] = field(default_factory=dict)

    def of(self, count: _Count) -> tuple[object, ...]:
        """A key, equal for counts that compute the same number."""
        steps = [repr(self._text(step)) for step in count.steps]
        return (repr(self._with(count.base)), *steps, count.floor, count.offset)

    def _with(self, argument: Argument) -> Argument:
        def number(leaf: object) -> object:
            return self._value(leaf.name) if isinstance(leaf, Ref) else leaf

        return map_argument(number, argument)

    def _text(self, call: object) -> object:
        match call:
            case FunctionCall() | MethodCall():
                return dataclasses.replace(
                    call, args=self._with(call.args), kwargs=self._with(dict(call.kwargs))
                )
            case _:
                return call

    def _value(self, name: str) -> object:
        op = self.graph.producer.get(name)
        if op is None:
            return name
        key = f"{self._text(op.call)} {op.outputs.index(name)}"
        return self._known.setdefault(key, len(self._known))


def _weight(graph: Graph, count: _Count, taken: set[str]) -> LossWeight | None:
    """The ops of a count; None where it depends on more than inputs and fixed numbers.

    Args:
        taken: names that new ops cannot have; theirs are added.
    """
    arguments = (count.base, *((step.args, dict(step.kwargs)) for step in count.steps))
    read = [name for name in value_names(arguments) if name]
    before = _ops_before(graph, read, [*state_names(arguments)], count.reader)
    if before is None:
        return None
    ops = (*before, *_own_ops(graph, count, taken))
    if not _reads_samples(graph, ops):
        return None
    used = {name for op in ops for name in op.inputs}
    inputs = tuple(source.name for source in graph.inputs if source.name in used)
    return LossWeight(count.what, inputs, ops, ops[-1].name, count.floor, count.offset)


def _reads_samples(graph: Graph, ops: Iterable[Op]) -> bool:
    """Whether what the last op gives depends on more than how many samples there are."""
    data = {source.name for source in graph.inputs if source.batched}
    for op in ops:
        reads = not data.isdisjoint(op.inputs)
        if reads:
            data.update(name for name in op.outputs if _is_tensor(graph, name))
    return reads


def _is_tensor(graph: Graph, name: str) -> bool:
    known = graph.values.get(name)
    return known is None or known.kind is ValueKind.TENSOR


def _own_ops(graph: Graph, count: _Count, taken: set[str]) -> list[Op]:
    """The steps of a count as ops, under names that the graph does not have."""
    taken.update(source.name for source in graph.inputs)
    made: list[Op] = []
    last = count.base
    for step in count.steps:
        wish = "weight" if step is count.steps[-1] else f"counted_{len(made)}"
        while wish in taken:
            wish += "_"
        taken.add(wish)
        made.append(Op(wish, dataclasses.replace(step, args=put(step.args, last)), wish))
        last = Ref(wish)
    return made


def _ops_before(
    graph: Graph, values: Iterable[str], states: Iterable[str], reader: Op
) -> tuple[Op, ...] | None:
    """The ops that these values are made by, writes in place before `reader` included.

    None where they cannot run apart from the model: they are random, differ between the modes, or
    need tensors that training changes.
    """
    names, states = graph.ancestors(values), set(states)
    if not names and not states:
        return ()
    position = {op.name: index for index, op in enumerate(graph.ops)}
    found = effects(graph)
    before: frozenset[str] = frozenset()
    while names != before:
        before = names
        made = {value for name in names for value in graph.op_of[name].outputs}
        writers = {
            name
            for name, written in found.writes.items()
            if not made.isdisjoint(written) and position[name] < position[reader.name]
        }
        names |= writers | graph.ancestors(v for name in writers for v in graph.op_of[name].inputs)
    ops = tuple(op for op in graph.ops if op.name in names)
    states.update(state for op in ops for state in found.states_of(graph, op))
    if any(graph.state[name].requires_grad for name in states) or states & found.written_states:
        return None
    if any(map(_depends_on_mode, ops)) or random_ops(graph.replace(ops=ops)):
        return None
    return ops


def _depends_on_mode(op: Op) -> bool:
    if op.mode is not Mode.ALWAYS or isinstance(op.call, RegionCall):
        return True
    return any(True for _ in choices(op.arguments))
