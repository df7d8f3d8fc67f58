"""Models that are large, or long: what compiling and checking them takes, measured from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import onnx_models
import pytest
from onnx import TensorProto, helper

WIDTH, LAYERS = 8192, 9
GIB = 2**30

MEASURE = """
import json, resource, sys, time
from gpipe_compiler.cli.main import compile_command
start = time.process_time()
code = compile_command(sys.argv[1:])
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
json.dump([code, time.process_time() - start, *(1024 * one.ru_maxrss for one in used)], sys.stderr)
"""


def write_large(folder: Path) -> Path:
    """More than 2 GiB of weights in a file beside the model, which is sparse on the disk."""
    size = 4 * WIDTH * WIDTH
    weights = folder / "weights.bin"
    with weights.open("wb") as file:
        file.truncate(LAYERS * size)
        for layer in range(LAYERS):
            file.seek(layer * size)
            file.write(onnx_models.weight("row", WIDTH, seed=layer).raw_data)
    nodes, tensors, last = [], [], "x"
    for layer in range(LAYERS):
        tensor = TensorProto(name=f"w{layer}", data_type=TensorProto.FLOAT, dims=[WIDTH, WIDTH])
        tensor.data_location = TensorProto.EXTERNAL
        place = {"location": weights.name, "offset": layer * size, "length": size}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        tensors.append(tensor)
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [f"m{layer}"]))
        nodes.append(helper.make_node("Add", [f"m{layer}", "x"], [f"a{layer}"]))
        last = f"a{layer}"
    proto = onnx_models.model_of(nodes, tensors, [onnx_models.rows(width=WIDTH)], [last])
    return onnx_models.write(proto, folder / "large.onnx")


def compiled(model: Path, *words: str) -> tuple[float, int, int]:
    """Processor seconds, and the largest memory of the compiler and of any process it started."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(model), *words],
        cwd=model.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    code, seconds, own, others = json.loads(done.stderr.splitlines()[-1])
    assert code == 0, done.stderr
    return seconds, own, others


@pytest.mark.slow
def test_weights_of_more_than_two_gib_take_less_than_six(tmp_path: Path) -> None:
    model = write_large(tmp_path)
    _, own, others = compiled(model, "--stages", "2", "--input", f"4x{WIDTH}")
    assert max(own, others) < 6 * GIB
    stages = [tmp_path / "large_x2" / f"stage_{k}.onnx" for k in range(2)]
    assert all(stage.stat().st_size < 1e6 for stage in stages)
    assert sum(len(onnx.load(s, load_external_data=False).graph.node) for s in stages) == 2 * LAYERS


@pytest.mark.slow
def test_five_thousand_nodes(tmp_path: Path) -> None:
    model = onnx_models.write(onnx_models.chain(1667, 8), tmp_path / "long.onnx")
    compiled(model, "--stages", "4", "--no-validate")
    found = [onnx.load(tmp_path / "long_x4" / f"stage_{k}.onnx").graph.node for k in range(4)]
    assert sum(map(len, found)) == 3 * 1667
    assert min(map(len, found)) > 1000
