"""What a user asks of the cut: ops in a stage of their choice, together, or apart."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpipe_compiler.errors import UsageError
from gpipe_compiler.ir import Graph, ModuleCall, Op, State
from gpipe_compiler.options import Constraints, pin_words
from gpipe_compiler.passes.cut.constraints import ConstraintWords, StageRanges
from gpipe_compiler.passes.cut.problem import CutProblem
from gpipe_compiler.planner.cut_problem import CutFacts, said_of
from gpipe_compiler.text.escaping import shell_line


def check_names(graph: Graph, constraints: Constraints) -> None:
    """Makes sure that everything named is there.

    Raises:
        UsageError: naming what is not, and what is nearly called so.
    """
    unknown = [name for name in constraints.names if not ops_of(graph, name)]
    if not unknown:
        return
    known = [*_modules(graph), *(op.name for op in graph.ops), *graph.producer]
    faults = []
    for name in unknown:
        if name in graph.paths:
            faults.append(_without_ops(graph, name))
            continue
        near = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=3)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        faults.append(f"there is no module, op or value {name!r}{meant}")
    top = list(dict.fromkeys(path.split(".")[0] for path in _modules(graph)))
    listed = f"the modules are {', '.join(top)}" if top else "the model has no modules"
    raise _refusal(faults, f"{listed}; gpipe-inspect and plan.json name the ops of a package")


def constrain(
    problem: CutProblem, facts: CutFacts, constraints: Constraints, stages: int
) -> CutProblem:
    """The problem of a graph (`cut_problem.problem_of`), under constraints.

    Raises:
        UsageError: with all that is unknown or contradicts something, and why.
    """
    check_names(facts.graph, constraints)
    asked = _Asked.of(problem, facts, constraints, stages)
    constrained = dataclasses.replace(
        problem,
        pinned=(*problem.pinned, *((node, stage) for node, (stage, _) in asked.pins.items())),
        groups=(*problem.groups, *(group for group in asked.groups if len(group) > 1)),
        apart=(*problem.apart, *asked.apart),
    )
    faults = asked.faults or StageRanges.of(constrained, stages, asked.words).faults
    if faults:
        raise _refusal(list(dict.fromkeys(faults)))
    return constrained


def _refusal(faults: Sequence[str], hint: str = "") -> UsageError:
    if len(faults) == 1:
        return UsageError(faults[0], hint=hint)
    listing = "".join(f"\n  - {fault}" for fault in faults)
    return UsageError(f"what is asked of the stages cannot be had:{listing}", hint=hint)


def _path(op: Op) -> str:
    return op.call.module if isinstance(op.call, ModuleCall) else op.module


def _modules(graph: Graph) -> list[str]:
    """Every module that ops stand in, in order."""
    found: dict[str, None] = {}
    for op in graph.ops:
        parts = _path(op).split(".")
        for end in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:end]), None)
    found.pop("", None)
    return list(found)


def ops_of(graph: Graph, name: str) -> list[Op]:
    """The ops of a module, or else the op or the maker of the value of this name.

    A module without ops of its own is where its parameters are: in the module of torch that is
    called whole around it, or in the ops that read them.
    """
    if not name:
        return []
    names = (name, *graph.aliases_of(name))
    for path in names:
        inside = [op for op in graph.ops if f"{_path(op)}.".startswith(f"{path}.")]
        if inside:
            return inside
    maker = graph.op_of.get(name) or graph.producer.get(name)
    if maker is not None:
        return [maker]
    around = [op for op in graph.ops if isinstance(op.call, ModuleCall)]
    around = [op for op in around if any(f"{path}.".startswith(f"{_path(op)}.") for path in names)]
    if around or name not in graph.paths:
        return around
    own = {state.name for state in graph.state.values() if _is_in(state, names)}
    return [op for op in graph.ops if not own.isdisjoint(op.states(graph.modules))]


def _is_in(state: State, paths: Sequence[str]) -> bool:
    """Whether a parameter or buffer belongs to one of some modules, by any of its names."""
    called = (state.name, *state.aliases)
    return any(name.startswith(f"{path}.") for name in called for path in paths)


def _without_ops(graph: Graph, name: str) -> str:
    """That a module's forward is not called, and which of those near it are."""
    if not name:
        return "'' is the whole model, and not a part of it"
    parent = name.rpartition(".")[0]
    while parent and not ops_of(graph, parent):
        parent = parent.rpartition(".")[0]
    depth = len(parent.split(".")) + 1 if parent else 1
    near = [".".join(path.split(".")[:depth]) for path in _modules(graph)]
    inside = dict.fromkeys(path for path in near if not parent or path.startswith(f"{parent}."))
    others = ", ".join(inside) or parent
    return (
        f"the module {name} computes nothing here: no op is of its forward, or reads what "
        f"it holds; name one of {others}"
    )


