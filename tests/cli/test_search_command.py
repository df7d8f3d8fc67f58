"""What gpipe-compile understands of constraints and of `auto`, and what it prints of them.

A small model is planned for real, without writing a package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpipe_compiler.cli import asked
from gpipe_compiler.cli import main as cli
from gpipe_compiler.cli.arguments import compile_parser
from gpipe_compiler.cluster import IN_PROCESS, Cluster, Device
from gpipe_compiler.options import Auto, Constraints

MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

def example_inputs():
    return torch.ones(8, 4)

def loss_fn(output, target):
    return output.square().sum()

example_target = example_inputs
"""

DEVICE = Device("toy", 1e9, 1e9, 10**6, 1e-6)

Printed = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def deep_model(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workplace / "model.py").write_text(MODEL)
    two = Cluster((DEVICE, DEVICE), IN_PROCESS)
    monkeypatch.setattr(asked, "devices_named", lambda name: two)


def run(words: str) -> int:
    return cli.compile_command(["model.py", "--dry-run", *words.split()])


def planned(words: str, capsys: Printed) -> dict[str, Any]:
    assert run(f"{words} --json") == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


class TestConstraints:
    def test_they_are_read(self) -> None:
        words = "model.py -k 3 --pin a.b=1 --pin head=-1 --keep-together c --split-at d"
        given = asked.options_of(compile_parser().parse_args(words.split()), 3).constraints
        assert given == Constraints((("a.b", 1), ("head", -1)), ("c",), ("d",))

    @pytest.mark.parametrize("pin", ["head", "head=", "=1", "head=one", "head=1.5", "head=--1"])
    def test_a_pin_without_a_stage_is_refused(self, pin: str, capsys: Printed) -> None:
        assert run(f"-k 2 --pin {pin}") == 2
        assert "write MODULE=STAGE" in capsys.readouterr().err

    def test_they_are_kept_and_shown(self, capsys: Printed) -> None:
        stages = planned("-k 2 --pin 2=0 --split-at 4", capsys)["plan"]["stages"]
        assert any("2" in op for op in stages[0]["ops"])
        assert any("4" in op for op in stages[1]["ops"])

        assert run("-k 2 --pin 2=0 --split-at 4") == 0
        assert "--pin 2=0, --split-at 4" in capsys.readouterr().out

    def test_all_that_is_unknown_is_told_at_once(self, capsys: Printed) -> None:
        assert run("-k 2 --pin 22=0 --keep-together encoder") == 2

        told = capsys.readouterr().err
        assert "'22'; did you mean 2?" in told
        assert "'encoder'" in told
        assert "the modules are 0, 1, 2, 3, 4" in told

    def test_what_contradicts_is_told(self, capsys: Printed) -> None:
        assert run("-k 2 --pin 0=1 --pin 4=0") == 2
        assert "--pin 4=0: some of it has to lie in stage 1 or later, by --pin 0=1" in (
            capsys.readouterr().err
        )


