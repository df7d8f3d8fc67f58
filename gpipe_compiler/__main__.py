"""The commands, for their scripts; `python -m gpipe_compiler` is `gpipe-compile`.

What they import takes a while, in which Ctrl-C ends them as quietly as later.
"""

import importlib
import sys

INTERRUPTED = 130
"""The exit code of a program that Ctrl-C ends, as shells have it."""


def compile_command() -> int:
    """gpipe-compile; returns the exit code."""
    return _run("compile_command")


def inspect_command() -> int:
    """gpipe-inspect; returns the exit code."""
    return _run("inspect_command")


def _run(name: str) -> int:
    try:
        code: int = getattr(importlib.import_module("gpipe_compiler.cli.main"), name)()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # The working directory, which `-m` puts first: a file there may be called torch.py.
        sys.path.append(sys.path.pop(0))
    sys.exit(compile_command())
