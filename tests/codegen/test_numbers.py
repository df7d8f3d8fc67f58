"""Emitted stages, chained in plain Python, compute what the model computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

CASES = [
    *("conv_net", "decoder", "operators", "recurrent", "modes", "regions", "names", "inception"),
]


@pytest.mark.parametrize(
    ("label", "count", "segments"),
    [
        *((case, 3, 0) for case in CASES),
        *((case, 2, 3) for case in CASES),
        ("conv_net", 1, 0),
        ("decoder", 1, 0),
    ],
)
def test_stages_in_a_row_equal_the_model(
    label: str,
    count: int,
    segments: int,
    emitted: Callable[..., Any],
    ruff: Callable[..., None],
) -> None:
    """Outputs, loss, gradients and buffers, in train mode and then in eval mode.

    Stages with segments are here without the engine, which keeps BatchNorm from counting twice.
    """
    package = emitted(label, count, segments)
    case, model = package.case, package.model
    args = case.args()
    target = case.target() if case.target is not None else None
    started = copy.deepcopy(model.state_dict())

    for training in (True, False):
        model.train(training)
        pipeline = package.chain(training)
        if segments:
            model.load_state_dict(copy.deepcopy(started))
            package.load(started)
        expected = model(*copy.deepcopy(args))
        actual, loss = pipeline(copy.deepcopy(args), target)

        assert_same(tensors(expected), tensors(actual))
        if training:
            wanted = reference_loss(case, expected, target)
            torch.testing.assert_close(loss, wanted)
            wanted.backward()
            loss.backward()
            assert_same(gradients(model), package.gradients())
    if not segments:
        assert_same(dict(model.named_buffers()), package.buffers())
    ruff(package.directory)


def reference_loss(case: Any, output: object, target: object) -> Tensor:
    if case.loss_fn is not None:
        loss: Tensor = case.loss_fn(output, target)
        return loss
    floating = [t for t in tensors(output).values() if t.is_floating_point()]
    return torch.stack([t.square().sum() for t in floating]).sum()


def tensors(nest: object) -> dict[str, Tensor]:
    def walk(item: object, path: str) -> Iterator[tuple[str, Tensor]]:
        if isinstance(item, Tensor):
            yield path, item
        elif isinstance(item, dict):
            for key, value in item.items():
                yield from walk(value, f"{path}.{key}")
        elif isinstance(item, tuple | list):
            for index, value in enumerate(item):
                yield from walk(value, f"{path}.{index}")

    return dict(walk(nest, ""))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> None:
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, msg=lambda text, n=name: f"{n}: {text}")


def test_a_package_needs_no_compiler(emitted: Callable[..., Any]) -> None:
    """No emitted file names gpipe_compiler."""
    directory: Path = emitted("conv_net", 2).directory

    naming = [
        path.name
        for path in directory.rglob("*.py")
        if "import gpipe_compiler" in path.read_text() or "from gpipe_compiler" in path.read_text()
    ]

    assert naming == []
