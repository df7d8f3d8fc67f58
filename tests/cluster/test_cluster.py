"""Descriptions of machines, against figures of data sheets and sums made by hand."""

from __future__ import annotations

import dataclasses
import math
import tempfile
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
    Arithmetic,
    Cluster,
    Device,
    Link,
    built_in,
    core_count,
    devices_named,
    is_here,
    local,
    local_cluster,
    this_machine,
)
from gpipe_compiler.cluster.catalogue import NVLINK2, NVLINK4, PCIE3, PCIE4, plain
from gpipe_compiler.errors import UsageError
from gpipe_compiler.plan import Plan, Prediction, Stage
from gpipe_compiler.runtime.schedule.actions import parse_order
from gpipe_compiler.runtime.spec import ScheduleKind

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

    @pytest.mark.parametrize("slots", [(0, 1), (3, 2), (4, 0, 3), (4, 3, 2, 1, 0)])
    def test_a_part_has_the_devices_and_links_of_the_whole(self, slots: tuple[int, ...]) -> None:
        part = self.cluster.part(slots)

        assert part.devices == tuple(self.cluster.devices[slot] for slot in slots)
        for one, first in enumerate(slots):
            for other, second in enumerate(slots):
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
            ("V100,P40,2xV100", "V100, P40, 2 x V100, NVLink 150 GB/s, 3 pairs PCIe 12 GB/s"),
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

    def test_a_processor_stands_for_any_number_of_processes(self) -> None:
        cluster = local_cluster()
        whole = cluster.devices[0].memory

        assert (cluster.endless, cluster.pooled, cluster.link) == (True, True, GLOO)
        assert cluster.places == max(1, core_count() // torch.get_num_threads())
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
        assert (cluster.endless, cluster.pooled, cluster.link) == (endless, endless, PCIE4)
        assert cluster.places == len(names)
        assert len(measured) == kinds
        assert devices_named("3xlocal").places is None

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
    def test_two_processes_are_timed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Wherever temporary files lie."""
        folder = tmp_path / "50% full, über"
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))

        link = local.timed_link(timeout_s=500)

        assert link.name == "gloo"
        assert 1e6 < link.bandwidth < 1e12
        assert 0 <= link.latency_s < 1.0

    def test_processes_that_do_not_answer_are_given_up(self) -> None:
        with pytest.raises(UsageError, match=r"cannot be measured: nothing within 0 s"):
            local.timed_link(timeout_s=0.01)

    def test_a_lone_gpu_has_no_link(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

        with pytest.raises(UsageError, match="one GPU"):
            local.timed_link()

    @pytest.mark.parametrize(("bandwidth", "latency"), [(1e9, 1e-4), (3e11, 1e-6), (1e7, 0.0)])
    def test_two_times_give_bandwidth_and_latency(self, bandwidth: float, latency: float) -> None:
        true = Link(bandwidth, latency)
        times = (true.seconds(size) for size in (local.SMALL, local.LARGE))

        found = local.link_of(*times, "found")

        assert found.bandwidth == pytest.approx(bandwidth)
        assert found.latency_s == pytest.approx(latency, rel=1e-6, abs=1e-9)

    def test_small_messages_that_took_longer_than_large_ones_make_a_link_too(self) -> None:
        found = local.link_of(2.0, 1.0, "disturbed")

        assert 0 < found.bandwidth < math.inf
        assert found.latency_s >= 0


links = st.builds(
    Link,
    st.floats(min_value=1.0, max_value=1e15),
    st.floats(min_value=0.0, max_value=1.0),
    st.text(max_size=5),
)
devices = st.builds(
    Device,
    st.text(max_size=5),
    st.floats(min_value=1.0, max_value=1e30),
    st.floats(min_value=1.0, max_value=1e15),
    st.integers(1, 2**60),
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
        draw(st.none() | st.integers(1, len(there))),
    )


@given(clusters())
def test_any_cluster_goes_through_the_json_of_a_plan(cluster: Cluster) -> None:
    nothing = Prediction(0.0, 0.0, 0.0, 0.0, True, (0,))
    stage = Stage(0, ("op",), (), (), (), (), 0.0, 0.0, 0, 0, 0, 0, 0)
    orders, kind = (parse_order("0F0"),), ScheduleKind.GPIPE
    plan = Plan("model", (stage,), (), kind, 1, 1, False, orders, cluster, "guessed", nothing)

    read = Plan.from_json(plan.to_json())

    assert read == plan
    assert str(read.cluster) == str(cluster)
