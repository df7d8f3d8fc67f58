"""A package under torchrun, watched and disturbed from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 240.0


class Training:
    """`run.py train` with a process per stage.

    Attributes:
        log: the steps that were done, one line of JSON each.
    """

    def __init__(self, package: Path, folder: Path, words: list[str], restarts: int = 0) -> None:
        self.log = folder / "log.jsonl"
        self.errors = folder / "stderr.txt"
        self.weights = folder / "weights.safetensors"
        self.checkpoints = folder / "checkpoints"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", f"--max-restarts={restarts}", "--monitor-interval=0.1"]
        command += [str(package / "run.py"), "train", "--log-file", str(self.log)]
        command += ["--save", str(self.weights), "--checkpoint-dir", str(self.checkpoints)]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, *words],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
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
        words = self.errors.read_text()
        return words[: words.find("torch/distributed/elastic")][-4000:]

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks that live."""
        found = {}
        for line in _children(self.process.pid):
            environment = Path("/proc", str(line), "environ")
            try:
                words = environment.read_bytes().split(b"\0")
            except OSError:
                continue
            values = dict(word.split(b"=", 1) for word in words if b"=" in word)
            if b"RANK" in values and b"LOCAL_RANK" in values:
                found[int(values[b"RANK"])] = line
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

    def finish(self) -> int:
        """The exit code."""
        return self.process.wait(PATIENCE_S)


@contextmanager
def training(
    package: Path, folder: Path, words: list[str], restarts: int = 0
) -> Iterator[Training]:
    """A training that leaves no process behind."""
    folder.mkdir(exist_ok=True)
    running = Training(package, folder, words, restarts)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            os.killpg(running.process.pid, signal.SIGKILL)
            for process in running.ranks().values():
                os.kill(process, signal.SIGKILL)
            running.process.wait()


def _children(parent: int) -> list[int]:
    path = Path("/proc", str(parent), "task", str(parent), "children")
    try:
        return [int(word) for word in path.read_text().split()]
    except OSError:
        return []
