"""The arguments of the commands."""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial

from gpipe_compiler import __version__
from gpipe_compiler.cli.folder import folder_arguments
from gpipe_compiler.cli.search import search_arguments, setting_arguments, sweep_arguments
from gpipe_compiler.cluster import BUILT_IN, Cluster, devices_named, is_host, read_cluster
from gpipe_compiler.cluster.quantities import BANDWIDTH, SIZE, TIME, Quantity
from gpipe_compiler.options import SEARCH_SECONDS, SHOWN_HOLDERS, LossChoice, RematChoice
from gpipe_compiler.runtime.core.typed import natural, path, positive, seed, shown
from gpipe_compiler.runtime.spec import BatchNorm, Precision
from gpipe_compiler.targets import TARGETS


def compile_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpipe-compile",
        description="Compiles a PyTorch model into a pipeline: one readable module per stage, and "
        "the script that trains or serves it.",
        epilog="exit codes: 0 done, 1 the model is at fault, 2 the command line is, 3 the package "
        "does not reproduce the model",
    )
    version_argument(parser)
    parser.set_defaults(words=())
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="model.py, model.py:factory or package.module:factory; it offers build_model() and "
        "example_inputs(), to be trained also loss_fn(output, target) and example_target(); "
        "model.onnx, for ONNX Runtime; a folder of Hugging Face's with a config.json "
        "(docs/hugging_face.md); or graph.json, ops and edges that are only planned "
        "(docs/graph_file.md)",
    )
    setting_arguments(parser)
    sweep_arguments(parser)
    parser.add_argument(
        "--mode",
        choices=["train", "infer"],
        default="train",
        help="what the package does (default %(default)s)",
    )
    parser.add_argument(
        "--target",
        choices=[name for name, known in TARGETS.items() if not known.suffix],
        default="torch",
        help="what the stages run on: torch, or ONNX Runtime, which only infers; an ONNX model "
        "always runs on that (default %(default)s)",
    )
    search_arguments(parser)
    _training_arguments(parser)
    _input_arguments(parser)
    folder_arguments(parser)
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
        "--loss",
        choices=[choice.value for choice in LossChoice],
        default=LossChoice.MODEL.value,
        help="model: loss_fn(output, target) of MODEL, or the loss that the model returns; "
        "sum-of-squares: that of the outputs, for experiments (default %(default)s)",
    )
    group.add_argument(
        "--loss-over",
        choices=["micro-batches", "batch"],
        default="micro-batches",
        help="micro-batches: each has its own loss, and the mini-batch their weighted mean; batch: "
        "the loss is computed once, of the outputs of the whole mini-batch, as contrastive and "
        "balancing losses need; it includes --batchnorm exact (gpipe and one replica only) "
        "(default %(default)s)",
    )
    group.add_argument(
        "--precision",
        choices=[precision.value for precision in Precision],
        default=Precision.FP32.value,
        help="fp32: as the model is; bf16, fp16: under autocast (default %(default)s)",
    )


def _input_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what the model is given")
    group.add_argument(
        "--input",
        metavar="SPEC",
        action="append",
        default=[],
        help="[NAME=]32x3x224x224:float32, once for every input: random tensors in place of "
        "example_inputs(); input_ids=BATCHxTOKENS:int64 names the sizes of an input that "
        "example_inputs() gives, in place of input_ids.1",
    )
    group.add_argument(
        "--batch-dim",
        metavar="NAME=DIM",
        type=_batch_dim,
        action="append",
        default=[],
        help="which dimension of an input is the batch, where that cannot be found out: x=1; "
        "mask=none for an input that all samples share; repeatable",
    )
    group.add_argument(
        "--free",
        metavar="[NAME=]INPUT.DIM",
        action="append",
        default=[],
        help="a dimension of an input, such as the length of texts, has to be free: the model is "
        "refused where it fixes it. By default every dimension is free that the model takes at any "
        "size. input_ids.1 is dimension 1 of input_ids; tokens=input_ids.1 gives its size a name, "
        "and sizes of one name are equal; repeatable",
    )
    group.add_argument(
        "--fix",
        metavar="INPUT.DIM",
        action="append",
        default=[],
        help="take only the size that this dimension has in the example; all: that of every "
        "dimension beside the batch that --free does not name; repeatable",
    )
    group.add_argument(
        "--at",
        metavar="NAME=N",
        type=_size,
        action="append",
        default=[],
        help="plan for this size in place of the example's, which is repeated or cut to it: "
        "input_ids.1=2048, or by the name that --free gives; repeatable",
    )


