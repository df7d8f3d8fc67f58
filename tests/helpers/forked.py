"""Scripts in processes forked from one that has imported torch, alone or as torchrun's ranks.

What `python` or torchrun starts imports torch anew in every process, which takes longer than most
of the scripts here. Ranks find here what torchrun (without restarts) gives them: its variables,
its store, and SIGTERM where another one fails. Torchrun itself is started in `tests/faults`,
`tests/exactness/test_two_hosts.py`, `tests/runtime/train/test_train_ranks.py`, and by the commands
of the documentation.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PATIENCE_S = 540.0
"""A script that takes longer hangs, on however loaded a machine."""

GRACE_S = 30
"""How long the other ranks of one that failed may take to end, as under torchrun."""


def run(
    words: Sequence[object], *, ranks: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python script as `subprocess.run([sys.executable, *words])` does, on one thread.

    Args:
        ranks: so many processes of it, as by `torchrun --standalone`; 0 for one without ranks.
        variables: added to the environment.
    """
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    asked = {
        "words": list(map(str, words)),
        "ranks": ranks,
        "folder": str(Path.cwd()),
        "environment": {**os.environ, **own, **variables},
    }
    with tempfile.TemporaryDirectory() as scratch:
        out, err = Path(scratch, "out"), Path(scratch, "err")
        code = _obeyed(json.dumps({**asked, "out": str(out), "err": str(err)}))
        said = (path.read_text(encoding="utf-8", errors="replace") for path in (out, err))
        return subprocess.CompletedProcess(asked["words"], code, *said)


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    """End it, and all that it has started."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _obeyed(line: str) -> int:
    """The exit code of what is asked for."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    print(line, file=server.stdin, flush=True)
    if not select.select([server.stdout], [], [], PATIENCE_S)[0]:
        _end(server)
        _server.cache_clear()
        raise subprocess.TimeoutExpired(line, PATIENCE_S)
    return int(server.stdout.readline())


# --- in the server and what is forked from it -------------------------------------------------


def _next_script() -> str | None:
    """In a fork, the script that it is to run; in the server, None when nobody asks any more."""
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            return _taken_over(asked)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def _taken_over(asked: Mapping[str, Any]) -> str:
    """The script, where this process has become one that was started for it."""
    for path, stream in ((os.devnull, 0), (asked["out"], 1), (asked["err"], 2)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, stream)
        os.close(opened)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    tempfile.tempdir = None
    sys.argv[:] = asked["words"]
    script = sys.argv[0]
    sys.path[:] = [str(Path(script).parent), *os.environ["PYTHONPATH"].split(os.pathsep)]
    if asked["ranks"]:
        _become_a_rank(asked["ranks"])
    return script


def _become_a_rank(size: int) -> None:
    """Return in every rank, and never in the process that minds them."""
    receive, send = os.pipe()
    ranks = set()
    for rank in range(size):
        child = os.fork()
        if not child:
            port = os.read(receive, 8).decode()
            for fd in (receive, send):
                os.close(fd)
            os.environ.update(_variables(rank, size, port))
            return
        ranks.add(child)
    # Not before they are forked: it has threads.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(send, f"{store.port:8}".encode() * size)
    failed = _ended(ranks)
    if failed:
        for rank in ranks:
            os.kill(rank, signal.SIGTERM)
        signal.signal(signal.SIGALRM, lambda *_: [os.kill(rank, signal.SIGKILL) for rank in ranks])
        signal.alarm(GRACE_S)
        while ranks:
            _ended(ranks)
    os._exit(1 if failed else 0)


def _ended(ranks: set[int]) -> bool:
    """Wait for all, or for the first that fails; whether one has. Those that live are left."""
    while ranks:
        ended, status = os.wait()
        ranks.discard(ended)
        if status:
            return True
    return False


def _variables(rank: int, size: int, port: str) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0}
    sizes = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "ROLE_WORLD_SIZE": size}
    restarts = {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    values = {**numbers, **sizes, **restarts, "GROUP_WORLD_SIZE": 1}
    return {
        **{name: str(value) for name, value in values.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port.strip(),
        "TORCHELASTIC_RUN_ID": "forked",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


if __name__ == "__main__":
    import torch
    import torch._dynamo  # the first step of any optimizer imports it
    import torch.distributed

    script = _next_script()
    if script is not None:
        torch.set_num_threads(1)
        runpy.run_path(script, run_name="__main__")
