"""The terms of a loss: what they are, and how each goes into it."""

from __future__ import annotations

from dataclasses import dataclass

from gpipe_compiler.ir import Argument, FunctionCall, MethodCall, Mode, Op, Reduction, Ref, StateRef
from gpipe_compiler.ir.arguments import map_argument
from gpipe_compiler.passes.loss_functions import Targets


@dataclass(frozen=True, slots=True)
class Division:
    """A sum over samples, or their mean, divided by a value that depends on the batch.

    Attributes:
        total: whether it is known to be a sum (True) or a mean (False).
    """

    op: Op
    divisor: str
    total: bool | None


@dataclass(frozen=True, slots=True)
class ConstantTerm:
    """What depends on no sample, such as the size of the weights: it counts once."""


@dataclass(frozen=True, slots=True)
class Other:
    """Anything else.

    Attributes:
        kind: whether it is known to be a sum over samples, or their mean; None where unknown.
    """

    op: Op | None
    kind: Reduction | None


@dataclass(frozen=True, slots=True)
class Selected:
    """The mean over what a mask selects.

    Attributes:
        mask: a value of booleans.
    """

    op: Op
    mask: Ref


@dataclass(frozen=True, slots=True)
class Guarded:
    """A term that counts only where something has been counted: `where(n > 0, term, 0)`.

    Attributes:
        counted: the scalar that has to be above 0; None for what the term itself is a mean over,
            without which it is no number: `where(term.isfinite(), term, 0)`.
    """

    op: Op
    counted: str | None
    inner: Summand


Term = Targets | Division | Selected | Guarded | ConstantTerm | Other

Step = FunctionCall | MethodCall
LAST = Ref("")
"""In a step, its operand."""


def put(args: Argument, last: Argument) -> Argument:
    """The arguments of a step that is done to this."""
    return map_argument(lambda leaf: last if leaf == LAST else leaf, args)


@dataclass(frozen=True, slots=True)
class Summand:
    """A term, and how it goes into the loss.

    Attributes:
        value: the name of its scalar in the graph, a number, or a tensor of the model's.
        scale: what the loss does to it besides adding it: what it does to sums of terms.
        mode: in which it goes into the loss.
    """

    term: Term
    value: str | float | StateRef
    scale: tuple[Step, ...] = ()
    mode: Mode = Mode.ALWAYS
