"""How the stages of a device recompute: the fastest way that fits into its memory.

What a stage can do (`ways`) is to keep everything but what the model itself checkpoints, to run its
whole forward again, or one of the choices of segments that no other is better than
(`passes.remat`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gpipe_compiler.passes.remat import (
    RematProblem,
    SegmentChoice,
    choices,
    choices_of,
    evaluate,
    stage_problem,
    whole_calls,
)
from gpipe_compiler.plan import RematPoint, Stage
from gpipe_compiler.planner.cut_problem import CutFacts
from gpipe_compiler.runtime.schedule.actions import Compute, Orders, Phase
from gpipe_compiler.runtime.schedule.joint import waiting
from gpipe_compiler.runtime.spec import Remat
from gpipe_compiler.simulate.in_flight import held

MOST_COMBINED = 20_000
"""Ways of all stages of a device together that are compared, at most."""

MOST_POINTS = 24
"""Of a stage's frontier, in a plan."""

_WHOLE = 2
"""How many of the ways of a stage have no segments but those of the model itself: the first."""

Bytes = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RematOption:
    """A way for one stage to recompute.

    Attributes:
        seconds: of running ops again for one micro-batch.
        choice: of segments, where it recomputes so; of FULL those of the model itself, if any.
        written: whether nothing runs again but what the model itself checkpoints.
    """

    remat: Remat
    seconds: float
    choice: SegmentChoice | None = None
    written: bool = False

    def of(self, stage: Stage, *, split: bool) -> Stage:
        """The stage that recomputes so.

        Args:
            split: whether its backward is.
        """
        if self.choice is None:
            return dataclasses.replace(stage, remat=self.remat, segments=(), written=self.written)
        choice = self.choice
        return dataclasses.replace(
            stage,
            remat=self.remat,
            written=self.written,
            segments=tuple(stage.ops[start:stop] for start, stop in choice.segments),
            segments_s=choice.seconds,
            segments_kept_bytes=choice.kept,
            segments_again_bytes=(choice.whole if split else choice.peak) - choice.kept,
        )


def as_written(
    facts: CutFacts, stage: Stage, seconds: Mapping[str, float], *, again: bool
) -> RematOption:
    """What a stage runs again because the model checkpoints it.

    Args:
        again: whether it runs its whole forward again besides.
    """
    keeps, full, *_ = _ways(stage, _problem(facts, stage, seconds), ())
    return full if again else keeps


def run_again_anyhow(facts: CutFacts, seconds: Mapping[str, float]) -> frozenset[str]:
    """The ops that run again wherever the cuts are, because the model checkpoints them."""
    ops = [op.name for op in facts.graph.ops]
    if not any(op.checkpoint for op in facts.graph.ops):
        return frozenset()
    problem = stage_problem(facts.graph, facts.effects, facts.saved, seconds, ops)
    inside = (place for start, stop in problem.written for place in range(start, stop))
    steps = ((ops[place], problem.steps[place]) for place in inside)
    return frozenset(name for name, step in steps if step.saves and not step.early)


def _problem(facts: CutFacts, stage: Stage, seconds: Mapping[str, float]) -> RematProblem:
    return stage_problem(facts.graph, facts.effects, facts.saved, seconds, stage.ops)


def ways_by_calls(
    facts: CutFacts, stage: Stage, seconds: Mapping[str, float]
) -> list[tuple[RematOption, ...]]:
    """All that may be worth it with segments that are whole calls of modules: first the outermost
    (`passes.remat.whole_calls`), then these and those inside, and so on."""
    kept = facts.kept
    calls = [(call.path, [kept[node].name for node in call.nodes]) for call in facts.modules]
    here = set(stage.ops)
    inside = [(path, names) for path, names in calls if here.issuperset(names)]
    problem = _problem(facts, stage, seconds)
    levels = whole_calls(facts.graph, facts.effects, seconds, stage.ops, inside, facts.duplicable)
    return [_ways(stage, problem, choices_of(problem, segments)) for segments in levels]


def _ways(
    stage: Stage, problem: RematProblem, found: Iterable[SegmentChoice]
) -> tuple[RematOption, ...]:
    several = (RematOption(Remat.SEGMENTS, one.seconds, one) for one in found if one.segments)
    if not problem.written:
        keeps = RematOption(Remat.NONE, 0.0, written=True)
        return keeps, RematOption(Remat.FULL, stage.forward_s), *several
    own = evaluate(problem, ())
    return (
        RematOption(Remat.SEGMENTS, own.seconds, own, written=True),
        RematOption(Remat.FULL, stage.forward_s + own.seconds, own),
        *several,
    )


