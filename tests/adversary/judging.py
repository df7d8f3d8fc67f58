"""Compiles cases as the command does, and asks the judge about the packages."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Self

import torch
from adversary.case import SAMPLES, Case
from adversary.registry import MODELS

from gpipe_compiler.cli.main import compile_command

PATIENCE_S = 180.0
"""After which a judge that does not answer is ended, and its package is at fault."""


@dataclass(frozen=True)
class Outcome:
    """What a compile came to."""

    code: int
    text: str
    package: Path


def compiled(case: Case, module: str, folder: Path, more: str = "") -> Outcome:
    """Runs `gpipe-compile` on a case.

    Args:
        module: the file of `models/` that its lines stand in.
        folder: an empty one.
        more: options.
    """
    name = f"case_{case.name}"
    sys.modules[name] = user_module(case, name, MODELS / f"{module}.py")
    package = folder / "package"
    words = f"--stages 2 --devices V100 --bandwidth 1e15 {case.options} {more}"
    if case.microbatches is not None:
        words = f"--microbatches {case.microbatches} {words}"
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            code = compile_command([f"{name}:build_model", *words.split(), "-o", str(package)])
    finally:
        del sys.modules[name]
        left = transforms_left_on()
    return Outcome(code, output.getvalue() + left, package)


def transforms_left_on() -> str:
    """Ends what a trace has left of torch.vmap, which breaks all that follows; says so."""
    found = ""
    while torch._C._functorch.peek_interpreter_stack() is not None:
        torch._C._functorch.pop_dynamic_layer_stack()
        found = "Traceback: a transform of torch.func is left on"
    return found


def user_module(case: Case, name: str, file: Path) -> ModuleType:
    """The module that a user would have written: `build_model()` and what belongs to it."""
    module = ModuleType(name)
    module.__file__ = str(file)
    module.build_model = case.model
    module.example_inputs = lambda: case.inputs(SAMPLES)
    if case.loss is not None:
        module.loss_fn = case.loss
    target = case.target
    if target is not None:
        module.example_target = lambda: target(SAMPLES)
    elif case.loss is not None:
        module.example_target = lambda: None
    vars(module).update(case.hooks)
    return module


class JudgeProcess:
    """`judge.py`, started when it is first asked, and again after it had to be ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def faults(self, **request: object) -> list[str]:
        """What is wrong with a package; as the judge's requests."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        line = process.stdout.readline() if ready else ""
        if not line:
            self._end()
            return [f"the judge gave no verdict within {PATIENCE_S:.0f} s, or died"]
        verdict = json.loads(line)
        if not verdict["compared"] and not verdict["faults"]:
            return ["nothing was compared"]
        faults: list[str] = verdict["faults"]
        return faults

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            environment = {key: v for key, v in os.environ.items() if key != "PYTHONPATH"}
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("judge.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=tempfile.gettempdir(),
                env={**environment, "OMP_NUM_THREADS": "1"},
            )
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
