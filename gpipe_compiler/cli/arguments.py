"""The arguments of gpipe-compile."""

from __future__ import annotations

import argparse

from gpipe_compiler import __version__
from gpipe_compiler.cli.values import (
    AUTO,
    batch_dim,
    carried,
    choice,
    count_or_auto,
    counts,
    named_size,
    number_of,
    pin,
    repeated,
    share,
    words_of,
)
from gpipe_compiler.cluster import BUILT_IN
from gpipe_compiler.cluster.quantities import BANDWIDTH, SIZE, TIME
from gpipe_compiler.options import CUT_INSIDE, SEARCH_SECONDS, LossChoice, Objective, RematChoice
from gpipe_compiler.runtime.core.typed import path, positive, seed
from gpipe_compiler.runtime.spec import (
    BatchNorm,
    OptimizerKind,
    Precision,
    ScheduleKind,
    WeightSharding,
)
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
    _setting_arguments(parser)
    _sweep_arguments(parser)
    choice(parser, "--mode", ["train", "infer"], "what the package does")
    choice(
        parser,
        "--target",
        [name for name, known in TARGETS.items() if not known.suffix],
        "what the stages run on: torch, or ONNX Runtime, which only infers; an ONNX model always "
        "runs on that",
    )
    _search_arguments(parser)
    _training_arguments(parser)
    _input_arguments(parser)
    _folder_arguments(parser)
    _cost_arguments(parser)
    _output_arguments(parser)
    return parser


def version_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")