def _cost_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what it runs on")
    group.add_argument(
        "--cost",
        choices=["roofline", "measured"],
        default="roofline",
        help="op times: estimated from work and bytes, or timed on this machine "
        "(default %(default)s)",
    )
    group.add_argument(
        "--calibration",
        metavar="FILE",
        type=path,
        help="scale op times by what stages took over what was told, as run.py bench --calibrate "
        "has written it where the model is to run",
    )
    group.add_argument(
        "--state",
        metavar="PAST=PRESENT",
        type=_state,
        action="append",
        default=[],
        help="an input that a session holds between calls, and the output that it becomes, as "
        "past_key_values=past_key_values; repeatable; not to train",
    )
    group.add_argument(
        "--custom-ops",
        metavar="LIB",
        type=path,
        action="append",
        default=[],
        help="a library of custom operators that an ONNX model needs; may be given again",
    )
    machine_arguments(group)
    group.add_argument(
        "--search-time",
        metavar="S",
        type=partial(_quantity, TIME),
        default=SEARCH_SECONDS,
        help=f"with auto, look at no further settings after SECONDS (default {SEARCH_SECONDS:g})",
    )


def _output_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what comes out")
    group.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        type=path,
        help="the package (default: <model>_x<stages> in the current directory)",
    )
    group.add_argument("--force", action="store_true", help="replace a package that is there")
    group.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")
    group.add_argument(
        "--no-validate", action="store_true", help="do not compare the package with the model"
    )
    group.add_argument(
        "--remedies",
        action="store_true",
        help="find out what other settings would save of memory, for gpipe-inspect memory",
    )
    group.add_argument(
        "--no-inplace",
        action="store_true",
        help="write no result over an operand that nobody needs any more, where the model does not "
        "say so itself; the numbers are the same either way",
    )
    group.add_argument(
        "--per-microbatch",
        action="store_true",
        help="accept a loss that micro-batches cannot give, as a contrastive one: each of them "
        "has its own, and the mini-batch their weighted mean",
    )
    group.add_argument(
        "--print-after",
        metavar="PASS",
        action="append",
        default=[],
        help="print the graph to standard error after this pass, or the table of an analysis; all: "
        "after every pass; repeatable (a name that there is not lists them)",
    )
    group.add_argument(
        "--pass-option",
        metavar="PASS.OPTION=VALUE",
        action="append",
        default=[],
        help="an option of a pass; repeatable",
    )
    group.add_argument("--json", action="store_true", help="print one JSON document instead")
    group.add_argument(
        "--seed", type=seed, default=0, help="of random weights and inputs (default %(default)s)"
    )


def _batch_dim(text: str) -> tuple[str, int | None]:
    name, _, dim = text.partition("=")
    if not name or not (dim == "none" or dim.isdecimal()):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not NAME=DIM, such as x=1 or mask=none")
    return name, None if dim == "none" else natural(dim)


def _state(text: str) -> tuple[str, str]:
    past, _, present = text.partition("=")
    if not past or not present:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not PAST=PRESENT, an input and an output"
        )
    return past, present


def _size(text: str) -> tuple[str, int]:
    name, _, size = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not NAME=N, such as input_ids.1=2048")
    return name, positive(size)


def inspect_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpipe-inspect",
        description="Prints what a package holds: stages, boundaries, prediction.",
        epilog="gpipe-inspect memory PKG tells what holds the memory of each device and what would "
        "save some; gpipe-inspect graph PKG draws it as SVG; gpipe-inspect trace PKG writes the "
        "simulated step for ui.perfetto.dev; gpipe-inspect machine measures this machine; each has "
        "its own --help",
    )
    version_argument(parser)
    _package_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON instead")
    return parser


