"""Packages of ONNX stages that serve: one call after another, several on their way at once.

Held against plain ONNX Runtime on each request.
"""

from __future__ import annotations

import gc
import importlib.util
import io
import logging
import queue
import resource
import sys
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models
import packages
import pytest
from loading import load_package
from onnx import TensorProto, helper
from onnx_compiling import compile_onnx

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.compile import compile as compile_model
from gpipe_compiler.errors import UsageError
from gpipe_compiler.onnx import OnnxFile

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_onnx.py"
ROWS = 99
"""Of the table that the model reads: an index from there on is an error."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers, a long skip, and a row of a table, which is there or not."""
    proto = onnx_models.chain(6)
    proto.graph.input.append(helper.make_tensor_value_info("number", TensorProto.INT64, ["batch"]))
    proto.graph.initializer.append(onnx_models.weight("table", ROWS, 16))
    proto.graph.node.extend(
        [
            helper.make_node("Gather", ["table", "number"], ["row"]),
            helper.make_node("Sum", ["r5", "row", "r0"], ["y"]),
        ]
    )
    proto.graph.output[0].name = "y"
    return _made(proto, tmp_path_factory.mktemp("stream"), 3)


@pytest.fixture(scope="module")
def whole_calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What cannot be split, so that its pipeline is one of calls."""
    return _made(onnx_models.data_dependent(), tmp_path_factory.mktemp("whole"), 2)


def _made(proto: Any, folder: Path, stages: int) -> Path:
    path = onnx_models.write(proto, folder / "model.onnx")
    made = compile_onnx(path, CompileOptions(stages), folder / "package")
    assert made.directory is not None
    return made.directory


def _request(number: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(number)
    samples = 1 + number % 11
    return {
        "x": generator.standard_normal((samples, 16)).astype(np.float32),
        "number": generator.integers(0, ROWS, samples),
    }


def _assert_same(package: Path, arrays: dict[str, np.ndarray], found: Any) -> None:
    expected = packages.whole(package.with_name("model.onnx"), arrays)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5)


def test_a_stream_of_requests_of_any_size(package: Path) -> None:
    with load_package(package).Pipeline() as pipe:
        for number, found in enumerate(pipe.stream(map(_request, range(50)))):
            _assert_same(package, _request(number), found)
    assert number == 49


def test_a_stream_of_whole_calls(whole_calls: Path) -> None:
    requests = [{"x": _request(number)["x"]} for number in range(20)]
    pipe = load_package(whole_calls).Pipeline()
    for arrays, found in zip(requests, pipe.stream(requests), strict=True):
        _assert_same(whole_calls, arrays, found)


def test_no_more_is_asked_for_than_is_on_its_way(package: Path) -> None:
    asked = []

    def requests() -> Iterator[dict[str, np.ndarray]]:
        for number in range(1000):
            asked.append(number)
            yield _request(0)

    stream = load_package(package).Pipeline().stream(requests())
    next(stream)
    assert len(asked) <= 10


def test_a_request_that_fails_leaves_the_others_alone(package: Path) -> None:
    pipe = load_package(package).Pipeline()
    requests = [_request(number) for number in range(6)]
    requests[3]["number"][0] = ROWS + 1
    futures = [pipe.submit(arrays) for arrays in requests]
    for number, (arrays, future) in enumerate(zip(requests, futures, strict=True)):
        if number == 3:
            with pytest.raises(Exception, match="fails on micro-batch"):
                future.result()
        else:
            _assert_same(package, arrays, future.result())
    with pytest.raises(Exception, match="the input x is missing"):
        pipe.submit({"number": requests[0]["number"]})


def test_calls_from_several_threads(package: Path) -> None:
    pipe = load_package(package).Pipeline()
    with ThreadPoolExecutor(8) as threads:
        for number, found in enumerate(threads.map(lambda n: pipe(_request(n)), range(40))):
            _assert_same(package, _request(number), found)


def test_the_arrays_are_the_callers_again_at_once(package: Path) -> None:
    requests = [_request(11 * number + 4) for number in range(20)]
    held = {name: numbers.copy() for name, numbers in requests[0].items()}

    def refilled() -> Iterator[dict[str, np.ndarray]]:
        for request in requests:
            for name, numbers in request.items():
                held[name][:] = numbers
            yield held

    with load_package(package).Pipeline() as pipe:
        for request, found in zip(requests, pipe.stream(refilled()), strict=True):
            _assert_same(package, request, found)


def test_a_request_that_does_not_fit_is_refused_at_its_turn(package: Path) -> None:
    requests = [_request(1), _request(2), {"y": np.zeros(3)}]
    with load_package(package).Pipeline() as pipe:
        answers = pipe.stream(requests)
        for request in requests[:2]:
            _assert_same(package, request, next(answers))
        with pytest.raises(Exception, match="no input y"):
            next(answers)


def test_what_is_done_with_a_result_may_call_the_pipeline(package: Path) -> None:
    with load_package(package).Pipeline() as pipe:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        pipe.submit(_request(1)).add_done_callback(lambda _: answers.put(pipe(_request(2))))
        _assert_same(package, _request(2), answers.get(timeout=60))


def test_a_call_that_is_given_up(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    logger = logging.getLogger("concurrent.futures")
    monkeypatch.setattr(logger, "exception", lambda *words: said.append(words))
    with load_package(package).Pipeline() as pipe:
        calls = [pipe.submit(_request(number)) for number in range(30)]
        given_up = [call.cancel() for call in calls]
        _assert_same(package, _request(3), pipe(_request(3)))
        for number, call in enumerate(calls):
            if not given_up[number]:
                _assert_same(package, _request(number), call.result(60))
    assert not said


def test_calls_while_it_is_closed_end(package: Path) -> None:
    """Each with its outputs, or refused."""
    pipe, begun = load_package(package).Pipeline(), threading.Barrier(5)

    def call(number: int) -> int:
        begun.wait()
        for count in range(200):
            try:
                later = pipe.submit(_request(number))
            except Exception as error:
                if "is closed" not in str(error):
                    raise
                return count
            _assert_same(package, _request(number), later.result(60))
        return 200

    with ThreadPoolExecutor(4) as threads:
        counts = [threads.submit(call, number) for number in range(4)]
        begun.wait()
        pipe.close()
        assert all(count.result(120) < 200 for count in counts)


def test_a_thousand_requests_leave_nothing(package: Path) -> None:
    """Each is 2 MB with its boundary values: kept, they would be gigabytes."""
    pipe = load_package(package).Pipeline()
    arrays = {"x": np.ones((4096, 16), np.float32), "number": np.zeros(4096, np.int64)}
    for _ in pipe.stream((arrays for _ in range(20)), microbatches=1):
        pass
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    for _ in pipe.stream((arrays for _ in range(1000)), microbatches=1):
        pass
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * unit < 300 * 2**20


def test_threads_end_with_their_pipeline(package: Path) -> None:
    def named() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("stage ")]

    gc.collect()
    before = set(named())
    pipe = load_package(package).Pipeline()
    mine = set(named()) - before
    assert len(mine) == 3
    pipe(_request(0))
    held = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert held() is None
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive()
    pipe = load_package(package).Pipeline()
    pipe.close()
    with pytest.raises(Exception, match="the pipeline is closed"):
        pipe(_request(0))


def test_options_of_each_stage(package: Path) -> None:
    seen = {}

    def configure(stage: int, options: Any) -> None:
        seen[stage] = options.intra_op_num_threads
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")

    module = load_package(package)
    pipe = module.Pipeline(threads=[1, 2, 1], configure=configure)
    assert seen == {0: 1, 1: 2, 2: 1}
    pipe.warm_up()
    _assert_same(package, _request(5), pipe(_request(5)))
    with pytest.raises(Exception, match="threads are given for 2 stages, but there are 3"):
        module.Pipeline(threads=[1, 2])


def test_the_server_of_the_examples(package: Path) -> None:
    """Eight clients at once; each gets what its own numbers give, or is told what is wrong."""
    spec = importlib.util.spec_from_file_location("serve_onnx", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    served = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(served)
    pipe = load_package(package).Pipeline()
    served.Handler.log_message = lambda *_: None
    server = served.Server(pipe, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def ask(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        data = io.BytesIO()
        np.savez(data, **arrays)
        url = f"http://localhost:{server.server_port}"
        with urllib.request.urlopen(url, data.getvalue(), timeout=60) as answer:
            return dict(np.load(io.BytesIO(answer.read())))

    try:
        wrong = {"x": np.ones((1, 16), np.float32), "number": np.array([ROWS + 1])}
        with ThreadPoolExecutor(8) as clients:
            answers = [clients.submit(ask, _request(number)) for number in range(40)]
            refused = [clients.submit(ask, wrong) for _ in range(3)]
            for number, answer in enumerate(answers):
                _assert_same(package, _request(number), answer.result())
            for answer in refused:
                with pytest.raises(urllib.error.HTTPError, match="400"):
                    answer.result()
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask({"x": np.zeros((1, 3), np.float32)})
    finally:
        server.shutdown()
        server.server_close()


def _counting() -> Any:
    """A state (2, batch, 16), and a past (batch, any, 16) to which each call adds a row."""
    node = helper.make_node
    proto = onnx_models.chain(4)
    for name, shape in (("state", [2, "batch", 16]), ("past", ["batch", "length", 16])):
        value = helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        proto.graph.input.append(value)
    proto.graph.node.insert(0, node("Split", ["state"], ["s0", "s1"], axis=0))
    proto.graph.node.insert(1, node("Squeeze", ["s0", "first"], ["before"]))
    proto.graph.node.insert(2, node("Add", ["x", "before"], ["x2"]))
    proto.graph.node[3].input[0] = "x2"
    proto.graph.node.extend(
        [
            node("Unsqueeze", ["r3", "second"], ["row"]),
            node("Concat", ["past", "row"], ["present"], axis=1),
            node("ReduceSum", ["present", "second"], ["y"], keepdims=0),
            node("Unsqueeze", ["r1", "first"], ["after"]),
            node("Concat", ["after", "s0"], ["state_out"], axis=0),
        ]
    )
    for name, number in (("first", 0), ("second", 1)):
        proto.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [1], [number]))
    del proto.graph.output[:]
    proto.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        for name in ("y", "present", "state_out")
    )
    return proto


STATE = {"past": "present", "state": "state_out"}


def test_state_between_calls(tmp_path: Path) -> None:
    """Two sessions at once, each like a loop around plain ONNX Runtime."""
    path = onnx_models.write(_counting(), tmp_path / "model.onnx")
    file = OnnxFile(path, ("past=8x3x16",), state=STATE)
    made = compile_model(file, CompileOptions(2, target="onnx"), tmp_path / "package")
    assert made.directory is not None
    pipe = load_package(made.directory).Pipeline()
    begin = {"past": np.zeros((2, 0, 16), np.float32), "state": np.ones((2, 2, 16), np.float32)}
    sessions = [pipe.session(begin) for _ in range(2)]
    plain = [dict(begin) for _ in range(2)]
    for step in range(5):
        for number, session in enumerate(sessions):
            x = np.random.default_rng(2 * step + number).normal(size=(2, 16)).astype(np.float32)
            found = session({"x": x})
            expected = packages.whole(path, {"x": x, **plain[number]})
            assert found.keys() == {"y"}
            np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-4, atol=1e-5)
            plain[number] = {past: expected[present] for past, present in STATE.items()}
    assert plain[0]["past"].shape == (2, 5, 16)
    with pytest.raises(Exception, match="the input past is missing"):
        pipe.session({"state": begin["state"]})({"x": x})
    with pytest.raises(Exception, match="x is no state: that is past, state"):
        pipe.session({"x": x})


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"nobody": "present"}, "no input nobody"),
        ({"past": "nobody"}, "no output nobody"),
        ({"past": "y"}, "y cannot be the next past"),
    ],
)
def test_state_that_is_none(state: dict[str, str], said: str, tmp_path: Path) -> None:
    path = onnx_models.write(_counting(), tmp_path / "model.onnx")
    file = OnnxFile(path, ("past=8x3x16",), state=state)
    with pytest.raises(UsageError, match=said):
        compile_model(file, CompileOptions(2, target="onnx"), None)


def test_no_session_without_state(package: Path) -> None:
    with pytest.raises(Exception, match="has no state: compile it with --state"):
        load_package(package).Pipeline().session()
