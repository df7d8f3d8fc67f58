"""The options that say what machines there are, all the way to a plan."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from gpipe_compiler.cli import main as cli
from gpipe_compiler.cluster import Cluster, Device, Link, devices_named, read_cluster
from gpipe_compiler.cluster.local import machine_name
from gpipe_compiler.plan import Plan
from gpipe_compiler.report.machine import machine_file

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "clusters"
MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 2))

def example_inputs():
    return torch.ones(8, 8)

def loss_fn(output, target):
    return output.square().sum()

example_target = example_inputs
"""

Printed = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a model and a cluster file that is wrong."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "machines_model.py").write_text(MODEL)
    (tmp_path / "wrong.toml").write_text("[[hosts]]\ndevices = '2xH100'\ncuont = 2\n")
    return tmp_path


def planned(words: str, capsys: Printed) -> Plan:
    """The plan of a dry run."""
    command = f"machines_model.py -k 2 -m 4 --dry-run --json {words}"
    assert cli.compile_command(command.split()) == 0
    return Plan.from_json(json.dumps(json.loads(capsys.readouterr().out)["plan"]))


@pytest.mark.parametrize("words", ["4xH200", "2xV100,2xP40", "RTX4090", "h100-pcie,l4"])
def test_devices_go_into_the_plan(words: str, capsys: Printed) -> None:
    plan = planned(f"--devices {words}", capsys)

    named = devices_named(words)
    assert plan.cluster == named.sized(2)
    assert set(plan.devices) <= set(named.devices)
    assert {word.removeprefix("roofline on ") for word in plan.cost_source.split("; ")} == {
        device.name for device in named.kinds
    }


@pytest.mark.parametrize("name", ["two_hosts", "mixed_host", "own_devices"])
def test_cluster_files_go_into_the_plan(name: str, capsys: Printed) -> None:
    plan = planned(f"--cluster {EXAMPLES / name}.toml", capsys)

    assert plan.cluster == read_cluster(EXAMPLES / f"{name}.toml")


def test_links_and_memories_are_replaced_everywhere(capsys: Printed) -> None:
    words = f"--cluster {EXAMPLES}/own_devices.toml --bandwidth 8Gb/s --latency 3us --memory 5GiB"

    cluster = planned(words, capsys).cluster

    pairs = [(0, 1), (4, 5), (0, 4)]
    assert {cluster.between(*pair).seconds(10**9) for pair in pairs} == {1 + 3e-6}
    assert {device.memory for device in cluster.devices} == {5 * 2**30}


def test_measured_times_say_where_they_are_scaled(capsys: Printed) -> None:
    plan = planned("--devices V100,P40 --cost measured", capsys)

    assert plan.cost_source.startswith("measured on ")
    assert plan.cost_source.endswith("; on V100, P40 scaled by rooflines")


def test_a_dry_run_names_the_devices(capsys: Printed) -> None:
    words = "machines_model.py -k 2 --dry-run --devices 4xH200"
    assert cli.compile_command(words.split()) == 0

    printed = capsys.readouterr().out
    assert "in 2 stages on 2 x H200, NVLink 450 GB/s: gpipe" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--devices abacus", "error: no device is known as 'abacus'"),
        ("--devices 0xH100", "error: '0xH100' names no devices"),
        ("--devices local,H100", "error: local does not mix with other devices"),
        ("--cluster none.toml", "error: there is no file none.toml"),
        ("--cluster machines_model.py", "error: machines_model.py is no TOML: "),
        (
            "--cluster wrong.toml",
            "error: wrong.toml describes no cluster:\n"
            "  - line 3: hosts[0].cuont means nothing here; did you mean count?\n  hint: ",
        ),
        ("--cluster wrong.toml --devices H100", "argument --devices: not allowed with argument"),
        ("--bandwidth 450GB", "'450GB' is no bandwidth: write bytes/s"),
    ],
)
def test_what_is_wrong_ends_with_2_and_a_message(words: str, said: str, capsys: Printed) -> None:
    assert cli.compile_command(f"machines_model.py -k 2 --dry-run {words}".split()) == 2

    printed = capsys.readouterr()
    assert said in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


GRAPH = {
    "ops": [
        {
            "name": name,
            "forward_s": 1.0,
            "backward_s": 0.0,
            "output_bytes": 10**9,
            "parameter_bytes": 1,
            "saved_bytes": 0,
        }
        for name in "ab"
    ],
    "edges": [["a", "b"]],
}


@pytest.mark.parametrize(
    ("words", "step_s"),
    [
        ("2xV100", 3 + 1e-5 + 1 / 150),
        ("2xV100 --bandwidth 2G --latency 0", 3.5),
        ("2xV100 --bandwidth 0.5G", 4.0),
        ("V100,P40", 1 + 2 * 15.7 / 11.76 + 1e-5 + 1 / 12),
    ],
)
def test_graphs_from_elsewhere_run_on_devices_too(
    words: str, step_s: float, capsys: Printed, in_folder: Path
) -> None:
    """Two micro-batches through two ops of a second: in two stages, or where links are slow in one.

    The last of them leaves after 1 + 2 seconds and one transfer, of which the P40 needs more.
    """
    (in_folder / "graph.json").write_text(json.dumps(GRAPH))
    command = f"graph.json -k 2 -m 2 --mode infer --json --devices {words}"

    assert cli.compile_command(command.split()) == 0
    answer = json.loads(capsys.readouterr().out)

    assert answer["step_time_s"] == pytest.approx(step_s)


@pytest.mark.slow
def test_what_is_measured_is_shown_and_written(tmp_path: Path, capsys: Printed) -> None:
    assert cli.inspect_command(["machine"]) == 0
    assert "TFLOP/s in large products" in capsys.readouterr().out
    file = tmp_path / "this.toml"
    assert cli.inspect_command(["machine", "-o", str(file)]) == 0
    capsys.readouterr()
    assert machine_name() == read_cluster(file).devices[0].name


@pytest.mark.parametrize("shared", [True, False])
def test_a_file_says_all_that_was_measured(shared: bool, tmp_path: Path, capsys: Printed) -> None:
    """Of any machine; devices in one memory have equal parts of it."""
    device = Device("A card", 1e13, 1e12, 80 * 10**9, 5e-6, 3e14, 1e14, 2e14, 2**23, 10**9)
    link = Link(25e9, 1e-5)
    devices = (device,) if shared else (device,) * 4
    cluster = Cluster(devices, link, endless=shared, pooled=shared, places=4)
    file = tmp_path / "described.toml"
    file.write_text(machine_file(cluster, link))

    found = read_cluster(file)
    memory = device.memory // 4 if shared else device.memory
    assert found.devices == (dataclasses.replace(device, memory=memory),) * 4
    assert dataclasses.replace(found.between(0, 3), name="") == link
    assert planned(f"--cluster {file}", capsys).cluster == found.sized(2)