@dataclass(frozen=True)
class _Asked:
    """Constraints by index of nodes, each with its words.

    Attributes:
        pins: node -> (stage, words).
        apart: (before, after) -> words.
    """

    names: tuple[str, ...]
    ties: tuple[tuple[frozenset[int], str], ...] = ()
    pins: dict[int, tuple[int, str]] = field(default_factory=dict)
    groups: dict[tuple[int, ...], str] = field(default_factory=dict)
    apart: dict[tuple[int, int], str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def words(self) -> ConstraintWords:
        pins = {(node, stage): words for node, (stage, words) in self.pins.items()}
        return ConstraintWords(pins, self.groups, self.apart, self.ties)

    @classmethod
    def of(
        cls, problem: CutProblem, facts: CutFacts, constraints: Constraints, stages: int
    ) -> _Asked:
        names = tuple(node.name for node in problem.nodes)
        index = {name: position for position, name in enumerate(names)}
        ties = [
            (frozenset(index[name] for name in tie.ops if name in index), said_of(tie, facts.graph))
            for tie in facts.atoms.ties
        ]
        asked = cls(names, tuple(tie for tie in ties if tie[0]))
        nodes: dict[str, tuple[int, ...]] = {}
        for name in constraints.names:
            ops = ops_of(facts.graph, name)
            nodes[name] = tuple(index[op.name] for op in ops if op.name in index)
            if not nodes[name]:
                asked.faults.append(
                    f"{name} is cheap enough to be computed in every stage that needs it, so it "
                    "has no stage of its own"
                )
        for name, stage in constraints.pins:
            asked._pin(nodes[name], name, stage, stages)
        for name in constraints.together:
            asked.groups[nodes[name]] = shell_line(["--keep-together", name])
        for name in constraints.split_at:
            asked._split(facts, index, nodes[name], name)
        return asked

    def _pin(self, nodes: Sequence[int], name: str, stage: int, stages: int) -> None:
        words = pin_words(name, stage)
        there = stage + stages if stage < 0 else stage
        if not 0 <= there < stages:
            self.faults.append(
                f"{words}: of {stages} stages, 0 is the first, {stages - 1} or -1 the last"
            )
            return
        for node in nodes:
            other, said = self.pins.setdefault(node, (there, words))
            if other != there:
                self.faults.append(f"{said} and {words}: {self.names[node]} is in both")
                return

    def _split(
        self, facts: CutFacts, index: Mapping[str, int], nodes: Sequence[int], name: str
    ) -> None:
        inside = set(nodes)
        made = {node: _made_before(facts, index, self.names[node]) for node in nodes}
        first = [node for node in nodes if not made[node] & inside]
        pairs = [(before, node) for node in first for before in sorted(made[node])]
        if nodes and not pairs:
            self.faults.append(
                f"{shell_line(['--split-at', name])}: it reads only inputs of the model, so no "
                "stage need end before it"
            )
        self.apart.update(dict.fromkeys(pairs, shell_line(["--split-at", name])))


def _made_before(facts: CutFacts, index: Mapping[str, int], name: str) -> set[int]:
    """The nodes whose values an op reads, directly or through ops that every stage repeats."""
    found: set[int] = set()
    pending, seen = [name], {name}
    while pending:
        for value in facts.reads(facts.graph.op_of[pending.pop()]):
            maker = facts.graph.producer.get(value)
            if maker is None or maker.name in seen:
                continue
            seen.add(maker.name)
            if maker.name in index:
                found.add(index[maker.name])
            else:
                pending.append(maker.name)
    return found
