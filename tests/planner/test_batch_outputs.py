"""Outputs of a mini-batch equal plain PyTorch's on all of it, whatever its micro-batches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loading import load_package
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.compile import CompileOptions, trace
from gpipe_compiler.compile import compile as compile_subject
from gpipe_compiler.errors import ModelError, UnsplittableError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.passes.joined_outputs import joined_outputs
from gpipe_compiler.passes.output_terms import weigh_outputs
from gpipe_compiler.runtime.spec import Joined
from gpipe_compiler.runtime.train.comparison import flat_tensors

BATCH, WIDTH = 8, 4


class Reducing(nn.Module):
    """Two layers, and what is asked of their rows."""

    def __init__(self, reduce: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.reduce = reduce

    def forward(self, x: Tensor) -> object:
        return self.reduce(self.last(torch.tanh(self.first(x))))


def grown(y: Tensor) -> Tensor:
    total = torch.zeros(3)
    total += y.sum(0)
    return total


WAYS: dict[str, tuple[Callable[[Tensor], Tensor], Joined]] = {
    "sum": (lambda y: y.sum(0), Joined.SUM),
    "total": (lambda y: y.double().sum().float() * 2, Joined.SUM),
    "count": (lambda y: (y > 0).sum(0), Joined.SUM),
    "products": (lambda y: y.T @ y, Joined.SUM),
    "grown": (grown, Joined.SUM),
    "mean": (lambda y: 3 * y.mean(dim=0, keepdim=True).flatten() - 1, Joined.MEAN),
    "share": (lambda y: (y > 0).float().mean(), Joined.MEAN),
    "divided": (lambda y: y.sum((0, 1)) / y.shape[0], Joined.MEAN),
    "cast": (lambda y: y.sigmoid().to(y.dtype).mean(), Joined.MEAN),
    "of a type": (lambda y: (y - torch.ones(3).type_as(y)).mean(), Joined.MEAN),
    "error": (lambda y: F.mse_loss(y, torch.zeros_like(y)), Joined.MEAN),
    "max": (lambda y: -y.max(0)[0], Joined.MIN),
    "largest": (lambda y: y.max().exp(), Joined.MAX),
    "min": (lambda y: y.amin(0), Joined.MIN),
    "any": (lambda y: (y > 0.4).any(), Joined.MAX),
    "all": (lambda y: (y > -0.4).all(0), Joined.MIN),
    "shared": (lambda y: torch.arange(3) + 1, Joined.SAME),
}
APART: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda y: y.mean(0).norm(),
    "which": lambda y: y.max(0)[1],
    "first": lambda y: y[0],
    "spread": lambda y: y.std(0),
    "scaled": lambda y: (y / y.shape[0]).sum(0),
    "offset": lambda y: y.sum(0) + 1,
    "entropy": lambda y: F.cross_entropy(y, y.argmax(1)),
    "squared": lambda y: y.mean(0) * y.mean(0),
    "rounded": lambda y: y.sum(0).int(),
}


MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "variance": lambda y: y.var(0).mean(),
    "of the mean": lambda y: (y.mean(0) ** 2).mean(),
    "softmax": lambda y: y.softmax(0).mean(),
    "centred": lambda y: ((y - y.mean(0)) ** 2).sum(),
    "products": lambda y: (y @ y.T).mean(),
}
"""Scalars that are written as a sum or a mean, of what takes other samples along."""


def ways(reduce: Callable[[Tensor], object]) -> list[Joined]:
    graph = trace(Reducing(reduce), torch.randn(BATCH, WIDTH), training=False)
    return list(joined_outputs(graph).values())


@pytest.mark.parametrize("name", WAYS)
def test_ways_are_told_from_the_ops(name: str) -> None:
    reduce, way = WAYS[name]

    assert ways(reduce) == [way]


def test_what_cannot_be_put_together_is_known() -> None:
    found = ways(lambda y: tuple(reduce(y) for reduce in APART.values()))

    assert found == [Joined.APART] * len(APART)


@pytest.mark.parametrize("name", MIXED)
def test_a_mean_of_what_takes_other_samples_is_no_term(name: str) -> None:
    graph = trace(
        Reducing(lambda y: (y, MIXED[name](y))), torch.randn(BATCH, WIDTH), training=False
    )

    assert not weigh_outputs(graph).output_terms


def test_a_sum_and_a_mean_of_rows_are_terms() -> None:
    graph = trace(
        Reducing(lambda y: (y, y.square().mean() + y.exp().sum())),
        torch.randn(BATCH, WIDTH),
        training=False,
    )

    (terms,) = weigh_outputs(graph).output_terms.values()

    assert len(terms) == 2


def serving(reduce: Callable[[Tensor], object], name: str = "serving") -> Subject:
    torch.manual_seed(0)
    return Subject(name, Reducing(reduce), (torch.randn(BATCH, WIDTH),), training=False)


def equal(pipe: Callable[[Tensor], object], model: nn.Module, samples: int) -> None:
    batch = torch.randn(samples, WIDTH)
    with torch.no_grad():
        expected = flat_tensors(copy.deepcopy(model).eval()(batch))
    actual = flat_tensors(pipe(batch))

    assert expected.keys() == actual.keys()
    for key, tensor in expected.items():
        assert tensor.dtype == actual[key].dtype
        torch.testing.assert_close(actual[key], tensor, msg=key)


def test_all_of_them_are_those_of_whole_batches(tmp_path: Path) -> None:
    given = serving(lambda y: {name: reduce(y) for name, (reduce, _) in WAYS.items()})
    compile_subject(given, CompileOptions(2, 4, training=False, validate=False), tmp_path / "out")

    with load_package(tmp_path / "out").Pipeline() as pipe:
        for samples in (BATCH, 7, 2):  # in micro-batches of other sizes, and in fewer
            equal(pipe.eval(), given.model, samples)


def test_what_cannot_be_put_together_is_refused(tmp_path: Path) -> None:
    """By its line, where several micro-batches are asked for; else there is one."""
    given = serving(lambda y: (y, APART["norm"](y)))
    options = CompileOptions(2, 4, training=False, validate=False)

    with pytest.raises(ModelError, match="cannot be put together from micro-batches") as raised:
        compile_subject(given, options, tmp_path / "refused")

    assert raised.value.location is not None
    assert '"norm": lambda' in raised.value.location.code
    assert "--microbatches 1" in raised.value.hint
    by_default = dataclasses.replace(options, microbatches=None)
    made = compile_subject(given, by_default, tmp_path / "out")
    assert made.plan.microbatches == 1
    with load_package(tmp_path / "out").Pipeline(microbatches=4) as pipe:
        equal(pipe.eval(), given.model, 7)


def test_a_package_that_trains_evaluates_them_in_one_piece(tmp_path: Path) -> None:
    given = dataclasses.replace(
        serving(lambda y: (y, APART["spread"](y), WAYS["sum"][0](y))),
        training=True,
        target=torch.randn(BATCH, 3),
        loss_fn=lambda output, target: F.mse_loss(output[0], target),
    )
    options = CompileOptions(2, microbatches=8, validate=False)
    compile_subject(given, options, tmp_path / "out")
    with load_package(tmp_path / "out").Pipeline() as pipe:
        equal(pipe.eval(), given.model, 7)


def test_draws_of_what_is_evaluated_in_one_piece_are_those_of_one(tmp_path: Path) -> None:
    """A loss over what is masked at random, in eval mode too, as masked autoencoders have it."""

    class Masked(Reducing):
        def __init__(self) -> None:
            super().__init__(lambda y: y)

        def forward(self, x: Tensor) -> Tensor:
            mask = (torch.rand(x.shape[0], 3).argsort(1) < 2).float()
            return (super().forward(x).square() * mask).sum() / mask.sum()

    torch.manual_seed(0)
    given = Subject(
        "masked",
        Masked(),
        (torch.randn(BATCH, WIDTH),),
        target=torch.zeros(BATCH),
        loss_fn=lambda output, target: output + 0 * target.mean(),
    )

    made = compile_subject(given, CompileOptions(2, 4), tmp_path / "out")

    assert made.validation is not None
    assert made.validation.passed


def test_a_loss_in_eval_mode_is_held_to_micro_batches_beside_what_is_in_one_piece(
    tmp_path: Path,
) -> None:
    """`evaluate` runs micro-batches where no outputs are asked for."""

    class Weighed(Reducing):
        def __init__(self) -> None:
            super().__init__(lambda y: y)

        def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
            y = super().forward(x)
            loss = (y - target).square()
            weights = torch.ones_like(y) if self.training else (4 * y).exp()
            loss = loss.mean() if self.training else (loss * weights).sum() / weights.sum()
            return {"loss": loss, "y": y, "norm": y.square().sum().sqrt()}

    torch.manual_seed(0)
    given = Subject("weighed", Weighed(), (torch.randn(BATCH, WIDTH), torch.randn(BATCH, 3)))

    with pytest.raises(UnsplittableError):
        compile_subject(given, CompileOptions(2, 4), tmp_path / "out")


def test_batchnorm_after_global_pooling_trains_by_default(tmp_path: Path) -> None:
    """On micro-batches of two, where the default would leave one."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.conv(x).mean((2, 3), keepdim=True)).flatten(1))

    given = Subject(
        "pooled",
        Pooled(),
        (torch.randn(BATCH, 2, 5, 5),),
        target=torch.randn(BATCH, 3),
        loss_fn=F.mse_loss,
    )
    made = compile_subject(given, CompileOptions(2, validate=False), None)

    assert made.plan.microbatches >= 2
    assert made.plan.microbatch_size >= 2


