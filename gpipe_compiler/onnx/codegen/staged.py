"""A copy of the whole model in which every node tells its stage and device.

As metadata of each node (`gpipe.stage`, `gpipe.device`), which Netron shows, and as multi-device
annotations of the IR version 11: one configuration, and the pipeline stage of each node.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onnx import ModelProto, NodeProto, TensorProto

from gpipe_compiler.onnx.codegen.stages import boundary
from gpipe_compiler.onnx.codegen.weights import Place, point_to, save, take_in, write_weights
from gpipe_compiler.onnx.frontend.reading import OnnxModel
from gpipe_compiler.plan import Plan
from gpipe_compiler.text.escaping import file_stem

CONFIGURATION = "gpipe"
"""The name of the multi-device configuration."""

_SINCE = 11
"""The IR version that has multi-device annotations."""


def staged_file(plan: Plan) -> str:
    """What the copy is called."""
    return f"{file_stem(plan.name)}.staged.onnx"


def write_staged(plan: Plan, model: OnnxModel, folder: Path, places: Mapping[str, Place]) -> Path:
    """Writes the copy, checked by onnx.checker.

    Args:
        places: of weights that stand in the files of stages; the copy reads them there.

    Raises:
        EmitError: when the checker refuses it.
    """
    assert plan.graph is not None
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    for tensor in proto.graph.initializer:
        if tensor.name in places:
            point_to(tensor, places[tensor.name])
    path = folder / staged_file(plan)
    apart = any(t.data_location == TensorProto.EXTERNAL for t in proto.graph.initializer)
    if places and apart:
        rest = folder / f"{path.name}.data"
        _write_rest(proto, model, rest, places)
    else:
        take_in(proto.graph, model.path.parent)
    _annotate(proto, plan)
    for value in (*proto.graph.input, *proto.graph.output):
        if not value.type.tensor_type.HasField("shape"):
            value.CopyFrom(boundary(plan.graph, value.name, free=True))
    save(proto, path, "the annotated model")
    return path


def _write_rest(
    proto: ModelProto, model: OnnxModel, file: Path, places: Mapping[str, Place]
) -> None:
    """Brings along the weights that no stage has: those that no node reads."""
    kept = [tensor for tensor in proto.graph.initializer if tensor.name in places]
    rest = [tensor for tensor in proto.graph.initializer if tensor.name not in places]
    copies = [TensorProto.FromString(tensor.SerializeToString()) for tensor in kept]
    others = [TensorProto.FromString(tensor.SerializeToString()) for tensor in rest]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(others)
    write_weights(proto.graph, model.path.parent, file)
    proto.graph.initializer.extend(copies)


def _annotate(proto: ModelProto, plan: Plan) -> None:
    graph = plan.graph
    assert graph is not None
    stage_of = {name: stage.index for stage in reversed(plan.stages) for name in stage.ops}
    configure(proto, plan)
    for node, op in zip(proto.graph.node, graph.ops, strict=True):
        stage = stage_of.get(op.name)
        if stage is not None:  # otherwise constant, and read by nobody
            annotate(node, plan, stage)


def configure(proto: ModelProto, plan: Plan) -> None:
    """Declares the devices of a plan, to which nodes can then be assigned."""
    proto.ir_version = max(proto.ir_version, _SINCE)
    configuration = proto.configuration.add()
    configuration.name = CONFIGURATION
    configuration.num_devices = len(plan.orders)
    configuration.device.extend(_devices(plan))


def annotate(node: NodeProto, plan: Plan, stage: int) -> None:
    """Writes down that a node is of this stage."""
    device = plan.placement[stage] if plan.placement else stage
    for key, value in (("gpipe.stage", str(stage)), ("gpipe.device", _devices(plan)[device])):
        entry = node.metadata_props.add()
        entry.key, entry.value = key, value
    place = node.device_configurations.add()
    place.configuration_id = CONFIGURATION
    place.pipeline_stage = stage


def _devices(plan: Plan) -> list[str]:
    return [f"{number}: {device.name}" for number, device in enumerate(plan.devices)]