def graph_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpipe-inspect graph", description="Draws a package's stages, or one stage, as SVG."
    )
    _package_argument(parser)
    parser.add_argument("--stage", metavar="K", type=natural, help="the ops of this stage, from 0")
    parser.add_argument("-o", "--output", metavar="FILE", type=path, help="the SVG file")
    return parser


def memory_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpipe-inspect memory",
        description="Prints what holds the memory of each device at its peak, and what other "
        "settings would save.",
    )
    _package_argument(parser)
    parser.add_argument("--device", metavar="D", type=natural, help="of this device alone, from 0")
    parser.add_argument(
        "--top",
        metavar="N",
        type=positive,
        default=SHOWN_HOLDERS,
        help="of what is in a device's memory, show so many of the largest, up to 12 "
        "(default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    return parser


def trace_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpipe-inspect trace",
        description="Writes the simulated step as a trace for ui.perfetto.dev.",
    )
    _package_argument(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=path, help="the JSON file")
    return parser


def machine_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpipe-inspect machine",
        description="Measures this machine, as --devices measured does: its devices, and the link "
        "between two of them.",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=path,
        help="write them as a description for gpipe-compile --cluster, whose plans do not change "
        "with what is measured the next time",
    )
    return parser


def version_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")


def _package_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("package", metavar="PKG", type=path, help="what gpipe-compile wrote")


# --- what machines there are ----------------------------------------------------------------------


def machine_arguments(group: argparse._ArgumentGroup) -> None:
    """Devices and links: by name, from a file, or this machine's; some of it replaced."""
    machines = group.add_mutually_exclusive_group()
    machines.add_argument(
        "--devices",
        metavar="NxNAME",
        default="local",
        help="what there is to run on, in one host: 4xH200, or H200 for as many as needed, or "
        "2xV100,2xP40; local is this machine, measured now, and measured the same with its links "
        "(default %(default)s); known are "
        + ", ".join(entry.device.name for entry in BUILT_IN.values()),
    )
    machines.add_argument(
        "--cluster",
        metavar="FILE",
        type=path,
        help="a description of hosts, devices and links, as the .toml files in examples/clusters",
    )
    group.add_argument(
        "--bandwidth",
        metavar="B/s",
        type=partial(_quantity, BANDWIDTH),
        help="bytes a second of every link between two devices, such as 12.5G, 25GB/s, 100Gb/s",
    )
    group.add_argument(
        "--latency",
        metavar="S",
        type=partial(_quantity, TIME),
        help="seconds before the first byte, on every link, such as 20us",
    )
    group.add_argument(
        "--memory",
        metavar="SIZE",
        type=lambda text: int(_quantity(SIZE, text)),
        help="what every device holds, such as 16GiB; a plan that does not fit is then refused "
        "(default: as it is described)",
    )


def cluster_asked(arguments: argparse.Namespace) -> Cluster:
    """The cluster that these arguments describe.

    Raises:
        UsageError: for devices that are not known, or a file that describes no cluster.
    """
    if arguments.cluster is None:
        cluster = devices_named(arguments.devices)
    else:
        cluster = read_cluster(arguments.cluster)
    linked = cluster.with_links(arguments.bandwidth, arguments.latency)
    # Of ops from elsewhere nothing is known of what runs them.
    least = 0 if str(arguments.model).endswith(".json") else arguments.memory
    return _of_tensors(linked.with_memory(arguments.memory), least)


def _of_tensors(cluster: Cluster, size: int | None) -> Cluster:
    """A cluster whose processors count tensors alone, where `size` bytes are less than a process
    takes before it holds any; None for no such limit."""
    if size is None:
        return cluster
    devices = tuple(
        dataclasses.replace(each, kept_free=0) if is_host(each) and size <= each.kept_free else each
        for each in cluster.devices
    )
    return dataclasses.replace(cluster, devices=devices)


def _quantity(quantity: Quantity, text: str) -> float:
    try:
        return quantity.read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