class TestAuto:
    def test_each_may_be_auto(self) -> None:
        words = "model.py --stages auto --microbatches auto --schedule auto --remat auto"
        given = compile_parser().parse_args(words.split())
        assert given.stages is given.microbatches is Auto.AUTO

    @pytest.mark.parametrize("words", ["-k automatic", "-k 2 -m none", "-k 0"])
    def test_what_is_neither_is_refused(self, words: str, capsys: Printed) -> None:
        assert run(words) == 2
        assert (
            "is no whole number from 1 to 2,147,483,647, and it is not auto"
            in capsys.readouterr().err
        )

    @pytest.mark.parametrize(
        ("words", "free"),
        [
            ("--stages auto --microbatches 4", "stages"),
            ("--stages 2 --microbatches auto", "microbatches"),
            ("--stages 2 --microbatches 4 --schedule auto", "schedule"),
        ],
    )
    def test_one_alone_is_explored(self, words: str, free: str, capsys: Printed) -> None:
        document = planned(words, capsys)
        points = document["frontier"]["points"]

        settings = ("stages", "microbatches", "schedule", "remat")
        for name in settings:
            values = {point[name] for point in points}
            several = len(values) > 1
            # Schedules have other numbers of stages and of devices.
            assert several is (name == free), name
        chosen = points[0]
        assert chosen["reason"] == "chosen"
        assert chosen["step_s"] == document["plan"]["prediction"]["step_s"]
        assert len(document["plan"]["stages"]) == chosen["stages"]
        assert document["plan"]["frontier"]["points"][0]["microbatches"] == chosen["microbatches"]

    def test_the_table_comes_first(self, capsys: Printed) -> None:
        assert run("--stages auto --microbatches auto --schedule auto --remat auto") == 0

        printed = capsys.readouterr().out
        assert printed.startswith("settings, best first")
        assert "chosen" in printed
        assert "dry run: nothing written" in printed

    def test_without_auto_there_is_no_frontier(self, capsys: Printed) -> None:
        assert planned("--stages 2", capsys)["frontier"] is None

    def test_the_package_is_named_for_it(self, workplace: Path) -> None:
        words = "model.py --stages auto --microbatches 2 --no-validate"
        assert cli.compile_command(words.split()) == 0
        assert (workplace / "model_auto" / "plan.json").is_file()

    def test_time_may_be_limited(self, capsys: Printed) -> None:
        words = "--stages auto --microbatches auto --schedule auto --search-time 0s"
        points = planned(words, capsys)["frontier"]["points"]
        assert {"planned", "not reached"} <= {point["status"] for point in points}

    def test_the_kind_of_device_alone_is_not_enough(
        self, capsys: Printed, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(asked, "devices_named", lambda name: Cluster.of(DEVICE, IN_PROCESS))
        assert run("--stages auto") == 2
        assert "--devices 4xtoy" in capsys.readouterr().err

    def test_a_bare_graph_has_its_settings_given(self, workplace: Path, capsys: Printed) -> None:
        (workplace / "graph.json").write_text('{"ops": [], "edges": []}')
        assert cli.compile_command(["graph.json", "--stages", "auto"]) == 2
        assert "auto" in capsys.readouterr().err


class TestMemory:
    def test_a_plan_that_does_not_fit_what_is_stated_is_refused(self, capsys: Printed) -> None:
        assert run("--stages 2 --memory 400B") == 1

        told = capsys.readouterr().err
        assert "more than the 400 B of device" in told
        assert "what would fit" in told

    def test_as_json_too(self, capsys: Printed) -> None:
        assert run("--stages 2 --memory 400B --json") == 1
        error = json.loads(capsys.readouterr().out)["error"]
        assert (error["exit_code"], "--memory" in error["hint"]) == (1, True)

    def test_enough_is_enough(self, capsys: Printed) -> None:
        assert run("--stages 2 --memory 1MiB") == 0

    def test_replicas_and_the_optimizer_count(self, capsys: Printed) -> None:
        plain = planned("--stages 1 --microbatches 2", capsys)["plan"]
        words = "--stages 1 --microbatches 2 --data-parallel 2 --optimizer adam"
        counted = planned(words, capsys)["plan"]

        assert counted["stages"][0]["state_bytes"] == 2 * plain["stages"][0]["state_bytes"]
        assert counted["stages"][0]["update_s"] > plain["stages"][0]["update_s"]
        assert counted["stages"][0]["saved_bytes"] < plain["stages"][0]["saved_bytes"]

    def test_replicas_share_the_batch(self, capsys: Printed) -> None:
        """What crosses is of as many samples as a micro-batch of one replica has."""
        words = "--stages 2 --microbatches 2 --data-parallel 2"
        (crossing,) = planned(words, capsys)["plan"]["crossings"]
        assert run(words) == 0

        assert crossing["shape"][0] == 2
        assert "in 2 x 2 stages" in (said := " ".join(capsys.readouterr().out.split()))
        assert "a batch of 8 in 2 x 2 micro-batches of 2" in said


class TestObjective:
    def test_the_bound_is_of_what_was_to_be_short(self, capsys: Printed) -> None:
        words = "--stages 2 --microbatches 2 --objective bottleneck"
        prediction = planned(words, capsys)["plan"]["prediction"]
        assert run(words) == 0

        longest, bound = prediction["longest_s"], prediction["lower_bound_s"]
        assert bound * (1 + prediction["gap"]) == pytest.approx(longest)
        assert longest < prediction["step_s"]
        assert "of the longest stage (" in " ".join(capsys.readouterr().out.split())


class TestSweep:
    def test_plans_for_several_numbers_of_devices_are_compared(
        self, workplace: Path, capsys: Printed
    ) -> None:
        before = sorted(path.name for path in workplace.iterdir())
        assert cli.compile_command(["model.py", "--sweep", "1,2,3"]) == 0

        printed = capsys.readouterr().out
        assert "The most samples a second of a pipeline that fits" in printed
        assert "no:" in printed  # there are two devices
        assert sorted(path.name for path in workplace.iterdir()) == before

    def test_json_is_all_there_is_on_stdout(self, capsys: Printed) -> None:
        assert cli.compile_command(["model.py", "--sweep", "1,2", "--json"]) == 0

        found = json.loads(capsys.readouterr().out)["sweep"]
        assert [point["devices"] for point in found] == [1, 2]
        assert all(point["fits"] for point in found)

    def test_mini_batches_are_doubled_as_long_as_they_fit(self, capsys: Printed) -> None:
        words = "model.py --stages 2 --batch auto --memory 100kB --json"
        assert cli.compile_command(words.split()) == 0

        found = json.loads(capsys.readouterr().out)["sweep"]
        assert [point["batch_size"] for point in found[:2]] == [8, 16]
        assert [point["fits"] for point in found] == [True] * (len(found) - 1) + [False]
