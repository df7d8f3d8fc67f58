"""The words of the command: `run.py train | infer | check | bench | export`."""

from __future__ import annotations

import argparse
from enum import Enum

from ..core.address import place
from ..core.topology import device_counts, devices_by_default
from ..core.typed import (
    from_environment,
    microbatches,
    names,
    natural,
    numbers_of,
    path,
    path_or_word,
    positive,
    positive_real,
    seed,
    size,
)
from ..errors import UsageError
from ..spec import (
    BatchNorm,
    OptimizerKind,
    PipelineSpec,
    Precision,
    Remat,
    ScheduleKind,
    WeightSharding,
)
from ..wording import counted, printable
from .checkpoint_manager import KEPT, LATEST, CheckpointOptions
from .data import InputChoice
from .hooks import UserHooks
from .loading import HUGGING_FACE, SHARD_BYTES
from .optimizer import OptimizerChoice, RateShape
from .train import TrainOptions
from .training_log import check_tensorboard

STEPS = 100


def parser_for(spec: PipelineSpec) -> argparse.ArgumentParser:
    named = printable(spec.name).replace("%(", "% (")  # no place that argparse fills
    parser = argparse.ArgumentParser(
        prog="run.py",
        description=f"{named} as a pipeline of {counted(len(spec.stages), 'stage')} on "
        f"{counted(devices_by_default(spec, spec.schedule), 'device')}. {_processes(spec)}",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    if spec.loss is not None:
        train = commands.add_parser("train", help="train on your data, or the example batch")
        _add_train(train, spec)
        _add_rate(train)
        _add_checkpoints(train)
        _add_common(train, spec)
    infer = commands.add_parser("infer", help="run the model")
    infer.add_argument("--input", type=path, metavar="FILE", help="safetensors, by name")
    infer.add_argument("--output", type=path, metavar="FILE", help="safetensors to write")
    _add_common(infer, spec)
    check = commands.add_parser("check", help="compare with a plain run of the model")
    check.add_argument(
        "--reference",
        type=path,
        action="append",
        default=[],
        metavar="FILE",
        help="saved results, of the example or of the batch in the file; may be repeated",
    )
    check.add_argument("--report", type=path, metavar="FILE", help="JSON to write")
    _add_common(check, spec)
    bench = commands.add_parser("bench", help="time it")
    bench.add_argument("--steps", type=positive, default=10, metavar="N")
    bench.add_argument("--stages", action="store_true", help="time each of its stages, too")
    bench.add_argument(
        "--calibrate",
        type=path,
        metavar="FILE",
        help="JSON to write with what stages took over what was told, for gpipe-compile "
        "--calibration FILE",
    )
    bench.add_argument("--report", type=path, metavar="FILE", help="JSON to write with the times")
    _add_common(bench, spec)
    if spec.loss is not None:
        _add_export(commands.add_parser("export", help="write the weights of a checkpoint"))
    return parser


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", type=place, metavar="PLACE", required=True)
    parser.add_argument(
        *("-o", "--output"), type=path, metavar="PATH", required=True, help="to write"
    )
    parser.add_argument(
        "--format",
        choices=["safetensors", HUGGING_FACE],
        default="safetensors",
        help="one file, under the model's own names; or a folder that from_pretrained loads, of "
        "adapters where these alone are trained (%(default)s)",
    )
    parser.add_argument(
        "--shard-size",
        type=size,
        metavar="SIZE",
        default=SHARD_BYTES,
        help="bytes of a file in such a folder, at most, such as 500MB (5GiB)",
    )
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)


def train_options(arguments: argparse.Namespace, hooks: UserHooks) -> TrainOptions:
    """What was typed about training.

    Raises:
        UsageError: naming all options that make no sense, together or with the user's file.
    """
    steps = arguments.steps
    if steps is None and arguments.epochs is None:
        steps = STEPS
    problems = [text for text, wrong in _contradictions(arguments, hooks).items() if wrong]
    if problems:
        raise UsageError("; ".join(problems))
    if arguments.tensorboard is not None and from_environment("RANK", 0) == 0:
        check_tensorboard()
    return TrainOptions(
        steps=steps,
        epochs=arguments.epochs,
        optimizer=OptimizerChoice(
            arguments.optimizer and OptimizerKind(arguments.optimizer),
            arguments.lr,
            arguments.lr_schedule and RateShape(arguments.lr_schedule),
            arguments.warmup_steps,
        ),
        accumulate=arguments.accumulate,
        clip_norm=arguments.clip_norm,
        evaluate_every=arguments.evaluate_every,
        checkpoints=CheckpointOptions(
            arguments.checkpoint_dir,
            arguments.checkpoint_every,
            arguments.keep_checkpoints or KEPT,
            arguments.resume,
            arguments.async_checkpoint,
        ),
        gradient_norm=arguments.gradient_norm,
        log=arguments.log,
        tensorboard=arguments.tensorboard,
        profile=arguments.profile or 0,
        input=input_choice(arguments),
        own_rows=arguments.read == "rows",
    )


