"""Descriptions of machines, against figures of data sheets and sums made by hand."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe_compiler.cluster import (
    BUILT_IN,
    DEFAULT_HOST,
    GLOO,
    NO_LINK,
    NVLINK2,
    NVLINK4,
    PCIE3,
    PCIE4,
    Arithmetic,
    Cluster,
    Device,
    Link,
    built_in,
    devices_named,
    is_here,
    local,
    local_cluster,
    read_cluster,
    this_machine,
    timing,
)
from gpipe_compiler.cluster.catalogue import plain
from gpipe_compiler.cluster.machines import MOST_DEVICES
from gpipe_compiler.cluster.quantities import BANDWIDTH, SIZE, SPEED, TIME, rate_text
from gpipe_compiler.errors import UsageError
from gpipe_compiler.plan import Plan, Prediction
from gpipe_compiler.runtime.spec import ScheduleKind

EXAMPLES = Path(__file__).parent.parent / "examples" / "clusters"
SLOW, FAST = Link(1e9, 1e-3), Link(2e9, 0.0, "wire")


class TestDevices:
    def test_each_arithmetic_has_its_speed(self) -> None:
        bare = Device("bare", 1.0, 1.0, 1, 0.0)
        full = Device("full", 1.0, 1.0, 1, 0.0, half_flops=4.0, tf32_flops=2.0, bf16_flops=3.0)
        half = dataclasses.replace(full, bf16_flops=None)

        assert [bare.speed(kind) for kind in Arithmetic] == [1, 1, 1, 1]
        assert [full.speed(kind) for kind in Arithmetic] == [1, 2, 4, 3]
        assert half.speed(Arithmetic.BF16) == 4

    def test_built_in_ones_are_as_their_data_sheets_say(self) -> None:
        """Dense, and fp32 outside tensor cores; see the catalogue for the sources."""
        h100, v100, p40 = (built_in(name).device for name in ("H100", "v100", "P40"))

        assert (h100.flops, h100.memory_bandwidth, h100.memory) == (66.9e12, 3.35e12, 80 * 10**9)
        assert h100.speed(Arithmetic.BF16) == 989.4e12
        assert h100.speed(Arithmetic.TF32) == 494.7e12
        assert (v100.speed(Arithmetic.FP16), v100.speed(Arithmetic.BF16)) == (125e12, 15.7e12)
        assert {p40.speed(kind) for kind in Arithmetic} == {11.76e12}

    @pytest.mark.parametrize("key", BUILT_IN)
    def test_built_in_ones_make_sense(self, key: str) -> None:
        card = BUILT_IN[key]
        device = card.device

        assert plain(device.name) == key
        assert built_in(device.name) is card
        assert device.flops <= device.speed(Arithmetic.TF32) <= device.speed(Arithmetic.FP16)
        assert 1e12 < device.flops < 1e15
        assert 1e11 < device.memory_bandwidth < 1e13
        assert 1e10 < device.memory < 3e11
        assert card.link is not None
        assert card.bus is not None
        assert 1e10 < card.bus.bandwidth < 1e12

    @pytest.mark.parametrize("name", ["RTX 4090", "rtx-4090", "rtx_4090", "RTX4090"])
    def test_names_may_be_spelled_differently(self, name: str) -> None:
        assert built_in(name).device.name == "RTX 4090"


class TestClusters:
    cluster = Cluster(
        tuple(Device(name, 1.0, 1.0, 12, 0.0) for name in "aabbc"),
        SLOW,
        network=Link(5e8, 1e-2),
        hosts=(0, 0, 1, 1, 1),
        exceptions=((3, 2, FAST), (0, 4, FAST)),
    )

    def test_links_are_those_of_the_host_the_network_or_the_pair(self) -> None:
        assert self.cluster.between(0, 1) is SLOW
        assert self.cluster.between(1, 2) is self.cluster.network
        assert self.cluster.between(2, 3) is self.cluster.between(3, 2) is FAST
        assert self.cluster.between(4, 0) is FAST
        assert self.cluster.between(2, 2) is NO_LINK
        assert NO_LINK.seconds(10**12) == 0.0

    def test_a_link_takes_its_latency_and_its_bandwidth(self) -> None:
        assert Link(bandwidth=100.0, latency_s=2.0).seconds(50) == 2.5
        assert Link(bandwidth=100.0, latency_s=2.0).seconds(0) == 0.0

    @pytest.mark.parametrize("seats", [(0, 1), (3, 2), (4, 0, 3), (4, 3, 2, 1, 0)])
    def test_a_part_has_the_devices_and_links_of_the_whole(self, seats: tuple[int, ...]) -> None:
        part = self.cluster.part(seats)

        assert part.devices == tuple(self.cluster.devices[seat] for seat in seats)
        for one, first in enumerate(seats):
            for other, second in enumerate(seats):
                assert part.between(one, other) == self.cluster.between(first, second)

    def test_only_endless_ones_grow(self) -> None:
        assert self.cluster.sized(9) is self.cluster
        grown = Cluster.of(DEFAULT_HOST, SLOW).sized(3)
        assert grown.devices == (DEFAULT_HOST,) * 3
        assert grown.sized(2) is grown

    def test_processes_share_the_memory_of_their_host(self) -> None:
        pool = dataclasses.replace(Cluster.of(DEFAULT_HOST, SLOW), pooled=True)
        half = DEFAULT_HOST.memory // 2

        assert [device.memory for device in pool.sized(2).devices] == [half] * 2
        assert pool.sized(2).sized(4) == pool.sized(4)
        assert [device.memory for device in pool.with_memory(7).sized(2).devices] == [7, 7]

    def test_all_links_and_all_memories_can_be_replaced(self) -> None:
        changed = self.cluster.with_links(7.0, None).with_memory(99)

        pairs = [(0, 1), (1, 2), (2, 3), (0, 4)]
        assert [changed.between(*pair).bandwidth for pair in pairs] == [7.0] * 4
        assert [changed.between(*pair).latency_s for pair in pairs] == [1e-3, 1e-2, 0.0, 0.0]
        assert {device.memory for device in changed.devices} == {99}
        assert self.cluster.with_links(None, None).with_memory(None) is self.cluster

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            ("H200", "any number of H200, NVLink 450 GB/s"),
            ("4xH200", "4 x H200, NVLink 450 GB/s"),
            ("1xH200", "1 x H200"),
            ("2xV100,2xP40", "2 x V100 and 2 x P40, PCIe 12 GB/s, 1 pair NVLink 150 GB/s"),
        ],
    )
    def test_one_line_tells_what_there_is(self, words: str, text: str) -> None:
        assert str(devices_named(words)) == text

    def test_one_line_tells_of_hosts_and_of_what_joins_them(self) -> None:
        assert str(self.cluster) == (
            "1 host of 2 x a, 1 host of 2 x b and 1 x c, links 1 GB/s, 1 pair wire 2 GB/s, "
            "network 500 MB/s, 1 pair wire 2 GB/s"
        )
        assert str(self.cluster.part((3, 2))) == "2 x b, wire 2 GB/s"
        assert (
            str(self.cluster.part((1, 2))) == "1 host of 1 x a, 1 host of 1 x b, network 500 MB/s"
        )


class TestWords:
    def test_a_name_alone_is_of_as_many_as_needed(self) -> None:
        assert devices_named("a100") == Cluster.of(built_in("a100").device, built_in("a100").link)

    def test_a_number_is_of_so_many(self) -> None:
        cluster = devices_named("4xH200")

        assert cluster.devices == (built_in("h200").device,) * 4
        assert cluster.sized(9) is cluster
        assert cluster.between(0, 3) == NVLINK4

    def test_kinds_may_be_mixed_in_one_host(self) -> None:
        cluster = devices_named(" 2 x V100, 2xP40,L4")

        assert [device.name for device in cluster.devices] == ["V100", "V100", "P40", "P40", "L4"]
        assert cluster.between(0, 1) == NVLINK2
        assert cluster.between(0, 2) == cluster.between(2, 3) == cluster.between(0, 4) == PCIE3
        assert {cluster.host(number) for number in range(5)} == {0}
        assert not cluster.endless

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ("abacus", "'abacus'"),
            ("2xabacus", "'abacus'"),
            ("0xH100", "'0xH100' names no devices"),
            ("00xH100", "names no devices"),
            ("", "names no devices"),
            ("H100,,H100", "names no devices"),
            ("-1xH100", "no device is known"),
            ("2xlocal,H100", "local does not mix"),
            ("99999xH100", "99,999 devices are more"),
            ("99999xlocal", "99,999 devices are more"),
            ("1500xH100,1500xP40", "3,000 devices are more"),
        ],
    )
    def test_others_are_refused(self, words: str, said: str) -> None:
        with pytest.raises(UsageError, match=said):
            devices_named(words)

    def test_an_unknown_name_is_answered_with_those_that_are_known(self) -> None:
        with pytest.raises(UsageError, match=r"'abacus'(.|\n)*local(.|\n)*H100 PCIe(.|\n)*MI300X"):
            devices_named("abacus")


class TestThisMachine:
    def test_it_is_measured(self) -> None:
        device = this_machine()

        assert 1e8 < device.flops < 1e15
        assert 1e8 < device.memory_bandwidth < 1e13
        assert device.memory > 2**28
        assert 0 < device.launch_s < 1e-3
        assert is_here(device)
        assert not is_here(DEFAULT_HOST)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without GPUs")
    def test_a_processor_stands_for_any_number_of_processes(self) -> None:
        cluster = local_cluster()
        whole = cluster.devices[0].memory

        assert (cluster.endless, cluster.pooled, cluster.link) == (True, True, GLOO)
        assert devices_named("4xlocal").devices[3].memory == pytest.approx(whole / 4, abs=1)
        assert len(devices_named("4xlocal").sized(9).devices) == 4

    @pytest.mark.parametrize(
        ("names", "endless", "kinds"),
        [(["X"], True, 1), (["X", "X"], False, 1), (["X", "X", "Y"], False, 2)],
    )
    def test_gpus_are_what_there_is(
        self, names: list[str], endless: bool, kinds: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The GPUs are pretended; each kind of them is measured once."""
        measured = []

        def measure(device: torch.device) -> Device:
            measured.append(device.index)
            return Device(names[device.index], 1.0, 1.0, 1, 0.0)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: names[gpu.index])
        monkeypatch.setattr(local, "_memory", lambda gpu: 1)
        monkeypatch.setattr(local, "_measure", measure)

        cluster = local_cluster()

        assert [device.name for device in cluster.devices] == names
        assert (cluster.endless, cluster.pooled, cluster.link) == (endless, False, PCIE4)
        assert len(measured) == kinds

    @pytest.mark.parametrize(
        ("full", "name"),
        [
            ("NVIDIA H200", "H200"),
            ("NVIDIA H100 80GB HBM3", "H100"),
            ("NVIDIA H100 PCIe", "H100 PCIe"),
            ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
            ("NVIDIA A100-SXM4-80GB", "A100"),
            ("Tesla V100-SXM2-16GB", "V100 16GB"),
            ("NVIDIA GeForce RTX 4090", "RTX 4090"),
            ("NVIDIA L40S", "L40S"),
            ("NVIDIA L40", None),
            ("x86_64 host", None),
        ],
    )
    def test_the_names_of_drivers_are_understood(self, full: str, name: str | None) -> None:
        assert local.built_in_name(full) == name


