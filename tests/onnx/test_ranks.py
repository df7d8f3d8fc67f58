"""Packages of ONNX stages that serve in several ranks, and state that stages hold between calls.

The programs that the ranks run compare every answer with plain ONNX Runtime themselves.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models
import packages
import pytest
from loading import load_package
from onnx import TensorProto, helper

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.compile import compile as compile_model
from gpipe_compiler.onnx import OnnxFile
from gpipe_compiler.options import Constraints

LAYERS = 3
WIDTH = 16
STATE = {f"past{layer}": f"present{layer}" for layer in range(LAYERS)}


def decoder() -> Any:
    """Layers that each look at a row for every token so far, and keep these for the next call."""
    node = helper.make_node
    nodes, weights, before = [], [], "x"
    for layer in range(LAYERS):
        weights += [
            onnx_models.weight(f"w{layer}", WIDTH, WIDTH),
            onnx_models.weight(f"u{layer}", WIDTH, WIDTH),
        ]
        nodes += [
            node("MatMul", [before, f"w{layer}"], [f"row{layer}"]),
            node("Concat", [f"past{layer}", f"row{layer}"], [f"present{layer}"], axis=1),
            node("ReduceMean", [f"present{layer}"], [f"seen{layer}"], axes=[1], keepdims=1),
            node("Add", [f"seen{layer}", before], [f"sum{layer}"]),
            node("MatMul", [f"sum{layer}", f"u{layer}"], [f"up{layer}"]),
            node("Tanh", [f"up{layer}"], [f"y{layer}"]),
        ]
        before = f"y{layer}"
    nodes.append(node("Identity", [before], ["words"]))
    value = helper.make_tensor_value_info
    inputs = [
        value(name, TensorProto.FLOAT, ["batch", length, WIDTH])
        for name, length in (("x", "tokens"), *((past, "length") for past in STATE))
    ]
    outputs = [value(name, TensorProto.FLOAT, None) for name in ("words", *STATE.values())]
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    made.ir_version = 8
    return made


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = onnx_models.write(decoder(), tmp_path_factory.mktemp("decoder") / "model.onnx")
    file = OnnxFile(path, (f"x=4x1x{WIDTH}", f"past0=4x3x{WIDTH}"), state=STATE)
    apart = Constraints(split_at=tuple(f"row{layer}" for layer in range(1, LAYERS)))
    options = CompileOptions(LAYERS, target="onnx", constraints=apart)
    made = compile_model(file, options, path.with_name("package"))
    assert made.directory is not None
    return made.directory


def test_every_stage_holds_its_own_state(package: Path) -> None:
    """No past or present crosses from stage to stage, nor leaves it with a session."""
    spec = load_package(package).SPEC
    assert set(spec.held_states) == set(STATE)
    for number, stage in enumerate(spec.stages):
        assert {n for n in stage.inputs if n.startswith("p")} == {f"past{number}"}
    assert sorted(spec.held_states.values()) == list(range(LAYERS))


def test_what_a_session_held_is_let_go_of(package: Path) -> None:
    pipe = load_package(package).Pipeline()
    kept, x = pipe.session(BEGIN), np.ones((1, 1, WIDTH), np.float32)
    kept({"x": x})
    for _ in range(5):
        pipe.session(BEGIN)({"x": x})
    pipe({"x": x, **BEGIN})  # by then the others are known to be gone
    assert [stage.sessions for stage in pipe.stages.values()] == [1] * LAYERS
    _assert_next(package, kept({"x": x}), calls=2)


def test_a_session_after_a_stage_has_failed(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one fails once, when the others have gone on: they go back."""
    pipe = load_package(package).Pipeline()
    run = pipe.stages[LAYERS - 1].run

    def failing(number: int, values: Any, turn: Any) -> Any:
        if turn.call == 1:
            raise RuntimeError("for once")
        return run(number, values, turn)

    monkeypatch.setattr(pipe.stages[LAYERS - 1], "run", failing)
    talk, x = pipe.session(BEGIN), np.ones((1, 1, WIDTH), np.float32)
    talk({"x": x})
    with pytest.raises(RuntimeError, match="for once"):
        talk({"x": x})
    _assert_next(package, talk({"x": x}), calls=2)


def test_asyncio(package: Path) -> None:
    async def ask(pipe: Any) -> list[Any]:
        return await asyncio.gather(*(pipe.acall(_request(number)) for number in range(30)))

    with load_package(package).Pipeline() as pipe:
        for number, found in enumerate(asyncio.run(ask(pipe))):
            expected = packages.whole(package.with_name("model.onnx"), _request(number))
            np.testing.assert_allclose(found["words"], expected["words"], rtol=1e-5, atol=1e-6)


def _request(number: int) -> dict[str, Any]:
    generator = np.random.default_rng(number)
    batch, tokens, past = 1 + number % 5, 1 + number % 3, number % 4
    shapes = {"x": (batch, tokens, WIDTH), **dict.fromkeys(STATE, (batch, past, WIDTH))}
    return {n: generator.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


BEGIN = {past: np.zeros((1, 0, WIDTH), np.float32) for past in STATE}


def _assert_next(package: Path, found: Any, *, calls: int) -> None:
    """That it is what plain ONNX Runtime makes of the last of so many calls with ones."""
    held, x = dict(BEGIN), np.ones((1, 1, WIDTH), np.float32)
    for _ in range(calls):
        expected = packages.whole(package.with_name("model.onnx"), {"x": x, **held})
        held = {past: expected[present] for past, present in STATE.items()}
    np.testing.assert_allclose(found["words"], expected["words"], rtol=1e-5, atol=1e-6)


PROGRAM = """
import asyncio, importlib.util, pathlib, sys
import numpy, onnxruntime
sys.path.insert(0, {tests!r})
folder = pathlib.Path({package!r})
spec = importlib.util.spec_from_file_location('p', folder / '__init__.py',
    submodule_search_locations=[str(folder)])
p = importlib.util.module_from_spec(spec); sys.modules['p'] = p
spec.loader.exec_module(p)
from test_ranks import BEGIN, STATE, WIDTH, _assert_next, _request
from packages import whole
model = folder.with_name('model.onnx')
def same(request, found):
    expected = whole(model, request)
    assert found.keys() == expected.keys()
    for name in expected:
        numpy.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)
with p.Pipeline() as pipe:
    if pipe.rank:
        try:
            pipe(_request(0))
        except Exception as error:
            assert 'rank 0 calls the pipeline' in str(error)
        pipe.serve()
    else:
        requests = [_request(number) for number in range(40)]
        for request, found in zip(requests, pipe.stream(requests), strict=True):
            same(request, found)
        same(requests[5], pipe(requests[5], microbatches=1))
        later = [pipe.submit(request) for request in requests]
        talks = [pipe.session(BEGIN) for _ in range(2)]
        x = numpy.ones((1, 1, WIDTH), numpy.float32)
        for calls in range(1, 4):
            for talk in talks:
                found = talk({{'x': x}})
                assert found.keys() == {{'words'}}
                _assert_next(folder, found, calls=calls)
        for request, done in zip(requests, later):
            same(request, done.result())
        try:
            pipe({{'x': requests[0]['x']}})
        except Exception as error:
            assert 'is missing' in str(error)
        print('all the same')
"""


def test_ranks_serve_as_one_process_does(package: Path) -> None:
    program = PROGRAM.format(tests=str(Path(__file__).parent), package=str(package))
    file = package.with_name("serving.py")
    file.write_text(program, encoding="utf-8")
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(LAYERS), str(file)],
        capture_output=True, text=True, check=False, timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "all the same" in done.stdout
