"""A pipeline of two ONNX stages against one session: ResNet-50 and a Transformer encoder.

    python benchmarks/onnx_speed.py [--rounds 7] [NAME ...]

Every model is exported by torch.onnx and compiled from the file, its nodes timed by ONNX Runtime
(`--cost measured`). Then a mini-batch is run in turns, round by round:

    1 thread      one session of one thread, micro-batch after micro-batch
    2 threads     one session of two threads, the same
    whole batch   one session of two threads, the mini-batch in one piece
    pipeline      two stages of one thread each

Told are medians in milliseconds; the speed-up over one thread, of two threads and of the pipeline;
the ideal M*K/(M+K-1); and what the cut allows: the same, with stages as long as they were when each
ran alone. The overhead of a micro-batch is measured on stages that do nothing.

Two cores are needed, and nothing else should run.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
import torch
from tables import machine, markdown
from torch import nn
from torch.export import Dim
from transformers import BertConfig, BertModel

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.compile import compile as compile_package
from gpipe_compiler.onnx import OnnxFile

EXAMPLES = Path(__file__).parents[1] / "examples"
STAGES = 2
IDLE = 2000
"""Micro-batches by which the overhead is measured."""

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A network, for an input of (batch, *shape), and how it is called."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch: int
    microbatches: int


def resnet50() -> nn.Module:
    """That of the examples."""
    sys.path.insert(0, str(EXAMPLES))
    model: nn.Module = importlib.import_module("resnet50").build_model()
    return model


class Bert(nn.Module):
    """The encoder of BERT, of tokens alone; random weights."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=8192,
            hidden_size=512,
            num_hidden_layers=8,
            num_attention_heads=8,
            intermediate_size=2048,
            max_position_embeddings=128,
        )
        self.model = BertModel(config, add_pooling_layer=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The last hidden state, (batch, length, 512)."""
        hidden: torch.Tensor = self.model(tokens).last_hidden_state
        return hidden


_IMAGE, _TOKENS = (3, 128, 128), (64,)

CASES = {
    "resnet50": Case(resnet50, _IMAGE, torch.float32, 16, 16),
    "resnet50, M=8": Case(resnet50, _IMAGE, torch.float32, 16, 8),
    "bert": Case(Bert, _TOKENS, torch.int64, 32, 16),
    "bert, M=32": Case(Bert, _TOKENS, torch.int64, 32, 32),
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where packages are made, or lie already")
    parser.add_argument("--only-make", action="store_true", help="make the packages, time nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        cases = {name: CASES[name] for name in arguments.names or CASES}
        packages = {name: made(case, folder) for name, case in cases.items()}
        if arguments.only_make:
            return
        rows = [row(name, cases[name], packages[name], arguments.rounds) for name in cases]
        print(machine())
        print()
        print(markdown(HEAD, rows))
        print()
        print(f"overhead of a micro-batch: {overhead(folder) * 1e6:.0f} µs")


HEAD = (
    "model",
    "batch",
    "M",
    "1 thread",
    "2 threads",
    "whole batch",
    "pipeline",
    "2 threads x",
    "pipeline x",
    "cut allows",
    "ideal",
)


def made(case: Case, folder: Path) -> tuple[Path, Path]:
    """The exported model, and its package."""
    model = folder / f"{case.build.__name__.lower()}.onnx"
    package = folder / f"{model.stem}_b{case.batch}_m{case.microbatches}"
    if not model.exists():
        export(case, model)
    if not package.exists():
        options = CompileOptions(
            STAGES,
            microbatches=case.microbatches,
            measured=True,
            validate=False,
            target="onnx",
        )
        sizes = "x".join(map(str, (case.batch, *case.shape)))
        compile_package(OnnxFile(model, (sizes,)), options, package)
    return model, package


def export(case: Case, path: Path) -> None:
    """Writes the model, for any batch."""
    example = torch.zeros((2, *case.shape), dtype=case.dtype)
    with torch.no_grad():
        program = torch.onnx.export(
            case.build().eval(),
            (example,),
            dynamo=True,
            dynamic_shapes=({0: Dim("batch")},),
            verbose=False,
        )
    assert program is not None
    program.save(path, external_data=False)


def row(name: str, case: Case, made_: tuple[Path, Path], rounds: int) -> list[str]:
    """Times a case."""
    model, package = made_
    module = load(package)
    pipe = module.Pipeline()
    generator = np.random.default_rng(0)
    source = module.SPEC.inputs[0]
    shape = (case.batch, *case.shape)
    whole = (
        generator.standard_normal(shape).astype(np.float32)
        if source.dtype == "float32"
        else generator.integers(0, 2, shape).astype(source.dtype)
    )
    parts = np.split(whole, case.microbatches)
    one, two = session(model, 1), session(model, 2)

    def run(held: onnxruntime.InferenceSession, arrays: list[np.ndarray]) -> Callable[[], None]:
        def work() -> None:
            for array in arrays:
                held.run(None, {source.name: array})

        return work

    ways: dict[str, Callable[[], object]] = {
        "one": run(one, parts),
        "two": run(two, parts),
        "whole": run(two, [whole]),
        "pipeline": lambda: pipe({source.name: whole}),
    }
    seconds = in_turns(ways, rounds)
    took = {way: statistics.median(found) for way, found in seconds.items()}
    alone = stage_seconds(module, package, parts[0])
    count = case.microbatches
    limit = sum(alone) * count / (max(alone) * (count - 1) + sum(alone))
    ideal = count * STAGES / (count + STAGES - 1)
    return [
        name,
        str(case.batch),
        str(count),
        *(f"{took[way] * 1e3:.1f}" for way in ways),
        f"{took['one'] / took['two']:.2f}",
        f"{took['one'] / took['pipeline']:.2f}",
        f"{limit:.2f}",
        f"{ideal:.2f}",
    ]


def in_turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every way, in every round."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, work in ways.items():
            start = time.perf_counter()
            work()
            if number:
                found[way].append(time.perf_counter() - start)
    return found


def stage_seconds(module: ModuleType, package: Path, part: np.ndarray) -> list[float]:
    """What a micro-batch takes in each stage, when nothing else runs."""
    values: Arrays = {module.SPEC.inputs[0].name: part}
    found = []
    for stage in module.SPEC.stages:
        held = session(package / stage.file, 1)
        given = {name: values[name] for name in stage.inputs}

        def work(
            held: onnxruntime.InferenceSession = held, given: Arrays = given
        ) -> list[np.ndarray]:
            return list(held.run(None, given))

        found.append(statistics.median(in_turns({"": work}, 15)[""]))
        values |= dict(zip([o.name for o in held.get_outputs()], work(), strict=True))
    return found


def overhead(folder: Path) -> float:
    """Seconds that a micro-batch takes in two stages that do nothing."""
    node = onnx.helper.make_node
    rows_ = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 4])
        for name in ("x", "y")
    ]
    graph = onnx.helper.make_graph(
        [node("Relu", ["x"], ["h"]), node("Neg", ["h"], ["y"])], "idle", rows_[:1], rows_[1:]
    )
    path = folder / "idle.onnx"
    onnx.save(
        onnx.helper.make_model(
            graph, ir_version=9, opset_imports=[onnx.helper.make_opsetid("", 18)]
        ),
        path,
    )
    options = CompileOptions(STAGES, microbatches=2, validate=False, force=True, target="onnx")
    compile_package(OnnxFile(path, ("2x4",)), options, folder / "idle")
    module = load(folder / "idle")
    pipe = module.Pipeline()
    whole = np.zeros((IDLE, 4), np.float32)
    found = in_turns({"": lambda: pipe({"x": whole}, microbatches=IDLE)}, 5)[""]
    return statistics.median(found) / IDLE


def session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    """One session, as a user would make it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Otherwise its threads go on spinning for a while and slow down whoever's turn is next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])


def load(package: Path) -> ModuleType:
    """A package, imported."""
    name = f"bench_{package.name}"
    spec = importlib.util.spec_from_file_location(
        name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
