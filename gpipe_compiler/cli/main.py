"""The commands gpipe-compile and gpipe-inspect: arguments in, tables out.

What needs torch, which takes seconds to import, is imported once it is known to be needed: a graph
from elsewhere is planned without, and what draws tables is not needed for JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from gpipe_compiler.cli.arguments import compile_parser
from gpipe_compiler.cli.graph_json import is_graph, plan_file
from gpipe_compiler.errors import ExitCode, GPipeCompilerError, UsageError
from gpipe_compiler.no_gc import importing
from gpipe_compiler.runtime.train.process import exit_code_of, keep_memory
from gpipe_compiler.runtime.wording import printable_message
from gpipe_compiler.text.units import format_source
from gpipe_compiler.validate.launching import fresh, spare


def compile_command(argv: Sequence[str] | None = None) -> int:
    """gpipe-compile: from a model to a package; returns the exit code."""
    parser = compile_parser()
    parser.set_defaults(words=tuple(sys.argv[1:] if argv is None else argv))
    return _run(parser, argv, _compile)


def inspect_command(argv: Sequence[str] | None = None) -> int:
    """gpipe-inspect: what a package holds, as tables, a picture or a trace."""
    from gpipe_compiler.cli import inspecting as own

    commands = {
        "graph": (own.graph_parser, own.draw),
        "memory": (own.memory_parser, own.memory),
        "machine": (own.machine_parser, own.machine),
        "trace": (own.trace_parser, own.trace),
    }
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] in commands:
        parser, command = commands[words[0]]
        return _run(parser(), words[1:], command)
    return _run(own.inspect_parser(), words, own.inspect)


def _run(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    command: Callable[[argparse.Namespace], None],
) -> int:
    """Parses and obeys; every error that is the user's to mend is one message."""
    return exit_code_of(lambda: _obey(parser, argv, command), ExitCode.DONE)


def _obey(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    command: Callable[[argparse.Namespace], None],
) -> int:
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as leaving:  # argparse has said why
        return leaving.code if isinstance(leaving.code, int) else ExitCode.DONE
    as_json = getattr(arguments, "json", False)
    try:
        command(arguments)
    except GPipeCompilerError as error:
        return _report(error, as_json)
    except (BrokenPipeError, KeyboardInterrupt):
        raise  # whoever reads, or waits, has seen enough
    except OSError as error:
        return _report(UsageError(f"{error.filename or 'a file'}: {error.strerror}"), as_json)
    except BaseException as error:
        from gpipe_compiler.frontend.user_code import error_of_user

        found = error_of_user(error)
        if found is None:
            raise
        return _report(found, as_json)
    return ExitCode.DONE


def _report(error: GPipeCompilerError, as_json: bool) -> int:
    where = f"{format_source(str(error.location))}: " if error.location else ""
    print(printable_message(f"error: {where}{error.problem}"), file=sys.stderr)
    if error.hint:
        print(printable_message(f"  hint: {error.hint}"), file=sys.stderr)
    if as_json:
        document = {
            "problem": error.problem,
            "file": error.location.file if error.location else None,
            "line": error.location.line if error.location else None,
            "hint": error.hint,
            "exit_code": int(error.exit_code),
        }
        print(json.dumps({"error": document}, indent=2))
    return error.exit_code


_KEPT = 4 * 2**20
"""Bytes of the largest freed blocks that are kept for what runs next."""


def _compile(arguments: argparse.Namespace) -> None:
    if not is_graph(arguments.model):
        keep_memory(_KEPT)
        let_threads_sleep(measured=arguments.cost == "measured")
        with spare() if _validates(arguments) else nullcontext(fresh) as launch:
            with importing():
                from gpipe_compiler.frontend.torch_inside import check_torch

                check_torch()
                from gpipe_compiler.cli.commands import compile_program

            compile_program(arguments, launch)
        return
    plan = plan_file(arguments, compile_parser())
    if arguments.json:
        print(plan.to_json(), end="")
    else:
        from gpipe_compiler.graph_json.report import show_bare_plan
        from gpipe_compiler.report.terminal import terminal

        terminal().print(show_bare_plan(plan))


def let_threads_sleep(*, measured: bool) -> None:
    """Has the threads of OpenMP, once torch is imported, sleep as they wait for work.

    Most of a compile is Python, beside which they would keep all cores busy. Where ops are timed
    they wait as they do in training; what the user has chosen stays.
    """
    if not measured:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _validates(arguments: argparse.Namespace) -> bool:
    """Whether a package is run in the end."""
    return not (arguments.dry_run or arguments.no_validate)
