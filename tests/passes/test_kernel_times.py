"""What was measured of kernels, against numbers worked by hand, and the folder that keeps it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_compiler.cluster import Arithmetic
from gpipe_compiler.cluster.cache import folder, kept
from gpipe_compiler.compile import trace
from gpipe_compiler.options import LossChoice
from gpipe_compiler.passes.cost import KernelCost, rooflines
from gpipe_compiler.passes.kernel_probes import PROBES, Case, Points, Probe, started_seconds
from gpipe_compiler.passes.kernel_times import KernelTimes, kernel_times, reference

HERE = reference(flops=1e9, bandwidth=1e9)
TIMES = KernelTimes.of(
    {
        "mul": [(1e-6, 4e-6), (1e-2, 3e-2), (1e-4, 0.5e-4), (1e-4, 2e-4)],
        "mm": [(1e-3, 2e-3)],
        "mm, few rows": [(1e-3, 8e-3)],
        "relu": [(1e-6, 5e-6)],
    },
    HERE,
)


def moves(size: int, name: str) -> KernelCost:
    return KernelCost(0, size, Arithmetic.FP32, name)


@pytest.mark.parametrize(
    ("kernel", "seconds"),
    [
        (moves(10**3, "mul"), 4e-6),
        (moves(10**5, "mul"), 1e-4),  # the mean of two that are alike by the roofline
        (moves(10**4, "mul"), math.sqrt(4e-6 * 1e-4)),  # half-way, as a power
        (moves(10, "mul"), 4e-6),  # no less than the smallest
        (moves(10**8, "mul"), 0.3),  # three times its roofline, as the largest
        (moves(10**5, "unheard of"), 1e-4),  # as one that moves memory
        (KernelCost(10**6, 10, Arithmetic.FP32, "unheard of"), 2e-3),  # that multiplies matrices
        (moves(10**3, "relu"), 5e-6),
        (moves(10**3, "relu, of a kind that was not timed"), 5e-6),
        (KernelCost(10**6, 10, Arithmetic.FP32, "mm"), 2e-3),
        (KernelCost(10**6, 10, Arithmetic.FP32, "mm, few rows"), 8e-3),
    ],
)
def test_seconds(kernel: KernelCost, seconds: float) -> None:
    assert TIMES.seconds(kernel) == pytest.approx(seconds)


def test_fields_come_back() -> None:
    assert KernelTimes.from_fields(json.loads(json.dumps(TIMES.to_fields()))) == TIMES
    assert KernelTimes.from_fields({}) is None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rgb = nn.Conv2d(3, 64, 3)
        self.points = nn.Conv2d(64, 64, 1)
        self.depthwise = nn.Conv2d(64, 64, 3, groups=64)
        self.grouped = nn.Conv2d(64, 64, 3, groups=4)
        self.windows = nn.Conv2d(64, 64, 3)
        self.back = nn.ConvTranspose2d(64, 32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.points(self.rgb(x))
        return self.back(self.windows(self.grouped(self.depthwise(x))))


def test_every_kernel_of_a_model_is_asked_for_by_its_kind() -> None:
    graph = trace(Net(), torch.randn(4, 3, 12, 12), loss=LossChoice.SUM_OF_SQUARES)
    asked: list[str] = []

    class Clock:
        def seconds(self, kernel: KernelCost) -> float:
            asked.append(kernel.name)
            return 1.0

    (costs,) = rooflines(graph, [HERE], lambda device: Clock())
    kinds = ("of windows, at most 4 channels", "of points", "depthwise", "grouped", "of windows")
    for kind in (*kinds, "transposed"):
        assert f"convolution {kind}" in asked
        assert f"convolution_backward {kind}" in asked
    assert sum(cost.forward_s for cost in costs.ops.values()) >= len(kinds) + 1
    assert costs.source.startswith("kernel times on")


def test_other_devices_keep_their_rooflines() -> None:
    assert kernel_times(dataclasses.replace(HERE, name="A100")) is None


def timed(probe: Probe) -> Iterator[Case]:
    """In its two smallest sizes, once."""
    for shapes in probe.shapes[:2]:
        case = Case(probe, shapes)
        case.backward(case.forward())
        yield case


class TestProbes:
    def test_what_is_left_is_of_the_kernel_that_is_not_known(self) -> None:
        points = Points(HERE)
        points.take([moves(1000, "mul")], 5e-6)
        points.take([moves(2000, "bernoulli"), moves(1000, "mul")], 12e-6)
        points.take([moves(5000, "mul"), moves(1000, "mul")], 1.0)  # nothing new in it
        found = points.found().points

        assert found["mul"] == ((1e-6, 5e-6),)
        ((ideal_s, seconds),) = found["bernoulli"]
        assert (ideal_s, seconds) == (pytest.approx(2e-6), pytest.approx(7e-6))

    def test_every_probe_runs_in_small_sizes(self) -> None:
        points, started_s = Points(HERE), started_seconds()
        for probe in PROBES:
            for case in timed(probe):
                case.tell(points, started_s)
        found = points.found()

        assert KernelTimes.from_fields(found.to_fields()) == found
        assert all(seconds > 0 for each in found.points.values() for _, seconds in each)
        assert {"mm", "mul", "bernoulli", "native_batch_norm_backward"} <= found.points.keys()

    def test_kernels_are_named_as_those_that_are_priced(self) -> None:
        """A layer's kernels, on fakes and as they run."""
        points = Points(HERE)
        for probe in PROBES:
            for case in timed(probe):
                case.tell(points, 0.0)
        model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        graph = trace(model, torch.randn(2, 16, 12, 12), loss=LossChoice.SUM_OF_SQUARES)
        asked: list[str] = []

        class Clock:
            def seconds(self, kernel: KernelCost) -> float:
                asked.append(kernel.name)
                return 1.0

        rooflines(graph, [HERE], lambda device: Clock())
        known = points.found().points.keys()
        for name in ("convolution of windows, at most 16 channels", "native_batch_norm", "relu"):
            assert name in asked
            assert name in known


class TestFolder:
    @pytest.fixture(autouse=True)
    def own_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def test_measures_once(self) -> None:
        made = [{"a": 1}, {"a": 2}, {"a": 3}]
        assert kept("x", lambda: made.pop(0)) == {"a": 1}
        assert kept("x", lambda: made.pop(0)) == {"a": 1}
        assert kept("x", lambda: made.pop(0), anew=True) == {"a": 2}
        assert kept("x", lambda: made.pop(0)) == {"a": 2}
        assert kept("y", lambda: made.pop(0)) == {"a": 3}

    def test_for_every_number_of_threads(self) -> None:
        threads = torch.get_num_threads()
        kept("x", lambda: {"a": 1})
        torch.set_num_threads(threads + 1)
        try:
            assert kept("x", lambda: {"a": 2}) == {"a": 2}
        finally:
            torch.set_num_threads(threads)

    def test_a_file_that_is_torn_is_measured_again(self) -> None:
        kept("x", lambda: {"a": 1})
        (file,) = folder().glob("x-*.json")
        file.write_text("{")

        assert kept("x", lambda: {"a": 2}) == {"a": 2}

    def test_what_could_not_be_measured_is_tried_again(self) -> None:
        assert kept("x", dict) == {}
        assert kept("x", lambda: {"a": 1}) == {"a": 1}

    def test_nothing_is_kept_where_nothing_can_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("a file")

        assert kept("x", lambda: {"a": 1}) == {"a": 1}
        assert kept("x", lambda: {"a": 2}) == {"a": 2}
