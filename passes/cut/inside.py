"""Of all cuts that are nearly as good as the best, the one that opens the fewest modules.

A call of a module is *opened* by a cut when its nodes lie in more than one stage. Which of two cuts
opens less is a comparison of numbers, the first that differs deciding:

- how many calls at depth 1 are opened, then at depth 2, and so on. Only modules count that have
  nodes of their own, which stand in no module further inside: a layer that adds a residual, a
  module made of convolutions. The depth of a call is the number of such calls around it, itself
  included.
- how many *containers*: modules that only call others, such as a list of layers, a `Sequential` of
  blocks. A part of one reads like the whole, so a cut between two layers opens nothing that
  counts before these.

What holds all nodes, as the model itself does, is opened by every cut and counts nowhere.

In graphs that can be cut in few ways all cuts are judged, those that open the least first, so that
none that is good enough opens less. In larger ones modules that the best cut opens are kept whole,
the outermost first, as long as the cut stays good enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from gpipe_compiler.errors import PlanError
from gpipe_compiler.passes.cut.choose import Cut, cut
from gpipe_compiler.passes.cut.contract import Contracted, contract, relevant
from gpipe_compiler.passes.cut.device_order import DeviceOrder, slot_orders
from gpipe_compiler.passes.cut.evaluator import CutEvaluator
from gpipe_compiler.passes.cut.ground import Known, most_places
from gpipe_compiler.passes.cut.orders import down_sets
from gpipe_compiler.passes.cut.problem import CutProblem
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.passes.cut.solve import WORK

MOST_DOWN_SETS = 256
"""Of a graph all of whose cuts are judged, at most."""

MOST_CUTS = 4_000
"""Cuts of it, at most."""

TRIES = 16
"""Cuts with some modules whole, at most."""

TRIED = 1_600_000
"""Places to cut, times stages, in all of them that are searched, about; one is in any case."""

QUICK = 20
"""A cut whose modules are mostly whole may compute this many times less than others."""

CLOSE = 1e-9
"""The share by which sums may differ for rounding."""


def cut_inside(
    problem: CutProblem,
    setting: CutSetting,
    modules: Sequence[ModuleNodes],
    best: Cut,
    share: float,
    *,
    work: int = WORK,
    known: Known | None = None,
) -> Cut:
    """The cut that opens the fewest modules among those that are good enough; the best of these.

    Good enough is what exceeds no memory by more than the best cut does, and whose objective is at
    most a share longer. What is said of how good a cut can be is that of the best.

    Args:
        best: of all cuts of the problem, in the same setting.
        share: such as 0.03.
    """
    if share <= 0 or not opened(modules, best.stage_of):
        return best
    inside = _Inside(problem, setting, modules, best, share, work // QUICK, known or Known())
    everything = _all_cuts(inside.problem, setting.stages)
    found = inside.closed() if everything is None else inside.judged(everything)
    if found is best:
        return best
    return replace(
        found,
        lower_bound_s=min(best.lower_bound_s, found.objective_s),
        proved=best.proved and found.objective_s <= best.objective_s,
        down_sets=best.down_sets,
    )


class _Inside:
    """One search."""

    def __init__(
        self,
        problem: CutProblem,
        setting: CutSetting,
        modules: Sequence[ModuleNodes],
        best: Cut,
        share: float,
        work: int,
        known: Known,
    ) -> None:
        plain = problem.forward_only() if setting.kind is None else problem
        self.problem = relevant(plain.check(), memory=setting.limited, updates=True)
        self.asked, self.setting, self.modules = problem, setting, modules
        self.best, self.work = best, work
        self.limit_s = best.objective_s * (1 + share + CLOSE)
        self.room = max(best.excess_bytes, default=0)
        # What has modules whole is not met again: only the timings outlive the search.
        self.known = Known(timings=known.timings)
        self.left = TRIES
        self.searches = max(1, TRIED // (most_places(setting.stages) * setting.stages))

    # --- all cuts ----------------------------------------------------------------------------

    def judged(self, cuts: Sequence[tuple[int, ...]]) -> Cut:
        """The best of those that open the least."""
        timing = self.known.timing(self.setting)
        evaluator = CutEvaluator(self.problem, self.setting, timing)
        device_orders = [
            DeviceOrder.of(self.setting, slots, timing.held, timing.again)
            for slots in slot_orders(self.setting)[0]
        ]
        by_openness = sorted((openness(self.modules, stage_of), stage_of) for stage_of in cuts)
        most = openness(self.modules, self.best.stage_of)
        for found, alike in itertools.groupby(by_openness, key=itemgetter(0)):
            if found >= most:
                break
            allowed = [stage_of for _, stage_of in alike if evaluator.allows(stage_of)]
            ranks = [
                (self._value(evaluator, device_order, stage_of), stage_of, device_order.slots)
                for stage_of in allowed
                for device_order in device_orders
            ]
            value, stage_of, slots = min(ranks, default=(math.inf, (), ()))
            if value <= self.limit_s:
                device_order = next(
                    device_order for device_order in device_orders if device_order.slots == slots
                )
                score = evaluator.evaluate(device_order, stage_of)
                return replace(
                    self.best,
                    stage_of=score.stage_of,
                    times=score.times,
                    step_s=score.step_s,
                    bottleneck_s=score.bottleneck_s,
                    slots=score.slots,
                    excess_bytes=score.excess,
                )
        return self.best

    def _value(
        self, evaluator: CutEvaluator, device_order: DeviceOrder, stage_of: Sequence[int]
    ) -> float:
        """The objective of a cut; infinite where it is too large."""
        excess, value = evaluator.evaluate(device_order, stage_of).rank(self.setting.objective)
        return math.inf if excess > self.room else value

    # --- modules kept whole ------------------------------------------------------------------

    def closed(self) -> Cut:
        """The best cut with as many of the opened modules whole as was found."""
        everything = self._whole(self.modules)
        if everything is not None:
            return everything
        found = self.best
        for depth in sorted({module.depth for module in self.modules}, key=_rank):
            outer = [m for m in self.modules if _rank(m.depth) <= _rank(depth)]
            pending = [[m for m in opened(outer, found.stage_of) if m.depth == depth]]
            while pending and self.left and self.searches:
                some = pending.pop()
                left_open = [m for m in opened(outer, found.stage_of) if m not in some]
                better = self._whole([m for m in outer if m not in left_open]) if some else None
                if better is not None:
                    found = better
                elif len(some) > 1:
                    half = len(some) // 2
                    pending += [some[half:], some[:half]]
        return found

    def _whole(self, modules: Sequence[ModuleNodes]) -> Cut | None:
        """The best cut that opens none of these; None where that is not good enough."""
        self.left -= 1
        groups = [set(module.nodes) for module in modules]
        beside_last = any(g & self.asked.last and g - self.asked.last for g in groups)
        problem = replace(
            self.asked,
            groups=(*self.asked.groups, *(module.nodes for module in modules)),
            last_alone=self.asked.last_alone or beside_last,
        )
        try:
            found = cut(
                problem,
                self.setting,
                work=self.work,
                known=self.known,
                within_s=self.limit_s,
            )
        except PlanError:  # too few parts for the stages, or too large ones
            return None
        self.searches -= 1
        fits = max(found.excess_bytes, default=0) <= self.room
        return found if fits and found.objective_s <= self.limit_s else None


def _rank(depth: int) -> float:
    """Where modules of a depth stand among others: containers, whose depth is 0, last."""
    return depth or math.inf


def _all_cuts(problem: CutProblem, stages: int) -> list[tuple[int, ...]] | None:
    """The stage of every node in all cuts into these stages; None where they are too many."""
    graph = contract(problem, stages)
    masks = down_sets(graph, MOST_DOWN_SETS)
    if masks is None:
        return None
    chains: list[tuple[int, ...]] = [()]
    for stage in range(stages):
        ends = masks[-1:] if stage == stages - 1 else masks[1:-1]
        longer = ((*c, end) for c in chains for end in ends if not c or _is_before(c[-1], end))
        chains = list(itertools.islice(longer, MOST_CUTS + 1))
        if len(chains) > MOST_CUTS:
            return None
    return [tuple(_stages(graph, chain)) for chain in chains]


def _is_before(mask: int, end: int) -> bool:
    """Whether a down-set is a part of another, and not the same."""
    return mask != end and not mask & ~end


def _stages(graph: Contracted, chain: Sequence[int]) -> Iterator[int]:
    place = {node: number for number, members in enumerate(graph.members) for node in members}
    for node in range(len(place)):
        yield next(stage for stage, mask in enumerate(chain) if mask >> place[node] & 1)


@dataclass(frozen=True, slots=True)
class ModuleNodes:
    """One call of a module.

    Attributes:
        depth: as above; 0 for a container.
    """

    path: str
    nodes: tuple[int, ...]
    depth: int


def module_calls(
    paths: Sequence[str], turn: Callable[[int, str], int] = lambda node, path: 0
) -> tuple[ModuleNodes, ...]:
    """The calls that a cut may open or not, each set of nodes once.

    Args:
        paths: of every node, the module whose forward it stands in.
        turn: of a node and a module around it, how many calls of that came before.
    """
    calls: dict[tuple[str, int], list[int]] = {}
    for node, path in enumerate(paths):
        for prefix in _prefixes(path):
            calls.setdefault((prefix, turn(node, prefix)), []).append(node)
    own = set(enumerate(paths))
    found: dict[tuple[int, ...], tuple[str, bool]] = {}
    for (path, _), nodes in calls.items():
        counts = any((node, path) in own for node in nodes)
        if 1 < len(nodes) < len(paths) and (counts or tuple(nodes) not in found):
            found[tuple(nodes)] = path, counts
    around: dict[str, list[set[int]]] = {}
    for call, (path, counts) in found.items():
        if counts:
            around.setdefault(path, []).append(set(call))
    return tuple(
        ModuleNodes(
            path,
            nodes,
            counts * sum(nodes[0] in other for p in _prefixes(path) for other in around.get(p, ())),
        )
        for nodes, (path, counts) in found.items()
    )


def _prefixes(path: str) -> Iterator[str]:
    """The modules around a module, itself last; not the model."""
    parts = path.split(".") if path else []
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def opened(modules: Sequence[ModuleNodes], stage_of: Sequence[int]) -> tuple[ModuleNodes, ...]:
    return tuple(m for m in modules if len({stage_of[node] for node in m.nodes}) > 1)


def openness(modules: Sequence[ModuleNodes], stage_of: Sequence[int]) -> tuple[int, ...]:
    """How much a cut opens, to be compared with that of other cuts of the same problem."""
    depths = [module.depth for module in opened(modules, stage_of)]
    deepest = max((module.depth for module in modules), default=0)
    return *(depths.count(depth) for depth in range(1, deepest + 1)), depths.count(0)