def _setting_arguments(parser: argparse.ArgumentParser) -> None:
    """How many stages and micro-batches, in which order of work; each may be `auto`."""
    parser.add_argument(
        "-k",
        "--stages",
        metavar="K",
        type=count_or_auto,
        help="stages to cut it into; auto: as many as are best on the devices there are",
    )
    parser.add_argument(
        "-m",
        "--microbatches",
        metavar="M",
        type=count_or_auto,
        help="micro-batches in a mini-batch; auto: as many as are best (default: from 1 to 4 for "
        "every stage, no more than pay, and of two samples or more for BatchNorm)",
    )
    schedules, text = [*words_of(ScheduleKind), AUTO], "the order of the work; auto: the best one"
    choice(parser, "--schedule", schedules, text)


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Several plans of one trace, in place of a package."""
    group = parser.add_argument_group("plans to compare (nothing is written)")
    group.add_argument(
        "--sweep",
        metavar="N,N,...",
        type=counts,
        default=(),
        help="in place of --stages, plans for so many devices each, as a table: 1,2,4,8",
    )
    group.add_argument(
        "--batch",
        choices=[AUTO],
        help="auto: mini-batches of twice and twice the example's, up to the first that does not "
        "fit (or half and half, down to the first that does)",
    )


def _search_arguments(parser: argparse.ArgumentParser) -> None:
    """What is to be short, what else counts, and what the user knows better."""
    group = parser.add_argument_group(
        "what is looked for (with auto for stages, microbatches or schedule, the fastest settings "
        "that fit; --remat auto then compares all of none, full and auto)"
    )
    choice(
        group,
        "--objective",
        words_of(Objective),
        "what the stages are to make short: the simulated step, or the longest stage with its "
        "transfers",
    )
    group.add_argument(
        "--cut-inside",
        metavar="SHARE",
        type=share,
        default=CUT_INSIDE,
        help="of all cuts that take at most this share more than the best, the one is taken that "
        "opens the fewest modules of the model; 0: the best, which may cut anywhere "
        "(default %(default)s)",
    )
    group.add_argument(
        "--prove",
        action="store_true",
        help="go on until the cut is proved to be the best, or it is known how far it may be from "
        "that, which may take minutes (default: a bound that costs no time)",
    )
    group.add_argument(
        "--optimizer",
        choices=words_of(OptimizerKind),
        help="whose memory and time count (default: the file's make_optimizer(), else sgd)",
    )
    group.add_argument(
        "--data-parallel",
        metavar="R",
        type=positive,
        default=1,
        help="replicas of the pipeline that share every mini-batch (default %(default)s)",
    )
    group.add_argument(
        "--shard",
        nargs="?",
        const=AUTO,
        choices=[AUTO, *(k.value for k in WeightSharding if k.described)],
        help="let replicas divide what the optimizer remembers, and the weights between steps "
        "(optimizer), or weights and gradients always (full); auto, as without a word, is the "
        "first, or the second where only that fits",
    )
    repeated(
        group,
        "--pin",
        "MODULE=STAGE",
        "all ops of this module (or this op, or value) lie in this stage, from 0, or from the end "
        "as -1; may be repeated, as the next two",
        pin,
    )
    repeated(group, "--keep-together", "MODULE", "all ops of this module lie in one stage")
    repeated(group, "--split-at", "MODULE", "a new stage begins with this module")


def _training_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how it trains (run.py can still choose otherwise)")
    choice(
        group,
        "--remat",
        words_of(RematChoice),
        "run a stage's forward again for the backward, instead of keeping activations: nowhere, "
        "everywhere, or where a stage would not fit its device",
    )
    choice(
        group,
        "--batchnorm",
        words_of(BatchNorm),
        "micro: over each micro-batch; deferred: the same, but running statistics are those of the "
        "mini-batch; exact: over the mini-batch, as without a pipeline (gpipe only)",
    )
    choice(
        group,
        "--loss",
        words_of(LossChoice),
        "model: loss_fn(output, target) of MODEL, or the loss that the model returns; "
        "sum-of-squares: that of the outputs, for experiments",
    )
    choice(
        group,
        "--loss-over",
        ["micro-batches", "batch"],
        "micro-batches: each has its own loss, and the mini-batch their weighted mean; batch: the "
        "loss is computed once, of the outputs of the whole mini-batch, as contrastive and "
        "balancing losses need; it includes --batchnorm exact (gpipe and one replica only)",
    )
    choice(
        group,
        "--precision",
        words_of(Precision),
        "fp32: as the model is; bf16, fp16: under autocast",
    )


def _input_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what the model is given")
    repeated(
        group,
        "--input",
        "SPEC",
        "[NAME=]32x3x224x224:float32, once for every input: random tensors in place of "
        "example_inputs(); input_ids=BATCHxTOKENS:int64 names the sizes of an input that "
        "example_inputs() gives, in place of input_ids.1",
    )
    repeated(
        group,
        "--batch-dim",
        "NAME=DIM",
        "which dimension of an input is the batch, where that cannot be found out: x=1; mask=none "
        "for an input that all samples share; repeatable",
        batch_dim,
    )
    repeated(
        group,
        "--free",
        "[NAME=]INPUT.DIM",
        "a dimension of an input, such as the length of texts, has to be free: the model is "
        "refused where it fixes it. By default every dimension is free that the model takes at any "
        "size. input_ids.1 is dimension 1 of input_ids; tokens=input_ids.1 gives its size a name, "
        "and sizes of one name are equal; repeatable",
    )
    repeated(
        group,
        "--fix",
        "INPUT.DIM",
        "take only the size that this dimension has in the example; all: that of every dimension "
        "beside the batch that --free does not name; repeatable",
    )
    repeated(
        group,
        "--at",
        "NAME=N",
        "plan for this size in place of the example's, which is repeated or cut to it: "
        "input_ids.1=2048, or by the name that --free gives; repeatable",
        named_size,
    )


def _folder_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("of a Hugging Face folder")
    group.add_argument(
        "--task",
        metavar="TASK",
        help="what the model is for: causal-lm, masked-lm, seq2seq-lm, sequence-classification, "
        "token-classification, question-answering, multiple-choice, image-classification, "
        "semantic-segmentation, audio-classification, speech-seq2seq, ctc, no-head (default: that "
        "of the model that the folder was written from)",
    )
    types = ["auto", "float32", "bfloat16", "float16"]
    choice(group, "--dtype", types, "of the weights; auto: as from_pretrained takes them")
    for option, text in (
        ("--peft", "an adapter_config.json of peft's, as of LoRA: adapters alone are trained"),
        ("--hooks", "a Python file that offers train_data() and the like, as a model file does"),
    ):
        group.add_argument(option, metavar="FILE", type=path, help=text)
    group.add_argument(
        "--copy-weights",
        action="store_true",
        help="copy the weights into the package, which else refers to the folder's files",
    )


def _cost_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what it runs on")
    text = "op times: estimated from work and bytes, or timed on this machine"
    choice(group, "--cost", ["roofline", "measured"], text)
    group.add_argument(
        "--calibration",
        metavar="FILE",
        type=path,
        help="scale op times by what stages took over what was told, as run.py bench --calibrate "
        "has written it where the model is to run",
    )
    repeated(
        group,
        "--state",
        "PAST=PRESENT",
        "an input that a session holds between calls, and the output that it becomes, as "
        "past_key_values=past_key_values; repeatable; not to train",
        carried,
    )
    text = "a library of custom operators that an ONNX model needs; may be given again"
    repeated(group, "--custom-ops", "LIB", text, path)
    _machine_arguments(group)
    group.add_argument(
        "--search-time",
        metavar="S",
        type=number_of(TIME),
        default=SEARCH_SECONDS,
        help=f"with auto, look at no further settings after SECONDS (default {SEARCH_SECONDS:g})",
    )


def _machine_arguments(group: argparse._ArgumentGroup) -> None:
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
        type=number_of(BANDWIDTH),
        help="bytes a second of every link between two devices, such as 12.5G, 25GB/s, 100Gb/s",
    )
    group.add_argument(
        "--latency",
        metavar="S",
        type=number_of(TIME),
        help="seconds before the first byte, on every link, such as 20us",
    )
    group.add_argument(
        "--memory",
        metavar="SIZE",
        type=lambda text: int(number_of(SIZE)(text)),
        help="what every device holds, such as 16GiB; a plan that does not fit is then refused "
        "(default: as it is described)",
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
    repeated(
        group,
        "--print-after",
        "PASS",
        "print the graph to standard error after this pass, or the table of an analysis; all: "
        "after every pass; repeatable (a name that there is not lists them)",
    )
    repeated(group, "--pass-option", "PASS.OPTION=VALUE", "an option of a pass; repeatable")
    group.add_argument("--json", action="store_true", help="print one JSON document instead")
    group.add_argument(
        "--seed", type=seed, default=0, help="of random weights and inputs (default %(default)s)"
    )
