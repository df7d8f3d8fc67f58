"""The backend tests of the onnx package that have two nodes or more, cut into two stages.

    python benchmarks/onnx_backend.py [PATTERN ...]

Each is compiled with the inputs that the test has, and the package's outputs for them are compared
with plain ONNX Runtime's. Left out are those that ONNX Runtime does not run here, and those with
inputs that are no tensors of numbers. All sizes are fixed, so a micro-batch is a call of the model.
"""

from __future__ import annotations

import fnmatch
import importlib
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, numpy_helper
from onnx.backend.test.case.node import collect_testcases
from onnx_speed import load

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.compile import compile as compile_package
from gpipe_compiler.errors import GPipeCompilerError
from gpipe_compiler.onnx import OnnxFile

Test = tuple[str, ModelProto, list[object]]


def tests() -> Iterator[Test]:
    """Names, models, and inputs: those made by code, and those in files of the package."""
    for case in collect_testcases(None):
        if case.model is not None and case.data_sets:
            yield case.name, case.model, list(case.data_sets[0][0])
    data = Path(onnx.__file__).parent / "backend" / "test" / "data"
    for path in sorted(data.glob("*/*/model.onnx")):
        inputs = []
        for file in sorted(path.parent.glob("test_data_set_0/input_*.pb")):
            tensor = onnx.TensorProto()
            tensor.ParseFromString(file.read_bytes())
            inputs.append(numpy_helper.to_array(tensor))
        yield path.parent.name, onnx.load(path), inputs


def outcome(name: str, model: ModelProto, inputs: list[object], folder: Path) -> str:
    """What becomes of a test: left out, right, wrong, or refused and why."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    weights = {tensor.name for tensor in model.graph.initializer}
    names = [source.name for source in model.graph.input if source.name not in weights]
    arrays = dict(zip(names, inputs, strict=False))
    known = all(isinstance(a, np.ndarray) and a.dtype.kind in "biufc" for a in inputs)
    if not known or len(arrays) < len(names):
        return "left out: inputs of other kinds"
    try:
        session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        expected = session.run(None, arrays)
    except Exception:  # noqa: BLE001  # onnxruntime's errors have no common class
        return "left out: not run by ONNX Runtime"
    np.savez(folder / "inputs.npz", **arrays)
    asked = CompileOptions(2, target="onnx", validate=False)
    try:
        file = OnnxFile(path, (str(folder / "inputs.npz"),))
        compile_package(file, asked, folder / f"p_{path.stem}")
        found = load(folder / f"p_{path.stem}").Pipeline()(arrays)
    except GPipeCompilerError as error:
        return f"refused: {error.problem}"
    except Exception as error:  # noqa: BLE001  # the benchmark goes on
        return f"traceback: {type(error).__name__}: {error}"
    results = zip([result.name for result in session.get_outputs()], expected, strict=True)
    return "right" if all(_same(found[name], array) for name, array in results) else "wrong"


def _same(found: object, expected: object) -> bool:
    if not isinstance(expected, np.ndarray):
        return bool(np.all([_same(a, b) for a, b in zip(found, expected, strict=True)]))
    if not isinstance(found, np.ndarray) or found.shape != expected.shape:
        return False
    if expected.dtype.kind not in "fc":
        return bool((found == expected).all())
    return bool(np.allclose(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True))


def main() -> None:
    """Prints what is not right, and the numbers of all."""
    warnings.simplefilter("ignore")
    patterns = sys.argv[1:] or ["*"]
    counts: Counter[str] = Counter()
    for name, model, inputs in tests():
        wanted = any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        if not wanted or len(model.graph.node) < 2:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = outcome(name, model, inputs, Path(folder))
        importlib.invalidate_caches()
        counts[found.partition(":")[0]] += 1
        if found != "right":
            print(f"{name}: {found}", flush=True)
    print(", ".join(f"{count} {found}" for found, count in counts.most_common()))


if __name__ == "__main__":
    main()
