"""Packages of ONNX stages in this process, compared with one session on the whole model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
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
    saturates: bool = False,
) -> Arrays:
    """Holds a package against its model; gives what the package made.

    Args:
        plan: where numbers follow from the whole of a micro-batch (dynamic quantisation), so that
            the model has to be run on each of them by itself.
        share: of its largest entry, by which an output may differ.
        saturates: whether kernels for 8 bits do where the processor has no instructions for them.
            ONNX Runtime's optimiser moves such a model, and an output may differ by four times
            that, as docs/onnx.md says.
    """
    found: Arrays = load_package(package).Pipeline()(arrays)
    if plan is None:
        splits = [arrays]
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
    expected = _put_together([whole(model, split) for split in splits])
    plain = expected
    if saturates:
        plain = _put_together([whole(model, split, optimised=False) for split in splits])
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        most = share * float(np.abs(array).max(initial=0.0))
        if saturates:
            moved = np.abs(array - plain[name]).max(initial=0.0)
            most = max(most, 4 * float(moved))
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=most)
    return found


def _put_together(parts: Sequence[Arrays]) -> Arrays:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
