"""Compares a package of ONNX stages with the whole model, on several batch sizes.

The whole model runs here, in ONNX Runtime or in PyTorch; the package in a process of its own in
which this compiler cannot be imported. The tolerances are those of `onnx/runtime/check.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpipe_compiler.errors import ModelError, ValidationError
from gpipe_compiler.frontend.comparable_runs import may_be_tried
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.sizes import SampleRule
from gpipe_compiler.onnx.codegen.package import closeness
from gpipe_compiler.onnx.frontend.nodes import draws, is_quantised, node_of, title
from gpipe_compiler.onnx.frontend.reading import OnnxModel, whole_session
from gpipe_compiler.onnx.frontend.sizes import InputSizes
from gpipe_compiler.onnx.runtime.arrays import write_arrays
from gpipe_compiler.onnx.runtime.batches import Arrays, join, rows
from gpipe_compiler.onnx.runtime.check import Closeness, compare
from gpipe_compiler.passes.batch_rules import takes_several
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.errors import StageError
from gpipe_compiler.runtime.train.comparison import Row
from gpipe_compiler.validate.package import Validation, run_check


class SamplesMeetError(ModelError):
    """The samples of a batch are not computed by themselves."""


@dataclass(frozen=True)
class WholeModel:
    """The model that a package is compared with.

    Attributes:
        run: gives its outputs, by name. Raises ModelError where it does not take the inputs.
        close: the tolerances.
        batch_dims: by input, the dimension along which a batch is split.
        fixed: whether it takes a micro-batch and no other number of samples.
        otherwise: gives the same outputs, rounded in another order; None where nothing does.
    """

    run: Callable[[Arrays], dict[str, np.ndarray]]
    close: Closeness
    batch_dims: Mapping[str, int]
    fixed: bool = False
    otherwise: Callable[[Arrays], dict[str, np.ndarray]] | None = None


def expected_outputs(
    model: WholeModel, graph: Graph, size: int, samples: int, inputs: Arrays
) -> dict[str, np.ndarray]:
    """The outputs of the model for a mini-batch, which are those of its micro-batches.

    Args:
        size: samples in a micro-batch.

    Raises:
        ModelError: where it does not take the inputs.
        SamplesMeetError: naming the outputs for which samples of the batch meet in the model.
    """
    whole = {} if model.fixed else model.run(inputs)
    if graph.whole_batch and not model.fixed:
        return whole
    parts = [
        model.run(
            {
                name: array
                if (dim := model.batch_dims.get(name)) is None
                # As callers pass them; OrtValue looks into arrays that are in one piece only.
                else np.ascontiguousarray(rows(array, dim, start, size))
                for name, array in inputs.items()
            }
        )
        for start in range(0, samples, size)
    ]
    try:
        found = join({name: graph.values[name].batch_dim for name in graph.output_values}, parts)
        compared = [] if model.fixed else compare(whole, found, model.close)
        if model.otherwise is not None and any(row.fault for row in compared):
            close = model.close.with_rounding(whole, model.otherwise(inputs))
            compared = compare(whole, found, close)
        differing = [row.name for row in compared if row.fault]
    except ValueError:  # shapes that follow from numbers, and differ
        found, differing = {}, list(graph.output_values)
    if differing:
        raise SamplesMeetError(
            f"{', '.join(differing)} of a batch is not put together from that of its "
            "micro-batches: somewhere in the model the samples of a batch meet",
            hint="compile with --microbatches 1",
        )
    return found


def validate_stages(
    model: WholeModel,
    plan: Plan,
    directory: Path,
    calls: Mapping[int, Arrays],
    custom_ops: Sequence[Path] = (),
) -> Validation:
    """Compares the package in `directory` with the model.

    Args:
        calls: inputs by their number of samples, of which only the first have to be such that model
            and package take them where there is a single micro-batch.

    Raises:
        ModelError: when the model does not run, or samples of a batch meet in it.
        ValidationError: when the package cannot be run. Differences are reported, not raised.
    """
    rows: list[Row] = []
    notes, graph = [], plan.known_graph
    for samples, inputs in calls.items():
        optional = (plan.microbatches == 1 or bool(graph.whole_batch)) and rows != []
        try:
            rows.append(_compared(model, directory, plan, samples, inputs, custom_ops))
        except ModelError as error:
            if not optional:
                raise
            notes.append(f"a batch of {samples} is not compared: {error.problem}")
        except ValidationError as error:
            if not optional:
                raise
            reason = error.problem.splitlines()[-1]
            notes.append(f"the package does not run on a batch of {samples}: {reason}")
    return Validation(tuple(rows), tuple(notes))


def _compared(
    model: WholeModel,
    directory: Path,
    plan: Plan,
    samples: int,
    inputs: Arrays,
    custom_ops: Sequence[Path],
) -> Row:
    """How the package's outputs for one batch compare; raises as `validate_stages`."""
    graph, size = plan.known_graph, plan.microbatch_size
    expected = expected_outputs(model, graph, size, samples, inputs)
    with tempfile.TemporaryDirectory(prefix="gpipe-validate-") as scratch:
        files = (Path(scratch, file) for file in ("in.npz", "out.npz", "report.json"))
        given, reference, report = files
        write_arrays(given, inputs)
        write_arrays(reference, expected)
        options: list[object] = ["--devices", ",".join(["cpu"] * len(plan.orders))]
        options += ["--reference", reference, "--input", given, "--report", report]
        libraries = [word for library in custom_ops for word in ("--custom-ops", library)]
        run_check(directory, [*options, *libraries], threads=1)
        rows = json.loads(report.read_text())
    if model.otherwise is not None and any(row["fault"] for row in rows):
        other = dataclasses.replace(model, run=model.otherwise, otherwise=None)
        with contextlib.suppress(ModelError):  # rounded so, the samples of a batch seem to meet
            otherwise = expected_outputs(other, graph, size, samples, inputs)
            close = model.close.with_rounding(expected, otherwise)
            rows = [_judged(row, close) for row in rows]
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


