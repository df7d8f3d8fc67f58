"""The loss of a graph, its terms, and what each is a mean over."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from gpipe_compiler.ir.ops import Op
from gpipe_compiler.runtime.spec import Reduction


@dataclass(frozen=True, eq=False, slots=True)
class LossWeight:
    """What the mean of a loss is taken over, where that is not the number of samples.

    The loss of a batch is a sum over its samples divided by `max(weight, floor) + offset`, where
    the weight of a batch is the sum of those of its parts; and 0 where that is not above `above`.
    The loss that the graph has is divided by no less than `least`: in a part of a batch nothing may
    count, by which that of the batch is not divided.

    Attributes:
        what: in words, such as `the targets other than -100`.
        inputs: the inputs of the graph that it is computed from.
        ops: how: ops of the graph, and after them some that are in no graph.
        value: the scalar among their results that is the weight.
    """

    what: str
    inputs: tuple[str, ...]
    ops: tuple[Op, ...]
    value: str
    floor: float = -inf
    offset: float = 0.0
    above: float = -inf
    least: float = -inf


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A summand of the loss, a scalar value: a sum over samples, or a mean over its own things.

    Attributes:
        weight: as in `Loss`.
    """

    value: str
    reduction: Reduction
    weight: LossWeight | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """The scalar value that training minimises.

    Attributes:
        weight: filled in by `passes.loss_weight`; None for a sum, or a mean over samples.
        terms: filled in by `passes.loss_weight`, where the loss adds up means over different
            things: each of them; the last ops of the graph only add them up. () elsewhere.
        over_batch: whether it is computed once, of the outputs of all micro-batches.
        returned: whether the model itself returns it, as `loss` of what it returns.
    """

    value: str
    reduction: Reduction = Reduction.MEAN
    weight: LossWeight | None = None
    terms: tuple[LossTerm, ...] = ()
    over_batch: bool = False
    returned: bool = False

    @property
    def summands(self) -> tuple[LossTerm, ...]:
        """The terms; a loss that has none is the only one."""
        return self.terms or (LossTerm(self.value, self.reduction, self.weight),)

    @property
    def of_parts(self) -> bool:
        """Whether what the graph has are terms of a part of a batch, and not the model's loss."""
        return bool(self.terms) or (self.weight is not None and self.weight.least > -inf)
