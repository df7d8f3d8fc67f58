"""`gpipe-inspect`: what a package holds, as tables, a picture or a trace; and this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gpipe_compiler.cli.arguments import version_argument
from gpipe_compiler.cluster.local import local_cluster, process_bytes, timed_link
from gpipe_compiler.errors import ModelError, UsageError
from gpipe_compiler.options import SHOWN_HOLDERS
from gpipe_compiler.passes.kernel_times import measured_anew
from gpipe_compiler.plan import Plan
from gpipe_compiler.report.gantt import format_trace
from gpipe_compiler.report.machine import kernel_table, machine_file, show_machine
from gpipe_compiler.report.memory_tables import memory_document, show_memory
from gpipe_compiler.report.picture import write_picture
from gpipe_compiler.report.terminal import terminal
from gpipe_compiler.report.text import show_plan
from gpipe_compiler.runtime.core.devices import gpu_count
from gpipe_compiler.runtime.core.typed import natural, path, positive
from gpipe_compiler.runtime.wording import printable
from gpipe_compiler.text.escaping import file_stem


def inspect_parser() -> argparse.ArgumentParser:
    parser = _parser(
        "",
        "Prints what a package holds: stages, boundaries, prediction.",
        epilog="gpipe-inspect memory PKG tells what holds the memory of each device and what would "
        "save some; gpipe-inspect graph PKG draws it as SVG; gpipe-inspect trace PKG writes the "
        "simulated step for ui.perfetto.dev; gpipe-inspect machine measures this machine; each has "
        "its own --help",
    )
    version_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON instead")
    return parser


def graph_parser() -> argparse.ArgumentParser:
    parser = _parser(
        " graph", "Draws a package's stages, or one stage, as SVG.", output="the SVG file"
    )
    parser.add_argument("--stage", metavar="K", type=natural, help="the ops of this stage, from 0")
    return parser


def memory_parser() -> argparse.ArgumentParser:
    parser = _parser(
        " memory",
        "Prints what holds the memory of each device at its peak, and what other settings would "
        "save.",
    )
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
    text = "Writes the simulated step as a trace for ui.perfetto.dev."
    return _parser(" trace", text, output="the JSON file")


def machine_parser() -> argparse.ArgumentParser:
    return _parser(
        " machine",
        "Measures this machine, as --devices measured does: its devices, and the link between two "
        "of them.",
        output="write them as a description for gpipe-compile --cluster, whose plans do not change "
        "with what is measured the next time",
        of_package=False,
    )


def _parser(
    command: str, text: str, *, output: str = "", of_package: bool = True, epilog: str | None = None
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"gpipe-inspect{command}", description=text, epilog=epilog
    )
    if of_package:
        parser.add_argument("package", metavar="PKG", type=path, help="what gpipe-compile wrote")
    if output:
        parser.add_argument("-o", "--output", metavar="FILE", type=path, help=output)
    return parser


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
