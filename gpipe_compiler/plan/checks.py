"""Whether a plan that was read from a file holds what its fields are declared as, and whether its
parts belong together."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

import torch

if TYPE_CHECKING:
    from gpipe_compiler.plan import Plan

LARGEST = 2**62
"""Whole numbers in a file are smaller: bytes, counts, places."""

LARGEST_FLOAT = 1e100
"""Other numbers are: seconds, bytes and operations a second; products of two do not overflow."""


def check_fields(item: Any, where: str = "") -> None:
    """Makes sure that every field of a dataclass, and of those in it, has the type it should.

    Raises:
        TypeError: naming the first that has not.
    """
    for name, kind in _hints(item.__class__).items():
        place = f"{where}.{name}" if where else name
        if not _fits(getattr(item, name), kind, place):
            raise TypeError(f"{place} is {getattr(item, name)!r:.40}")


@cache
def _hints(cls: Any) -> Mapping[str, Any]:
    hints = get_type_hints(cls, localns={"torch": torch})  # which some import for types alone
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _fits(value: Any, kind: Any, where: str) -> bool:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option, where) for option in args)
    if origin is tuple and args[-1] is not Ellipsis:
        pairs = zip(value, args, strict=False) if isinstance(value, tuple) else ()
        return len(args) == len(tuple(value)) and all(_fits(*pair, where) for pair in pairs)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and _all(value.values(), args[1], where)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, tuple) and _all(value, args[0], where)
    if kind is float:
        return type(value) in (int, float) and abs(value) < LARGEST_FLOAT
    if kind is int:
        return type(value) is int and abs(value) < LARGEST
    if not isinstance(value, kind if kind is not None else type(None)):
        return False
    if dataclasses.is_dataclass(value):
        check_fields(value, where)
    return True


def _all(values: Iterable[Any], kind: Any, where: str) -> bool:
    return all(_fits(value, kind, f"{where}[{i}]") for i, value in enumerate(values))


def check_whole(plan: Plan) -> None:
    """Makes sure that what a plan counts is there, and that its numbers name what there is.

    Raises:
        ValueError: saying what is not so.
    """
    stages, devices = len(plan.stages), len(plan.orders)
    known = {note.name for note in plan.noted}
    memory, prediction = plan.prediction.memory, plan.prediction
    places = plan.placement or tuple(range(stages))
    counts = (plan.microbatches, plan.replicas, plan.batch_size)
    faults = {
        "it has no stages": not stages,
        "its stages are not numbered in order": [s.index for s in plan.stages] != [*range(stages)],
        "a number is not above 0": min(counts) < 1,
        "its batch does not split": plan.batch_size % (plan.microbatches * plan.replicas) != 0,
        "its cluster has no devices, or such without memory": not plan.cluster.devices
        or min(device.memory for device in plan.cluster.devices) < 1,
        "its stages have no places": len(places) != stages or set(places) - set(range(devices)),
        "its devices have no seats": len(plan.seats) not in (0, devices)
        or (plan.seats and not 0 <= min(plan.seats) <= max(plan.seats) < len(plan.cluster.devices)),
        "a value crosses between stages that there are not": any(
            not 0 <= stage < stages
            for crossing in plan.crossings
            for stage in (crossing.source, *crossing.targets)
        ),
        "an action is of no stage or micro-batch": any(
            not (0 <= action.stage < stages and 0 <= action.microbatch < plan.microbatches)
            for order in plan.orders
            for action in order
        ),
        "its peaks are not those of its stages": len(prediction.peak_bytes) != stages,
        "its peaks are not those of its devices": len(prediction.device_bytes) not in (0, devices)
        or len(memory) not in (0, devices),
        "an op is not described": bool(known) and any(set(s.ops) - known for s in plan.stages),
        "a size or a time is below 0": min(
            *prediction.peak_bytes, *prediction.device_bytes, prediction.step_s, 0
        )
        < 0,
    }
    for fault, found in faults.items():
        if found:
            raise ValueError(fault)
