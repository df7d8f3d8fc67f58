"""Rules about the number of samples that no trial reaches: the package takes fewer samples."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loading import load_package
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.cluster import DEFAULT_HOST, IN_PROCESS, Cluster
from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.compile import compile as compile_subject
from gpipe_compiler.errors import GPipeCompilerError
from gpipe_compiler.frontend.subject import Subject

OPTIONS = CompileOptions(
    stages=2, microbatches=2, cluster=Cluster.of(DEFAULT_HOST, IN_PROCESS), validate=False
)
FAR = 1_000_000


def asked_in_python(x: Tensor) -> Tensor:
    return 2 * x if len(x) > FAR else x


def numbered(x: Tensor) -> Tensor:
    return x * (torch.arange(len(x)) < FAR)[:, None]


def near(x: Tensor) -> Tensor:
    """A rule that is tried, and changes nothing."""
    return torch.cat(x.split(50)) if len(x) > 50 else x


class Ruled(nn.Module):
    def __init__(self, rule: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.rule = nn.Linear(4, 4), nn.Linear(4, 2), rule

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rule(self.first(x)).tanh())


def subject(rule: Callable[[Tensor], Tensor]) -> Subject:
    return Subject(
        "ruled", Ruled(rule), (torch.randn(8, 4),), target=torch.randn(8, 2), loss_fn=F.mse_loss
    )


@pytest.mark.parametrize("rule", [asked_in_python, numbered])
def test_a_package_takes_as_many_samples_as_were_tried(
    rule: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    given = subject(rule)
    compile_subject(given, OPTIONS, tmp_path / "out")
    package = load_package(tmp_path / "out")
    refused = sys.modules[f"{package.__name__}.runtime.errors"].UsageError

    with package.Pipeline() as pipe:
        before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        with pytest.raises(refused, match=f"up to {FAR} samples.*test_sample_trials.py"):
            pipe.step(torch.randn(FAR + 1, 4), torch.randn(FAR + 1, 2))
        after = pipe.state_dict()
        x, target = torch.randn(50, 4), torch.randn(50, 2)
        loss = pipe.step(x, target)

    # In one piece, what tells samples apart in the graph does as in the model.
    many = torch.zeros(FAR + 1, 4)
    with package.Pipeline(microbatches=1) as pipe:
        if rule is numbered:
            assert len(pipe(many)) == FAR + 1
        else:
            with pytest.raises(refused, match=f"up to {FAR} samples"):
                pipe(many)

    assert all(map(torch.equal, before.values(), after.values()))
    torch.testing.assert_close(loss, F.mse_loss(given.model(x), target).detach())


def test_a_rule_that_was_tried_limits_nothing(tmp_path: Path) -> None:
    compile_subject(subject(near), OPTIONS, tmp_path / "out")

    assert load_package(tmp_path / "out").SPEC.limits == ()


def by_streams(output: Tensor, target: Tensor) -> Tensor:
    """Of two streams of every sample, all first ones before all second ones."""
    streams = output.unflatten(-1, (2, 1)).transpose(0, 1).reshape(-1, 1)
    return F.mse_loss(streams, target.t().reshape(-1, 1))


def test_a_loss_may_have_samples_in_another_order(tmp_path: Path) -> None:
    """Where a rule is tried, what the loss takes is compared, and nothing that it makes."""
    given = dataclasses.replace(subject(near), loss_fn=by_streams)
    compile_subject(given, OPTIONS, tmp_path / "out")
    x, target = torch.randn(60, 4), torch.randn(60, 2)
    with load_package(tmp_path / "out").Pipeline() as pipe:
        loss = pipe.step(x, target)

    torch.testing.assert_close(loss, by_streams(given.model(x), target).detach())


class Masked(nn.Module):
    """In training every sample has a mask of its own, in eval mode all of them share one. Behind
    it `rule`."""

    def __init__(self, rule: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.rule = nn.Linear(4, 4), nn.Linear(4, 2), rule

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        mask = (at[:, None] >= at)[None]
        mask = mask & (valid[:, None] if self.training else (at[:, None] < at + 3)[None])
        h = self.first(x)
        scores = (h @ h.transpose(1, 2)).masked_fill(~mask, -1e4)
        return self.last(self.rule(scores.softmax(-1) @ x))


def masked(rule: Callable[[Tensor], Tensor]) -> Subject:
    x, valid = torch.randn(8, 6, 4), torch.rand(8, 6) > 0.3
    model, target = Masked(rule), torch.randn(8, 6, 2)
    return Subject("masked", model, (x, valid), target=target, loss_fn=F.mse_loss)


@pytest.mark.usefixtures("in_process")
def test_what_all_samples_share_in_eval_mode_alone_tells_none_apart(tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, validate=True)
    made = compile_subject(masked(near), options, tmp_path / "out")
    assert made.validation is not None
    assert made.validation.passed, str(made.validation)


def test_what_tells_samples_apart_behind_that_is_refused(tmp_path: Path) -> None:
    def rule(x: Tensor) -> Tensor:
        return x * (torch.arange(len(x)) < 20)[:, None, None]

    with pytest.raises(GPipeCompilerError, match="takes the samples of a batch together"):
        compile_subject(masked(rule), OPTIONS, tmp_path / "out")
