"""The command of a package: `run.py train | infer | check | bench`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .check import check_pipeline, format_rows, write_rows
from .data import example_call
from .errors import PipelineError, StageError, UsageError
from .hooks import UserHooks
from .memory import keep_memory
from .pipeline import Pipeline
from .spec import PipelineSpec, ScheduleKind
from .weights import INDEX
from .work import OptimizerKind, Options, bench, infer, load_weights, train

FAILED_CHECK = 3
INTERRUPTED = 130


def main(
    spec: PipelineSpec,
    directory: Path,
    hooks: str | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Run the command and return its exit code.

    Args:
        directory: the package's folder.
        hooks: the user's own file, or the name of a module, that offers `train_data` or
            `make_optimizer`.

    Returns:
        0 when done, 1 when the model or a process failed, 2 for wrong usage, 3 for a failed check.
    """
    arguments = _parser(spec).parse_args(argv)
    rank = int(os.environ.get("RANK", "0"))
    try:
        return _run(spec, directory, hooks, arguments)
    except (PipelineError, OSError) as error:
        if arguments.traceback:
            raise
        if not (isinstance(error, UsageError) and rank != 0):
            who = f"rank {rank}: " if "RANK" in os.environ else ""
            print(f"{who}error: {error}", file=sys.stderr)
            if isinstance(error, StageError):
                print("  --traceback shows where in the stage", file=sys.stderr)
        return error.exit_code if isinstance(error, PipelineError) else 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return INTERRUPTED


def _run(
    spec: PipelineSpec, directory: Path, hooks: str | None, arguments: argparse.Namespace
) -> int:
    keep_memory()
    weights = directory / "weights"
    stored = weights if (weights / INDEX).is_file() else None
    options = _options(arguments)
    user = UserHooks.load(hooks) if arguments.command == "train" else UserHooks()
    with Pipeline(
        spec,
        stored,
        devices=arguments.devices,
        microbatches=arguments.microbatches,
        schedule=arguments.schedule,
        seed=arguments.seed,
        timeout_s=arguments.timeout,
    ) as pipe:
        if options.load is not None:
            load_weights(pipe, options.load)
        if pipe.rank == 0:
            print(pipe.describe())
        if arguments.command == "train":
            train(pipe, directory, user, options)
        elif arguments.command == "infer":
            infer(pipe, directory, options)
        elif arguments.command == "bench":
            bench(pipe, directory, options)
        else:
            return _check(pipe, stored, directory, arguments)
    return 0


def _check(
    pipe: Pipeline, stored: Path | None, directory: Path, arguments: argparse.Namespace
) -> int:
    inputs, target = example_call(pipe.spec, directory, arguments.batch_size)
    rows = check_pipeline(pipe, stored, inputs, target, arguments.reference)
    passed = all(row.passed for row in rows)
    if pipe.rank == 0 or not passed:
        print(format_rows(rows))
    if arguments.report is not None and pipe.rank == 0:
        write_rows(rows, arguments.report)
    return 0 if passed else FAILED_CHECK


def _options(arguments: argparse.Namespace) -> Options:
    given = vars(arguments)
    return Options(
        steps=given.get("steps", 1),
        rate=given.get("lr"),
        optimizer=given.get("optimizer"),
        samples=given.get("batch_size"),
        load=given.get("load"),
        save=given.get("save"),
        input=given.get("input"),
        output=given.get("output"),
    )


def _parser(spec: PipelineSpec) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run.py",
        description=f"{spec.name} as a pipeline of {len(spec.stages)} stages. Under torchrun, the "
        "number of processes divides that of the stages.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    if spec.loss is not None:
        _add_train(commands.add_parser("train", help="train on your data, or the example batch"))
    infer_parser = commands.add_parser("infer", help="run the model")
    infer_parser.add_argument("--input", type=Path, metavar="FILE", help="safetensors, by name")
    infer_parser.add_argument("--output", type=Path, metavar="FILE", help="safetensors to write")
    _add_common(infer_parser, spec)
    check_parser = commands.add_parser("check", help="compare with a plain run of the model")
    check_parser.add_argument("--reference", type=Path, metavar="FILE", help="saved results")
    check_parser.add_argument("--report", type=Path, metavar="FILE", help="JSON to write")
    _add_common(check_parser, spec)
    bench_parser = commands.add_parser("bench", help="time it")
    bench_parser.add_argument("--steps", type=_positive, default=10, metavar="N")
    _add_common(bench_parser, spec)
    if spec.loss is not None:
        _add_common(commands.choices["train"], spec)
    return parser


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=_positive, default=100, metavar="N", help="(100)")
    parser.add_argument("--lr", type=float, metavar="RATE", help="(0.01, adam: 0.001)")
    parser.add_argument(
        "--optimizer",
        type=OptimizerKind,
        metavar="{" + ",".join(kind.value for kind in OptimizerKind) + "}",
        help="(that of your file, or sgd)",
    )
    parser.add_argument("--input", type=Path, metavar="FILE", help="safetensors to train on")
    parser.add_argument(
        "--save", type=Path, metavar="PATH", help="write the weights: FILE.safetensors or a folder"
    )


def _add_common(parser: argparse.ArgumentParser, spec: PipelineSpec) -> None:
    parser.add_argument(
        "--microbatches", type=_positive, metavar="M", help=f"({spec.microbatches})"
    )
    parser.add_argument(
        "--schedule",
        choices=[kind.value for kind in ScheduleKind],
        help=f"({spec.schedule.value})",
    )
    parser.add_argument("--seed", type=int, default=0, help="of dropout and new weights (0)")
    parser.add_argument("--batch-size", type=_positive, metavar="N", help="of the example data")
    parser.add_argument("--load", type=Path, metavar="PATH", help="weights that --save has written")
    parser.add_argument(
        "--devices", type=_names, metavar="D,D", help="such as cuda:0,cuda:1 (one per stage)"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds for another rank (600)"
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1 is needed")
    return number
