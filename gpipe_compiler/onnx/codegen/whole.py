"""The whole model, put together from the models of its stages.

For Netron, which shows the stage and device of every node, and as what the package is held against.
Values inside a stage are named after it, so the graphs need only be written one after another.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import ModelProto

from gpipe_compiler.onnx.codegen.staged import annotate, configure, staged_file
from gpipe_compiler.onnx.codegen.stages import boundary, stage_file
from gpipe_compiler.onnx.codegen.weights import save
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.wording import printable


def write_whole(plan: Plan, folder: Path) -> Path:
    """Writes the copy; weights that stand in the files of stages are read there.

    Raises:
        EmitError: when onnx.checker refuses it.
    """
    graph = plan.graph
    assert graph is not None
    whole = ModelProto(producer_name="gpipe-compiler")
    whole.graph.name = printable(plan.name)
    weights: set[str] = set()
    functions: set[tuple[str, str, str]] = set()
    for stage in plan.stages:
        part = onnx.load(folder / stage_file(stage), load_external_data=False)
        whole.ir_version = max(whole.ir_version, part.ir_version)
        _import(whole, part)
        for node in part.graph.node:
            annotate(node, plan, stage.index)
        whole.graph.node.extend(part.graph.node)
        whole.graph.value_info.extend(part.graph.value_info)
        for tensor in part.graph.initializer:
            if tensor.name not in weights:  # one that several stages have is the same in all
                weights.add(tensor.name)
                whole.graph.initializer.append(tensor)
        for function in part.functions:
            key = function.domain, function.name, function.overload
            if key not in functions:
                functions.add(key)
                whole.functions.append(function)
    for names, values in (
        ([source.name for source in graph.inputs], whole.graph.input),
        (graph.output_values, whole.graph.output),
    ):
        values.extend(boundary(graph, name, free=False) for name in names)
    configure(whole, plan)
    path = folder / staged_file(plan)
    save(whole, path, "the whole model")
    return path


def _import(whole: ModelProto, part: ModelProto) -> None:
    """All that a stage imports."""
    known = {opset.domain: opset for opset in whole.opset_import}
    for opset in part.opset_import:
        if opset.domain not in known:
            whole.opset_import.append(opset)
        else:
            known[opset.domain].version = max(known[opset.domain].version, opset.version)
