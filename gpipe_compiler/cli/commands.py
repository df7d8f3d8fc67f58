"""What the commands do with models and packages: arguments in, tables out."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console

from gpipe_compiler.cli.arguments import cluster_asked, compile_parser
from gpipe_compiler.cli.folder import folder_options, options_given, refuse_folder_options
from gpipe_compiler.cli.search import constraints_of, schedule_of, sharding_of
from gpipe_compiler.cluster.local import local_cluster, process_bytes, timed_link
from gpipe_compiler.codegen.package import Progress
from gpipe_compiler.compile import Compiled, compare
from gpipe_compiler.compile import compile as compile_model
from gpipe_compiler.errors import ModelError, UsageError
from gpipe_compiler.frontend.examples import size_names
from gpipe_compiler.frontend.hugging_face import is_folder, load_folder
from gpipe_compiler.frontend.source import load
from gpipe_compiler.frontend.subject import Subject, Wish
from gpipe_compiler.frontend.user_code import ModelSpec
from gpipe_compiler.onnx import OnnxFile
from gpipe_compiler.options import (
    Auto,
    Calibration,
    CompileOptions,
    LossChoice,
    Objective,
    RematChoice,
)
from gpipe_compiler.passes.kernel_times import measured_anew
from gpipe_compiler.plan import Plan
from gpipe_compiler.report.facts import headline
from gpipe_compiler.report.first_question import first_question
from gpipe_compiler.report.frontier import document, show_frontier
from gpipe_compiler.report.gantt import format_trace
from gpipe_compiler.report.machine import kernel_table, machine_file, show_machine
from gpipe_compiler.report.memory_tables import (
    memory_document,
    remat_table,
    remedy_table,
    show_memory,
)
from gpipe_compiler.report.picture import write_picture
from gpipe_compiler.report.sweep import document as sweep_document
from gpipe_compiler.report.sweep import show_sweep
from gpipe_compiler.report.terminal import Spinner, notices, terminal
from gpipe_compiler.report.text import boundary_table, show_plan, stage_table, summary_table
from gpipe_compiler.runtime.core.devices import gpu_count
from gpipe_compiler.runtime.spec import BatchNorm, OptimizerKind, Precision, Remat
from gpipe_compiler.runtime.wording import printable
from gpipe_compiler.targets import of_file
from gpipe_compiler.text.escaping import file_stem, shell_line
from gpipe_compiler.validate.launching import Launch

T = TypeVar("T")

# --- gpipe-compile ---------------------------------------------------------------------------


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
    directory, options = _directory(arguments), _options(arguments, arguments.stages)
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
    options = _options(arguments, arguments.stages or arguments.sweep[0])
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


def _options(arguments: argparse.Namespace, stages: int | Auto) -> CompileOptions:
    return CompileOptions(
        stages=stages,
        microbatches=arguments.microbatches,
        schedule=schedule_of(arguments),
        loss_over_batch=arguments.loss_over == "batch",
        remat=RematChoice(arguments.remat),
        batchnorm=BatchNorm(arguments.batchnorm),
        precision=Precision(arguments.precision),
        training=arguments.mode == "train",
        measured=arguments.cost == "measured",
        cluster=cluster_asked(arguments),
        validate=not arguments.no_validate,
        force=arguments.force,
        seed=arguments.seed,
        per_microbatch=arguments.per_microbatch,
        objective=Objective(arguments.objective),
        constraints=constraints_of(arguments),
        data_parallel=arguments.data_parallel,
        sharding=sharding_of(arguments),
        optimizer=OptimizerKind(arguments.optimizer) if arguments.optimizer else None,
        must_fit=arguments.memory is not None,
        search_s=arguments.search_time,
        in_place=not arguments.no_inplace,
        cut_inside=arguments.cut_inside,
        prove=arguments.prove,
        calibration=_calibration(arguments.calibration, arguments.target, arguments.model),
        remedies=arguments.remedies,
        target=of_file(arguments.model) or arguments.target,
        print_after=tuple(arguments.print_after),
        pass_options=tuple(arguments.pass_option),
        words=arguments.words,
    )


def _calibration(file: Path | None, target: str, model: str) -> Calibration | None:
    """What `run.py bench --calibrate` has written.

    Raises:
        UsageError: for a file that is none, or stages that are not torch's.
    """
    if file is None:
        return None
    if of_file(model) is not None or target != "torch":
        raise UsageError("--calibration is for stages of torch")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        factors = float(found["forward"]), float(found["backward"])
        if not all(0 < factor < math.inf for factor in factors):
            raise ValueError("a factor is not above 0")
        return Calibration(*factors, printable(str(found["measured"])))
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError) as error:
        raise UsageError(
            f"{file} is no calibration: {type(error).__name__}: {error}",
            hint="run.py bench --calibrate FILE writes one",
        ) from error


@contextlib.contextmanager
def _watched(*, as_json: bool) -> Iterator[Progress]:
    """Says on standard error what is being done; there all else goes too beside a document."""
    console = Console(stderr=True)
    with _stdout_for_the_document(as_json), notices(console), Spinner(console) as progress:
        yield progress


def _model(arguments: argparse.Namespace, progress: Progress) -> Subject | OnnxFile:
    progress(f"loading {arguments.model}")
    if not is_folder(arguments.model):
        refuse_folder_options(arguments, compile_parser())
    if of_file(arguments.model) is not None:
        return onnx_file(arguments, compile_parser())
    return _subject(arguments)


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
        folder, asked = Path(arguments.model), folder_options(arguments)
        subject = load_folder(folder, asked, input_specs=tensors, training=training, loss=loss)
    else:
        subject = load(arguments.model, input_specs=tensors, training=training, loss=loss)
    free = Wish.parse(arguments.free, arguments.fix, arguments.at)
    return dataclasses.replace(
        subject,
        batch_dims=_each_once("--batch-dim", arguments.batch_dim),
        free=dataclasses.replace(free, names=names),
        state=_each_once("--state", arguments.state),
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
        "frontier": document(compiled.frontier) if compiled.frontier else None,
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


# --- gpipe-inspect ---------------------------------------------------------------------------


def inspect(arguments: argparse.Namespace) -> None:
    """`gpipe-inspect PACKAGE`: all of its plan."""
    plan = read_plan(arguments.package)
    if arguments.json:
        print(plan.to_json(), end="")
    else:
        terminal().print(show_plan(plan))


def draw(arguments: argparse.Namespace) -> None:
    """`gpipe-inspect graph`: a picture."""
    plan = read_plan(arguments.package)
    part = "" if arguments.stage is None else f"_stage_{arguments.stage}"
    path: Path = arguments.output or Path(f"{file_stem(plan.name)}{part}.svg")
    print(write_picture(plan, path, stage=arguments.stage))


def trace(arguments: argparse.Namespace) -> None:
    """`gpipe-inspect trace`: a step as a trace."""
    plan = read_plan(arguments.package)
    path: Path = arguments.output or Path(f"{file_stem(plan.name)}_trace.json")
    path.write_text(format_trace(plan), encoding="utf-8")
    print(path)


def machine(arguments: argparse.Namespace) -> None:
    """`gpipe-inspect machine`: what is measured of this one."""
    if not gpu_count():
        process_bytes(anew=True)
    cluster = local_cluster()
    link = timed_link() if gpu_count() != 1 else None
    times = None if gpu_count() else measured_anew(cluster.devices[0])
    if arguments.output is None:
        terminal().print(show_machine(cluster, link))
        if times is not None:
            terminal().print(kernel_table(times))
    else:
        arguments.output.write_text(machine_file(cluster, link), encoding="utf-8")
        print(printable(str(arguments.output)))


def memory(arguments: argparse.Namespace) -> None:
    """`gpipe-inspect memory`: what holds the memory."""
    plan = read_plan(arguments.package)
    if arguments.json:
        print(json.dumps(memory_document(plan, arguments.device), indent=2))
    else:
        terminal().print(show_memory(plan, arguments.device, arguments.top))


def read_plan(package: Path) -> Plan:
    """The plan of a package.

    Raises:
        UsageError: when `package` is neither a package nor a plan.json.
        ModelError: when its plan cannot be read.
    """
    file = package / "plan.json" if package.is_dir() else package
    if not file.is_file():
        problem = f"{package} is no package: it has no plan.json"
        if not package.exists():
            problem = f"there is no package {package}"
        raise UsageError(problem, hint="name the directory that gpipe-compile wrote")
    try:
        return Plan.from_json(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is no plan.json: it is not even text") from error
    except ModelError as error:
        hint = error.hint or "compile the package again, or name one that gpipe-compile wrote"
        raise ModelError(f"{file}: {error.problem}", hint=hint) from error


# --- ONNX models ----------------------------------------------------------------------------------

_MODEL = (
    *(
        "schedule",
        "remat",
        "batchnorm",
        "precision",
        "optimizer",
        "data_parallel",
        "shard",
        "loss",
        "loss_over",
    ),
    *("per_microbatch", "print_after", "pass_option", "free", "fix", "at"),
)
"""Options that say how a package trains, or how a model is traced and transformed."""


def onnx_file(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> OnnxFile:
    """The model that the command names.

    Args:
        parser: that made the arguments; it knows their defaults.

    Raises:
        UsageError: for options that say how to train or to trace.
    """
    given = options_given(arguments, parser, _MODEL)
    if given:
        raise UsageError(
            f"{', '.join(given)}: an ONNX model is neither traced nor trained",
            hint="leave it out, or compile the model.py that it was exported from",
        )
    return OnnxFile(
        Path(arguments.model),
        tuple(arguments.input),
        tuple(arguments.custom_ops),
        _each_once("--batch-dim", arguments.batch_dim),
        _each_once("--state", arguments.state),
    )


def _each_once(option: str, pairs: Sequence[tuple[str, T]]) -> dict[str, T]:
    """What is said of each name; raises UsageError where that is two things."""
    found: dict[str, T] = {}
    for name, said in pairs:
        if found.setdefault(name, said) != said:
            raise UsageError(f"{option} says {found[name]} and {said} of {name}")
    return found
