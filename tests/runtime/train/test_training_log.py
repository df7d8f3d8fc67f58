"""The log of training and its line for the user, against what was told to them."""

from __future__ import annotations

import errno
import io
import json
import math
import os

import pytest

from gpipe_compiler.runtime.errors import PipelineError
from gpipe_compiler.runtime.train.evaluation import EvaluationResult
from gpipe_compiler.runtime.train.optimizer import StepResult
from gpipe_compiler.runtime.train.training_log import StepLog, StepPrinter


def stepped(loss=1.0, *, norm=None, skipped=False):
    return StepResult(loss=loss, rate=0.1, samples=8, gradient_norm=norm, skipped=skipped)


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_for_every_step(tmp_path):
    """On the disk at once; a number that JSON has not is null."""
    path = tmp_path / "logs" / "train.jsonl"
    log = StepLog(path, 0)
    log.step(1, stepped(0.5), 0.25)
    assert written(path) == [
        {"step": 1, "loss": 0.5, "lr": 0.1, "seconds": 0.25, "samples": 8, "skipped": False}
    ]
    log.step(2, stepped(math.inf, norm=math.nan, skipped=True), 1.0)
    log.evaluation(2, EvaluationResult(0.75, {"accuracy": 0.5}))
    assert written(path)[1:] == [
        {
            "step": 2,
            "loss": None,
            "lr": 0.1,
            "grad_norm": None,
            "seconds": 1.0,
            "samples": 8,
            "skipped": True,
        },
        {"evaluation": {"step": 2, "loss": 0.75, "accuracy": 0.5}},
    ]


@pytest.mark.parametrize("cut", ["", '{"step": 6, "lo', "nonsense\n", "[1]\n"])
def test_a_run_that_goes_on_doubles_no_step(tmp_path, cut):
    """Later steps, and a line that a killed process has left unfinished, are cut off."""
    path = tmp_path / "train.jsonl"
    log = StepLog(path, 0)
    for step in range(1, 6):
        log.step(step, stepped(), 0.0)
        if step % 2 == 0:
            log.evaluation(step, EvaluationResult(1.0))
    log.close()
    with path.open("a") as stream:
        stream.write(cut)

    again = StepLog(path, 4)
    again.evaluation(4, EvaluationResult(1.0))  # made again after the restart, and known
    again.step(5, stepped(), 0.0)

    steps = [line.get("step", 0) or -line["evaluation"]["step"] for line in written(path)]
    assert steps == [1, 2, -2, 3, 4, -4, 5]


def test_a_new_run_begins_a_new_log(tmp_path):
    path = tmp_path / "train.jsonl"
    StepLog(path, 0).step(1, stepped(), 0.0)
    StepLog(path, 0).close()
    assert path.read_text() == ""


class Full(io.StringIO):
    """A file on a full disk."""

    def flush(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told(tmp_path):
    path = tmp_path / "train.jsonl"
    log = StepLog(path, 0)
    log._file = Full()
    with pytest.raises(PipelineError) as caught:
        log.step(1, stepped(), 0.0)
    assert caught.value.problem == f"cannot write {path}: No space left on device"
    with pytest.raises(PipelineError, match=r"cannot write .*below: File exists"):
        StepLog(path / "below", 0)


def test_lines_for_the_user(capsys):
    """Not on a terminal: the first, every tenth, the last, and what was skipped."""
    teller = StepPrinter(1, 30, quiet=False)
    for step in range(1, 31):
        teller.step(step, stepped(step, skipped=step == 5))
    told = capsys.readouterr().out.splitlines()

    assert [int(line.split()[1].split("/")[0]) for line in told] == [1, 3, 5, *range(6, 31, 3)]
    assert told[0].startswith("step 1/30  loss 1  ")
    assert told[2].endswith("samples/s  skipped: fp16 gradients overflow")


def test_lines_without_a_known_end(capsys):
    teller = StepPrinter(8, None, quiet=False)
    for step in range(8, 25):
        teller.step(step, stepped())
    teller.line("done")

    told = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in told] == ["step 8", "step 10", "step 20", "done"]


def test_other_ranks_are_quiet(capsys):
    teller = StepPrinter(1, 2, quiet=True)
    teller.step(1, stepped())
    teller.line("done")
    assert capsys.readouterr().out == ""
