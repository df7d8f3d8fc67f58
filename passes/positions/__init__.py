"""Follows tensors that are made of positions and constants alone, such as attention masks.

What is found holds at any size and in any precision: positions are followed as integers only, in
types that hold any size.
"""

from gpipe_compiler.passes.positions.coordinates import (
    Cases,
    Condition,
    Element,
    distances,
    is_causal,
    some,
)
from gpipe_compiler.passes.positions.known import Positions

__all__ = ["Cases", "Condition", "Element", "Positions", "distances", "is_causal", "some"]
