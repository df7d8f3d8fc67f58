"""torchgpipe's memory benchmark, rebuilt: against its published rows, hand-worked traces, and what
autograd is known to keep of two linear layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchgpipe_memory import (
    PUBLISHED,
    Pass,
    Place,
    Published,
    ReluKeepsInput,
    StageTrace,
    footprints,
    network,
    play,
    record,
    stages,
)

MIB = 2**20
ROW = 4000
"""Bytes of a row of 1000 floats."""


def trace(takes: tuple[int, ...], hands_on: tuple[int, ...]) -> StageTrace:
    """A stage of one parameter of 3 MiB: it makes 6 MiB, and keeps 5 of them for the backward."""
    forward = ((0, 5 * MIB), (1, MIB + 512))
    again = (*forward, (2, 3 * MIB), (2, -1), (0, -1), (1, -1), (3, sum(takes)))
    first = ((2, 3 * MIB), (0, -1), (3, sum(takes)))
    return StageTrace(
        takes,
        hands_on,
        Pass((*forward, (0, -1)), (), (1,), ()),
        Pass((*forward, (1, -1)), first, (1,), (3,)),
        Pass((*forward, (1, -1)), (*first, (2, -1)), (1,), (3,)),
        Pass((), again, (1,), (3,)),
        (3 * MIB,),
        (3 * MIB,),
    )


def test_live_bytes_by_hand() -> None:
    # All 3 inputs; 5 MiB kept; the parameter, its gradient and mean square. The peak is in the
    # second iteration: the gradient to be added (3), what has arrived and what will go (2 + 2).
    middle = play(trace((2 * MIB,), (2 * MIB,)), Place(first=False, last=False), 3)
    inputs, kept, state, gradient, arrived = 3 * 2, 5, 3 * 3, 3, 2
    # The recomputed micro-batch has its output too, and one input less.
    recomputed = 2 * 2 + kept + state + gradient + arrived
    assert middle.live == max(
        (inputs + kept + state + gradient + arrived) * MIB, recomputed * MIB + MIB + 512
    )


def test_every_copy_stream_reserves_segments_of_its_own() -> None:
    stage = trace((2 * MIB,), (2 * MIB,))
    place = Place(first=False, last=False)
    together = play(stage, place, 3, streams=False).reserved
    apart = play(stage, place, 3).reserved
    # 3 streams with a segment each; without, what they hold fits beside the rest.
    assert apart - together == 2 * 20 * MIB
    # 64 micro-batches take turns on 32 streams: two inputs and a gradient fit a segment.
    assert play(stage, place, 64).reserved - apart == (32 - 3) * 20 * MIB


def test_what_a_linear_stage_does() -> None:
    with torch.device("meta"):
        stage = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128))
        inputs = (torch.empty(64, 256),)
    found, passed = record(stage, inputs)
    hidden, out = 64 * 512 * 4, 64 * 128 * 4
    assert [size for _, size in found.unkept.forward if size > 0] == [hidden, hidden, out]
    assert [tensor.nbytes for tensor in passed] == [out]
    assert found.takes == (64 * 256 * 4,)
    assert sum(found.state) == 4 * (256 * 512 + 512 + 512 * 128 + 128)
    # After the forward: what ReLU gave, which it and the second layer keep.
    assert _left(found.last.forward) == [hidden]
    # Then: nothing but the gradient of the input; at first, those of the parameters too.
    assert _left(found.last.forward + found.last.backward) == [64 * 256 * 4]
    assert sum(_left(found.first.forward + found.first.backward)) == 64 * 256 * 4 + sum(found.state)
    assert _left(found.again.forward + found.again.backward) == [64 * 256 * 4]
    with ReluKeepsInput():
        assert _left(record(stage, inputs)[0].last.forward) == [hidden, hidden]


def _left(events: tuple[tuple[int, int], ...]) -> list[int]:
    alive: dict[int, int] = {}
    for number, size in events:
        if size >= 0:
            alive[number] = size
        else:
            del alive[number]
    return list(alive.values())


def test_the_network_is_torchgpipes() -> None:
    model = network(6, 32)
    assert not any(isinstance(m, nn.MaxPool2d) and m.kernel_size == 3 for m in model.modules())
    assert any(isinstance(m, nn.MaxPool2d) and m.kernel_size == 2 for m in model.modules())
    assert [len(stage) for stage in stages(model, (7, 5))] == [7, 5]


@pytest.mark.slow
@pytest.mark.parametrize("row", PUBLISHED)
def test_published_rows_within_three_per_cent(row: Published) -> None:
    found = footprints(row)
    model = network(row.layers, row.filters)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == row.parameters
    reserved = (sum(each.reserved for each in found) - 12 * parameters) / 2**30
    assert reserved == pytest.approx(row.activations_gib, rel=0.03)
    live = (sum(each.live for each in found) - 12 * parameters) / 2**30
    assert live == pytest.approx(row.live_gib, rel=0.005)
