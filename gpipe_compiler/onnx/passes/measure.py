"""Times each node of an ONNX graph by ONNX Runtime's own profiler."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import ModelProto

from gpipe_compiler.errors import ModelError
from gpipe_compiler.ir import Graph
from gpipe_compiler.onnx.frontend.reading import OnnxModel, whole_session
from gpipe_compiler.onnx.runtime.stage import SessionChoice, run_session
from gpipe_compiler.passes.cost import Costs

RUNS = 5
"""Timed runs, after one that is not; medians count."""

_KERNEL = "_kernel_time"

_FOLDER = "session.model_external_initializers_file_folder_path"
"""Where ONNX Runtime looks for the weights of a model that it is given as bytes."""


def onnx_measured(
    model: OnnxModel, graph: Graph, inputs: Mapping[str, np.ndarray], estimated: Costs
) -> Costs:
    """Costs with measured times, in one thread on this machine's processor.

    The profiler sees single nodes only where ONNX Runtime does not fuse them, so nodes are timed
    without its optimiser; then all times are made shorter alike, to what the optimised model takes.

    Args:
        inputs: of the size that the graph is described for.
        estimated: by the roofline of this machine: their FLOPs and bytes, and the times of nodes
            that did not run (in a branch that was not taken).

    Raises:
        ModelError: when ONNX Runtime cannot run the model.
    """
    try:
        seconds = _profile(model, graph, inputs)
        share = _optimised_s(model, inputs) / max(sum(seconds.values()), 1e-12)
    except Exception as error:
        raise ModelError(
            f"ONNX Runtime cannot run {model.path}, so its nodes cannot be timed: {error}",
            hint="leave out --cost measured, or give it inputs of other sizes with --input",
        ) from error
    ops = {
        name: replace(cost, forward_s=seconds[name] * share) if name in seconds else cost
        for name, cost in estimated.ops.items()
    }
    return Costs(ops, "measured in ONNX Runtime on cpu, 1 thread", graph.batch_size)


def _profile(model: OnnxModel, graph: Graph, inputs: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Median seconds of every op that ran."""
    with tempfile.TemporaryDirectory(prefix="gpipe-profile-") as scratch:
        options = SessionChoice(custom_ops=model.custom_ops).options()
        folder = str(model.path.parent)
        options.add_session_config_entry(_FOLDER, folder)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(scratch, "profile"))
        session = onnxruntime.InferenceSession(
            _named(model, graph), options, providers=["CPUExecutionProvider"]
        )
        for _ in range(1 + RUNS):
            run_session(session, inputs)
        events = json.loads(Path(session.end_profiling()).read_text())
    times: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith(_KERNEL):
            name = event["name"].removesuffix(_KERNEL)
            times.setdefault(name, []).append(event["dur"] * 1e-6)
    known = {op.name for op in graph.ops}
    return {
        name: statistics.median(found[len(found) // (1 + RUNS) :]) * (len(found) / (1 + RUNS))
        for name, found in times.items()
        if name in known
    }


def _optimised_s(model: OnnxModel, inputs: Mapping[str, np.ndarray]) -> float:
    """Median seconds of the whole model as it will run."""
    whole = whole_session(model)
    seconds = []
    for _ in range(1 + RUNS):
        start = time.perf_counter()
        whole(inputs)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _named(model: OnnxModel, graph: Graph) -> str | bytes:
    """The model, in which every node has the name of its op."""
    names = [op.name for op in graph.ops]
    if [node.name for node in model.proto.graph.node] == names:
        return str(model.path)
    copy = ModelProto()
    copy.CopyFrom(model.proto)
    for node, name in zip(copy.graph.node, names, strict=True):
        node.name = name
    return bytes(copy.SerializeToString())
