"""A package under torchrun, watched and disturbed from outside."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PATIENCE_S = 500.0


TWO_HOSTS = Path(__file__).parents[1] / "helpers" / "two_hosts.sh"

ONE = "--standalone --nproc-per-node=2"
BOTH = (
    "--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=10.77.0.1:29400 "
    "--rdzv-id=run --rdzv-conf=is_host=$((1 - HOST)) --local-addr=$ADDRESS"
)
"""The processes of torchrun on one host; and on each of two, which look for each other."""

LATECOMERS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Lets a host join others that run already: without it their torchruns wait for each other."""


class Training:
    """`run.py train` with a process per stage.

    Args:
        hosts: 1, or 2 with a process on each.

    Attributes:
        log: the steps that were done, one line of JSON each.
    """

    def __init__(
        self, package: Path, folder: Path, words: list[str], restarts: int, hosts: int
    ) -> None:
        self.log = folder / "log.jsonl"
        self.errors = folder / "stderr.txt"
        self.weights = folder / "weights.safetensors"
        self.checkpoints = folder / "checkpoints"
        command = [str(package / "run.py"), "train", "--log-file", str(self.log)]
        command += ["--save", str(self.weights), "--checkpoint-dir", str(self.checkpoints), *words]
        script = (
            f"{sys.executable} -m torch.distributed.run {ONE if hosts == 1 else BOTH} "
            f"--max-restarts={restarts} --monitor-interval=0.1 {shlex.join(command)}"
        )
        if hosts == 2:  # the second one starts its own again until it has done its work
            again = f"until {script}; do sleep 1; done"
            script = f"if [ $HOST = 1 ]; then {again}; else exec {script}; fi"
            script = f"export GLOO_SOCKET_IFNAME=$CABLE; {script}"
        prefix = [] if hosts == 1 else [str(TWO_HOSTS)]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*prefix, "sh", "-c", script],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", **LATECOMERS},
                start_new_session=True,
            )

    def steps(self) -> list[int]:
        """The steps that stand in the log."""
        if not self.log.is_file():
            return []
        whole = self.log.read_text().rpartition("\n")[0].splitlines()
        return [json.loads(line)["step"] for line in whole]

    def said(self) -> str:
        """What the ranks wrote about their end; torchrun's own words left out."""
        words = re.split(r"^E\d{4} .*\btorch/distributed/", self.errors.read_text(), flags=re.M)[0]
        return re.sub(r"^W\d{4} .*\btorch/distributed/.*\n", "", words, flags=re.M)[-4000:]

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks that live."""
        found = {}
        for line in _descendants(self.process.pid):
            try:
                words = _words(line, "environ")
            except OSError:
                continue
            values = dict(word.split(b"=", 1) for word in words if b"=" in word)
            if b"RANK" in values and b"LOCAL_RANK" in values:
                found.setdefault(int(values[b"RANK"]), line)  # and no child of it
        return found

    def wait_for(self, step: int) -> None:
        """Until this step stands in the log."""
        end = time.monotonic() + PATIENCE_S
        while max(self.steps(), default=0) < step:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < end, f"step {step} does not come"
            time.sleep(0.01)

    def wait_for_words(self, words: str) -> None:
        """Until this was said."""
        end = time.monotonic() + PATIENCE_S
        while words not in self.errors.read_text():
            assert time.monotonic() < end, f"nobody says {words!r}"
            time.sleep(0.05)

    def kill(self, rank: int) -> None:
        """SIGKILL to one rank; to one that is just being restarted, as soon as it lives."""
        end = time.monotonic() + PATIENCE_S
        while rank not in (alive := self.ranks()):
            assert time.monotonic() < end, f"rank {rank} does not come back"
            time.sleep(0.01)
        os.kill(alive[rank], signal.SIGKILL)

    def fail_host(self, host: int) -> None:
        """SIGKILL to all of a host's processes at once: torchrun and its rank."""
        found = []
        for process in _descendants(self.process.pid):
            with suppress(OSError):
                own = f"HOST={host}".encode() in _words(process, "environ")
                if own and b"torch.distributed.run" in _words(process, "cmdline"):
                    found += [process, *_descendants(process)]
        assert found, f"nothing runs on host {host}"
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def finish(self) -> int:
        """The exit code."""
        return self.process.wait(PATIENCE_S)


@contextmanager
def training(
    package: Path, folder: Path, words: list[str], restarts: int = 0, hosts: int = 1
) -> Iterator[Training]:
    """A training that leaves no process behind."""
    folder.mkdir(exist_ok=True)
    running = Training(package, folder, words, restarts, hosts)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            ranks = running.ranks()  # in sessions of their own, and soon without this parent
            os.killpg(running.process.pid, signal.SIGKILL)
            for process in ranks.values():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            running.process.wait()


def _words(process: int, what: str) -> list[bytes]:
    return Path("/proc", str(process), what).read_bytes().split(b"\0")


def _descendants(parent: int) -> list[int]:
    path = Path("/proc", str(parent), "task", str(parent), "children")
    try:
        children = [int(word) for word in path.read_text().split()]
    except OSError:
        return []
    return [*children, *(one for child in children for one in _descendants(child))]
