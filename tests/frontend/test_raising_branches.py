"""What a model checks of its values, and only raises for, is no branch on the data."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as D

from gpipe_compiler.compile import trace
from gpipe_compiler.ir.branches import required_lines
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.runtime.core.required import BranchError


class Checked(nn.Module):
    """Layers between which something is asked of the values."""

    def __init__(self, check: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.check = nn.Linear(4, 4), nn.Linear(4, 3), check

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.check(self.first(x).tanh()))


def of_both(h: Tensor) -> Tensor:
    if h is not None and h.max() > 2:
        name = "h"
        raise ValueError(f"{name} is {h.max()}")
    return h


def asserted(h: Tensor) -> Tensor:
    assert (h > -2).all(), "out of range"
    if not ((h < 2).all() and h.isfinite().all()):
        raise ValueError
    return h


def by_a_number(h: Tensor) -> Tensor:
    if h.abs().amax().item() > 2:
        raise ValueError("too large")
    return h


def otherwise(h: Tensor) -> Tensor:
    if not (h > 2).any():
        h = h * 2
    else:
        raise ValueError("too large")
    return h


def deciding(h: Tensor) -> Tensor:
    if (h > 0.1).any():
        h = h * 2
    return h


def caught(h: Tensor) -> Tensor:
    try:
        of_both(h)
    except ValueError:
        h = h / 2
    return h


def suppressed(h: Tensor) -> Tensor:
    with contextlib.suppress(ValueError):
        of_both(h)
        h = h * 2
    return h


class Forgiving:
    """A context manager of the user's own that catches what is raised in it."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, *_: object) -> bool:
        return kind is ValueError


def forgiven(h: Tensor) -> Tensor:
    with Forgiving():
        of_both(h)
        h *= 2
    return h


class Small:
    """Has a size only where a tensor is small."""

    def __init__(self, h: Tensor) -> None:
        self.h = h

    @property
    def size(self) -> int:
        if self.h.max() > 2:
            raise AttributeError("size")
        return 2


def asked_for(h: Tensor) -> Tensor:
    return h * getattr(Small(h), "size", 1)


def either(h: Tensor) -> Tensor:
    if (h.sum() if h.sum() > 0 else h.max()) > 99:
        raise ValueError("too large")
    return h


def differing(h: Tensor) -> Tensor:
    if h.isnan().any() or not (h > -2).all():
        raise ValueError
    return h


def handled(h: Tensor) -> Tensor:
    try:
        return of_both(h)
    except ValueError:
        if h.shape[1] == 4:
            return h / 2
        raise


def in_the_same_line(h: Tensor) -> Tensor:
    # fmt: off
    if not h.isnan().any(): h = h if (h < 2).all() else -h  # noqa: E701
    else: raise ValueError  # noqa: E701
    # fmt: on
    return h


class Steps:
    """Ends as soon as something is large enough."""

    def __init__(self) -> None:
        self.left, self.reached = 3, torch.zeros(1)

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> int:
        if not self.left or (self.reached > 2).all():
            raise StopIteration
        self.left -= 1
        return self.left


def as_long_as(h: Tensor) -> Tensor:
    steps = Steps()
    for _ in steps:
        h = steps.reached = h * 2
    return h


def without_gradients(h: Tensor) -> Tensor:
    with torch.no_grad():
        return of_both(h)


def of_one_or_the_other(h: Tensor) -> Tensor:
    if (h > 2).all() and not h.isfinite().all():
        raise ValueError
    return h


@pytest.mark.parametrize(
    "check",
    [
        *(of_both, asserted, by_a_number, otherwise, without_gradients),
        *(differing, of_one_or_the_other),
    ],
)
def test_a_branch_that_only_raises_is_passed(check: Callable[[Tensor], Tensor]) -> None:
    model, x = Checked(check), torch.randn(4, 4)
    with pytest.warns(UserWarning, match="test_raising_branches.*this check is not in the package"):
        graph = trace(model, x, training=False)
    assert len(graph.ops) <= 10


def asserted_on_the_device(h: Tensor) -> Tensor:
    torch._assert_async(h.isfinite().all(), "not finite")
    return h * 2


def test_what_is_asserted_on_the_device_is_told() -> None:
    with pytest.warns(UserWarning, match="_assert_async.*this check is not in the package"):
        trace(Checked(asserted_on_the_device), torch.randn(4, 4), training=False)


def of_distributions(h: Tensor) -> Tensor:
    normal = D.MultivariateNormal(h, torch.eye(4))
    other = D.Independent(D.Normal(h * 2, h.exp()), 1)
    shares = D.Categorical(probs=h.softmax(-1)).log_prob(torch.zeros(len(h)))
    far = D.kl_divergence(other.base_dist, D.Normal(0.0, 1.0))
    return h * (normal.log_prob(h) + other.log_prob(h + 1) + shares)[:, None] + far


def test_what_distributions_ask_of_their_numbers_is_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What was compiled in this process has switched that off for all.
    monkeypatch.setattr(D.Distribution, "_validate_args", True)
    torch.manual_seed(0)
    model, x = Checked(of_distributions), torch.randn(4, 4)
    with pytest.warns(UserWarning, match="distribution.*this check is not in the package"):
        graph = trace(model, x, training=False)

    x = torch.randn(5, 4)
    run = Interpreter(graph, graph.tensors, training=False).run({"x": x})
    torch.testing.assert_close(run[graph.output_values[0]], model(x))


@pytest.mark.parametrize(
    "check",
    [
        *(deciding, caught, suppressed, forgiven, asked_for, either, handled),
        *(in_the_same_line, as_long_as),
    ],
)
def test_a_branch_that_decides_is_held_as_it_goes(check: Callable[[Tensor], Tensor]) -> None:
    """A batch for which it goes another way is refused, and all others are right."""
    torch.manual_seed(0)
    model = Checked(check)
    graph = trace(model, torch.randn(4, 4), training=False)
    lines = required_lines(graph.ops)
    assert lines
    assert all(line.startswith("test_raising_branches.py:") for line in lines)
    for times in (1e-3, 0.1, 1.0, 9.0):
        x = torch.randn(3, 4) * times
        try:
            run = Interpreter(graph, graph.tensors, training=False).run({"x": x})
        except BranchError:
            continue
        assert torch.allclose(run[graph.output_values[0]], model(x))


def test_a_file_that_was_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "checks.py"
    for number, body in enumerate(("raise ValueError", "h = -h")):
        file.write_text(f"def check(h):\n    if (h > 2).any():\n        {body}\n    return h\n")
        os.utime(file, (number, number))
        held: dict[str, Callable[[Tensor], Tensor]] = {}
        exec(compile(file.read_text(), str(file), "exec"), held)
        graph = trace(Checked(held["check"]), torch.randn(4, 4), training=False)
        assert len(required_lines(graph.ops)) == number
