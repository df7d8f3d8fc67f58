"""Packages of ONNX stages in this process, compared with one session on the whole model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
from loading import load_package

from gpipe_compiler.plan import Plan

Arrays = dict[str, np.ndarray]


def random(package: Path, samples: int) -> Arrays:
    """Inputs of a package, as its own command draws them."""
    module = load_package(package)
    arrays = importlib.import_module(f"{module.__name__}.runtime.onnx.arrays")
    drawn: Arrays = arrays.random_arrays(module.SPEC, samples)
    return drawn


def whole(model: Path, arrays: Mapping[str, np.ndarray], *, optimised: bool = True) -> Arrays:
    """The outputs of the model in one piece."""
    options = onnxruntime.SessionOptions()
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(model), options, ["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(arrays)), strict=True))


def assert_equal(
    package: Path,
    model: Path,
    arrays: Arrays,
    *,
    plan: Plan | None = None,
    share: float = 1e-6,
) -> Arrays:
    """Holds a package against its model; gives what the package made.

    Where the processor has no instructions for it, ONNX Runtime's kernels for 8 bits saturate, and
    its optimiser moves a quantised model: an output may differ by four times that, as docs/onnx.md
    says.

    Args:
        plan: where numbers follow from the whole of a micro-batch (dynamic quantisation), so that
            the model has to be run on each of them by itself.
        share: of its largest entry, by which an output may differ.
    """
    found: Arrays = load_package(package).Pipeline()(arrays)
    if plan is None:
        expected, plain = (whole(model, arrays, optimised=wish) for wish in (True, False))
    else:
        count = len(next(iter(arrays.values())))
        size = plan.microbatch_size
        number = -(-count // size)
        splits = [
            dict(zip(arrays, split, strict=True))
            for split in zip(
                *(np.array_split(array, number) for array in arrays.values()), strict=True
            )
        ]
        made = ([whole(model, s, optimised=wish) for s in splits] for wish in (True, False))
        expected, plain = (
            {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            for parts in made
        )
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        moved = np.abs(array.astype(np.float64) - plain[name].astype(np.float64))
        most = share * float(np.abs(array).max(initial=0.0)) + 4 * float(moved.max(initial=0.0))
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=most)
    return found
