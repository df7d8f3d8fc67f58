"""Holds a package of ONNX stages against the whole model, both in ONNX Runtime.

The whole model runs here; the package in a process of its own in which this compiler cannot be
imported. Every output is compared, at several batch sizes. How close is close enough stands in
`onnx/runtime/check.py`.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from gpipe_compiler.errors import ModelError, ValidationError
from gpipe_compiler.ir import Graph
from gpipe_compiler.onnx.codegen.scripts import closeness
from gpipe_compiler.onnx.frontend.nodes import draws, is_quantised, node_of, title
from gpipe_compiler.onnx.frontend.reading import OnnxModel, whole_session
from gpipe_compiler.onnx.frontend.sizes import InputSizes
from gpipe_compiler.onnx.runtime.arrays import random_array, write_arrays
from gpipe_compiler.onnx.runtime.check import Closeness, compare
from gpipe_compiler.onnx.runtime.stage import Whole
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.errors import StageError
from gpipe_compiler.runtime.train.comparison import Row
from gpipe_compiler.validate.package import Validation, run_check

Arrays: TypeAlias = Mapping[str, np.ndarray]


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
        ModelError: when ONNX Runtime refuses the model itself, or samples of a batch meet in it.
        ValidationError: when the package cannot be run. Differences are reported, not raised.
    """
    assert plan.graph is not None
    drawing = [title(node) for op in plan.graph.ops if draws(node := node_of(op))]
    if drawing:
        raise ModelError(
            f"{drawing[0]} draws random numbers, so there is nothing to hold the package against",
            hint="--no-validate",
        )
    sizes_tried = [plan.batch_size]
    if not sizes.fixed:
        sizes_tried += [plan.microbatch_size, plan.batch_size + 1]
    calls = {
        samples: random_inputs(sizes, samples, seed + number)
        for number, samples in enumerate(dict.fromkeys(sizes_tried))
    }
    with tempfile.TemporaryDirectory(prefix="gpipe-validate-") as scratch:
        folder = Path(scratch)
        notes = _write_expected(model, calls, sizes, plan, folder)
        return held(directory, plan, calls, folder, notes, model.custom_ops)


def random_inputs(sizes: InputSizes, samples: int, seed: int) -> dict[str, np.ndarray]:
    """Arrays of the shapes that the plan is for, filled as `run.py` fills them."""
    generator = np.random.default_rng(seed % 2**63)
    return {
        name: random_array(generator, shape, str(sizes.dtypes[name]).removeprefix("torch."))
        for name, shape in sizes.at(samples).items()
    }


def refuse_meeting(model: OnnxModel, sizes: InputSizes, plan: Plan, *, seed: int) -> None:
    """Makes sure that the samples of a batch do not meet in the model.

    Raises:
        ModelError: naming the outputs in which they do; also when the model does not run.
    """
    session = whole_session(model)
    for samples in (plan.batch_size, plan.batch_size + 1):
        inputs = random_inputs(sizes, samples, seed)
        _expected(session, plan, sizes, inputs, _run(session, inputs, samples))


def _write_expected(
    model: OnnxModel,
    calls: Mapping[int, Arrays],
    sizes: InputSizes,
    plan: Plan,
    folder: Path,
) -> tuple[str, ...]:
    """Writes the outputs of the whole model for each batch; its session is gone afterwards.

    Returns:
        Which batches the model does not take, so that there is nothing to compare.
    """
    session = whole_session(model)
    notes = []
    for samples, inputs in calls.items():
        whole: Arrays = {}
        try:
            if not sizes.fixed:
                whole = _run(session, inputs, samples)
        except ModelError as error:
            if plan.microbatches > 1 or samples == plan.batch_size:
                raise
            notes.append(f"a batch of {samples} is not compared: {error.problem}")
            continue
        write_arrays(folder / f"{samples}.npz", _expected(session, plan, sizes, inputs, whole))
    return tuple(notes)


def _run(session: Whole, inputs: Arrays, samples: int) -> Arrays:
    try:
        return session(inputs)
    except StageError as error:
        raise ModelError(
            f"on {samples} samples {error}",
            hint="give it inputs of other sizes with --input, or --no-validate where random "
            "numbers will not do",
        ) from error


def _expected(
    session: Whole, plan: Plan, sizes: InputSizes, inputs: Arrays, whole: Arrays
) -> Arrays:
    """The outputs of the model for each micro-batch, put together.

    Args:
        whole: the outputs for the mini-batch, compared where the model takes it.
    """
    graph, size = plan.graph, plan.microbatch_size
    assert graph is not None
    if graph.whole_batch and not sizes.fixed:
        return whole
    parts = [_run(session, part, size) for part in _parts(sizes, inputs, size)]
    if sizes.fixed:
        return joined(graph, parts)
    return refuse_apart(graph, whole, parts, closeness(graph, quantised=is_quantised(graph)))


def _parts(sizes: InputSizes, inputs: Arrays, size: int) -> list[Arrays]:
    """The inputs of each micro-batch."""
    samples = max((len(inputs[name]) for name in sizes.batched), default=size)
    return [
        {
            name: array[start : start + size] if name in sizes.batched else array
            for name, array in inputs.items()
        }
        for start in range(0, samples, size)
    ]


def joined(graph: Graph, parts: Sequence[Arrays]) -> dict[str, np.ndarray]:
    """The outputs of a mini-batch, from those of its micro-batches."""
    found = {}
    for name in graph.output_values:
        dim = graph.values[name].batch_dim
        arrays = [part[name] for part in parts]
        found[name] = arrays[0] if dim is None else np.concatenate(arrays, axis=dim)
    return found


def refuse_apart(
    graph: Graph, whole: Arrays, parts: Sequence[Arrays], close: Closeness
) -> dict[str, np.ndarray]:
    """The outputs of micro-batches put together, which are to be those of the mini-batch.

    Raises:
        ModelError: naming the outputs that are not, as samples meet in the model.
    """
    try:
        found = joined(graph, parts)
        mixed = [row.name for row in compare(whole, found, close) if row.fault]
    except ValueError:  # shapes that follow from numbers, and differ
        mixed = list(graph.output_values)
    if mixed:
        raise ModelError(
            f"{', '.join(mixed)} of a batch is not put together from that of its micro-batches: "
            "somewhere in the model the samples of a batch meet",
            hint="compile with --microbatches 1",
        )
    return found


def held(
    directory: Path,
    plan: Plan,
    calls: Mapping[int, Arrays],
    expected: Path,
    notes: Sequence[str],
    custom_ops: Sequence[Path] = (),
) -> Validation:
    """How the outputs of a package compare with those in `expected/<samples>.npz`.

    Args:
        calls: the inputs, by their number of samples; what is not in `expected` is left out.
        notes: on what is left out.

    Raises:
        ValidationError: when the package cannot be run. Where one with a single micro-batch
            refuses another number of samples than planned, that is a note.
    """
    rows, more = [], []
    for samples, inputs in calls.items():
        if not (expected / f"{samples}.npz").exists():
            continue
        try:
            rows.append(_held(directory, samples, inputs, expected, len(plan.orders), custom_ops))
        except ValidationError as error:
            if plan.microbatches > 1 or samples == plan.batch_size:
                raise
            said = error.problem.splitlines()[-1]
            more.append(f"the package does not run on a batch of {samples}: {said}")
    return Validation(tuple(rows), (*notes, *more))


def _held(
    directory: Path,
    samples: int,
    inputs: Arrays,
    expected: Path,
    devices: int,
    custom_ops: Sequence[Path],
) -> Row:
    """How the outputs of one batch compare.

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
