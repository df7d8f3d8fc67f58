"""`gpipe-compile graph.json`: what it prints and refuses, from the words typed to the exit code.

Figures are those of graphs small enough to be worked out by hand.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe_compiler.cli import main as cli
from gpipe_compiler.runtime.spec import ScheduleKind

Printed = pytest.CaptureFixture[str]


def op(name: str, forward: float = 1.0, backward: float = 2.0, **more: object) -> dict[str, object]:
    sizes = {"output_bytes": 12, "parameter_bytes": 10}
    return {"name": name, "forward_s": forward, "backward_s": backward} | sizes | more


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four equal ops in a row."""
    monkeypatch.chdir(tmp_path)
    edges = [["a", "b"], ["b", "c"], ["c", "d"]]
    write(tmp_path / "graph.json", {"ops": [op(name) for name in "abcd"], "edges": edges})
    return tmp_path / "graph.json"


def write(path: Path, document: object) -> None:
    path.write_text(json.dumps(document))


def answer(words: str, capsys: Printed) -> dict[str, object]:
    assert cli.compile_command(["graph.json", "--json", *words.split()]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_command_of_the_issue(graph: Path, capsys: Printed) -> None:
    """Eight micro-batches through four stages of 1 s and 2 s: 11 times each way; 12 bytes take
    1e-9 s, three times there and three times back."""
    found = answer("--stages 4 --microbatches 8 --bandwidth 12e9 --dry-run --prove", capsys)

    assert found["stages"] == [["a"], ["b"], ["c"], ["d"]]
    assert found["step_time_s"] == pytest.approx(11 + 22 + 6e-9, rel=1e-12)
    assert found["bottleneck_s"] == pytest.approx(3 + 4e-9, rel=1e-12)
    assert found["lower_bound_s"] == found["step_time_s"]
    assert (found["gap"], found["proved"]) == (0, True)
    assert float(str(found["seconds"])) >= 0


def test_it_does_without_torch(graph: Path) -> None:
    """Which takes longer to import than most plans take."""
    code = (
        "import sys; from gpipe_compiler.cli.main import compile_command\n"
        "assert compile_command(['graph.json', '-k', '2', '--json', '--dry-run']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=graph.parent, capture_output=True)


def test_the_longest_stage(graph: Path, capsys: Printed) -> None:
    found = answer("-k 2 --objective bottleneck", capsys)

    assert found["stages"] == [["a", "b"], ["c", "d"]]
    assert found["lower_bound_s"] == found["bottleneck_s"] == pytest.approx(6 + 2e-9, rel=1e-12)


def test_fewer_stages_where_the_link_is_slow(graph: Path, capsys: Printed) -> None:
    """A boundary costs 24 s on either side; one stage takes 12 s."""
    found = answer("-k 4 --bandwidth 1 --objective bottleneck --prove", capsys)

    assert found["stages"] == [["a", "b", "c", "d"]]
    assert found["proved"]


def test_latency_counts_for_every_value(graph: Path, capsys: Printed) -> None:
    found = answer("-k 2 -m 1 --latency 500ms --objective bottleneck", capsys)

    assert found["bottleneck_s"] == pytest.approx(7 + 2e-9, rel=1e-12)


def test_inference(graph: Path, capsys: Printed) -> None:
    found = answer("-k 4 -m 8 --mode infer", capsys)

    assert (found["mode"], found["schedule"]) == ("infer", None)
    assert found["step_time_s"] == pytest.approx(11 + 3e-9, rel=1e-12)


@pytest.mark.parametrize("schedule", [kind.value for kind in ScheduleKind])
def test_every_schedule(schedule: str, graph: Path, capsys: Printed) -> None:
    found = answer(f"-k 4 -m 8 --schedule {schedule}", capsys)

    stages = found["stages"]
    assert isinstance(stages, list)
    assert [name for stage in stages for name in stage] == list("abcd")
    devices = {figure["device"] for figure in found["stage_figures"]}  # type: ignore[attr-defined]
    assert 8 * 12 / len(devices) <= float(str(found["step_time_s"]))


def test_memory(graph: Path, capsys: Printed) -> None:
    """Weights and their gradients, 20 bytes an op, and 12 bytes that a stage receives."""
    found = answer("-k 4 -m 1 --memory 60", capsys)
    assert len(found["stages"]) >= 2  # type: ignore[arg-type]
    assert max(found["device_bytes"]) <= 60  # type: ignore[call-overload]

    assert cli.compile_command(["graph.json", "-k", "4", "-m", "1", "--memory", "10"]) == 1
    assert "no cut into at most 4 stages fits into memory" in capsys.readouterr().err


def test_a_table(graph: Path, capsys: Printed) -> None:
    for option, known in (([], "lower bound met"), (["--prove"], "proved optimal")):
        assert cli.compile_command(["graph.json", "-k", "2", "-m", "4", *option]) == 0

        out = " ".join(capsys.readouterr().out.split())
        assert "graph in 2 stages: gpipe, 4 micro-batches" in out
        assert f"({known})" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--remat full", "a graph in a JSON file takes no --remat: it is planned"),
        ("--input 3x4 -o here", "takes no --input nor --output"),
        ("--pin a=0 --split-at b", "takes no --pin nor --split-at"),
        ("--schedule auto", "takes no --schedule auto: the best settings"),
        ("--stages auto -m auto", "takes no --stages auto nor --microbatches auto"),
        ("--objective speed", "invalid choice: 'speed'"),
    ],
)
def test_options_that_make_no_sense(words: str, said: str, graph: Path, capsys: Printed) -> None:
    assert cli.compile_command(["graph.json", "-k", "2", *words.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", ":1: this is no JSON"),
        ("[1, 2]", "found a list"),
        ('{"ops": [], "edges": []}', "there are no ops"),
        ('{"ops": []}', "the graph lacks edges"),
        (json.dumps({"ops": [op("a") | {"forward": 1}], "edges": []}), "is forward_s meant?"),
        (json.dumps({"ops": [op("a", -1.0)], "edges": []}), "forward_s is -1.0, but cannot be"),
        (json.dumps({"ops": [op("a", float("nan"))], "edges": []}), "a finite number, not nan"),
        (json.dumps({"ops": [op("a", True)], "edges": []}), "is to be a number, not True"),
        (json.dumps({"ops": [op("a"), op("a")], "edges": []}), "several ops are named 'a'"),
        (json.dumps({"ops": [op("conv1")], "edges": [["conv1", "conv2"]]}), "is 'conv1' meant?"),
        (json.dumps({"ops": [op("a")], "edges": [["a"]]}), "a pair of op names"),
        (
            json.dumps({"ops": [op(n) for n in "abc"], "edges": [["a", "b"], ["b", "a"]]}),
            "circle: a -> b -> a",
        ),
        (json.dumps({"ops": [op("a")], "edges": [["a", "a"]]}), "circle: a -> a"),
        (json.dumps({"ops": [op("a", weight_s=3.0)], "edges": []}), "a part of backward_s"),
        ('{"ops": 1, "ops": [], "edges": []}', "has the field 'ops' more than once"),
    ],
)
def test_faults_of_the_file(text: str, said: str, graph: Path, capsys: Printed) -> None:
    graph.write_text(text)

    assert cli.compile_command(["graph.json", "-k", "2"]) == 1
    assert said in capsys.readouterr().err


def test_all_faults_are_said_at_once(graph: Path, capsys: Printed) -> None:
    ops = [op("a", -1.0), op("b", float("inf")), {"name": "c"}]
    write(graph, {"ops": ops, "edges": [["a", "z"]], "title": "x"})

    assert cli.compile_command(["graph.json", "-k", "2", "--json"]) == 1
    problem = json.loads(capsys.readouterr().out)["error"]["problem"]
    for said in ("'a': forward_s", "'b': forward_s", "'c' lacks forward_s", "'z'", "'title'"):
        assert said in problem


def test_there_is_no_file(graph: Path, capsys: Printed) -> None:
    assert cli.compile_command(["nothing.json", "-k", "2"]) == 2
    assert "there is no file nothing.json" in capsys.readouterr().err
