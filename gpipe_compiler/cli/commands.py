"""`gpipe-compile`: from arguments to a package, or to plans that are compared, and their tables."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console

from gpipe_compiler.cli.arguments import compile_parser
from gpipe_compiler.cli.asked import each_once, options_given, options_of
from gpipe_compiler.codegen.package import Progress
from gpipe_compiler.compile import Compiled, compare
from gpipe_compiler.compile import compile as compile_model
from gpipe_compiler.errors import UsageError
from gpipe_compiler.frontend.examples import size_names
from gpipe_compiler.frontend.hugging_face import TASKS, FolderOptions, is_folder, load_folder
from gpipe_compiler.frontend.source import load
from gpipe_compiler.frontend.subject import Subject, Wish
from gpipe_compiler.frontend.user_code import ModelSpec
from gpipe_compiler.onnx import OnnxFile
from gpipe_compiler.options import Auto, LossChoice
from gpipe_compiler.plan import Plan
from gpipe_compiler.report.comparisons import (
    first_question,
    frontier_document,
    show_frontier,
    show_sweep,
    sweep_document,
)
from gpipe_compiler.report.facts import headline
from gpipe_compiler.report.memory_tables import remat_table, remedy_table
from gpipe_compiler.report.terminal import Spinner, notices, terminal
from gpipe_compiler.report.text import boundary_table, stage_table, summary_table
from gpipe_compiler.runtime.spec import Remat
from gpipe_compiler.runtime.wording import printable
from gpipe_compiler.targets import of_file
from gpipe_compiler.text.escaping import shell_line
from gpipe_compiler.validate.launching import Launch


def compile_program(arguments: argparse.Namespace, launch: Launch) -> None:
    """`gpipe-compile` of what is no bare graph.

    Args:
        launch: runs a package that is compared with its model.
    """
    if arguments.sweep or arguments.batch:
        _compare(arguments, launch)
        return
    if arguments.stages is None:
        raise UsageError("how many stages?", hint="--stages 4, or auto; --sweep compares several")
    directory, options = _directory(arguments), options_of(arguments, arguments.stages)
    with _watched(as_json=arguments.json) as progress:
        model = _model(arguments, progress)
        compiled = compile_model(model, options, directory, progress, launch)
    if arguments.json:
        print(json.dumps(_document(compiled), indent=2))
    else:
        _print_compiled(compiled)


def _compare(arguments: argparse.Namespace, launch: Launch) -> None:
    """`gpipe-compile --sweep` and `--batch auto`: plans of one trace, as a table."""
    if bool(arguments.sweep) == (arguments.stages is not None):
        raise UsageError(
            "either --stages says how many there are, or --sweep for how many devices"
            if arguments.sweep
            else "--batch auto: for how many stages?",
            hint="--stages 4 --batch auto; --sweep 1,2,4,8; or --sweep 1,2,4,8 --batch auto",
        )
    options = options_of(arguments, arguments.stages or arguments.sweep[0])
    with _watched(as_json=arguments.json) as progress:
        model = _model(arguments, progress)
        largest = arguments.batch is not None
        points = compare(
            model,
            options,
            arguments.sweep,
            largest_batch=largest,
            progress=progress,
            launch=launch,
        )
    if arguments.json:
        print(json.dumps({"sweep": sweep_document(points)}, indent=2))
    else:
        terminal().print(show_sweep(points))


@contextlib.contextmanager
def _watched(*, as_json: bool) -> Iterator[Progress]:
    """Says on standard error what is being done; there all else goes too beside a document."""
    console = Console(stderr=True)
    with _stdout_for_the_document(as_json), notices(console), Spinner(console) as progress:
        yield progress


def _model(arguments: argparse.Namespace, progress: Progress) -> Subject | OnnxFile:
    progress(f"loading {arguments.model}")
    of_folder = options_given(arguments, compile_parser(), _OF_FOLDER)
    if of_folder and not is_folder(arguments.model):
        raise UsageError(
            f"{', '.join(of_folder)}: {arguments.model} is no folder with a config.json",
            hint="these are for folders of Hugging Face's; a model file builds its model itself",
        )
    return _subject(arguments) if of_file(arguments.model) is None else _onnx_file(arguments)


_OF_FOLDER = ("task", "dtype", "peft", "hooks", "copy_weights")
_OF_TRACED = (
    *("schedule", "remat", "batchnorm", "precision", "optimizer", "data_parallel", "shard", "loss"),
    *("loss_over", "per_microbatch", "print_after", "pass_option", "free", "fix", "at"),
)
"""Options that say how a package trains, or how a model is traced and transformed."""


def _onnx_file(arguments: argparse.Namespace) -> OnnxFile:
    given = options_given(arguments, compile_parser(), _OF_TRACED)
    if given:
        raise UsageError(
            f"{', '.join(given)}: an ONNX model is neither traced nor trained",
            hint="leave it out, or compile the model.py that it was exported from",
        )
    return OnnxFile(
        Path(arguments.model),
        tuple(arguments.input),
        tuple(arguments.custom_ops),
        each_once("--batch-dim", arguments.batch_dim),
        each_once("--state", arguments.state),
    )


def _subject(arguments: argparse.Namespace) -> Subject:
    """The torch model that the command names."""
    if arguments.custom_ops:
        raise UsageError("--custom-ops: only an ONNX file can need them")
    torch.manual_seed(arguments.seed)  # the factory and --input draw random numbers
    training, loss = arguments.mode == "train", LossChoice(arguments.loss)
    if loss is not LossChoice.MODEL and not training:
        raise UsageError(
            f"--loss {loss.value} is for training, and with --mode infer there is none",
            hint="leave it out, or compile with --mode train",
        )
    tensors, names = size_names(arguments.input)
    if is_folder(arguments.model):
        if arguments.task not in (None, *TASKS):
            raise UsageError(f"--task {arguments.task}: known are {', '.join(TASKS)}")
        asked = FolderOptions(
            arguments.task, arguments.dtype, arguments.peft, arguments.hooks, arguments.copy_weights
        )
        folder = Path(arguments.model)
        subject = load_folder(folder, asked, input_specs=tensors, training=training, loss=loss)
    else:
        subject = load(arguments.model, input_specs=tensors, training=training, loss=loss)
    free = Wish.parse(arguments.free, arguments.fix, arguments.at)
    return dataclasses.replace(
        subject,
        batch_dims=each_once("--batch-dim", arguments.batch_dim),
        free=dataclasses.replace(free, names=names),
        state=each_once("--state", arguments.state),
    )


def _directory(arguments: argparse.Namespace) -> Path | None:
    """Where the package goes; None for a dry run. A place that is taken is refused at once."""
    if arguments.dry_run:
        return None
    model = arguments.model
    stem = Path(model).resolve().name if is_folder(model) else _stem(model)
    stages = arguments.stages
    named = f"{stem}_{stages.value}" if isinstance(stages, Auto) else f"{stem}_x{stages}"
    directory: Path = arguments.output or Path(named)
    if directory.exists() and not arguments.force:
        raise UsageError(
            f"{directory} exists",
            hint="--force replaces it, -o names another directory, --dry-run writes nothing",
        )
    return directory


def _stem(model: str) -> str:
    return Path(model).stem if of_file(model) else ModelSpec.parse(model).stem


def _stdout_for_the_document(as_json: bool) -> contextlib.AbstractContextManager[object]:
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def _document(compiled: Compiled) -> dict[str, object]:
    validation = compiled.validation
    return {
        "directory": str(compiled.directory) if compiled.directory else None,
        "plan": json.loads(compiled.plan.to_json()),
        "frontier": frontier_document(compiled.frontier) if compiled.frontier else None,
        "batch": compiled.batch or None,
        "without_effect": list(_unread(compiled.plan)),
        "not_validated": compiled.not_validated or None,
        "validation": None
        if validation is None
        else {
            "passed": validation.passed,
            "rows": [dataclasses.asdict(row) for row in validation.rows],
            "notes": list(validation.notes),
        },
    }


def _unread(plan: Plan) -> Sequence[str]:
    """The inputs on which neither what is returned nor the loss depends."""
    return () if plan.graph is None else plan.graph.unread_inputs


def _print_compiled(compiled: Compiled) -> None:
    console = terminal()
    plan, directory = compiled.plan, compiled.directory
    console.print(first_question(plan), end="")
    if compiled.frontier is not None:
        console.print(show_frontier(compiled.frontier))
    if directory is None:
        console.print(headline(plan))
    console.print(stage_table(plan))
    if directory is None and plan.crossings:
        console.print(boundary_table(plan))
    if directory is None and any(stage.remat is not Remat.NONE for stage in plan.stages):
        console.print(remat_table(plan))
    if plan.what_if is not None and plan.what_if.remedies:
        console.print(remedy_table(plan))
    held, refused = compiled.validation, compiled.not_validated
    unread = [f"input {name}" for name in _unread(plan)]
    console.print(summary_table(plan, held, refused, compiled.batch, unread))
    if directory is None:
        _say("dry run: nothing written")
        return
    if directory.is_relative_to(Path.cwd()):
        directory = directory.relative_to(Path.cwd())
    work = "train" if plan.training else "infer"
    script = directory / "run.py"
    also = ", and with one process per device" if compiled.under_torchrun else ""
    _say(f"written to {directory}. To run it here{also}:")
    _say(f"  {shell_line(['python', script, work])}")
    if compiled.under_torchrun:
        count = len(plan.orders) * (plan.replicas if plan.training else 1)
        _say(f"  {shell_line(['torchrun', '--nproc-per-node', str(count), script, work])}")
    shown = shell_line(["gpipe-inspect", directory])
    _say(f"For people: {directory / 'README.md'}, {directory / 'report.html'}; {shown}")


def _say(line: str) -> None:
    """Prints a line as it is: no colours, no wrapping, so that it can be copied."""
    print(printable(line))
