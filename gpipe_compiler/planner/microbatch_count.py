"""Into how many micro-batches a mini-batch is split where nobody says.

From one for every stage, so that all have work at once, up to four, so that they seldom wait; and
no more than pay: every micro-batch costs what kernels, messages and the sums of gradients take
however few samples there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpipe_compiler.errors import ModelError
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import Policy
from gpipe_compiler.passes.batch_rules import takes_several
from gpipe_compiler.passes.cross_sample_ops import mixing_ops
from gpipe_compiler.passes.joined_outputs import apart_outputs
from gpipe_compiler.planner.cut_problem import MicrobatchGraph
from gpipe_compiler.runtime.spec import BatchNorm

MICROBATCHES_PER_STAGE = 4
"""GPipe finds the bubble negligible from four micro-batches per stage on (section 3)."""

_ALIKE = 1.03
"""How many times as fast fewer micro-batches have to be: more take less memory."""

_LARGE = 2000


def likely_microbatches(batch_size: int, stages: int) -> list[int]:
    """The divisors of the batch up to four per stage, the largest first."""
    most = max(1, MICROBATCHES_PER_STAGE * stages)
    return [count for count in range(most, 0, -1) if batch_size % count == 0]


def infers_whole(graph: Graph) -> bool:
    """Whether a package of an annotated graph only infers, and takes the batch in one piece."""
    return graph.loss is None and bool(apart_outputs(graph))


@dataclass(frozen=True)
class MicrobatchCount:
    """What a number of micro-batches is chosen by.

    Attributes:
        samples: of the mini-batch of one replica.
        latency_s: that a message takes at least.
        prepare: describes and costs the graph for a number of micro-batches; raises a ModelError
            where it does not run on so few samples.
    """

    graph: Graph
    samples: int
    stages: int
    policy: Policy
    latency_s: float
    prepare: Callable[[int], MicrobatchGraph]

    def most(self) -> int:
        """As many as a batch can make: fewer where a layer has to have several samples.

        BatchNorm after a global pooling cannot train on one, and elsewhere its statistics would be
        those of one. A package that only infers takes the batch in one piece where an output does
        not follow from those of micro-batches.

        Raises:
            ModelError: naming the op that cannot run on the samples of any.
        """
        met: list[ModelError] = []
        for count in self._likely():
            try:
                if self._takes(count):
                    return 1 if infers_whole(self.prepare(count).graph) else count
            except ModelError as error:
                met.append(error)
        raise met[0]

    def fastest(self) -> int:
        """The largest number of micro-batches than which half as many are not faster, or are fewer
        than the stages.

        Of graphs of more than `_LARGE` ops, which take seconds to describe, it is `most`.
        """
        count = self.most()
        if len(self.prepare(count).graph.ops) > _LARGE:
            return count
        while fewer := self._half_of(count):
            if _ALIKE * self._step_s(fewer) > self._step_s(count):
                break
            count = fewer
        return count

    def above(self, count: int) -> list[int]:
        """Twice as many or more, and again, up to `most`."""
        most, found = self.most(), list[int]()
        for more in sorted(each for each in self._likely() if count < each <= most):
            doubled = more >= 2 * (found[-1] if found else count)
            if more == most or (doubled and self._can_take(more)):
                found.append(more)
        return found

    def _half_of(self, count: int) -> int | None:
        """The largest number up to half of one that the model takes, and that the stages need."""
        fewer = (each for each in self._likely() if 2 * each <= count and each >= self.stages)
        return next(filter(self._can_take, fewer), None)

    def _likely(self) -> list[int]:
        counts = likely_microbatches(self.samples, self.stages)
        if takes_several(self.graph):
            return [count for count in counts if 2 * count <= self.samples] or counts
        return counts

    def _takes(self, count: int) -> bool:
        graph = self.prepare(count).graph
        return not (count == self.samples > 1 and _mixes(graph, self.policy))

    def _can_take(self, count: int) -> bool:
        try:
            return self._takes(count)
        except ModelError:  # of samples that go together
            return False

    def _step_s(self, count: int) -> float:
        """Seconds of a step by GPipe on equal stages."""
        costs = self.prepare(count).costs[0].ops.values()
        each = (sum(cost.forward_s for cost in costs), sum(cost.backward_s for cost in costs))
        longest = (max(seconds / self.stages, self.latency_s) for seconds in each if seconds)
        return sum(longest) * (count + self.stages - 1)


def _mixes(graph: Graph, policy: Policy) -> bool:
    """Whether training computes results of one sample from the others of its micro-batch, as
    BatchNorm does.
    """
    if graph.loss is None or policy.batchnorm is BatchNorm.EXACT:
        return False
    made = (name for op in mixing_ops(graph) for name in graph.op_of[op].outputs)
    return any(graph.values[name].batch_dim is not None for name in made)
