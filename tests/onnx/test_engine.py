"""The engine of a package of ONNX stages, compared with one session of ONNX Runtime on all samples.

And what it does when something goes wrong: every thread and every process ends, and what is told
names the stage and the micro-batch.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models
import packages
import pytest
from loading import load_package
from onnx import ModelProto, TensorProto, helper
from onnx_compiling import compile_onnx

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.onnx.runtime import distributed
from gpipe_compiler.runtime.errors import PipelineError

ROWS = 99
"""Of the table that `failing` reads: an index from there on is an error."""


def failing() -> ModelProto:
    """A chain, at whose end a row of a table is added, which is there or not."""
    proto = onnx_models.chain(4)
    proto.graph.input.append(helper.make_tensor_value_info("number", TensorProto.INT64, ["batch"]))
    proto.graph.initializer.append(onnx_models.weight("table", ROWS, 16))
    proto.graph.node.extend(
        [
            helper.make_node("Gather", ["table", "number"], ["row"], name="look_up"),
            helper.make_node("Add", ["r3", "row"], ["y"]),
        ]
    )
    proto.graph.output[0].name = "y"
    return proto


def narrow() -> ModelProto:
    """Layers whose results are bfloat16, int8 and uint8 by turns."""
    nodes, last = [], "x"
    for number, kind in enumerate((TensorProto.BFLOAT16, TensorProto.INT8, TensorProto.UINT8)):
        nodes += [
            helper.make_node("MatMul", [last, "w"], [f"m{number}"]),
            helper.make_node("Relu", [f"m{number}"], [f"r{number}"]),
            helper.make_node("Cast", [f"r{number}"], [f"n{number}"], to=kind),
            helper.make_node("Cast", [f"n{number}"], [f"f{number}"], to=TensorProto.FLOAT),
        ]
        last = f"f{number}"
    return onnx_models.model_of(
        nodes, [onnx_models.weight("w", 16, 16)], [onnx_models.rows()], [last]
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _made(failing(), tmp_path_factory.mktemp("failing"))


@pytest.fixture(scope="module")
def narrow_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _made(narrow(), tmp_path_factory.mktemp("narrow"))


def _made(proto: ModelProto, folder: Path, stages: int = 2) -> Path:
    path = onnx_models.write(proto, folder / "model.onnx")
    options = CompileOptions(stages, microbatches=4, validate=False)
    return compile_onnx(path, options, folder / "package", inputs=["8x16"]).directory or folder


def _arrays(samples: int = 8) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(samples)
    return {
        "x": generator.standard_normal((samples, 16)).astype(np.float32),
        "number": generator.integers(0, ROWS, samples),
    }


def _whole(package: Path, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return packages.whole(package.parent / "model.onnx", arrays)


def _run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


# --- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "microbatches"), [(8, None), (8, 8), (7, None), (7, 3), (1, None), (20, 6)]
)
def test_any_batch_in_any_number_of_parts(
    package: Path, samples: int, microbatches: int | None
) -> None:
    arrays = _arrays(samples)
    found = load_package(package).Pipeline()(arrays, microbatches=microbatches)
    np.testing.assert_allclose(found["y"], _whole(package, arrays)["y"], rtol=1e-5, atol=1e-6)


def test_boundaries_of_types_that_numpy_does_not_have(narrow_package: Path) -> None:
    module = load_package(narrow_package)
    assert {"n0", "n1", "n2"} & set(module.SPEC.stages[1].inputs)
    x = _arrays()["x"]
    expected = _whole(narrow_package, {"x": x})["f2"]
    np.testing.assert_allclose(module.Pipeline()({"x": x})["f2"], expected, rtol=1e-5)


def test_values_as_arrays_and_back(package: Path) -> None:
    """1.0, 2.0 and -0.5 in bfloat16 are the upper halves of their float32."""
    values = importlib.import_module(f"{load_package(package).__name__}.runtime.onnx.arrays")
    bits = np.array([[0x3F80, 0x4000, 0xBF00]], np.uint16)
    value = values.value_of(bits, "bfloat16")
    assert value.data_type() == "tensor(bfloat16)"
    np.testing.assert_array_equal(values.array_of(value), bits)
    assert values.foreign_name(value) == "bfloat16"


# --- what goes wrong --------------------------------------------------------------------------


def test_a_stage_that_fails(package: Path) -> None:
    module = load_package(package)
    pipe = module.Pipeline()
    arrays = _arrays()
    arrays["number"][5] = ROWS + 1
    before = threading.active_count()
    with pytest.raises(Exception, match=r"stage \d fails on micro-batch 2.*look_up") as caught:
        pipe(arrays, microbatches=4)
    assert type(caught.value).__name__ == "StageError"
    assert threading.active_count() == before
    arrays["number"][5] = 0  # and the pipeline can still be used
    np.testing.assert_allclose(
        pipe(arrays)["y"], _whole(package, arrays)["y"], rtol=1e-5, atol=1e-6
    )


def test_the_command_tells_it_without_a_traceback(package: Path, tmp_path: Path) -> None:
    arrays = _arrays()
    arrays["number"][0] = ROWS + 1
    np.savez(tmp_path / "x.npz", **arrays)
    done = _run(package / "run.py", "infer", "--input", tmp_path / "x.npz")
    assert done.returncode == 1
    assert "fails on micro-batch 0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": None}, "the input x is missing"),
        ({"z": np.zeros(1)}, "there is no input z"),
        ({"x": np.zeros((8, 17), np.float32)}, "the input x is 8x17, not Bx16"),
        ({"x": np.zeros((8, 16))}, "the input x is float64, not float32"),
        ({"x": np.zeros((0, 16), np.float32)}, "the input x is an empty batch"),
        ({"number": np.zeros(7, np.int64)}, "different numbers of samples: x 8, number 7"),
    ],
)
def test_inputs_that_do_not_fit(package: Path, change: dict[str, Any], said: str) -> None:
    arrays = {name: array for name, array in (_arrays() | change).items() if array is not None}
    with pytest.raises(Exception, match=said) as caught:
        load_package(package).Pipeline()(arrays)
    assert type(caught.value).__name__ == "UsageError"


def test_ctrl_c(package: Path) -> None:
    program = (
        "import importlib.util, pathlib, signal, sys\n"
        # What a shell starts in the background ignores the signal, and so would its children.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"folder = pathlib.Path({str(package)!r})\n"
        "spec = importlib.util.spec_from_file_location('p', folder / '__init__.py',\n"
        "    submodule_search_locations=[str(folder)])\n"
        "p = importlib.util.module_from_spec(spec); sys.modules['p'] = p\n"
        "spec.loader.exec_module(p)\n"
        "from p.runtime.onnx import command\n"
        "bench = command._bench\n"
        "command._bench = lambda *given: print('ready', flush=True) or bench(*given)\n"
        "sys.exit(command.main(p.SPEC, folder, ['bench', '--steps', '100000000']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.5)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=500)
    assert running.returncode == 130
    assert "Traceback" not in said


# --- processes --------------------------------------------------------------------------------


def _torchrun(package: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return _run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--",
        package / "run.py", *words,
    )  # fmt: skip


def test_ranks_come_to_what_threads_come_to(narrow_package: Path, tmp_path: Path) -> None:
    """With a boundary of 16 bits, which goes as its bits."""
    np.savez(tmp_path / "x.npz", x=_arrays(7)["x"])
    done = _torchrun(
        narrow_package, "infer", "--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz"
    )
    assert done.returncode == 0, done.stderr
    local = load_package(narrow_package).Pipeline()({"x": _arrays(7)["x"]})
    np.testing.assert_array_equal(np.load(tmp_path / "y.npz")["f2"], local["f2"])


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_is_killed_takes_the_other_down(package: Path, victim: int) -> None:
    program = (
        "import importlib.util, os, pathlib, signal, sys\n"
        f"folder = pathlib.Path({str(package)!r})\n"
        "spec = importlib.util.spec_from_file_location('p', folder / '__init__.py',\n"
        "    submodule_search_locations=[str(folder)])\n"
        "p = importlib.util.module_from_spec(spec); sys.modules['p'] = p\n"
        "spec.loader.exec_module(p)\n"
        "from p.runtime.onnx import command, pipeline, stage\n"
        "run = stage.OnnxStage.run\n"
        "def dying(self, microbatch, *more):\n"
        f"    if microbatch == 2 and int(os.environ['RANK']) == {victim}:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return run(self, microbatch, *more)\n"
        "stage.OnnxStage.run = dying\n"
        "sys.exit(command.main(p.SPEC, folder, ['infer']))\n"
    )
    with socket.socket() as found:
        # Bound and not listened on: nobody else is given the port, and rank 0 may share it.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", program],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **shared, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=500)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert ranks[victim].returncode == -signal.SIGKILL
    assert ranks[1 - victim].returncode == 1, said
    assert "cannot be reached any more" in said[1 - victim]


def test_a_rank_that_is_gone_before_all_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nobody at the address, as where rank 0 ends early."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = str(silent.getsockname()[1])
        shared = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in shared.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(distributed, "TIMEOUT_S", 0.2)
        with pytest.raises(PipelineError, match="cannot be reached any more"):
            distributed.World(2)


def test_as_many_processes_as_devices(package: Path) -> None:
    done = _run(
        package / "run.py", "infer", RANK="0", WORLD_SIZE="3", MASTER_ADDR="x", MASTER_PORT="1"
    )
    assert done.returncode == 2
    assert "needs 2 processes, torchrun started 3" in done.stderr