@dataclass(frozen=True)
class DeviceRematOptions:
    """What the stages of one device can do.

    Attributes:
        seconds: for each of them and way, what it takes of a mini-batch.
        bytes: for each of them: what it holds of micro-batches; shape (ways, moments).
    """

    stages: tuple[Stage, ...]
    ways: tuple[tuple[RematOption, ...], ...]
    seconds: tuple[Bytes, ...]
    bytes: tuple[Bytes, ...]

    @classmethod
    def of(
        cls,
        order: Sequence[Compute],
        joint: Collection[int],
        stages: Sequence[Stage],
        known: Mapping[int, Sequence[RematOption]],
        *,
        split: bool,
    ) -> DeviceRematOptions:
        """Those of a device.

        Args:
            known: the ways of each stage.
        """
        numbers = sorted({action.stage for action in order})
        waits = waiting(order, joint)
        counts = {
            Remat.NONE: held(order, (), joint, (), waits).counts,
            Remat.FULL: held(order, numbers, joint, (), waits).counts,
            Remat.SEGMENTS: held(order, (), joint, numbers, waits).counts,
        }
        together = np.concatenate([table.reshape(len(table), -1) for table in counts.values()], 1)
        distinct = np.unique(together, axis=0, return_index=True)[1]
        seconds, sizes = [], []
        for place, number in enumerate(numbers):
            rows, times = [], []
            remats = {way.remat for way in known[number]}
            often = {remat: runs(order, number, remat, joint) for remat in remats}
            for way in known[number]:
                table = counts[way.remat][distinct, place]
                stage = way.of(stages[number], split=split)
                rows.append(table @ np.array(stage.microbatch_bytes, dtype=np.float64))
                times.append(way.seconds * often[way.remat])
            seconds.append(np.array(times))
            sizes.append(np.array(rows).reshape(len(rows), -1))
        kept = tuple(stages[number] for number in numbers)
        return cls(kept, tuple(tuple(known[n]) for n in numbers), tuple(seconds), tuple(sizes))

    @property
    def state_bytes(self) -> int:
        """Bytes that the stages hold for good."""
        return sum(stage.state_bytes for stage in self.stages)

    def fastest(self, memory: float, *, segments: bool) -> tuple[bool, dict[int, RematOption]]:
        """The ways that take the least time in so much memory; else those that need the least.
        And whether they fit.

        Args:
            memory: bytes, of which the state takes its part.
            segments: whether there may be others than the model itself has.
        """
        room = memory - self.state_bytes
        places = self._compared(segments=segments)
        total = np.zeros((1, self.bytes[0].shape[1]))
        taken = np.zeros(1)
        for size, seconds, chosen in zip(self.bytes, self.seconds, places, strict=True):
            total = (total[:, None] + size[chosen][None]).reshape(-1, total.shape[1])
            taken = (taken[:, None] + seconds[chosen][None]).reshape(-1)
        peaks = total.max(axis=1, initial=0.0)
        fits = peaks <= room
        if fits.any():
            best = int(np.lexsort((peaks, np.where(fits, taken, np.inf)))[0])
        else:
            best = int(np.lexsort((taken, peaks))[0])
        found = np.unravel_index(best, [len(chosen) for chosen in places])
        return bool(fits.any()), {
            stage.index: known[chosen[index]]
            for stage, known, chosen, index in zip(
                self.stages, self.ways, places, found, strict=True
            )
        }

    def _compared(self, *, segments: bool) -> list[list[int]]:
        """For every stage the ways that are compared; of many, some from the fastest to the
        smallest."""
        most = max(2, int(MOST_COMBINED ** (1 / len(self.stages))))
        found = []
        for place in range(len(self.stages)):
            front = self._front(place, segments=segments)
            if len(front) > most:
                steps = [index * (len(front) - 1) // (most - 1) for index in range(most)]
                front = [front[step] for step in dict.fromkeys(steps)]
            found.append(front)
        return found

    def _front(self, place: int, *, segments: bool) -> list[int]:
        """The ways of one stage that no other is better than, the fastest first."""
        peaks = self.bytes[place].max(axis=1, initial=0.0)
        seconds = self.seconds[place]
        wanted = [*range(len(self.ways[place]) if segments else _WHOLE)]
        wanted.sort(key=lambda i: (seconds[i], peaks[i], i))
        front: list[int] = []
        for index in wanted:
            if not front or peaks[index] < peaks[front[-1]]:
                front.append(index)
        return front

    def frontier(self, stage: int) -> tuple[RematPoint, ...]:
        """A stage's time against its memory, by itself."""
        place = next(p for p, known in enumerate(self.stages) if known.index == stage)
        front = self._front(place, segments=True)
        if len(front) > MOST_POINTS:
            steps = [index * (len(front) - 1) // (MOST_POINTS - 1) for index in range(MOST_POINTS)]
            front = [front[step] for step in steps]
        peaks = self.bytes[place].max(axis=1, initial=0.0)
        state = self.stages[place].state_bytes
        return tuple(
            RematPoint(
                (way := self.ways[place][index]).remat,
                state + int(peaks[index]),
                float(self.seconds[place][index]),
                len(way.choice.segments) if way.choice is not None else 0,
            )
            for index in front
        )


def runs(order: Sequence[Compute], stage: int, remat: Remat, joint: Collection[int]) -> int:
    """How often a stage runs ops again in a mini-batch."""
    if remat is Remat.FULL:
        return sum(waits == stage for waits, _ in waiting(order, joint))
    return sum(a.stage == stage and a.phase is Phase.FORWARD for a in order)


@dataclass(frozen=True)
class RematOptions:
    """What the stages of a graph can do, looked for once.

    Attributes:
        seconds: for each kind of device, of every op's forward.
        split: whether backwards are.
        most: places of each stage to look at (`passes.remat.choices`).
    """

    facts: CutFacts
    seconds: tuple[Mapping[str, float], ...]
    split: bool
    most: int
    _known: dict[Hashable, list[tuple[RematOption, ...]]] = field(default_factory=dict)

    def fitted(
        self,
        stages: Sequence[Stage],
        orders: Orders,
        joint: Collection[int],
        devices: Sequence[tuple[float, int]],
    ) -> list[tuple[Stage, ...]]:
        """The stages that recompute as fast as fits: in segments too, and without.

        Segments are whole calls of modules, the outermost with which a device fits; they are any
        only where it fits with none of these.

        Args:
            devices: for each, the bytes that it holds, and its kind.
        """
        segmented: dict[int, RematOption] = {}
        whole: dict[int, RematOption] = {}
        for order, (memory, kind) in zip(orders, devices, strict=True):
            for known in self._levels(stages, order, joint, kind):
                fits, found = known.fastest(memory, segments=True)
                whole.update(known.fastest(memory, segments=False)[1])
                if fits:
                    break
            segmented.update(found)
        return [
            tuple(taken[stage.index].of(stage, split=self.split) for stage in stages)
            for taken in (segmented, whole)
        ]

    def _levels(
        self, stages: Sequence[Stage], order: Sequence[Compute], joint: Collection[int], kind: int
    ) -> Iterator[DeviceRematOptions]:
        """What the stages of a device can do, with segments further and further inside."""
        calls = {n: self._by_calls(stages[n], kind) for n in {action.stage for action in order}}
        for level in range(max(map(len, calls.values()))):
            known = {
                n: found[min(level, len(found) - 1)]
                if found
                else self._any(stages[n], kind, self.most)
                for n, found in calls.items()
            }
            yield DeviceRematOptions.of(order, joint, stages, known, split=self.split)
        yield self.all(stages, order, joint, kind, self.most)

    def all(
        self,
        stages: Sequence[Stage],
        order: Sequence[Compute],
        joint: Collection[int],
        kind: int,
        most: int,
    ) -> DeviceRematOptions:
        """All that the stages of a device can do, with segments of any ops."""
        known = {n: self._any(stages[n], kind, most) for n in {action.stage for action in order}}
        return DeviceRematOptions.of(order, joint, stages, known, split=self.split)

    def _any(self, stage: Stage, kind: int, most: int) -> tuple[RematOption, ...]:
        key: Hashable = stage.ops, stage.forward_s, kind, most
        if key not in self._known:
            problem = _problem(self.facts, stage, self.seconds[kind])
            self._known[key] = [_ways(stage, problem, choices(problem, most))]
        return self._known[key][0]

    def _by_calls(self, stage: Stage, kind: int) -> list[tuple[RematOption, ...]]:
        """With segments that are whole calls of modules, further and further inside."""
        key: Hashable = stage.ops, stage.forward_s, kind
        if key not in self._known:
            self._known[key] = ways_by_calls(self.facts, stage, self.seconds[kind])
        return self._known[key]