def test_numbers_of_samples_are_those_of_the_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Reducing(lambda y: {"rows": y, "of": (len(y), y.numel(), y.shape[1], "rows", True)})
    subject = Subject("numbers", model, (torch.randn(BATCH, WIDTH),), training=False)
    options = CompileOptions(2, 4, training=False, validate=False)
    made = compile_subject(subject, options, tmp_path / "out")
    assert made.directory is not None

    for microbatches in (1, 4):
        with load_package(made.directory).Pipeline(microbatches=microbatches) as pipe:
            for samples in (1, 7, 8, 11):
                x = torch.randn(samples, WIDTH)
                assert pipe(x)["of"] == model.eval()(x)["of"]


@pytest.mark.parametrize(
    "number", [lambda y: len(y) + 1, lambda y: len(y) // 2, lambda y: y.sum().item()]
)
def test_numbers_that_differ_in_another_way_are_refused(number: Callable[[Tensor], object]) -> None:
    model = Reducing(lambda y: (y, number(y)))

    with pytest.raises(ModelError, match=r"output\[1\] is no tensor and differs") as raised:
        trace(model, torch.randn(BATCH, WIDTH), training=False)

    assert raised.value.location is not None
    assert raised.value.location.file == __file__
    assert "return it as a tensor" in raised.value.hint
