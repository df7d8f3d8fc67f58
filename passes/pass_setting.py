"""What passes are given; apart from their list, which imports them."""

from __future__ import annotations

from dataclasses import dataclass

from gpipe_compiler.runtime.spec import Precision


@dataclass(frozen=True, slots=True)
class PassSetting:
    """What a graph is transformed for.

    Attributes:
        samples: of a micro-batch.
        kept: names of ops that constraints name, and that are to stay.
        in_place: whether ops may write over what nobody needs any more.
    """

    samples: int
    precision: Precision = Precision.FP32
    kept: frozenset[str] = frozenset()
    in_place: bool = False
