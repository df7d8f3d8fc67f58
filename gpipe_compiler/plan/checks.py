"""Whether the parts of a plan that was read from a file belong together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpipe_compiler.plan import Plan


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
