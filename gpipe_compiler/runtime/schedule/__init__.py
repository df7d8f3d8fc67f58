"""Schedules: generators of actions, and lowering to transfers, so that nobody hangs."""

from .choosing import devices_for, orders_for, placement_for, splits_backward
from .gpipe import forward_only, gpipe
from .interleaved import interleaved
from .joint import Joint
from .lowering import lower
from .one_f_one_b import one_f_one_b, zb_h1
from .zbv import zbv

__all__ = [
    "Joint",
    "devices_for",
    "forward_only",
    "gpipe",
    "interleaved",
    "lower",
    "one_f_one_b",
    "orders_for",
    "placement_for",
    "splits_backward",
    "zb_h1",
    "zbv",
]
