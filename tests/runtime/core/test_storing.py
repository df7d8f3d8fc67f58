"""Files that are complete or not there, whatever stands in their place, and locks."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpipe_compiler.codegen.package import place as place_package
from gpipe_compiler.errors import EmitError
from gpipe_compiler.runtime.core.distributed import Network
from gpipe_compiler.runtime.core.storing import HeldError, locked, place
from gpipe_compiler.runtime.core.weights import load_file, save_file
from gpipe_compiler.runtime.errors import UsageError
from gpipe_compiler.runtime.train.checkpoint_manager import CheckpointManager, CheckpointOptions
from gpipe_compiler.runtime.train.optimizer import StepResult
from gpipe_compiler.runtime.train.training_log import StepLog

HOLDER = """
import os, sys, time
from pathlib import Path
from gpipe_compiler.runtime.core.storing import locked
with locked(Path(sys.argv[1])):
    if "fork" not in sys.argv or os.fork():
        print("held", flush=True)
    time.sleep(300)
"""


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def holder(file: Path, *words: str) -> subprocess.Popen[str]:
    """A process that holds a lock."""
    command = [sys.executable, "-c", HOLDER, str(file), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
def test_weights_have_the_mode_of_other_files(tmp_path: Path) -> None:
    save_file({"x": torch.ones(3)}, tmp_path / "new" / "w.safetensors")
    (tmp_path / "text").write_text("")

    assert mode(tmp_path / "new" / "w.safetensors") == mode(tmp_path / "text") == 0o640
    (tmp_path / "text").chmod(0o604)
    save_file({"x": torch.ones(3)}, tmp_path / "text")
    assert mode(tmp_path / "text") == 0o604


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(Path("far", "weights"))
    for number in range(2):
        save_file({"x": torch.tensor(number)}, tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert load_file(tmp_path / "far" / "weights")["x"] == number
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["weights"]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    place(tmp_path / "pipe", lambda file: file.write_text("all of it") and None)
    reader.join()

    assert read == [b"all of it"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_what_fails_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")

    def write(file: Path) -> None:
        file.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        place(tmp_path / "file", write)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "before"


def test_a_lock_is_of_one_process_and_ends_with_it(tmp_path: Path) -> None:
    """Even where a child of it, such as a worker that loads data, lives on."""
    file = tmp_path / "lock"
    other = holder(file, "fork")
    with pytest.raises(HeldError, match=f"process {other.pid} on "), locked(file):
        pass
    other.kill()
    other.wait()
    with locked(file):
        pass
    os.killpg(other.pid, signal.SIGKILL)  # the child

    assert not file.exists()


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    other = holder(tmp_path / "lock")
    threading.Timer(0.3, other.kill).start()
    with locked(tmp_path / "lock", wait_s=30):
        pass
    other.wait()


def test_two_runs_do_not_share_a_folder_of_checkpoints(tmp_path: Path) -> None:
    class Alone:
        world = Network.alone(torch.device("cpu"))
        rank = 0

    kept = CheckpointOptions(tmp_path / "kept")
    manager = CheckpointManager(Alone(), None, None, {}, kept)  # type: ignore[arg-type]
    (tmp_path / "kept").mkdir()
    other = holder(tmp_path / "kept" / ".lock")
    with pytest.raises(UsageError, match="another run writes its checkpoints"):
        manager.resume()
    end(other)
    assert manager.resume() is None
    manager.close()
    assert not [*(tmp_path / "kept").iterdir()]


def test_two_compiles_do_not_share_a_folder(tmp_path: Path) -> None:
    other = holder(tmp_path / ".out.lock")
    with pytest.raises(EmitError, match="written by another compile, process"):
        place_package(tmp_path / "out", lambda folder: None, force=False, check=None)
    end(other)
    place_package(tmp_path / "out", lambda folder: None, force=False, check=None)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


STEP = StepResult(loss=0.5, rate=0.1, samples=4, gradient_norm=None, skipped=False)


def log(path: Path, *, after: int = 0, steps: int = 1) -> None:
    made = StepLog(path, after)
    for step in range(after + 1, after + steps + 1):
        made.step(step, STEP, 0.1)
    made.close()


def test_a_log_goes_through_links_and_keeps_its_mode(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.write_text("")
    real.chmod(0o640)
    (tmp_path / "link").symlink_to(real)

    log(tmp_path / "link", steps=3)
    log(tmp_path / "link", after=2)

    assert (tmp_path / "link").is_symlink()
    assert mode(real) == 0o640
    assert [json.loads(line)["step"] for line in real.read_text().splitlines()] == [1, 2, 3]


def test_a_log_to_a_device_or_a_pipe(tmp_path: Path) -> None:
    log(Path("/dev/null"))
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)

    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    log(tmp_path / "pipe")
    reader.join()
    assert json.loads(read[0])["step"] == 1


LOGGING = """
import sys
from pathlib import Path
from gpipe_compiler.runtime.train.training_log import StepLog
from gpipe_compiler.runtime.train.optimizer import StepResult
print("before", flush=True)
log = StepLog(Path("/dev/stdout"), 0)
log.step(1, StepResult(loss=0.5, rate=0.1, samples=4, gradient_norm=None, skipped=False), 0.1)
log.close()
print("after")
"""


def test_a_log_to_stdout_that_is_a_file(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as stream:
        subprocess.run([sys.executable, "-c", LOGGING], stdout=stream, check=True)
    before, step, after = (tmp_path / "out").read_text().splitlines()

    assert (before, after) == ("before", "after")
    assert json.loads(step)["step"] == 1