class TestLinks:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without GPUs")
    def test_two_processes_are_timed(self) -> None:
        link = timing.timed_link()

        assert link.name == "gloo"
        assert 1e6 < link.bandwidth < 1e12
        assert 0 <= link.latency_s < 1.0

    @pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without GPUs")
    def test_processes_that_do_not_answer_are_given_up(self) -> None:
        with pytest.raises(UsageError, match=r"cannot be measured: nothing within 0 s"):
            timing.timed_link(timeout_s=0.01)

    def test_a_lone_gpu_has_no_link(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

        with pytest.raises(UsageError, match="one GPU"):
            timing.timed_link()

    @pytest.mark.parametrize(("bandwidth", "latency"), [(1e9, 1e-4), (3e11, 1e-6), (1e7, 0.0)])
    def test_two_times_give_bandwidth_and_latency(self, bandwidth: float, latency: float) -> None:
        true = Link(bandwidth, latency)
        times = (true.seconds(size) for size in (timing.SMALL, timing.LARGE))

        found = timing.link_of(*times, "found")

        assert found.bandwidth == pytest.approx(bandwidth)
        assert found.latency_s == pytest.approx(latency, rel=1e-6, abs=1e-9)

    def test_small_messages_that_took_longer_than_large_ones_make_a_link_too(self) -> None:
        found = timing.link_of(2.0, 1.0, "disturbed")

        assert 0 < found.bandwidth < math.inf
        assert found.latency_s >= 0


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
        assert {path.stem for path in EXAMPLES.iterdir()} == {
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
    ('[[hosts]]\ndevices = "0xH100"', "line 2: hosts[0].devices '0xH100' names no devices"),
    ('[[hosts]]\ndevices = ["H100", "abacus"]', "line 2: hosts[0].devices no device is known"),
    (HOST + "count = 0", "line 3: hosts[0].count = 0 is not a whole number of at least 1"),
    (HOST + "count = true", "line 3: hosts[0].count = True is not a whole number"),
    (HOST + "count = 99999", "line 3: hosts[0].count makes 199,998 devices, more than"),
    (HOST + "cuont = 2", "line 3: hosts[0].cuont means nothing here; did you mean count?"),
    (HOST + 'link = "rope"', "line 3: hosts[0].link 'rope' is no link: known are pcie3"),
    (HOST + 'link = { latency = "1us" }', "line 3: hosts[0].link.bandwidth is missing"),
    (HOST + "link = 7", "line 3: hosts[0].link = 7 is no name"),
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
    (HOST + "[devices.mine]\nlike = 'abacus'", "line 4: devices.mine.like no device is known"),
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


links = st.builds(
    Link,
    st.floats(min_value=1.0, max_value=1e15),
    st.floats(min_value=0.0, max_value=1.0),
    st.text(max_size=5),
)
devices = st.builds(
    Device,
    st.text(max_size=5),
    st.floats(min_value=1.0),
    st.floats(min_value=1.0, max_value=1e15),
    st.integers(min_value=1),
    st.floats(min_value=0.0, max_value=1.0),
    st.none() | st.floats(min_value=1.0, max_value=1e18),
    st.none() | st.floats(min_value=1.0, max_value=1e18),
    st.none() | st.floats(min_value=1.0, max_value=1e18),
)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Any cluster of up to five devices."""
    there = draw(st.lists(devices, min_size=1, max_size=5))
    steps = draw(st.lists(st.booleans(), min_size=len(there), max_size=len(there)))
    hosts = tuple(sum(steps[1 : number + 1]) for number in range(len(there)))
    pairs = [(one, other) for other in range(len(there)) for one in range(other)]
    special = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return Cluster(
        tuple(there),
        draw(links),
        draw(st.none() | links),
        hosts if hosts[-1] else (),
        tuple((*pair, draw(links)) for pair in special),
        draw(st.booleans()),
        draw(st.booleans()),
    )


@given(clusters())
def test_any_cluster_goes_through_the_json_of_a_plan(cluster: Cluster) -> None:
    nothing = Prediction(0.0, 0.0, 0.0, 0.0, True, ())
    kind = ScheduleKind.GPIPE
    plan = Plan("model", (), (), kind, 1, 1, False, (), cluster, "guessed", nothing)

    read = Plan.from_json(plan.to_json())

    assert read == plan
    assert str(read.cluster) == str(cluster)
