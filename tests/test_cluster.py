"""Descriptions of machines."""

from __future__ import annotations

import time

import pytest

from gpipe_compiler.cluster import CLUSTERS, Link, local_cluster, named_cluster, this_machine
from gpipe_compiler.errors import UsageError


def test_built_in_machines_are_found_by_name_in_any_case():
    assert named_cluster("A100") is CLUSTERS["a100"]
    assert named_cluster("a100").device.memory == 80 * 10**9


def test_an_unknown_machine_is_refused_with_those_that_are_known():
    with pytest.raises(UsageError, match=r"'abacus'(.|\n)*p40"):
        named_cluster("abacus")


def test_this_machine_is_measured_in_under_two_seconds():
    start = time.perf_counter()
    device = this_machine()

    assert time.perf_counter() - start < 2
    assert 1e8 < device.flops < 1e15
    assert 1e8 < device.memory_bandwidth < 1e13
    assert device.memory > 2**28
    assert 0 < device.launch_s < 1e-3
    assert local_cluster().link.seconds(0) == 0.0


def test_a_link_takes_its_latency_and_its_bandwidth():
    assert Link(bandwidth=100.0, latency_s=2.0).seconds(50) == 2.5
