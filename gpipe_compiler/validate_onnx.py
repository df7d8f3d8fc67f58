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

from gpipe_compiler.codegen.onnx.traits import closeness
from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.onnx.nodes import title
from gpipe_compiler.frontend.onnx.reading import OnnxModel
from gpipe_compiler.frontend.onnx.running import whole_session
from gpipe_compiler.frontend.onnx.sizes import InputSizes
from gpipe_compiler.passes.onnx_constants import draws, is_quantised, node_of
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.comparison import Row
from gpipe_compiler.runtime_onnx.arrays import random_array, write_arrays
from gpipe_compiler.runtime_onnx.check import compare
from gpipe_compiler.runtime_onnx.errors import StageError
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
    assert plan.graph is not None
    drawing = [title(node) for op in plan.graph.ops if draws(node := node_of(op))]
    if drawing:
        raise ModelError(
            f"{drawing[0]} draws random numbers, so there is nothing to hold the package against",
            hint="--no-validate",
        )
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
            held(directory, samples, inputs, expected, len(plan.orders), model.custom_ops)
            for samples, inputs in calls.items()
        ]
    return Validation(tuple(rows))


def random_inputs(sizes: InputSizes, samples: int, seed: int) -> dict[str, np.ndarray]:
    """Arrays of the shapes that the plan is for, filled as `run.py` fills them."""
    generator = np.random.default_rng(seed % 2**63)
    return {
        name: random_array(generator, shape, str(sizes.dtypes[name]).removeprefix("torch."))
        for name, shape in sizes.at(samples).items()
    }


def _run_whole(
    model: OnnxModel,
    calls: Mapping[int, Mapping[str, np.ndarray]],
    sizes: InputSizes,
    plan: Plan,
    folder: Path,
) -> None:
    """Writes the outputs of the whole model for each batch; its session is gone afterwards."""
    session = whole_session(model)

    def run(inputs: Mapping[str, np.ndarray], samples: int) -> dict[str, np.ndarray]:
        try:
            return session(inputs)
        except StageError as error:
            raise ModelError(
                f"on {samples} samples {error}",
                hint="give it inputs of other sizes with --input, or --no-validate where random "
                "numbers will not do",
            ) from error

    size = plan.microbatch_size
    for samples, inputs in calls.items():
        parts = [run(part, size) for part in _parts(sizes, inputs, samples, size)]
        joined = _joined(plan, parts)
        if not sizes.fixed:
            _check_apart(plan, run(inputs, samples), joined)
        write_arrays(folder / f"{samples}.npz", joined)


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
    close = closeness(plan.graph, quantised=is_quantised(plan.graph))
    rows = compare(whole, joined, close)
    mixed = [row.name for row in rows if row.fault]
    if mixed:
        raise ModelError(
            f"{', '.join(mixed)} of a batch is not put together from that of its micro-batches: "
            "somewhere in the model the samples of a batch meet",
            hint="compile with --microbatches 1",
        )


def held(
    directory: Path,
    samples: int,
    inputs: Mapping[str, np.ndarray],
    expected: Path,
    devices: int,
    custom_ops: Sequence[Path] = (),
) -> Row:
    """How the outputs of a package compare with those in `expected/<samples>.npz`.

    Raises:
        ValidationError: when the package cannot be run.
    """
    given, report = expected / "inputs.npz", expected / "report.json"
    write_arrays(given, inputs)
    options: list[object] = ["--devices", ",".join(["cpu"] * devices)]
    options += ["--reference", expected / f"{samples}.npz", "--input", given, "--report", report]
    libraries = [word for library in custom_ops for word in ("--custom-ops", library)]
    run_check(directory, [*options, *libraries], threads=1)
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
