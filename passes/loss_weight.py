"""Finds what the mean of a loss is taken over, so that micro-batches weigh in it as they should.

The loss of a mini-batch is the mean of its micro-batches' losses only where each weighs as much as
its own mean is taken over: the targets that are not ignored, the sum of a mask. This pass finds the
ops that compute it from the inputs alone; the runtime runs them before every step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpipe_compiler.ir import (
    Argument,
    Call,
    FunctionCall,
    Graph,
    LossWeight,
    MethodCall,
    Mode,
    Op,
    Reduction,
    Ref,
    ValueKind,
    called,
)
from gpipe_compiler.ir.arguments import map_argument, state_names, value_names
from gpipe_compiler.ir.ops import with_arguments
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.loss_additivity import Bent
from gpipe_compiler.passes.loss_divisors import Count, count_of, guard_of, with_targets
from gpipe_compiler.passes.loss_functions import (
    ConstantTerm,
    Guarded,
    Other,
    Summand,
    Targets,
    Term,
    put,
)
from gpipe_compiler.passes.loss_terms import Terms
from gpipe_compiler.passes.random_ops import random_ops
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.passes.split_loss import (
    TermGroup,
    are_returned,
    bare_terms,
    copies_of_parts,
    never_by_zero,
    with_terms,
)
from gpipe_compiler.passes.verbs import verb


def weigh_loss(graph: Graph) -> Graph:
    """The graph, its loss with the weight that its mean asks for.

    A loss that is divided by what depends on the batch is no sum over micro-batches, whatever it
    looks like on the example. One that adds up means over different things gets a term for each,
    made by ops at the end of the graph.
    """
    if graph.loss is None or graph.loss.over_batch:
        return graph
    groups, adding = terms_of_loss(graph)
    guarded = any(group.weight and group.weight.above > -math.inf for group in groups)
    bare, safe = bare_terms(groups), graph
    if bare and are_returned(graph, bare):
        copies = copies_of_parts(graph, groups)
        if copies is None:
            return graph
        more, groups = copies
        safe = graph.replace(ops=(*graph.ops, *more), values={})
        return (
            with_terms(annotate(safe, graph.batch_size, graph.precision), groups, adding) or graph
        )
    if bare:
        safe = never_by_zero(graph, bare)
    if len(groups) > 1 or guarded:
        return with_terms(safe, groups, adding) or graph
    loss = graph.loss
    for group in groups:
        reduction = group.reduction or loss.reduction
        loss = dataclasses.replace(loss, reduction=reduction, weight=group.weight)
    return safe if loss == graph.loss else safe.replace(loss=loss)


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


def uncountable(graph: Graph) -> Bent | None:
    """What in a loss is a mean over things of which nothing before the step tells how many there
    are: some that are drawn, or another number of them for each of several elements."""
    terms = Terms(graph)
    for written in terms.summands:
        term = written.term.inner.term if isinstance(written.term, Guarded) else written.term
        count = count_of(terms, term)
        if count is not None and _is_drawn(graph, count):
            return Bent(count.reader, "it is a mean over as many as are drawn in the step")
    needed = graph.ancestors(() if graph.loss is None else (graph.loss.value,))
    quotients = (op for op in graph.ops if op.name in needed and _divides_sums(graph, op))
    each = "it divides each of several sums over the batch by one of its own"
    return next((Bent(op, each) for op in quotients), None)


def _is_drawn(graph: Graph, count: Count) -> bool:
    names = graph.ancestors(name for name in value_names(count.base) if name)
    ops = tuple(op for op in graph.ops if op.name in names)
    return bool(random_ops(graph.replace(ops=ops)))


def _divides_sums(graph: Graph, op: Op) -> bool:
    """Whether an op divides elements that are of all samples by others that are."""
    values = [graph.values.get(getattr(item, "name", "")) for item in op.call.args]
    return verb(op) == "div" and all(
        known is not None
        and known.kind is ValueKind.TENSOR
        and known.name in graph.batched
        and known.batch_dim is None
        and math.prod(known.shape) > 1
        for known in values
    )


def terms_of_loss(
    graph: Graph, further: Iterable[str] = ()
) -> tuple[list[TermGroup], tuple[Op, ...]]:
    """The terms of the loss, those together that are means over the same; and what adds them up.

    Recognised are torch's losses of class numbers with reduction "mean", and divisions by sums of
    what follows from the inputs alone. Anything else counts as a mean over samples, unless it is
    known to be a sum.

    Args:
        graph: annotated.
        further: names that new ops cannot have, besides those in the graph.
    """
    terms, numbers, plain = Terms(graph), _Numbers(graph), _reading_no_forms(graph)
    found: dict[object, TermGroup] = {}
    constants = []
    taken = {*further, *(name for op in graph.ops for name in (op.name, *op.outputs))}
    for written in terms.summands:
        if isinstance(written.term, ConstantTerm):
            constants.append(written)
            continue
        count = _count(terms, numbers, written.term)
        key: object = None if count is None else numbers.of(count)
        weight = found[key].weight if key in found else None
        if count is not None and weight is None:
            weight = _weight(plain, count, taken)
        summand = _unguarded(terms, written, weight)
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


def _count(terms: Terms, numbers: _Numbers, term: Term) -> Count | None:
    """The count of a term; None for samples, and where a term is guarded by something else."""
    if not isinstance(term, Guarded):
        return count_of(terms, term)
    inner = count_of(terms, term.inner.term)
    if term.counted is None:
        return None if inner is None else dataclasses.replace(inner, above=0.0)
    guard = guard_of(terms, term)
    if inner is None or guard is None:
        return None
    ignored = term.inner.term.ignored if isinstance(term.inner.term, Targets) else None
    counts = (with_targets(terms.graph, count, ignored) for count in (inner, guard))
    same = set(map(numbers.sum_of, counts))
    return dataclasses.replace(inner, above=0.0) if len(same) == 1 else None


def _unguarded(terms: Terms, summand: Summand, weight: LossWeight | None) -> Summand:
    """What a guarded term is where something counts: the weights of micro-batches do the rest."""
    if not isinstance(summand.term, Guarded):
        return summand
    if weight is None:
        return dataclasses.replace(summand, term=Other(summand.term.op, None))
    terms.adding.append(summand.term.op)
    return dataclasses.replace(summand.term.inner, scale=summand.scale, mode=summand.mode)


def _put_in(groups: dict[object, TermGroup], constants: tuple[Summand, ...]) -> None:
    """Adds the constant terms to a mean whose shares add up to one, so that they count once."""
    key = next((key for key, group in groups.items() if group.adds_up), None)
    known = groups.get(key, TermGroup(Reduction.MEAN, None, ()))
    groups[key] = dataclasses.replace(known, summands=(*known.summands, *constants))


@dataclass
class _Numbers:
    """Numbers values so that equal ones are what is computed alike."""

    graph: Graph
    _known: dict[str, int] = field(default_factory=dict)

    def of(self, count: Count) -> tuple[object, ...]:
        """A key, equal for counts that compute the same number."""
        return (*self.sum_of(count), count.floor, count.offset, count.above, count.least)

    def sum_of(self, count: Count) -> tuple[str, ...]:
        """The same for the sum alone, whatever is done to it."""
        steps = [str(with_arguments(step, self._with)) for step in count.steps]
        return (repr(self._with(count.base)), *steps)

    def _with(self, argument: Argument) -> Argument:
        def number(leaf: object) -> object:
            return self._value(leaf.name) if isinstance(leaf, Ref) else leaf

        return map_argument(number, argument)

    def _value(self, name: str) -> object:
        op = self.graph.producer.get(name)
        if op is None:
            return name
        plain = isinstance(op.call, FunctionCall | MethodCall)
        call = with_arguments(op.call, self._with) if plain else op.call
        return self._known.setdefault(f"{call} {op.outputs.index(name)}", len(self._known))


def _weight(graph: Graph, count: Count, taken: set[str]) -> LossWeight | None:
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
    value, guards = ops[-1].name, (count.floor, count.offset, count.above, count.least)
    return LossWeight(count.what, inputs, ops, value, *guards)


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


def _own_ops(graph: Graph, count: Count, taken: set[str]) -> list[Op]:
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


def _reading_no_forms(graph: Graph) -> Graph:
    """The graph, in which nothing of the loss reads a tensor for its shape or its type alone: what
    counts may be given those of an output, and depends on the inputs alone for all that."""

    def plain(op: Op) -> Op:
        args = [item.name if isinstance(item, Ref) else "" for item in op.call.args]
        if op.name not in graph.loss_only or not args:
            return op
        if called(op.call) in _OF_A_FORM:
            return _of_an_input(graph, op, args[0])
        if len(args) != 2 or op.call.kwargs:
            return op
        asked = graph.producer.get(args[1])
        if asked is not None and called(asked.call) == "getattr" and asked.call.args[1] == "dtype":
            args[1] = getattr(asked.call.args[0], "name", "")
        own, other = map(graph.values.get, args)
        if own is None or other is None or other.dtype is None:
            return op
        call: Call = op.call
        if called(op.call) in ("type_as", "to"):
            call = MethodCall("to", (op.call.args[0], other.dtype))
        elif called(op.call) == "expand_as":
            added = len(other.dims) - len(own.dims)
            sizes = [
                -1 if n >= added and own.dims[n - added] == size else size
                for n, size in enumerate(other.dims)
            ]
            fixed = [n for n, size in enumerate(sizes) if size != -1]
            if other.batch_dim not in fixed and all(isinstance(sizes[n], int) for n in fixed):
                call = MethodCall("expand", (op.call.args[0], *sizes))
        return op if call is op.call else dataclasses.replace(op, call=call)

    return graph.replace(ops=tuple(map(plain, graph.ops)))


_OF_A_FORM = ("zeros_like", "ones_like", "full_like")


def _of_an_input(graph: Graph, op: Op, like: str) -> Op:
    """What fills a tensor of another's form, with that of an input of the same sizes for it."""
    form = graph.values.get(like)
    if form is None or form.dtype is None:
        return op
    for name in (source.name for source in graph.inputs):
        own = graph.values.get(name)
        if own is not None and (own.dims, own.batch_dim) == (form.dims, form.batch_dim):
            kwargs = {"dtype": form.dtype, **dict(op.call.kwargs)}
            call = dataclasses.replace(op.call, args=(Ref(name), *op.call.args[1:]), kwargs=kwargs)
            return dataclasses.replace(op, call=call)
    return op


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
    # What one mode alone runs follows from the inputs as well in the other.
    ops = tuple(dataclasses.replace(op, mode=Mode.ALWAYS) for op in graph.ops if op.name in names)
    states.update(state for op in ops for state in found.states_of(graph, op))
    if any(graph.state[name].requires_grad for name in states) or states & found.written_states:
        return None
    if any(op.has_choices for op in ops) or random_ops(graph.replace(ops=ops)):
        return None
    return ops
