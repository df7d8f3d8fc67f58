"""The arguments of the commands."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from pathlib import Path

from gpipe_compiler.cluster import CLUSTERS
from gpipe_compiler.frontend.auto import Frontend
from gpipe_compiler.passes.cut_setting import Objective
from gpipe_compiler.policy import RematChoice
from gpipe_compiler.runtime.spec import BatchNorm, Precision, ScheduleKind


def compile_parser() -> argparse.ArgumentParser:
    """Of gpipe-compile."""
    parser = argparse.ArgumentParser(
        prog="gpipe-compile",
        description="Compiles a PyTorch model into a pipeline: one readable module per stage, and "
        "the script that trains or serves it.",
        epilog="exit codes: 0 done, 1 the model is at fault, 2 the command line is, 3 the package "
        "does not reproduce the model",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="model.py, model.py:factory or package.module:factory; it offers build_model() and "
        "example_inputs(), to be trained also loss_fn(output, target) and example_target(); or "
        "graph.json, ops and edges that are only planned (docs/graph_file.md)",
    )
    parser.add_argument(
        "-k", "--stages", metavar="K", type=_positive, required=True, help="stages to cut it into"
    )
    parser.add_argument(
        "-m",
        "--microbatches",
        metavar="M",
        type=_positive,
        help="micro-batches in a mini-batch (default: the most that divide the batch, "
        "up to 4 for every stage)",
    )
    parser.add_argument(
        "--schedule",
        choices=[kind.value for kind in ScheduleKind],
        default=ScheduleKind.GPIPE.value,
        help="the order of the work (default %(default)s)",
    )
    parser.add_argument(
        "--objective",
        choices=[objective.value for objective in Objective],
        default=Objective.STEP.value,
        help="what the stages are to make short: the simulated step, or the longest stage with "
        "its transfers (default %(default)s)",
    )
    parser.add_argument(
        "--mode",
        choices=["train", "infer"],
        default="train",
        help="what the package does (default %(default)s)",
    )
    parser.add_argument(
        "--frontend",
        choices=[frontend.value for frontend in Frontend],
        default=Frontend.AUTO.value,
        help="what traces the model (default %(default)s: the first that is right)",
    )
    _training_arguments(parser)
    _cost_arguments(parser)
    _output_arguments(parser)
    return parser


def _training_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how it trains (run.py can still choose otherwise)")
    group.add_argument(
        "--remat",
        choices=[choice.value for choice in RematChoice],
        default=RematChoice.NONE.value,
        help="run a stage's forward again for the backward, instead of keeping activations: "
        "nowhere, everywhere, or where a stage would not fit its device (default %(default)s)",
    )
    group.add_argument(
        "--batchnorm",
        choices=[kind.value for kind in BatchNorm],
        default=BatchNorm.MICRO.value,
        help="micro: over each micro-batch; deferred: the same, but running statistics are those "
        "of the mini-batch; exact: over the mini-batch, as without a pipeline (gpipe only) "
        "(default %(default)s)",
    )
    group.add_argument(
        "--precision",
        choices=[precision.value for precision in Precision],
        default=Precision.FP32.value,
        help="fp32: as the model is; bf16, fp16: under autocast (default %(default)s)",
    )


def _cost_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what it runs on")
    group.add_argument(
        "--input",
        metavar="SPEC",
        action="append",
        default=[],
        help="[NAME=]32x3x224x224:float32, once for every input: random tensors in place of "
        "example_inputs()",
    )
    group.add_argument(
        "--cost",
        choices=["roofline", "measured"],
        default="roofline",
        help="op times: estimated from work and bytes, or timed on this machine "
        "(default %(default)s)",
    )
    group.add_argument(
        "--device",
        choices=["local", *CLUSTERS],
        default="local",
        help="what every stage runs on (default %(default)s: this machine, measured now)",
    )
    group.add_argument(
        "--bandwidth",
        metavar="B/s",
        type=_bandwidth,
        help="bytes a second between two devices, such as 12.5G",
    )
    group.add_argument(
        "--latency", metavar="S", type=_seconds, help="seconds before the first byte, such as 20us"
    )
    group.add_argument(
        "--memory",
        metavar="SIZE",
        type=_memory,
        help="what a device holds, such as 16GiB (default: that of the device)",
    )


def _output_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what comes out")
    group.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        type=Path,
        help="the package (default: <model>_x<stages> in the current directory)",
    )
    group.add_argument("--force", action="store_true", help="replace a package that is there")
    group.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")
    group.add_argument(
        "--no-validate", action="store_true", help="do not hold the package against the model"
    )
    group.add_argument(
        "--per-microbatch",
        action="store_true",
        help="accept a loss that micro-batches cannot give, as a contrastive one: each of them "
        "has its own, and the mini-batch their weighted mean",
    )
    group.add_argument("--json", action="store_true", help="print one JSON document instead")
    group.add_argument(
        "--seed", type=int, default=0, help="of random weights and inputs (default %(default)s)"
    )


def inspect_parser() -> argparse.ArgumentParser:
    """Of gpipe-inspect PKG."""
    parser = argparse.ArgumentParser(
        prog="gpipe-inspect",
        description="Prints what a package holds: stages, boundaries, prediction.",
        epilog="gpipe-inspect graph PKG draws it as SVG; gpipe-inspect trace PKG writes the "
        "simulated step for ui.perfetto.dev; each has its own --help",
    )
    _package_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON instead")
    return parser


def graph_parser() -> argparse.ArgumentParser:
    """Of gpipe-inspect graph."""
    parser = argparse.ArgumentParser(
        prog="gpipe-inspect graph", description="Draws a package's stages, or one stage, as SVG."
    )
    _package_argument(parser)
    parser.add_argument("--stage", metavar="K", type=int, help="the ops of this stage, from 0")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="the SVG file")
    return parser


def trace_parser() -> argparse.ArgumentParser:
    """Of gpipe-inspect trace."""
    parser = argparse.ArgumentParser(
        prog="gpipe-inspect trace",
        description="Writes the simulated step as a trace for ui.perfetto.dev.",
    )
    _package_argument(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="the JSON file")
    return parser


def _package_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("package", metavar="PKG", type=Path, help="what gpipe-compile wrote")


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


_QUANTITY = re.compile(r"(\d+\.?\d*(?:e[+-]?\d+)?)([a-zA-Z]*)")
_DECIMAL: Mapping[str, float] = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIME: Mapping[str, float] = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_BYTES: Mapping[str, float] = {
    "": 1.0,
    "B": 1.0,
    **{f"{prefix}B": size for prefix, size in _DECIMAL.items() if prefix},
    **{f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGT", start=1)},
}


def _bandwidth(text: str) -> float:
    value = _quantity(text, _DECIMAL)
    if value is None or value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no bandwidth: write bytes/s, such as 12.5G")
    return value


def _memory(text: str) -> int:
    value = _quantity(text, _BYTES)
    if value is None or value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write bytes, such as 16GiB, 8e9")
    return int(value)


def _seconds(text: str) -> float:
    value = _quantity(text, _TIME)
    if value is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write seconds, such as 2e-5, 20us")
    return value


def _quantity(text: str, units: Mapping[str, float]) -> float | None:
    """A finite number with one of these units; None when it is none."""
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        return None
    value = float(match[1]) * units[match[2]]
    return value if math.isfinite(value) else None