def input_choice(arguments: argparse.Namespace) -> InputChoice:
    """The data that a command runs on, where the user's own is not."""
    file = getattr(arguments, "input", None)  # not every command has it
    return InputChoice(file, arguments.batch_size, arguments.at)


def _contradictions(given: argparse.Namespace, hooks: UserHooks) -> dict[str, bool]:
    """What is wrong with options, with whether it is so here."""
    own_data = hooks.train_data is not None and given.input is None
    own_optimizer = hooks.make_optimizer is not None and given.optimizer is None
    own_schedule = hooks.make_scheduler is not None and given.lr_schedule is None
    return {
        f"--lr: make_optimizer() of {hooks.name} sets the learning rate, unless an --optimizer is "
        "named": given.lr is not None and own_optimizer,
        f"--warmup-steps: make_scheduler() of {hooks.name} sets the learning rate's course, unless "
        "an --lr-schedule is named": given.warmup_steps > 0 and own_schedule,
        "--epochs counts passes over train_data(), and there is none here": (
            given.epochs is not None and not own_data
        ),
        "--batch-size is of the example data, and train_data() gives the batches": (
            given.batch_size is not None and own_data
        ),
        "--batch-size is of the example data, not of --input": (
            given.batch_size is not None and given.input is not None
        ),
        "--at is of the example data, and not of --input or train_data()": (
            bool(given.at) and (own_data or given.input is not None)
        ),
        "--evaluate-every needs eval_data() in the model's file": (
            given.evaluate_every is not None and hooks.eval_data is None
        ),
        **{
            f"--{name} needs a --checkpoint-dir": bool(word) and given.checkpoint_dir is None
            for name, word in {
                "async-checkpoint": given.async_checkpoint,
                "checkpoint-every": given.checkpoint_every,
                "keep-checkpoints": given.keep_checkpoints,
            }.items()
        },
        "--resume needs a --checkpoint-dir, or the path of a checkpoint": (
            given.resume == LATEST and given.checkpoint_dir is None
        ),
        "--load and --resume PATH both say where the weights come from": (
            given.load is not None and given.resume not in (None, LATEST)
        ),
    }


def _add_train(parser: argparse.ArgumentParser, spec: PipelineSpec) -> None:
    parser.add_argument(
        "--steps", type=positive, metavar="N", help=f"of the optimizer ({STEPS}, or --epochs)"
    )
    parser.add_argument("--epochs", type=positive, metavar="N", help="passes over train_data()")
    parser.add_argument(
        "--accumulate", type=positive, default=1, metavar="N", help="mini-batches for a step (1)"
    )
    parser.add_argument(
        "--clip-norm", type=positive_real, metavar="X", help="of all gradients together (none)"
    )
    parser.add_argument(
        "--data-parallel",
        type=positive,
        metavar="R",
        help=f"replicas of the pipeline that share every batch, under torchrun ({_replicas(spec)})",
    )
    parser.add_argument(
        "--shard",
        nargs="?",
        const=(spec.sharding if spec.sharding.described else WeightSharding.OPTIMIZER).value,
        choices=[kind.value for kind in WeightSharding],
        help="what replicas divide among them: what the optimizer remembers, and the weights "
        f"between steps, or (full) always, with gradients ({spec.sharding.value})",
    )
    parser.add_argument(
        "--read",
        choices=["rows", "batches"],
        default="rows",
        help="of a DataLoader over a data set with indices, a replica loads its own rows of every "
        "batch alone, or whole batches (%(default)s)",
    )
    parser.add_argument(
        "--hooks",
        type=path,
        metavar="FILE",
        help="the Python file with train_data() and the like (the package's copy)",
    )
    parser.add_argument("--input", type=path, metavar="FILE", help="safetensors to train on")
    parser.add_argument(
        "--evaluate-every",
        type=positive,
        metavar="N",
        help="steps between passes over eval_data() (at the end of every pass)",
    )
    parser.add_argument(
        "--log-file", dest="log", type=path, metavar="FILE", help="a line of JSON for every step"
    )
    parser.add_argument(
        "--tensorboard", type=path, metavar="DIR", help="the numbers of every step, for TensorBoard"
    )
    parser.add_argument(
        "--gradient-norm", action="store_true", help="compute it though nothing is clipped"
    )
    parser.add_argument(
        "--profile",
        type=positive,
        metavar="STEPS",
        help="after the first: a trace of all ranks, in --checkpoint-dir or here",
    )
    parser.add_argument(
        "--save", type=path, metavar="PATH", help="write the weights: FILE.safetensors or a folder"
    )


