"""A process that has imported torch and nothing of the compiler, and forks one for each check.

What `validate.launching.fresh` starts imports torch anew, which takes longer than most of the
models here. What is forked from here is as clean. `tests/test_launching.py` starts it as users do.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpipe_compiler.validate import launching

_SERVER = """
import importlib.util, json, os, sys
spec = importlib.util.spec_from_file_location("launching", sys.argv[1])
launching = importlib.util.module_from_spec(spec)
sys.modules["launching"] = launching  # dataclasses look there
spec.loader.exec_module(launching)
import torch.fx.experimental.symbolic_shapes
for line in sys.stdin:
    child = os.fork()
    if not child:
        code = 1
        try:
            code = launching._obey(launching._Asked(*json.loads(line)))
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class ForkServer:
    """Stands in for the `subprocess` of `validate.launching`; begins with its first script."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str], **_: object
    ) -> subprocess.CompletedProcess[str]:
        """Runs a script in a forked process, as `subprocess.run` does in a new one."""
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-c", _SERVER, str(launching.__file__)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
                text=True,
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        words = list(command)[command.index("-c") + 2 :]
        with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as errors:
            asked = [words, int(env["OMP_NUM_THREADS"]), dict(env), str(Path.cwd()), errors.name]
            print(json.dumps(asked), file=self._server.stdin, flush=True)
            code = int(self._server.stdout.readline())
            return subprocess.CompletedProcess(words, code, stderr=errors.read())

    def end(self) -> None:
        """Ends the process."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
