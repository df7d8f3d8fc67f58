"""Cluster files and their quantities, against what the same words mean when written in Python."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_compiler.cluster import (
    Cluster,
    Device,
    Link,
    built_in,
    devices_named,
    read_cluster,
)
from gpipe_compiler.cluster.catalogue import NVLINK2, NVLINK4, PCIE3, PCIE4
from gpipe_compiler.cluster.machines import MOST_DEVICES
from gpipe_compiler.cluster.quantities import BANDWIDTH, SIZE, SPEED, TIME, rate_text
from gpipe_compiler.errors import UsageError

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"


class TestQuantities:
    @pytest.mark.parametrize(
        ("quantity", "written", "value"),
        [
            (BANDWIDTH, "450GB/s", 450e9),
            (BANDWIDTH, "400Gb/s", 50e9),
            (BANDWIDTH, "400 Gbit/s", 50e9),
            (BANDWIDTH, "12.5G", 12.5e9),
            (BANDWIDTH, "1GiB/s", 2**30),
            (BANDWIDTH, 3e9, 3e9),
            (TIME, "10us", 1e-5),
            (TIME, "2.5 ms", 2.5e-3),
            (TIME, "5µs", 5e-6),
            (TIME, 0, 0.0),
            (SIZE, "80GiB", 80 * 2**30),
            (SIZE, "80GB", 80e9),
            (SIZE, 1, 1.0),
            (SPEED, "66.9TFLOP/s", 66.9e12),
            (SPEED, "1.5PFLOPS", 1.5e15),
            (SPEED, "2e9", 2e9),
        ],
    )
    def test_are_read_with_their_units(self, quantity, written, value) -> None:
        assert quantity.read(written) == pytest.approx(value, rel=1e-15)

    @pytest.mark.parametrize(
        ("quantity", "written"),
        [
            (BANDWIDTH, "450GB"),
            (BANDWIDTH, "0"),
            (BANDWIDTH, -1),
            (BANDWIDTH, "-1GB/s"),
            (BANDWIDTH, True),
            (BANDWIDTH, None),
            (BANDWIDTH, math.inf),
            (BANDWIDTH, "1e999"),
            (BANDWIDTH, math.nan),
            (BANDWIDTH, [1]),
            (TIME, "3h"),
            (TIME, -1e-6),
            (SIZE, "80Gib"),
            (SIZE, "80Gb"),
            (SIZE, 0.5),
            (SPEED, "3THz"),
            (SPEED, "1 2"),
        ],
    )
    def test_of_another_kind_are_refused(self, quantity, written) -> None:
        with pytest.raises(ValueError, match=rf"is no {quantity.name}: write"):
            quantity.read(written)

    @given(st.floats(min_value=1.0, max_value=9.99e14))
    def test_rates_are_told_to_three_figures(self, rate: float) -> None:
        text = rate_text(rate)

        assert BANDWIDTH.read(text) == pytest.approx(rate, rel=5.1e-3)
        assert len(text.split()[0].replace(".", "").lstrip("0")) <= 4


class TestFiles:
    def test_two_hosts(self) -> None:
        cluster = read_cluster(EXAMPLES / "two_hosts.toml")

        assert cluster.devices == (built_in("h100").device,) * 8
        assert cluster.hosts == (0,) * 4 + (1,) * 4
        assert cluster.between(0, 3) == cluster.between(6, 7) == NVLINK4
        assert cluster.between(3, 4) == cluster.between(0, 7) == Link(50e9, 5e-6)
        assert str(cluster) == "2 hosts of 4 x H100, NVLink 450 GB/s, network 50 GB/s"

    def test_a_mixed_host(self) -> None:
        cluster = read_cluster(EXAMPLES / "mixed_host.toml")

        plainly = devices_named("2xV100,2xP40")
        assert cluster.devices == plainly.devices
        assert cluster.between(3, 2) == Link(13e9, 8e-6)
        others = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
        assert all(cluster.between(*pair) == plainly.between(*pair) for pair in others)

    def test_own_devices(self) -> None:
        cluster = read_cluster(EXAMPLES / "own_devices.toml")

        accelerator = Device(
            "accelerator", 3e12, 300e9, 8 * 2**30, 8e-6, half_flops=22e12, bf16_flops=22e12
        )
        slower = dataclasses.replace(
            built_in("A100-40GB").device, name="shared-a100", memory=30 * 2**30, flops=17e12
        )
        assert cluster.devices == (accelerator,) * 4 + (slower,) * 2
        assert cluster.between(0, 3) == Link(60e9, 2e-6)
        assert cluster.between(4, 5) == PCIE4
        assert cluster.between(0, 5) == Link(12.5e9, 2e-5)

    def test_every_example_is_tested_here(self) -> None:
        assert {path.stem for path in EXAMPLES.glob("*.toml")} == {
            "two_hosts",
            "mixed_host",
            "own_devices",
        }

    def test_hosts_may_be_of_different_makes(self, tmp_path: Path) -> None:
        """Most pairs, ten, are joined by PCIe 3; those of the other two hosts are special."""
        cluster = described(
            tmp_path,
            '[network]\nbandwidth = 1e9\n[[hosts]]\ndevices = "2xV100"\n'
            '[[hosts]]\ndevices = ["1xL4", "4xP40"]\n[[hosts]]\ndevices = "2xL4"',
        )

        assert cluster.link == PCIE3
        joined = {
            (0, 1): NVLINK2,
            (2, 3): PCIE3,
            (3, 6): PCIE3,
            (7, 8): PCIE4,
            (1, 2): Link(1e9, 1e-5),
        }
        assert {pair: cluster.between(*pair) for pair in joined} == joined
        assert len(cluster.exceptions) == 2

    def test_this_machine_is_measured_once(self, tmp_path: Path) -> None:
        cluster = described(
            tmp_path,
            '[devices.half]\nlike = "local"\nmemory = "1GiB"\n'
            '[[hosts]]\ndevices = ["local", "half", "local"]',
        )

        here, half, again = cluster.devices
        assert here == again
        assert half == dataclasses.replace(here, name="half", memory=2**30)

    def test_a_device_may_be_called_as_a_built_in_one(self, tmp_path: Path) -> None:
        cluster = described(
            tmp_path,
            '[devices.H100]\nlike = "H100"\nmemory = 5\n[[hosts]]\ndevices = "h100"',
        )

        assert cluster.devices == (dataclasses.replace(built_in("h100").device, memory=5),)

    def test_bare_numbers_are_in_plain_units(self, tmp_path: Path) -> None:
        cluster = described(
            tmp_path,
            "[devices.mine]\nflops = 1e12\nmemory_bandwidth = 1e11\nmemory = 1_000\nlaunch = 0\n"
            '[[hosts]]\ndevices = "2xmine"\nlink = { bandwidth = 1e9, latency = 1e-5 }',
        )

        assert cluster.devices == (Device("mine", 1e12, 1e11, 1000, 0.0),) * 2
        assert cluster.link == Link(1e9, 1e-5)


def described(folder: Path, text: str) -> Cluster:
    """The cluster of a file with this text."""
    file = folder / "cluster.toml"
    file.write_text(text)
    return read_cluster(file)


HOST = '[[hosts]]\ndevices = "2xH100"\n'
FAULTS = [
    ("", "hosts is missing"),
    ("hosts = 3", "line 1: hosts has to be tables, each under [[hosts]]"),
    ("[[hosts]]", "line 1: hosts[0].devices is missing"),
    ("[[hosts]]\ndevices = 4", "line 2: hosts[0].devices = 4 names no devices"),
    ("[[hosts]]\ndevices = []", "line 2: hosts[0].devices = [] names no devices"),
    ('[[hosts]]\ndevices = "0xH100"', "line 2: hosts[0].devices = '0xH100' names no devices"),
    (
        '[[hosts]]\ndevices = ["H100", "abacus"]',
        "line 2: hosts[0].devices = 'abacus' is no device: known are",
    ),
    (HOST + "count = 0", "line 3: hosts[0].count = 0 is not a whole number of at least 1"),
    (HOST + "count = true", "line 3: hosts[0].count = True is not a whole number"),
    (HOST + "count = 99999", "line 3: hosts[0].count makes 199,998 devices, more than"),
    (HOST + "cuont = 2", "line 3: hosts[0].cuont means nothing here; did you mean count?"),
    (HOST + 'link = "rope"', "line 3: hosts[0].link = 'rope' is no link: known are pcie3"),
    (HOST + 'link = { latency = "1us" }', "line 3: hosts[0].link.bandwidth is missing"),
    (HOST + "link = 7", "line 3: hosts[0].link = 7 is no link"),
    (HOST + "count = 2", "network is missing: say what joins the hosts"),
    (HOST + "[network]\nlatency = 1", "line 3: network.bandwidth is missing"),
    (
        HOST + '[network]\nbandwidth = "1GB"',
        "line 4: network.bandwidth = '1GB' is no bandwidth: write bytes/s",
    ),
    (HOST + "[rest]", "line 3: rest means nothing here; known: devices, hosts, network"),
    (HOST + "[[exceptions]]\nbandwidth = 1", "line 3: exceptions[0].pairs is missing"),
    (
        HOST + "[[exceptions]]\nbandwidth = 1\npairs = [0, 1]",
        "line 5: exceptions[0].pairs = [0, 1] is no list of pairs",
    ),
    (
        HOST + "[[exceptions]]\nbandwidth = 1\npairs = [[0, 2]]",
        "line 5: exceptions[0].pairs [0, 2] names device 2, but they are numbered from 0 to 1",
    ),
    (
        HOST + "[[exceptions]]\nbandwidth = 1\npairs = [[1, 1]]",
        "line 5: exceptions[0].pairs [1, 1] is a single device",
    ),
    (
        HOST + "[[exceptions]]\nbandwidth = 1\npairs = [[0, 1], [1, 0]]",
        "line 5: exceptions[0].pairs [1, 0] has a link already",
    ),
    (HOST + "[devices]\nmine = 3", "line 4: devices.mine = 3 is no table"),
    (
        HOST + "[devices.local]\nlike = 'H100'",
        "line 3: devices.local is what this machine is called",
    ),
    (HOST + "[devices.mine]\nlike = 'abacus'", "line 4: devices.mine.like = 'abacus' is no device"),
    (
        HOST + "[devices.mine]\nflops = 1\nmemory = 1",
        "line 3: devices.mine.memory_bandwidth is missing",
    ),
    (
        HOST + "[devices.mine]\nlike = 'H100'\nflops = 'fast'",
        "line 5: devices.mine.flops = 'fast' is no speed",
    ),
    (
        HOST + "[devices.mine]\nlike = 'H100'\nflops = { fp33 = 1 }",
        "line 5: devices.mine.flops.fp33 means nothing here; did you mean fp32?",
    ),
    (
        "[devices.mine]\nflops = 1\nmemory = 1\nmemory_bandwidth = 1\n"
        '[[hosts]]\ndevices = "2xmine"',
        "line 5: hosts[0].link is missing: say what joins its devices",
    ),
    (
        "[devices.mine]\nflops = 1\nmemory = 1\nmemory_bandwidth = 1\n"
        '[[hosts]]\ndevices = ["mine", "H100"]',
        "line 5: hosts[0].link is missing: say what joins its devices",
    ),
]


class TestFaults:
    @pytest.mark.parametrize(("text", "said"), FAULTS)
    def test_each_is_told_with_its_place(self, text: str, said: str, tmp_path: Path) -> None:
        with pytest.raises(UsageError) as raised:
            described(tmp_path, text)

        assert f"\n  - {said}" in raised.value.problem

    def test_all_are_told_at_once_from_the_top(self, tmp_path: Path) -> None:
        text = (
            "[network]\nbandwidth = 0\n\n[devices.mine]\nmemory = '8GX'\n\n"
            "[[hosts]]\ndevices = '4xH100'\ncount = 0\n\n"
            "[[hosts]]\ndevices = 'abacus'\n\n[[exceptions]]\nbandwidth = -3\npairs = [[7, 7]]\n"
        )

        with pytest.raises(UsageError) as raised:
            described(tmp_path, text)

        lines = raised.value.problem.splitlines()[1:]
        places = [line.split()[3] for line in lines]
        assert places == [
            "network.bandwidth",
            "devices.mine.flops",
            "devices.mine.memory_bandwidth",
            "devices.mine.memory",
            "hosts[0].count",
            "hosts[1].devices",
            "exceptions[0].bandwidth",
            "exceptions[0].pairs",
        ]
        numbers = [int(line.split()[2].rstrip(":")) for line in lines]
        assert numbers == [2, 4, 4, 5, 9, 12, 15, 16]

    def test_a_device_that_is_wrong_is_not_unknown_besides(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError) as raised:
            described(tmp_path, "[devices.mine]\nlike = 7\n[[hosts]]\ndevices = 'mine'")

        assert len(raised.value.problem.splitlines()) == 2

    def test_what_is_no_toml_is_told_with_its_line(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"is no TOML: .*line 2"):
            described(tmp_path, "[network]\nbandwidth = 12GB")

    def test_what_is_no_text_or_no_file_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="there is no file"):
            read_cluster(tmp_path / "none.toml")
        with pytest.raises(UsageError, match="directory"):
            read_cluster(tmp_path)
        (tmp_path / "bytes").write_bytes(b"\xff\xfe")
        with pytest.raises(UsageError, match="not UTF-8"):
            read_cluster(tmp_path / "bytes")

    def test_there_is_a_largest_cluster(self, tmp_path: Path) -> None:
        hosts = "[network]\nbandwidth = 1\n" + HOST + f"count = {MOST_DEVICES // 2}\n" + HOST

        with pytest.raises(UsageError, match=r"hosts has 2,050 devices, more than 2,048"):
            described(tmp_path, hosts)
