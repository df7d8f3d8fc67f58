"""Schedules: generators of actions, lowering to transfers, and the proof that nobody hangs."""

from .deadlock import prove
from .forward_only import forward_only
from .gpipe import gpipe
from .lowering import lower
from .one_f_one_b import one_f_one_b
from .together import Joint

__all__ = ["Joint", "forward_only", "gpipe", "lower", "one_f_one_b", "prove"]