def _add_rate(parser: argparse.ArgumentParser) -> None:
    _add_kind(parser, "--optimizer", OptimizerKind, "(that of your file, or sgd)")
    parser.add_argument("--lr", type=positive_real, metavar="RATE", help="(0.01, adam: 0.001)")
    _add_kind(parser, "--lr-schedule", RateShape, "over --steps (that of your file, or constant)")
    parser.add_argument(
        "--warmup-steps", type=natural, default=0, metavar="N", help="up to the full rate (0)"
    )


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint-dir",
        type=place,
        metavar="PLACE",
        help="write checkpoints to this folder or address, such as s3://bucket/run",
    )
    parser.add_argument(
        "--checkpoint-every", type=positive, metavar="N", help="steps (at the end of every pass)"
    )
    parser.add_argument(
        "--async-checkpoint",
        action="store_true",
        help="write them while training goes on, from a copy in host memory",
    )
    parser.add_argument(
        "--keep-checkpoints", type=positive, metavar="N", help=f"the newest ({KEPT})"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const=LATEST,
        type=lambda text: str(place(text)),
        metavar="PLACE",
        help="go on from the newest checkpoint, or this one (torchrun's restarts do)",
    )


def _add_common(parser: argparse.ArgumentParser, spec: PipelineSpec) -> None:
    parser.add_argument(
        "--microbatches", type=microbatches, metavar="M", help=f"({spec.microbatches})"
    )
    when = (
        "who works when; interleaved and zbv have several stages a device, zb-h1 and zbv split the "
        f"backward ({spec.schedule.value})"
    )
    again = (
        "compute every stage's forward again in its backward, all at once or in the segments that "
        "a stage has (as planned)"
    )
    _add_kind(parser, "--schedule", ScheduleKind, when)
    _add_kind(parser, "--remat", Remat, again)
    over = f"over what it takes statistics ({spec.batchnorm.value})"
    _add_kind(parser, "--batchnorm", BatchNorm, over)
    _add_kind(parser, "--precision", Precision, f"({spec.precision.value})")
    parser.add_argument(
        "--compile", action="store_true", help="run the layers of stages through torch.compile"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of dropout, data, new weights (0)")
    parser.add_argument("--batch-size", type=positive, metavar="N", help="of the example data")
    examples = ", ".join(f"{size.name}={size.example}" for size in spec.sizes)
    parser.add_argument(
        "--at",
        type=numbers_of([size.name for size in spec.sizes]),
        default={},
        metavar="NAME=N,...",
        help=f"repeat or cut the example data to these sizes ({examples})"
        if examples
        else argparse.SUPPRESS,
    )
    parser.add_argument(
        "--weights",
        type=path_or_word,
        metavar="DIR",
        help="the folder to read the weights from; none: begin as a new model (as compiled)",
    )
    parser.add_argument(
        "--load",
        type=place,
        metavar="PLACE",
        help="then weights over these: FILE.safetensors, FILE.pt, a folder, a checkpoint",
    )
    parser.add_argument(
        "--devices", type=names, metavar="D,D", help="such as cuda:0,cuda:1 (as planned)"
    )
    parser.add_argument(
        "--timeout",
        type=positive_real,
        default=600.0,
        metavar="S",
        help="seconds for another rank (600)",
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")


def _add_kind(parser: argparse.ArgumentParser, name: str, kinds: type[Enum], text: str) -> None:
    parser.add_argument(name, choices=[kind.value for kind in kinds], help=text)


def _processes(spec: PipelineSpec) -> str:
    """How many processes torchrun may start."""
    count = len(spec.stages)
    usual = device_counts(count, ScheduleKind.GPIPE)
    parts = [usual]
    for kind in ScheduleKind:
        own = device_counts(count, kind)
        if own not in ("", usual):
            parts.append(f"{own} with --schedule {kind.value}")
    return f"Processes under torchrun: {'; '.join(parts)}."


def _replicas(spec: PipelineSpec) -> str:
    if spec.replicas == 1:
        return "1"
    devices = devices_by_default(spec, spec.schedule)
    return f"{spec.replicas} with {spec.replicas * devices} processes, else 1"