def _judged(row: dict[str, Any], close: Closeness) -> dict[str, Any]:
    """The report on an output, by another tolerance."""
    tolerance = max(row["tolerance"], close.of(row["name"]))
    passes = row["tolerance"] and row["relative"] <= tolerance
    return {**row, "tolerance": tolerance, "fault": "" if passes else row["fault"]}


def batch_sizes(plan: Plan) -> tuple[int, ...]:
    """What is compared: the planned mini-batch, one micro-batch, and one that splits unevenly."""
    more = 2 if takes_several(plan.known_graph) else 1
    return tuple(dict.fromkeys([plan.batch_size, plan.microbatch_size, plan.batch_size + more]))


# --- ONNX models ------------------------------------------------------------------------------


def _whole(model: OnnxModel, sizes: InputSizes, graph: Graph) -> WholeModel:
    """The model, loaded; raises ModelError when ONNX Runtime refuses it."""
    sessions = functools.cache(lambda optimised: whole_session(model, optimised=optimised))

    def run(inputs: Arrays, *, optimised: bool = True) -> dict[str, np.ndarray]:
        try:
            return sessions(optimised=optimised)(inputs)
        except StageError as error:
            samples = max((inputs[n].shape[dim] for n, dim in sizes.batch_dims.items()), default=1)
            raise ModelError(
                f"on {samples} samples {error}",
                hint="give it inputs of other sizes with --input, or --no-validate where random "
                "numbers will not do",
            ) from error

    close = closeness(graph, quantised=is_quantised(graph))
    sessions(optimised=True)
    return WholeModel(
        run, close, sizes.split_dims, sizes.fixed, lambda inputs: run(inputs, optimised=False)
    )


def validate_onnx(
    model: OnnxModel, sizes: InputSizes, plan: Plan, directory: Path, *, seed: int = 0
) -> Validation:
    """Compares the package in `directory` with an ONNX model, on random inputs.

    Raises:
        ModelError: when ONNX Runtime refuses the model itself, or samples of a batch meet in it.
        ValidationError: when the package cannot be run. Differences are reported, not raised.
    """
    drawing = [title(node) for op in plan.known_graph.ops if draws(node := node_of(op))]
    if drawing:
        raise ModelError(
            f"{drawing[0]} draws random numbers, so there is nothing to compare the package with",
            hint="--no-validate",
        )
    if sizes.fixed or not sizes.batch_dims:
        counts: tuple[int, ...] = (plan.batch_size,)
    elif sizes.requests:
        counts = tuple(dict.fromkeys([sizes.batch, 1, sizes.batch + 1]))
    else:
        counts = batch_sizes(plan)
    calls = {n: sizes.arrays(n, seed + number) for number, n in enumerate(counts)}
    return validate_stages(
        _whole(model, sizes, plan.known_graph), plan, directory, calls, model.custom_ops
    )


def refuse_meeting(
    model: OnnxModel,
    sizes: InputSizes,
    graph: Graph,
    size: int,
    counts: Sequence[int],
    rules: Sequence[SampleRule] = (),
    *,
    seed: int,
) -> SampleRule | None:
    """Makes sure that the samples of a batch do not meet in the model.

    Args:
        graph: says along which dimension outputs are put together.
        size: samples in a micro-batch.
        counts: samples of the batches that are tried.
        rules: by which it may be another for more samples.

    Returns:
        The first of these that takes too long to be tried.

    Raises:
        ModelError: naming the outputs for which they do; also when the model does not run.
    """
    whole, few = _whole(model, sizes, graph), max(counts)
    started = time.process_time()
    for samples in counts:
        expected_outputs(whole, graph, size, samples, sizes.arrays(samples, seed))
    seconds = time.process_time() - started
    for rule in rules:
        samples = 2 * rule.samples + 1
        if not may_be_tried(samples, few, seconds):
            return rule
        expected_outputs(whole, graph, size, samples, sizes.arrays(samples, seed))
    return None
