"""The whole model, put together from its stages, with the stage and device of every node.

For Netron, which shows the metadata of each node (`gpipe.stage`, `gpipe.device`), as multi-device
annotations of the IR version 11, and as the reference of `run.py check`. A value has one name in
all stages, so their graphs need only be written one after another.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import ModelProto, NodeProto, ValueInfoProto

from gpipe_compiler.onnx.codegen.stages import boundary, stage_file
from gpipe_compiler.onnx.codegen.weights import save
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.wording import printable
from gpipe_compiler.text.escaping import file_stem

CONFIGURATION = "gpipe"
"""The name of the multi-device configuration."""

_SINCE = 11
"""The IR version that has multi-device annotations."""


def staged_file(plan: Plan) -> str:
    """The file of the whole model."""
    return f"{file_stem(plan.name)}.staged.onnx"


def write_staged(plan: Plan, folder: Path) -> None:
    """Writes the whole model; weights that stand in the files of stages are read there.

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
