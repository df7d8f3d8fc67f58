"""`run.py` of a package of ONNX stages, and `gpipe-compile` of files: what is typed, what is told.

Numbers are compared with one session of ONNX Runtime on the whole model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_models
import onnxruntime
import pytest
import torch
from onnx_compiling import compile_onnx
from torch import nn
from torch.export import Dim

from gpipe_compiler.cli.main import compile_command
from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.frontend.source import load

EXAMPLES = Path(__file__).parents[2] / "examples"
FAST = (("mlp_digits", 2),)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    path = onnx_models.write(onnx_models.long_skip(), folder / "model.onnx")
    options = CompileOptions(2, microbatches=4, validate=False)
    return compile_onnx(path, options, folder / "package", inputs=["8x16"]).directory or folder


def _run(
    package: Path, *words: object, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Where neither this compiler nor torch can be imported."""
    program = (
        "import runpy, sys\n"
        "sys.modules['gpipe_compiler'] = sys.modules['torch'] = None\n"
        "del sys.argv[0]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program, str(package / "run.py"), *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        cwd=folder,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )


def _assert_refused(done: subprocess.CompletedProcess[str], code: int, said: str) -> None:
    """An error in words, without a traceback."""
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_infer(package: Path, suffix: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((9, 16)).astype(np.float32)
    given = tmp_path / f"x.{suffix}"
    if suffix == "npy":
        np.save(given, x)
    else:
        np.savez(given, x=x)
    done = _run(package, "infer", "--input", given, "--output", tmp_path / "y.npz")
    assert done.returncode == 0, done.stderr
    assert "y: 9x48 float32" in done.stdout
    whole = onnxruntime.InferenceSession(
        str(package.parent / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    found = np.load(tmp_path / "y.npz")
    for name, expected in zip(("y", "r2"), whole.run(["y", "r2"], {"x": x}), strict=True):
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)


def test_check(package: Path, tmp_path: Path) -> None:
    assert _run(package, "check").returncode == 0
    done = _run(package, "check", "--reference", package.parent / "model.onnx", "--batch-size", 5)
    assert done.returncode == 0, done.stderr
    x = np.zeros((2, 16), np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    np.savez(tmp_path / "wrong.npz", y=np.ones((2, 48), np.float32))
    done = _run(
        package, "check", "--input", tmp_path / "x.npz", "--reference", tmp_path / "wrong.npz"
    )
    assert done.returncode == 3
    assert "differs" in done.stdout


def test_bench(package: Path) -> None:
    done = _run(package, "bench", "--steps", 3, "--microbatches", 2, "--threads", 2)
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout
    assert "one session of 4 threads" in done.stdout
    for samples in (1, 2, 4, 8, 16, 32):
        assert re.search(rf"^ +{samples}( +[\d.e+]+){{4}}$", done.stdout, re.MULTILINE)
    assert re.search("answers .* times as quickly, and takes .* times as many", done.stdout)


def test_options_of_sessions(package: Path, tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    done = _run(
        package, "infer", "--threads", "2,1", "--cpus", cpu, "--profile", tmp_path / "traces",
        "--session-option", "1:session.intra_op.allow_spinning=1",
        "--session-option", "session.use_device_allocator_for_initializers=1",
        "--provider-option", "0:any=thing",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    traces = sorted((tmp_path / "traces").iterdir())
    assert [trace.name[:7] for trace in traces] == ["stage_0", "stage_1"]
    for trace in traces:
        assert any(event["cat"] == "Node" for event in json.loads(trace.read_text()))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--devices", "gpu7"), "'gpu7' is no device"),
        (("--devices", "coreml"), "has no CoreMLExecutionProvider"),
        (("--devices", "cpu,cpu,cpu"), "names 3 devices, but the pipeline has 2"),
        (("--microbatches", "99"), "does not split into 99"),
        (("--input", "nowhere.npz"), "nowhere.npz cannot be read"),
        (("--compile",), "--compile is for stages of torch"),
        (("--threads", "1,1,1"), "threads are given for 3 stages, but there are 2"),
        (("--cpus", "0,65535"), "there are no processors 65535"),
        (("--cpus", "3-1"), "'3-1' names no processors"),
        (("--session-option", "key"), "'key' is no KEY=VALUE"),
        (("--provider-option", "7:key=1"), "7:key: the pipeline has 2 stages"),
    ],
)
def test_wrong_usage(package: Path, words: tuple[str, ...], said: str) -> None:
    _assert_refused(_run(package, "infer", *words), 2, said)


def test_a_file_that_is_no_array(package: Path, tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_text("nothing")
    done = _run(package, "infer", "--input", tmp_path / "x.npz")
    _assert_refused(done, 2, "cannot be read")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("infer", "--output", "no/such/y.npz"), "no writable folder"),
        (("infer", "--output", "y.npy"), "there are 2 outputs"),
        (("infer", "--custom-ops", "none.so"), "no library none.so"),
        (("infer", "--input", "empty.npz"), "empty.npz cannot be read"),
        (("check", "--reference", "none.onnx"), "there is no file none.onnx"),
        (("check", "--reference", "hollow.npz"), "holds no outputs"),
    ],
)
def test_files_that_are_not_as_they_should_be(
    package: Path, words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.npz").touch()
    np.savez(tmp_path / "hollow.npz")
    _assert_refused(_run(package, *words, folder=tmp_path), 2, said)


def test_a_reference_that_does_not_run(package: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_text("nothing")
    done = _run(package, "check", "--reference", tmp_path / "broken.onnx")
    _assert_refused(done, 1, "ONNX Runtime refuses")


def test_a_package_of_one_batch_size(tmp_path: Path) -> None:
    """Copied to a place with an odd name, and run from there."""
    path = onnx_models.write(onnx_models.fixed_batch(2), tmp_path / "MODEL.ONNX")
    assert compile_command([str(path), "--stages", "2", "-o", str(tmp_path / "p")]) == 0
    copy = tmp_path / "a copy: ü"
    shutil.copytree(tmp_path / "p", copy)
    shutil.rmtree(tmp_path / "p")
    done = _run(copy, "infer", "--batch-size", 6, "--output", "y.npy", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert np.load(tmp_path / "y.npy").shape == (6, 16)
    done = _run(copy, "infer", "--batch-size", 7)
    assert done.returncode == 2
    assert "takes 2 samples at a time" in done.stderr


def test_a_stage_that_is_damaged(tmp_path: Path) -> None:
    path = onnx_models.write(onnx_models.chain(), tmp_path / "model.onnx")
    assert compile_command([str(path), "--stages", "2", "-o", str(tmp_path / "p")]) == 0
    stage = tmp_path / "p" / "stage_1.onnx"
    stage.write_bytes(stage.read_bytes()[:200])
    _assert_refused(_run(tmp_path / "p", "infer"), 1, "stage_1.onnx is missing, or is not what was")
    (tmp_path / "p" / "checksums.json").unlink()
    _assert_refused(_run(tmp_path / "p", "infer"), 1, "refuses stage 1 (stage_1.onnx)")


def test_options_that_mean_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = onnx_models.write(onnx_models.chain(), tmp_path / "model.onnx")
    assert compile_command([str(path), "--stages", "2", "--remat", "full"]) == 2
    assert "--remat" in capsys.readouterr().err
    words = [str(EXAMPLES / "mlp_digits.py"), "--stages", "2", "--target", "onnxruntime"]
    assert compile_command([*words, "-o", str(tmp_path / "p")]) == 2
    assert "--mode infer" in capsys.readouterr().err


def _exported(example: str, path: Path) -> None:
    """An example's model as torch.onnx writes it by itself."""
    subject = load(str(EXAMPLES / f"{example}.py"), input_specs=[], training=False)
    model: nn.Module = subject.model.eval()
    with torch.no_grad():
        program = torch.onnx.export(
            model,
            tuple(subject.args),  # type: ignore[arg-type]  # tensors, in the examples
            dynamo=True,
            dynamic_shapes=tuple({0: Dim("batch")} for _ in subject.args),
            verbose=False,
        )
    assert program is not None
    program.save(path, external_data=False)


@pytest.mark.parametrize(
    ("example", "stages"),
    [
        *FAST,
        *(
            pytest.param(name, stages, marks=pytest.mark.slow)
            for name in ("mlp_digits", "transformer", "alexnet", "resnet50", "inception", "unet")
            for stages in (2, 4)
            if (name, stages) not in FAST
        ),
    ],
)
def test_examples_from_their_files(example: str, stages: int, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    _exported(example, path)
    sizes = "x".join(map(str, _sizes(example)))
    words = [str(path), "--stages", str(stages), "--input", sizes]
    assert compile_command([*words, "-o", str(tmp_path / "package")]) == 0


def _sizes(example: str) -> tuple[int, ...]:
    (only,) = load(str(EXAMPLES / f"{example}.py"), input_specs=[], training=False).args
    assert isinstance(only, torch.Tensor)
    return tuple(only.shape)
