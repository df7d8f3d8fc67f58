"""Steps in closed form: what `simulate` comes to, or at least to, under the simplest schedules.

The cut's searches for GPipe and 1F1B rest on them (`passes/cut/criteria.py`), and tests hold the
simulation against them.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_compiler.simulate.step import StageTimes


def fill_drain_time(times: Sequence[StageTimes], microbatches: int) -> float:
    """The step of GPipe, or of inference where backward takes no time, in closed form.

    Equal jobs pass a line of machines in sum + (M - 1) x slowest machine; the forward line is
    through before the backward line starts. Recomputing, which all but the first micro-batch to
    come back need, is a set-up between two jobs: it slows a machine down, but no job waits for it
    twice.
    """
    forward = [machine for t in times for machine in (t.receive_s, t.forward_s)]
    backward = [machine for t in times for machine in (t.backward_s, t.gradient_s)]
    pace = [machine for t in times for machine in (t.recompute_s + t.backward_s, t.gradient_s)]
    return (
        sum(forward)
        + sum(backward)
        + (microbatches - 1) * (max(forward, default=0.0) + max(pace, default=0.0))
    )


def one_f_one_b_bound(times: Sequence[StageTimes], microbatches: int) -> float:
    """A step of 1F1B (one stage a device) takes no less than this.

    For every stage s: the way of the first micro-batch to it; its w warm-up forwards, or the
    first micro-batch's round trip through the later stages, whichever is longer; the steady
    phase; the same at the end; and the way of the last gradient back to stage 0. Every stage but
    the last recomputes every micro-batch; while it waits for a gradient, that costs nothing.
    """
    stages = len(times)
    bound = 0.0
    way = 0.0  # to this stage's forward, and from its backward to the start
    rest = sum(t.forward_s + t.backward_s + t.receive_s + t.gradient_s for t in times)
    for index, t in enumerate(times):
        way += t.receive_s + t.gradient_s
        own = t.forward_s + t.backward_s
        rest -= own + t.receive_s + t.gradient_s
        again = t.recompute_s if index < stages - 1 and microbatches > 1 else 0.0
        both = t.backward_s + again
        warm = min(microbatches, stages - index)
        start = max(warm * t.forward_s + again, t.forward_s + rest)
        end = max(warm * both, t.backward_s + rest)
        if microbatches > warm:
            steady = (microbatches - warm) * (own + again) - again
            inner = start + steady + end
        else:
            inner = max(start + warm * both - again, warm * t.forward_s + end)
        port = (microbatches - 1) * max(t.receive_s, t.gradient_s, both)
        bound = max(bound, way + inner, way + own + rest + port)
        way += own
    return bound
