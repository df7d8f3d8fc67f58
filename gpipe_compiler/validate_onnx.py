"""Holds a package of ONNX stages against the whole model, both in ONNX Runtime.

The whole model runs here; the package in a process of its own in which this compiler cannot be
imported. Every output is compared, at several batch sizes. How close is close enough stands in
`runtime_onnx/check.py`.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import NodeProto

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.onnx.nodes import title
from gpipe_compiler.frontend.onnx.reading import OnnxModel
from gpipe_compiler.frontend.onnx.sizes import InputSizes
from gpipe_compiler.passes.onnx_constants import is_quantised
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.comparison import Row
from gpipe_compiler.runtime_onnx.arrays import write_arrays
from gpipe_compiler.runtime_onnx.check import compare
from gpipe_compiler.runtime_onnx.values import foreign
from gpipe_compiler.validate import Validation, run_check


def validate_onnx(
    model: OnnxModel,
    sizes: InputSizes,
    plan: Plan,
    directory: Path,
    *,
    seed: int = 0,
) -> Validation:
    """Runs the package in `directory` against the model, on random inputs.

    The batches are the planned mini-batch, one micro-batch, and one that does not split evenly; of
    a model that takes batches of one size only, the planned one.

    Raises:
        ModelError: when ONNX Runtime refuses the model itself.
        ValidationError: when the package cannot be run. Differences are reported, not raised.
    """
    batches = [plan.batch_size]
    if not sizes.fixed and plan.microbatches > 1:
        batches += [plan.microbatch_size, plan.batch_size + 1]
    calls = {
        samples: random_inputs(sizes, samples, seed + number)
        for number, samples in enumerate(dict.fromkeys(batches))
    }
    with tempfile.TemporaryDirectory(prefix="gpipe-validate-") as scratch:
        expected = Path(scratch)
        _run_whole(model, calls, sizes, plan, expected)
        rows = [
            held(directory, samples, inputs, expected, len(plan.orders))
            for samples, inputs in calls.items()
        ]
    return Validation(tuple(rows))


def random_inputs(sizes: InputSizes, samples: int, seed: int) -> dict[str, np.ndarray]:
    """Arrays of the shapes that the plan is for: normal numbers; integers that are 0 or 1.

    Raises:
        ModelError: for an input of a type that numpy does not have.
    """
    generator = np.random.default_rng(seed)
    arrays = {}
    for name, shape in sizes.at(samples).items():
        kind = str(sizes.dtypes[name]).removeprefix("torch.")
        if foreign(kind):
            raise ModelError(
                f"the input {name} is {kind}, which numpy does not have, so ONNX Runtime cannot be "
                "given one to compare with",
                hint="--no-validate, and --cost roofline",
            )
        dtype = np.dtype(kind)
        if np.issubdtype(dtype, np.inexact):
            arrays[name] = generator.standard_normal(shape).astype(dtype)
        else:
            arrays[name] = generator.integers(0, 2, shape).astype(dtype)
    return arrays


def _run_whole(
    model: OnnxModel,
    calls: Mapping[int, Mapping[str, np.ndarray]],
    sizes: InputSizes,
    plan: Plan,
    folder: Path,
) -> None:
    """Writes the outputs of the whole model for each batch; its session is gone afterwards."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # what is wrong is raised; the rest is not the user's to mend
    try:
        session = onnxruntime.InferenceSession(
            str(model.path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        nodes = [title(n) for n in model.proto.graph.node if _names(n, str(error))]
        at = f" at {nodes[0]}" if nodes else ""
        raise ModelError(
            f"ONNX Runtime refuses {model.path}{at}: {error}",
            hint="it has to run in one piece before it can run in stages",
        ) from error
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Mapping[str, np.ndarray], samples: int) -> dict[str, np.ndarray]:
        try:
            return dict(zip(names, session.run(names, dict(inputs)), strict=True))
        except Exception as error:
            raise ModelError(
                f"the model fails in ONNX Runtime on {samples} samples: {error}",
                hint="give it inputs of other sizes with --input",
            ) from error

    size = plan.microbatch_size
    for samples, inputs in calls.items():
        parts = [run(part, size) for part in _parts(sizes, inputs, samples, size)]
        joined = _joined(plan, parts)
        if not sizes.fixed:
            _check_apart(plan, run(inputs, samples), joined)
        write_arrays(folder / f"{samples}.npz", joined)


def _names(node: NodeProto, message: str) -> bool:
    """Whether a message of ONNX Runtime is about a node: by its name, or domain and operator."""
    if node.name and node.name in message:
        return True
    return bool(node.domain) and f"{node.domain}:{node.op_type}" in message


def _parts(
    sizes: InputSizes, inputs: Mapping[str, np.ndarray], samples: int, size: int
) -> list[dict[str, np.ndarray]]:
    """The inputs of each micro-batch."""
    return [
        {
            name: array[start : start + size] if name in sizes.batched else array
            for name, array in inputs.items()
        }
        for start in range(0, samples, size)
    ]


def _joined(plan: Plan, parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    assert plan.graph is not None
    whole = {}
    for name in plan.graph.output_values:
        dim = plan.graph.values[name].batch_dim
        arrays = [part[name] for part in parts]
        whole[name] = arrays[0] if dim is None else np.concatenate(arrays, axis=dim)
    return whole


def _check_apart(
    plan: Plan, whole: Mapping[str, np.ndarray], joined: Mapping[str, np.ndarray]
) -> None:
    """Makes sure that samples do not meet in the model.

    Raises:
        ModelError: naming the outputs in which they do.
    """
    assert plan.graph is not None
    quantised = is_quantised(plan.graph)
    rows = compare(whole, joined, quantised=quantised)
    mixed = [row.name for row in rows if row.fault]
    if mixed:
        raise ModelError(
            f"{', '.join(mixed)} of a batch is not put together from that of its micro-batches: "
            "somewhere in the model the samples of a batch meet",
            hint="compile with --microbatches 1",
        )


def held(
    directory: Path, samples: int, inputs: Mapping[str, np.ndarray], expected: Path, devices: int
) -> Row:
    """How the outputs of a package compare with those in `expected/<samples>.npz`.

    Raises:
        ValidationError: when the package cannot be run.
    """
    given, report = expected / "inputs.npz", expected / "report.json"
    write_arrays(given, inputs)
    options = ["--reference", expected / f"{samples}.npz", "--input", given, "--report", report]
    run_check(directory, [*options, "--devices", ",".join(["cpu"] * devices)], threads=1)
    rows = json.loads(report.read_text())
    worst = max(rows, key=lambda row: row["relative"])
    return Row(
        what=f"outputs of a batch of {samples}",
        compared=len(rows),
        largest_difference=max((row["difference"] for row in rows), default=math.inf),
        relative=worst["relative"],
        tolerance=worst["tolerance"],
        worst=worst["name"],
        faults=tuple(f"{row['name']}: {row['fault']}" for row in rows if row["fault"]),
    )
