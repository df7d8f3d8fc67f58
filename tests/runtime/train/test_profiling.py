"""The trace of the steps that are profiled, as one process alone and two ranks write it."""

from __future__ import annotations

import json
from pathlib import Path

import forked
import pytest
import torch
from tiny_pipelines import skip_spec
from torch.profiler import ProfilerActivity, profile
from training_commands import PLAIN, Run

from gpipe_compiler.runtime.train.optimizer import Update
from gpipe_compiler.runtime.train.profiling import merged

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPT = Path(__file__).parents[1] / "train_rank.py"


def read(file):
    """By the name of a process, the names of what runs in it."""
    events = json.loads(file.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    found = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            found[names[event["pid"]]].append(event["name"])
    return found


def work(stages):
    """What a rank with these stages does of a mini-batch of four micro-batches."""
    words = ("forward", "backward")
    names = (f"stage {stage} {word}, micro-batch" for stage in stages for word in words)
    return sorted(f"{name} {number}" for name in names for number in range(4))


def test_two_ranks_write_one_trace(tmp_path):
    """Each of them is a process in it, with the work of its own stages; losses stay the same."""
    for folder in ("ranks", "plain"):
        (tmp_path / folder).mkdir()
    run = Run(tmp_path / "ranks", skip_spec(), PLAIN)
    plain = Run(tmp_path / "plain", skip_spec(), PLAIN)

    words = ("--log-file", run.log, "--steps", 4, "--profile", 1, "--checkpoint-dir", tmp_path)
    done = forked.run(
        [str(word) for word in (SCRIPT, "skip", run.folder, "train", *words)], ranks=2
    )
    assert done.returncode == 0, done.stderr
    assert plain("--steps", 4) == 0

    file = tmp_path / "trace_steps_2-2.json"
    assert f"trace of all ranks: {file} " in done.stdout
    found = read(file)
    assert list(found) == ["rank 0", "rank 1"]
    for rank, stages in enumerate(((0, 1), (2, 3))):
        names = found[f"rank {rank}"]
        assert names.count("step 2") == 1
        assert sorted(name for name in names if name.startswith("stage ")) == work(stages)
        assert "aten::tanh" in names or "aten::addmm" in names
    assert [line["loss"] for line in run.steps] == pytest.approx(
        [line["loss"] for line in plain.steps], rel=1e-6
    )


def test_one_process_with_several_devices(tmp_path, monkeypatch, capsys):
    """Also what their threads do; more steps are asked for than there are."""
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path, skip_spec(), PLAIN)

    assert run("--steps", 2, "--profile", 5, "--devices", "cpu,cpu") == 0

    assert "trace of all ranks: trace_steps_2-2.json " in capsys.readouterr().out
    names = read(tmp_path / "trace_steps_2-2.json")["rank 0"]
    assert sorted(name for name in names if name.startswith("stage ")) == work(range(4))

    assert run("--steps", 1, "--profile", 5) == 0
    assert "nothing was profiled" in capsys.readouterr().out


@pytest.mark.parametrize("failing", [1, 2])
def test_a_run_that_fails_leaves_the_profiler_to_others(tmp_path, monkeypatch, failing):
    """While it warms up, and while it records: torch has one profiler for the whole process."""
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path, skip_spec(), PLAIN)
    update, steps = Update.__call__, []

    def step(self, batches, number):
        steps.append(number)
        if number == failing:
            raise ZeroDivisionError
        return update(self, batches, number)

    monkeypatch.setattr(Update, "__call__", step)
    with pytest.raises(ZeroDivisionError):
        run("--steps", 4, "--profile", 2)
    assert steps == list(range(1, failing + 1))

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        torch.ones(2).tanh()
    names = {event.name for event in seen.events()}
    assert "aten::tanh" in names
    assert f"step {failing}" not in names


def test_gpus_and_clocks_of_ranks_are_told_apart():
    """As torch.profiler writes them: GPUs that do nothing are named, too; arrows count from 1."""

    def labels(pid, label):
        return {
            "ph": "M",
            "name": "process_labels",
            "pid": pid,
            "tid": 0,
            "args": {"labels": label},
        }

    def trace(base, pid):
        return {
            "baseTimeNanoseconds": base,
            "traceEvents": [
                *(labels(pid, "CPU"), labels(0, "GPU 0"), labels(1, "GPU 1")),
                {"ph": "X", "name": "kernel", "pid": 1, "tid": 7, "ts": 5.0, "dur": 1.0},
                {"ph": "s", "name": "ac2g", "id": 1, "pid": pid, "tid": 9, "ts": 4.0},
                {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 9.0},
            ],
        }

    events = merged([trace(2000, 70), trace(5000, 70)])["traceEvents"]

    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0", "rank 0, GPU 1", "rank 1", "rank 1, GPU 1"]
    kernels = [(names[e["pid"]], e["ts"]) for e in events if e["ph"] == "X"]
    assert kernels == [("rank 0, GPU 1", 5.0), ("rank 1, GPU 1", 8.0)]
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 2
    assert all(isinstance(e["pid"], int) for e in events)
