"""The graph: ops in topological order over named values.

A graph is what every frontend produces and every pass reads. It is frozen: a pass that transforms
returns a new graph, an analysis returns a table keyed by name. What is legal stands in
`legality.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch

from gpipe_compiler.ir.arguments import Argument, at_place, value_names
from gpipe_compiler.ir.branches import is_requirement
from gpipe_compiler.ir.losses import Loss
from gpipe_compiler.ir.ops import ModuleCall, ModuleSpec, Op
from gpipe_compiler.ir.printing import format_argument, format_op
from gpipe_compiler.ir.sizes import SampleRule, named
from gpipe_compiler.ir.stretches import Stretch
from gpipe_compiler.ir.values import State, StateKind, Value
from gpipe_compiler.runtime.sizes import Dim, Requirement, Size
from gpipe_compiler.runtime.spec import GivenValue, Input, OutputClass, OutputTerm, Precision

T = TypeVar("T")

_DESCRIPTIONS = frozenset(
    {
        *("batch_size", "values", "held", "loss", "whole_batch", "requires", "paths"),
        *("module_classes", "of_torch", "repeats", "sample_rules", "untried"),
        *("untried_in_pieces", "alone", "left_out", "given", "fused", "packs", "keeps"),
        *("least", "carried"),
    }
)
"""Fields of a graph that do not decide how its ops run, but for whether there is a loss."""


class KeptRuns(dict[Hashable, Any]):
    """Runs that go on where a graph is changed: what they know of ops that stay is known already.

    They are not pickled.
    """

    def __reduce__(self) -> tuple[type[KeptRuns], tuple[()]]:
        return KeptRuns, ()


@dataclass(frozen=True, eq=False)
class Graph:
    """A traced model. It pickles, its tensors included (`torch.save` writes it too).

    Attributes:
        outputs: what the model returns: tuples, lists and dicts with a `Ref` at every tensor; the
            loss stands apart in `loss` (also where the model itself returns it).
        classes: of the model's own, in what it returns.
        output_terms: for each output that is a loss, its terms; filled in by `passes.output_terms`.
        values: by name; empty until `passes.shapes` has run, complete afterwards.
        batch_size: the batch size of the shapes in `values`.
        tensors: the model's own tensors by canonical state name (on meta for a meta model).
        example: one example tensor for every input, by name (meta will do); passes read its sizes
            and dtype.
        held: ops that serve only the loss and yet have to run in their place among the others,
            because a write in place orders them; filled in by `passes.shapes`.
        precision: under which the analyses run the ops; that of `values`.
        paths: every name of a module of the model to the first name of the same module.
        module_classes: of the modules of the model whose forward a user wrote (or torch, of several
            modules), by path: the names of their classes.
        of_torch: the paths of those whose class is torch's own; a user's may be called as torch's.
        unlike: the precisions in which the model is another program than this graph, and why.
        requires: what the model demands of the sizes that are free (those in `inputs`).
        least: by the names of sizes that are free, the smallest number at which the model is this
            graph, where that is below `SMALLEST`.
        carried: inputs that are state between calls, each with the place of the output that it
            becomes.
        sample_rules: numbers of samples for which the model may be another program, by what it
            compared theirs with while it was traced; in order.
        untried: the first of these for which no batch was tried.
        left_out: what the model returns in training alone, where `outputs` have no place for it.
        untried_in_pieces: the first of those in the graph for which none was tried in pieces.
        alone: by mode (training or not), the rule by which the model computes something else of one
            sample than this graph.
        fused: by mode, the name and line of a layer that torch computes as one kernel on a CPU:
            under autocast it gives other numbers than its ops.
        packs: the same of an encoder that packs what is padded in eval mode without autocast;
            "" for none.
        whole_batch: why micro-batches do not give what the mini-batch does, "" where they do.
        given: the values of Python's in the example call.
        one_by_one: whether each micro-batch is accepted as a call of the model by itself.
        keeps: what Python is told where it decides by a draw, for a layer to run (`ir.left_out`).
        repeats: where a block repeats (`ir.repeats`); filled in by `passes.shapes`. Other ops
            have other stretches: to replace them is to forget these.
        kept: one for all graphs that are made of one another.
    """

    name: str
    inputs: tuple[Input, ...]
    ops: tuple[Op, ...]
    outputs: Argument
    state: Mapping[str, State]
    modules: Mapping[str, ModuleSpec]
    batch_size: int
    loss: Loss | None = None
    values: Mapping[str, Value] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    example: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    held: frozenset[str] = frozenset()
    precision: Precision = Precision.FP32
    repeats: tuple[Stretch, ...] = ()
    classes: tuple[OutputClass, ...] = ()
    output_terms: Mapping[str, tuple[OutputTerm, ...]] = field(default_factory=dict)
    unlike: Mapping[Precision, str] = field(default_factory=dict)
    requires: tuple[Requirement, ...] = ()
    least: Mapping[str, int] = field(default_factory=dict)
    carried: tuple[tuple[str, tuple[str | int, ...]], ...] = ()
    sample_rules: tuple[SampleRule, ...] = ()
    left_out: str = ""
    untried: SampleRule | None = None
    untried_in_pieces: SampleRule | None = None
    alone: Mapping[bool, SampleRule] = field(default_factory=dict)
    fused: Mapping[bool, str] = field(default_factory=dict)
    packs: str = ""
    whole_batch: str = ""
    given: tuple[GivenValue, ...] = ()
    one_by_one: bool = False
    keeps: bool = False
    paths: Mapping[str, str] = field(default_factory=dict, repr=False)
    module_classes: Mapping[str, str] = field(default_factory=dict, repr=False)
    of_torch: frozenset[str] = field(default=frozenset(), repr=False)
    kept: KeptRuns = field(default_factory=KeptRuns, repr=False)
    _found: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, analysis: Hashable, find: Callable[[], T]) -> T:
        """What an analysis finds, run once for this graph and those that only describe it further.

        Args:
            analysis: its key. What it finds may depend on how ops run: on anything
                but the fields in `_DESCRIPTIONS`, and on whether there is a loss.
        """
        key = (analysis, self.batch_size, self.loss is None)
        if key not in self._found:
            self._found[key] = find()
        found: T = self._found[key]
        return found

    def aliases_of(self, path: str) -> tuple[str, ...]:
        """The other names of a module."""
        first = self.paths.get(path)
        same = (name for name, own in self.paths.items() if own == first)
        return () if first is None else tuple(name for name in same if name != path)

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        """The dimensions of inputs that are free, beside the batch."""
        return named(source.shape or () for source in self.inputs)

    @cached_property
    def registered(self) -> Mapping[str, int]:
        """The places of the model's modules and tensors, by their paths, in the order in which it
        registers them."""
        own = (name for name, item in self.state.items() if item.kind is not StateKind.CONSTANT)
        return {path: place for place, path in enumerate((*self.paths, *own))}

    @property
    def presents(self) -> Mapping[str, str]:
        """The values that state between calls becomes, by the inputs that it is."""
        return {past: at_place(self.outputs, place).name for past, place in self.carried}

    @property
    def traced_in(self) -> Precision:
        """The precision in which the model is this graph; fp32 unless it is for another alone."""
        return next(precision for precision in Precision if precision not in self.unlike)

    @cached_property
    def op_of(self) -> Mapping[str, Op]:
        """Ops by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def producer(self) -> Mapping[str, Op]:
        """The op that makes each value; inputs of the graph have none."""
        return {name: op for op in self.ops for name in op.outputs}

    @cached_property
    def last_reads(self) -> Mapping[str, tuple[str, ...]]:
        """By op, the values that no op after it reads."""
        last = {name: op.name for op in self.ops for name in (*op.outputs, *op.inputs)}
        table: dict[str, list[str]] = {}
        for name, op in last.items():
            table.setdefault(op, []).append(name)
        return {op: tuple(names) for op, names in table.items()}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Op, ...]]:
        """The ops that read each value, in order."""
        table: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in op.inputs:
                table.setdefault(name, []).append(op)
        return {name: tuple(ops) for name, ops in table.items()}

    @property
    def on_meta(self) -> bool:
        """Whether the model has no numbers."""
        return any(tensor.is_meta for tensor in self.tensors.values())

    @cached_property
    def batched(self) -> frozenset[str]:
        """The values that depend on an input with a batch dimension, be it on its shape alone."""
        found = {source.name for source in self.inputs if source.batched}
        for op in self.ops:
            if not found.isdisjoint(op.inputs):
                found.update(op.outputs)
        return frozenset(found)

    @cached_property
    def output_values(self) -> tuple[str, ...]:
        """The values the model returns, each once, and the terms of those that are losses.

        The loss that is minimised is not among them.
        """
        terms = (term for terms in self.output_terms.values() for term in terms)
        handed = (name for term in terms for name in (term.value, term.weight) if name)
        return tuple(dict.fromkeys((*value_names(self.outputs), *handed)))

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """The values that somebody reads after the last op: those returned, and the loss."""
        return (*self.output_values, *(() if self.loss is None else (self.loss.value,)))

    @property
    def unread_inputs(self) -> tuple[str, ...]:
        """The inputs that no op reads, and that are not returned either."""
        read = {*self.ends, *(name for op in self.ops for name in op.inputs)}
        return tuple(source.name for source in self.inputs if source.name not in read)

    @cached_property
    def targets(self) -> frozenset[str]:
        """The inputs that only the loss is given: inference has none."""
        return frozenset(source.name for source in self.inputs if source.path[0] == "target")

    @cached_property
    def loss_only(self) -> frozenset[str]:
        """Names of the ops that serve only the loss.

        They make no output of the model, so inference does without them; they run in the last
        stage, after all others. What follows from them (a running mean of the loss) is counted
        with them. Where the loss is all that the model returns they are those that add up its
        terms, if it has any.
        """
        if self.loss is None:
            return frozenset()
        apart = self.output_values or tuple(term.value for term in self.loss.terms)
        if not apart:
            return frozenset()
        others = self.ancestors(apart)
        found = set(self.ancestors((self.loss.value,)) - others)
        read = {name for op in self.ops if op.name in others for name in op.inputs}
        for op in filter(is_requirement, self.ops):
            needed = self.ancestors(op.inputs)
            asked = {*op.inputs, *(name for name in needed for name in self.op_of[name].inputs)}
            # What asks of the target is no business of inference.
            if any(item.name in asked and item.name not in read for item in self.inputs):
                found.update(needed - others, (op.name,))
        while more := self._with_them(found) - others - found:
            found |= more
        return frozenset(found - self.held)

    def _with_them(self, names: set[str]) -> frozenset[str]:
        """The ops that read what these ops make, such as those that write into it; and what they
        read, as what is written is not among the ancestors of what it is written into."""
        read = {name for op in self.ops if op.name in names for name in op.inputs}
        made = {name for op in self.ops if op.name in names for name in op.outputs}
        after = {op.name for op in self.ops if not made.isdisjoint(op.inputs)}
        return self.ancestors(read) | after

    @property
    def loss_inputs(self) -> frozenset[str]:
        """The values that the ops that serve only the loss take from others."""
        late = [op for op in self.ops if op.name in self.loss_only]
        made = {name for op in late for name in op.outputs}
        return frozenset(name for op in late for name in op.inputs) - made

    def told(self, values: Iterable[str]) -> frozenset[Dim]:
        """The sizes that vary from call to call and can be read off the shapes of values."""
        known = (self.values[value] for value in values if value in self.values)
        return frozenset[Dim]().union(*(value.tells for value in known))

    def ancestors(self, names: Iterable[str]) -> frozenset[str]:
        """Names of the ops that these values are computed from.

        Writes in place are no edges here: a pass that needs them asks `passes.effects`.
        """
        found: set[str] = set()
        pending = list(names)
        while pending:
            op = self.producer.get(pending.pop())
            if op is not None and op.name not in found:
                found.add(op.name)
                pending.extend(op.inputs)
        return frozenset(found)

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(
            torch.Size(state.shape).numel()
            for state in self.state.values()
            if state.kind is StateKind.PARAMETER
        )

    def replace(self, **changes: object) -> Graph:
        """A copy with these fields changed."""
        if "ops" in changes:
            changes = {"repeats": (), **changes}
        made = dataclasses.replace(self, **changes)  # type: ignore[arg-type]  # checked by replace
        if changes.keys() <= _DESCRIPTIONS:
            object.__setattr__(made, "_found", self._found)
        return made

    def only(self, ops: tuple[Op, ...]) -> Graph:
        """The graph of these ops, with no more state and modules than they have."""
        states = {name for op in ops for name in op.states(self.modules)}
        modules = {op.call.module for op in ops if isinstance(op.call, ModuleCall)}
        return self.replace(
            ops=ops,
            state={n: s for n, s in self.state.items() if n in states},
            tensors={n: t for n, t in self.tensors.items() if n in states},
            modules={n: m for n, m in self.modules.items() if n in modules},
        )

    def __str__(self) -> str:
        """The whole graph, one op a line, with types where they are known and source lines."""
        lines = [f"graph {self.name} (batch {self.batch_size})"]
        for source in self.inputs:
            dim = f" in dimension {source.batch_dim}" if source.batch_dim else ""
            lines.append(f"  input {source.name}{f' (batched{dim})' if source.batched else ''}")
        for op in self.ops:
            types = ", ".join(str(self.values[name]) for name in op.outputs if name in self.values)
            where = f"  # {op.source}" if op.source else ""
            lines.append(f"  {format_op(op)}{'  : ' + types if types else ''}{where}")
        lines.append(f"  return {format_argument(self.outputs)}")
        for term in () if self.loss is None else self.loss.summands:
            over = f", over {term.weight.what}" if term.weight is not None else ""
            what = "term of the loss" if self.loss is not None and self.loss.terms else "loss"
            lines.append(f"  {what} {term.value} ({term.reduction.value} of micro-batches{over})")
        return "\n".join(lines)


def found_once(find: Callable[[Graph], T]) -> Callable[[Graph], T]:
    """An analysis that is run as `Graph.once` runs it."""

    @functools.wraps(find)
    def found(graph: Graph) -> T:
        return graph.once(find.__qualname__, lambda: find(graph))

    return found
