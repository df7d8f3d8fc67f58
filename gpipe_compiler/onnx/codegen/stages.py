"""The ONNX model of each stage: the nodes of the model, as they are, with their weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import ModelProto, NodeProto, ValueInfoProto

from gpipe_compiler.ir import Graph
from gpipe_compiler.onnx.codegen.weights import INLINE, save, take_in, weight_bytes, write_weights
from gpipe_compiler.onnx.frontend.nodes import node_of, other_type
from gpipe_compiler.onnx.frontend.reading import OnnxModel
from gpipe_compiler.onnx.frontend.types import element_of
from gpipe_compiler.plan import Plan, Stage
from gpipe_compiler.runtime.wording import printable
from gpipe_compiler.text.escaping import file_stem

_WEIGHTS_ALONE = 4
"""The IR version from which on weights need not be inputs too."""

BATCH = "batch"
"""What the free dimension is called at boundaries."""


def stage_file(stage: Stage) -> str:
    return f"stage_{stage.index}.onnx"


def write_stages(plan: Plan, model: OnnxModel, folder: Path, *, free: bool) -> None:
    """Writes the model of every stage, checked by onnx.checker.

    Large weights go into `stage_<k>.onnx.data`, one after another and never all in memory.

    Args:
        free: whether sizes other than the batch are free, so that none holds for all calls.

    Raises:
        EmitError: naming the stage that the checker refuses.
    """
    apart = weight_bytes(model) > INLINE
    for stage in plan.stages:
        proto = stage_model(plan, model, stage, free=free)
        path = folder / stage_file(stage)
        if apart:
            write_weights(proto.graph, model.path.parent, path.with_name(f"{path.name}.data"))
        else:
            take_in(proto.graph, model.path.parent)
        save(proto, path, f"the model of stage {stage.index}")


def stage_model(plan: Plan, model: OnnxModel, stage: Stage, *, free: bool) -> ModelProto:
    """The model of one stage; weights that stand in files of the whole model are left there."""
    graph = plan.known_graph
    whole = model.proto
    proto = ModelProto()
    proto.ir_version = max(whole.ir_version, _WEIGHTS_ALONE)
    proto.opset_import.extend(whole.opset_import)
    proto.producer_name = "gpipe-compiler"
    proto.doc_string = f"stage {stage.index} of {len(plan.stages)} of {printable(plan.name)}"
    nodes = [node_of(graph.op_of[name]) for name in stage.ops]
    proto.graph.name = f"{printable(plan.name)}_stage_{stage.index}"
    proto.graph.node.extend(nodes)
    declared = _declared(whole)
    for name in stage.inputs:
        proto.graph.input.append(declared.get(name) or boundary(graph, name, free=free))
    for name in stage.outputs:
        proto.graph.output.append(declared.get(name) or boundary(graph, name, free=free))
    wanted = set(stage.state)
    proto.graph.initializer.extend(
        tensor for tensor in whole.graph.initializer if tensor.name in wanted
    )
    inside = wanted.union(name for node in nodes for name in node.output)
    proto.graph.value_info.extend(value for value in whole.graph.value_info if value.name in inside)
    proto.graph.sparse_initializer.extend(
        tensor for tensor in whole.graph.sparse_initializer if tensor.values.name in wanted
    )
    return proto


def _declared(whole: ModelProto) -> Mapping[str, ValueInfoProto]:
    """The inputs and outputs of the model, which stages take and give as the model does.

    Without those whose shape the model leaves out.
    """
    return {
        value.name: value
        for value in (*whole.graph.input, *whole.graph.output)
        if not value.type.HasField("tensor_type") or value.type.tensor_type.HasField("shape")
    }


def boundary(graph: Graph, name: str, *, free: bool) -> ValueInfoProto:
    """The type of a value that crosses, for any number of samples."""
    value = graph.values[name]
    other = other_type(graph, name)
    if other is not None:
        return onnx.helper.make_value_info(name, other)
    assert value.dtype is not None
    element = element_of(value.dtype)
    shape: list[int | str | None] = [None if free else size for size in value.shape]
    if value.batch_dim is not None:
        whole = value.shape[value.batch_dim] == graph.batch_size
        shape[value.batch_dim] = BATCH if whole else None
    elif not value.splittable:
        shape = [None] * len(shape)
    return onnx.helper.make_tensor_value_info(name, element, shape)


# --- the whole model, put together from its stages ------------------------------------------------


CONFIGURATION = "gpipe"
"""The name of the multi-device configuration."""

_SINCE = 11
"""The IR version that has multi-device annotations."""


def staged_file(plan: Plan) -> str:
    return f"{file_stem(plan.name)}.staged.onnx"


def write_staged(plan: Plan, folder: Path) -> None:
    """Writes the whole model, with the stage and device of every node.

    For Netron, which shows the metadata of each node (`gpipe.stage`, `gpipe.device`), as
    multi-device annotations of the IR version 11, and as the reference of `run.py check`. A value
    has one name in all stages, so their graphs need only be written one after another. Weights that
    stand in the files of stages are read there.

    Raises:
        EmitError: when onnx.checker refuses it.
    """
    graph = plan.known_graph
    whole = ModelProto(producer_name="gpipe-compiler", ir_version=_SINCE)
    whole.graph.name = printable(plan.name)
    configuration = whole.configuration.add(name=CONFIGURATION, num_devices=len(plan.orders))
    configuration.device.extend(_devices(plan))
    boundaries: dict[str, ValueInfoProto] = {}
    seen: set[object] = set()
    for stage in plan.stages:
        part = onnx.load(folder / stage_file(stage), load_external_data=False)
        whole.ir_version = max(whole.ir_version, part.ir_version)
        _import(whole, part)
        made = part.graph
        # What is constant, and a weight, several stages may have: the same in all.
        for items, into, key in (
            (made.node, whole.graph.node, lambda node: next(filter(None, node.output))),
            (made.value_info, whole.graph.value_info, lambda value: ("shape", value.name)),
            (made.initializer, whole.graph.initializer, lambda tensor: tensor.name),
            (made.sparse_initializer, whole.graph.sparse_initializer, lambda t: t.values.name),
            (part.functions, whole.functions, lambda f: (f.domain, f.name, f.overload)),
        ):
            for item in items:
                if key(item) not in seen:
                    seen.add(key(item))
                    into.append(item)
                    if isinstance(item, NodeProto):
                        _annotate(into[-1], plan, stage.index)
        boundaries |= {value.name: value for value in (*made.input, *made.output)}
    for names, values in (
        ([source.name for source in graph.inputs], whole.graph.input),
        (graph.output_values, whole.graph.output),
    ):
        values.extend(boundaries.get(name) or boundary(graph, name, free=True) for name in names)
    save(whole, folder / staged_file(plan), "the whole model")


def _import(whole: ModelProto, part: ModelProto) -> None:
    """Has the whole import all that a stage does."""
    known = {opset.domain: opset for opset in whole.opset_import}
    for opset in part.opset_import:
        if opset.domain not in known:
            whole.opset_import.append(opset)
        else:
            known[opset.domain].version = max(known[opset.domain].version, opset.version)


def _annotate(node: NodeProto, plan: Plan, stage: int) -> None:
    """Writes down that a node is of this stage."""
    device = plan.placement[stage] if plan.placement else stage
    for key, value in (("gpipe.stage", str(stage)), ("gpipe.device", _devices(plan)[device])):
        node.metadata_props.add(key=key, value=value)
    node.device_configurations.add(configuration_id=CONFIGURATION, pipeline_stage=stage)


def _devices(plan: Plan) -> list[str]:
    return [f"{number}: {device.name}" for number, device in enumerate(plan.devices)]
