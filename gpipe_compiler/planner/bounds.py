"""What a choice of settings costs at least, before anything is cut."""

from __future__ import annotations

from dataclasses import dataclass

from gpipe_compiler.options.policy import RematChoice
from gpipe_compiler.passes.cut.problem import CutProblem, Node, Seconds
from gpipe_compiler.plan.pareto import Choice
from gpipe_compiler.runtime.schedule.choosing import splits_backward
from gpipe_compiler.runtime.spec import ScheduleKind


@dataclass(frozen=True, slots=True)
class Work:
    """Sums over a problem, in seconds and bytes of one micro-batch.

    Of unequal devices the fastest counts for every node.

    Attributes:
        weight_s: the part of `backward_s` that a schedule may run later.
        most_forward_s, most_backward_s, most_s: of the node that takes longest, forward, backward
            and both.
        kept_bytes: held for good, counted once.
        most_kept_bytes: of the largest thing held for good.
        saved_bytes: held for a micro-batch between its forward and backward, counted once.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    most_forward_s: float
    most_backward_s: float
    most_s: float
    kept_bytes: int
    most_kept_bytes: int
    saved_bytes: int

    @classmethod
    def of(cls, problem: CutProblem, *, training: bool) -> Work:
        """That of a problem."""
        kinds: list[tuple[Node | Seconds, ...]] = [problem.nodes, *problem.other_kinds]
        forward = [min(node.forward_s for node in nodes) for nodes in zip(*kinds, strict=True)]
        backward = [min(node.backward_s for node in nodes) for nodes in zip(*kinds, strict=True)]
        weight = [max(node.weight_s for node in nodes) for nodes in zip(*kinds, strict=True)]
        if not training:
            backward = [0.0] * len(backward)
        both = [f + b for f, b in zip(forward, backward, strict=True)]
        return cls(
            sum(forward),
            sum(backward),
            sum(weight),
            max(forward, default=0.0),
            max(backward, default=0.0),
            max(both, default=0.0),
            sum(kept.bytes for kept in problem.kept),
            max((kept.bytes for kept in problem.kept), default=0),
            sum(kept.microbatch_bytes for kept in problem.kept) if training else 0,
        )


def least_step_s(work: Work, choice: Choice) -> float:
    """No step takes less.

    Some device has its share of all work, and the one with the longest node has that. The first
    micro-batch goes forward and back through all, without gradients of parameters where these can
    wait. GPipe's devices are a line of machines in each direction (`cut.criteria.FillDrain`).
    """
    devices, count = choice.devices, choice.microbatches
    total = work.forward_s + work.backward_s
    waits = work.weight_s if splits_backward(choice.schedule) else 0.0
    least = max(count * total / devices, count * work.most_s, total - waits)
    if choice.schedule is ScheduleKind.GPIPE:
        forward = max(work.forward_s / devices, work.most_forward_s)
        backward = max(work.backward_s / devices, work.most_backward_s)
        least = max(least, total + (count - 1) * (forward + backward))
    return least


def surely_fits(work: Work, choice: Choice, memory: int) -> bool:
    """Whether all the work on one device would fit it, with everything kept of all micro-batches.

    A device may hold what several of its stages use as often as it has stages.
    """
    times = -(-choice.stages // choice.devices)
    return times * (work.kept_bytes + work.saved_bytes * choice.microbatches) <= memory


def least_peak_bytes(work: Work, choice: Choice) -> int:
    """No fullest device has less.

    Each device holds what is kept for good, and at some moment a micro-batch of each of its
    stages, unless these may recompute in segments; GPipe's hold all micro-batches of all their
    stages at once, unless they recompute. The fullest has no less than the mean of them.
    """
    held = 0.0
    if choice.remat is not RematChoice.AUTO:
        held = work.saved_bytes * choice.devices / choice.stages
    if choice.schedule is ScheduleKind.GPIPE and choice.remat is RematChoice.NONE:
        held = work.saved_bytes * choice.microbatches
    return max(int((work.kept_bytes + held) / choice.devices), work.most_kept_bytes)
