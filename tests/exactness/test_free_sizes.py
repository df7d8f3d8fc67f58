"""Packages that are compiled at one size of tokens or images, held to plain PyTorch at others.

A step's loss and gradients, and the outputs in eval mode, are compared on the whole batch.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from loading import load_package
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe_compiler as gpc
from gpipe_compiler.cli.main import compile_command
from gpipe_compiler.cluster import DEFAULT_HOST, IN_PROCESS, Cluster
from gpipe_compiler.errors import GPipeCompilerError, Notice
from gpipe_compiler.frontend.subject import Wish
from gpipe_compiler.plan import Plan

SAMPLES = 6
VOCABULARY = 11
LONGEST = 24


class Attention(nn.Module):
    """Causal attention with a mask as large as the longest text, as nanoGPT has it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        mask = torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril()
        self.register_buffer("mask", mask[None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm(x)).split(width, dim=2)
        q, k, v = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in parts
        )
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        scores = scores.masked_fill(~self.mask[:, :, :tokens, :tokens], float("-inf"))
        mixed = scores.softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class LanguageModel(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LONGEST, width)
        self.layers = nn.ModuleList(Attention(width, 2) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Typed(nn.Module):
    """Gathers the types of tokens from a table, as BERT does where it is given none."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tokens, self.types = nn.Embedding(VOCABULARY, width), nn.Embedding(2, width)
        self.head = nn.Linear(width, VOCABULARY)
        places = torch.arange(LONGEST).expand((1, -1))
        self.register_buffer("places", places, persistent=False)
        self.register_buffer("table", torch.zeros_like(places), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        places = self.places[:, 0 : length + 0]
        types = torch.gather(self.table.expand(places.shape[0], -1), dim=1, index=places)
        types = types.expand(batch, length)
        return self.head(torch.tanh(self.tokens(ids) + self.types(types)))


class PerToken(nn.Module):
    """Flattens tokens into the batch, and takes a mean over them at the end."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(width, 7)
        self.second = nn.Linear(7, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        y = self.second(torch.tanh(self.first(x.reshape(batch * tokens, width))))
        return x - y.view(batch, tokens, width).sum(1, keepdim=True) / tokens


class Segmenter(nn.Module):
    """Goes down and up again to the sizes that it came from, odd ones included."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.deeper = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.up = nn.Conv2d(10, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down(x))
        deep = self.norm(F.relu(self.deeper(skip)))
        deep = F.interpolate(deep, size=skip.shape[2:])
        y = F.relu(self.up(torch.cat([deep, skip], dim=1)))
        return self.out(F.interpolate(y, size=x.shape[2:], mode="bilinear"))


class Coordinates(Segmenter):
    """Is told where each pixel stands."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(5, 4, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        rows = torch.linspace(-1, 1, height)
        columns = torch.logspace(0, 1, steps=width, dtype=x.dtype, device=x.device)
        places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"))
        return super().forward(torch.cat([x, places.expand(batch, 2, height, width)], 1))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.second = nn.Conv2d(4, 6, 3, padding=1)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.first(x)), 2, ceil_mode=True)
        return self.out(F.adaptive_avg_pool2d(F.relu(self.second(y)), 1).flatten(1))


def language_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


ODD_HALVES = ((9, 31), (5, 5)) if torch.__version__ >= (2, 13) else ()
"""torch 2.11 leaves a guard on `ceil_mode` that asks for even ones; others are refused there."""


class CausalByLength(nn.Module):
    """Attention as Hugging Face calls it: causal where there is more than one token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.parts = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 24)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        query, key, value = self.parts(self.embed(ids)).unsqueeze(1).chunk(3, -1)
        is_causal = True and query.shape[2] > 1
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        return self.head(mixed.squeeze(1))


@dataclass(frozen=True)
class Case:
    """A model with its inputs and target at any sizes.

    Attributes:
        batch: of so many samples, at these sizes.
        example, others: sizes that it is compiled at, and those that it is run at.
    """

    model: Callable[[], nn.Module]
    batch: Callable[..., tuple[Tensor, Tensor]]
    loss: Callable[[Any, Any], Tensor]
    example: tuple[int, ...]
    others: tuple[tuple[int, ...], ...]
    free: tuple[str, ...] = ()


def texts(tokens: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (SAMPLES, tokens + 1))
    return ids[:, :-1], ids[:, 1:]


def pictures(height: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, 3, height, width), torch.randint(0, 2, (SAMPLES, height, width))


CASES: Mapping[str, Case] = {
    "language": Case(
        LanguageModel,
        texts,
        language_loss,
        (8,),
        ((2,), (7,), (8,), (13,), (LONGEST,)),
        ("tokens=ids.1", "tokens=target.1"),
    ),
    "longest": Case(LanguageModel, texts, language_loss, (LONGEST,), ((5,), (23,), (LONGEST,))),
    "typed": Case(Typed, texts, language_loss, (8,), ((2,), (7,), (13,), (LONGEST,))),
    "causal_by_length": Case(
        CausalByLength, texts, language_loss, (8,), ((2,), (7,), (13,), (LONGEST,))
    ),
    "per_token": Case(
        PerToken,
        lambda n: (torch.randn(SAMPLES, n, 5), torch.randn(SAMPLES, n, 5)),
        F.mse_loss,
        (5,),
        ((2,), (4,), (5,), (6,), (31,)),
    ),
    "segmenter": Case(
        Segmenter,
        pictures,
        F.cross_entropy,
        (16, 12),
        ((16, 12), (12, 16), (9, 31), (17, 17), (5, 6)),
    ),
    "coordinates": Case(
        Coordinates,
        pictures,
        F.cross_entropy,
        (16, 12),
        ((16, 12), (12, 16), (9, 31), (17, 17), (5, 6)),
    ),
    "classifier": Case(
        Classifier,
        lambda h, w: (torch.randn(SAMPLES, 3, h, w), torch.randint(0, 3, (SAMPLES,))),
        F.cross_entropy,
        (16, 12),
        ((16, 12), (12, 16), *ODD_HALVES),
    ),
}


@dataclass(frozen=True)
class Compiled:
    case: Case
    model: nn.Module
    package: ModuleType
    folder: Path = field(repr=False)


def package_of(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    loss: Callable[[Any, Any], Tensor],
    folder: Path,
    free: tuple[str, ...] = (),
    stages: int = 3,
) -> ModuleType:
    graph = gpc.trace(copy.deepcopy(model), (batch[0],), target=batch[1], loss_fn=loss, free=free)
    plan = gpc.plan(
        graph, stages=stages, microbatches=3, cluster=Cluster.of(DEFAULT_HOST, IN_PROCESS)
    )
    gpc.emit(plan, folder)
    return load_package(folder)


@pytest.fixture(scope="module", params=CASES)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    case = CASES[request.param]
    torch.manual_seed(0)
    model = case.model()
    folder = tmp_path_factory.mktemp("made") / request.param
    package = package_of(model, case.batch(*case.example), case.loss, folder, case.free)
    return Compiled(case, model, package, folder)


def test_as_plain_pytorch_at_other_sizes(compiled: Compiled) -> None:
    case = compiled.case
    with compiled.package.Pipeline() as pipe:
        for number, sizes in enumerate(case.others):
            torch.manual_seed(number)
            inputs, target = case.batch(*sizes)
            plain = copy.deepcopy(compiled.model)
            expected = plain(inputs)
            loss = case.loss(expected, target)
            loss.backward()
            pipe.train()
            pipe.zero_grad()
            torch.testing.assert_close(pipe.step((inputs,), target), loss.detach())
            gradients = {name: p.grad for name, p in pipe.named_parameters()}
            for name, parameter in plain.named_parameters():
                torch.testing.assert_close(gradients[name], parameter.grad, msg=f"{name} {sizes}")
            pipe.eval()
            torch.testing.assert_close(pipe((inputs,)), expected.detach())


def test_sizes_are_read_off_what_a_stage_has(compiled: Compiled) -> None:
    """No number of the example stands in a stage: only comments and docstrings tell it."""
    schedule = (compiled.folder / "schedule.py").read_text()
    assert "Size(" in schedule
    for stage in compiled.folder.glob("stage_*.py"):
        text = re.sub(r'""".*?"""', "", stage.read_text(), flags=re.DOTALL)
        code = "\n".join(line.split("#")[0] for line in text.splitlines())
        for size in compiled.case.example:
            assert f" {size}," not in code.replace("nn.", "").split("def forward")[-1]


def test_a_mean_over_micro_batches_of_sizes_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = PerToken()
    texts_of = [(torch.randn(2, n, 5), torch.randn(2, n, 5)) for n in (3, 8, 4)]
    package = package_of(
        model, (torch.randn(6, 5, 5), torch.randn(6, 5, 5)), F.mse_loss, tmp_path / "made"
    )
    with package.Pipeline() as pipe:
        loss = pipe.step([(x,) for x, _ in texts_of], [target for _, target in texts_of])
        squares = sum((model(x) - target).square().sum() for x, target in texts_of)
        expected = squares / sum(target.numel() for _, target in texts_of)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        gradients = {name: p.grad for name, p in pipe.named_parameters()}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, msg=name)
        with pytest.raises(Exception, match=r"demands 2 <= x\.1"):
            pipe.step((torch.randn(6, 1, 5),), torch.randn(6, 1, 5))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if x.shape[1] > 10:
            x = 2 * x
        return x


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 6)
        self.table = nn.Embedding(LONGEST, 6)
        self.out = nn.Linear(6, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0) + 2
        return self.out(torch.tanh(self.tokens(ids) + self.table(places)))


class Windows(nn.Module):
    """Attention within windows of four tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.first(x).view(batch, tokens // 4, 4, width)
        return self.second((parts @ parts.transpose(2, 3) @ parts).reshape(batch, tokens, width))


class Relative(nn.Module):
    """Takes the middle of a table of relative positions, as Transformer-XL and its kin."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = nn.Parameter(torch.randn(2 * LONGEST - 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        near = self.table[LONGEST - tokens : LONGEST + tokens - 1]
        scores = self.first(x) @ near.t()
        scores = F.pad(scores, (1, 0)).view(batch, 2 * tokens, tokens)[:, 1:]
        scores = scores.reshape(batch, tokens, 2 * tokens - 1)[:, :, :tokens]
        return self.second(scores.softmax(-1) @ x)


REFUSED: Mapping[str, tuple[Callable[[], nn.Module], bool, int, tuple[int, ...], int, str]] = {
    "branch": (Branching, False, 8, (3, 10), 11, "if x.shape[1] > 10"),
    "positions": (Positions, True, 8, (5, LONGEST - 2), LONGEST - 1, "self.table(places)"),
    "windows": (Windows, False, 8, (4, 16), 6, ".view(batch, tokens // 4, 4, width)"),
    "relative": (Relative, False, 8, (3, 17, LONGEST), LONGEST + 1, "self.table[LONGEST - tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_at_which_the_model_is_another_are_refused(name: str, tmp_path: Path) -> None:
    """Before anything is run, and naming the line."""
    make, of_ids, example, fine, wrong, line = REFUSED[name]
    torch.manual_seed(0)
    model = make()

    def batch(tokens: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(SAMPLES, tokens, 4)
        return texts(tokens) if of_ids else (x, x.cos())

    loss = language_loss if of_ids else F.mse_loss
    package = package_of(model, batch(example), loss, tmp_path / "made", stages=2)
    with package.Pipeline() as pipe:
        for tokens in fine:
            inputs, target = batch(tokens)
            torch.testing.assert_close(
                pipe.step((inputs,), target), loss(model(inputs), target).detach()
            )
        pipe.zero_grad()
        inputs, target = batch(wrong)
        with pytest.raises(Exception, match=r"test_free_sizes\.py:\d+") as caught:
            pipe.step((inputs,), target)
        assert line in str(caught.value)
        assert all(p.grad is None or not p.grad.any() for p in pipe.parameters())


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(4, 4), nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(x).view(-1, 24))


def test_what_the_model_fixes_stays_fixed(tmp_path: Path) -> None:
    x, target = torch.randn(SAMPLES, 6, 4), torch.randn(SAMPLES, 2)
    package = package_of(Fixed(), (x, target), F.mse_loss, tmp_path / "made", stages=2)
    with package.Pipeline() as pipe, pytest.raises(Exception, match="compiled for batchx6x4"):
        pipe.step((torch.randn(SAMPLES, 12, 4),), torch.randn(2 * SAMPLES, 2))
    with pytest.raises(GPipeCompilerError, match=r"one size of x\.1 only") as caught:
        gpc.trace(Fixed(), (x,), target=target, loss_fn=F.mse_loss, free=("x.1",))
    assert caught.value.location is not None
    assert caught.value.location.code == "return self.out(self.first(x).view(-1, 24))"


class Numbered(nn.Module):
    """Returns numbers beside its tensors: one that is always the same, one that is the height."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Conv2d(1, 3, 1), nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> dict[str, object]:
        height = x.shape[2]
        y = torch.tanh(self.first(x)) + torch.arange(height)[:, None] / height
        return {"y": self.out(y), "scale": 0.5, "rows": height, "samples": 2 * x.shape[0]}


class StepByStep(nn.Module):
    """A scan in Python: as many rounds as the example has tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        state = torch.zeros_like(h[:, 0])
        for place in range(h.shape[1]):
            state = torch.tanh(state + h[:, place])
        return self.head(state)


def test_a_line_that_makes_a_number_of_a_size_is_told() -> None:
    ids, target = torch.randint(VOCABULARY, (SAMPLES, 7)), torch.randint(3, (SAMPLES,))
    with pytest.warns(Notice, match=r"ids\.1 is taken .* for place in range\(h\.shape\[1\]\)"):
        graph = gpc.trace(StepByStep(), ids, target=target, loss_fn=F.cross_entropy)
    assert not graph.sizes


def test_a_size_that_is_returned_as_a_number_stays_fixed_and_no_other(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Numbered(), torch.randn(SAMPLES, 1, 4, 5)

    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.mse_loss(output["y"], target)

    package = package_of(model, (x, x.cos()), loss, tmp_path / "made", stages=2)
    wide = torch.randn(SAMPLES, 1, 4, 9)
    with package.Pipeline() as pipe:
        torch.testing.assert_close(
            pipe.step((wide,), wide.cos()), loss(model(wide), wide.cos()).detach()
        )
        with pytest.raises(Exception, match=r"compiled for batch x 1 x 4 x x\.3"):
            pipe.step((torch.randn(SAMPLES, 1, 6, 9),), torch.randn(SAMPLES, 1, 6, 9))
        pipe.eval()
        with torch.no_grad():
            assert {**pipe((wide,)), "y": 0} == {**model(wide), "y": 0}


class OtherInTraining(nn.Module):
    """Reads one value in train mode, and another in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = torch.tanh(y) / x.shape[1] if self.training else torch.sigmoid(y)
        return self.second(y)


def test_both_modes_are_run_at_sizes_that_are_free(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = OtherInTraining(), torch.randn(SAMPLES, 5, 4)
    package = package_of(model, (x, x.cos()), F.mse_loss, tmp_path / "made", stages=2)
    long = torch.randn(SAMPLES, 9, 4)
    with package.Pipeline() as pipe:
        expected = F.mse_loss(model(long), long.cos()).detach()
        torch.testing.assert_close(pipe.step((long,), long.cos()), expected)
        pipe.eval()
        torch.testing.assert_close(pipe((long,)), model.eval()(long).detach())


class Prefix(nn.Module):
    """Adds the first rows of a table of positions; takes the root of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.positions = nn.Parameter(torch.randn(1, LONGEST, 4))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return self.second(self.first(x) + self.positions[:, :length]) / length**0.5


class EvenLength(nn.Module):
    """Pads to an even number of tokens, by a branch, and joins them in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if x.shape[1] % 2:
            y = F.pad(y, (0, 0, 0, 1))
        return self.second(y.view(y.shape[0], -1, 2, 4).mean(2))


class Resized(nn.Module):
    """Of a size that follows by way of a float."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.interpolate(self.first(x.transpose(1, 2)), scale_factor=0.7)
        return self.second(y).transpose(1, 2)


class LastHalf(nn.Module):
    """Takes a slice of which both bounds follow from the length, and the end may be beyond it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return self.second(self.first(x)[:, -length // 2 : 2 * length - 3]).sum(1)


def next_token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].reshape(-1, VOCABULARY), target[:, 1:].reshape(-1))


@pytest.mark.parametrize(
    ("make", "free"),
    [(Prefix, True), (LastHalf, True), (EvenLength, False), (Resized, False)],
)
def test_sizes_that_only_a_formula_tells_are_free_or_fixed(
    make: Callable[[], nn.Module], free: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = make()
    x = torch.randn(SAMPLES, 8, 4)
    batch = x, torch.randn_like(model(x))
    package = package_of(model, batch, F.mse_loss, tmp_path / "made", stages=2)
    with package.Pipeline() as pipe:
        torch.testing.assert_close(
            pipe.step((x,), batch[1]), F.mse_loss(model(x), batch[1]).detach()
        )
        for tokens in (3, LONGEST):
            x = torch.randn(SAMPLES, tokens, 4)
            target = torch.randn_like(model(x))
            if not free:
                with pytest.raises(Exception, match="compiled for batchx8x4"):
                    pipe.step((x,), target)
                continue
            loss = F.mse_loss(model(x), target)
            torch.testing.assert_close(pipe.step((x,), target), loss.detach())
            pipe.eval()
            torch.testing.assert_close(pipe((x,)), model(x).detach())
            pipe.train()


def test_a_loss_of_the_next_token_leaves_the_length_free(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    package = package_of(model, texts(8), next_token_loss, tmp_path / "made", stages=2)
    with package.Pipeline() as pipe:
        for tokens in (3, 8, LONGEST):
            ids, target = texts(tokens)
            expected = next_token_loss(model(ids), target).detach()
            torch.testing.assert_close(pipe.step((ids,), target), expected)


def test_a_loss_that_divides_by_the_root_of_a_length(tmp_path: Path) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean() / output.shape[1] ** 0.5

    torch.manual_seed(0)
    model = PerToken()
    batch = torch.randn(SAMPLES, 4, 5), torch.randn(SAMPLES, 4, 5)
    package = package_of(model, batch, loss, tmp_path / "made", stages=2)
    with package.Pipeline() as pipe:
        for tokens in (2, 7):
            x, target = torch.randn(SAMPLES, tokens, 5), torch.randn(SAMPLES, tokens, 5)
            torch.testing.assert_close(pipe.step((x,), target), loss(model(x), target).detach())


def test_a_size_of_one_in_the_example_stays_one(tmp_path: Path) -> None:
    x, longer = torch.randn(SAMPLES, 1, 5), torch.randn(SAMPLES, 3, 5)
    model = PerToken()
    package = package_of(model, (x, x), F.mse_loss, tmp_path / "made", stages=2)

    with package.Pipeline() as pipe:
        torch.testing.assert_close(pipe.eval()(x), model(x))
        with pytest.raises(Exception, match="compiled for batchx1x5"):
            pipe(longer)
    with pytest.raises(GPipeCompilerError, match=r"--free x\.1.*at least 2 in the example"):
        gpc.trace(model, (x,), target=x, loss_fn=F.mse_loss, free=("x.1",))


def test_a_dimension_that_there_is_not_is_refused() -> None:
    x, target = torch.randn(SAMPLES, 6, 4), torch.randn(SAMPLES, 2)
    with pytest.raises(GPipeCompilerError, match=r"--free x\.7"):
        gpc.trace(Fixed(), (x,), target=target, loss_fn=F.mse_loss, free=("x.7",))


@pytest.mark.parametrize(
    ("free", "told"),
    [
        (["class=x.1"], "'class' cannot be the name of a size"),
        (["two words=x.1"], "'two words' cannot be the name of a size"),
        (["=x.1"], "'' cannot be the name of a size"),
        (["x.1", "x_1=target.1"], "x.1 and x_1 would be one variable"),
    ],
)
def test_names_that_no_variable_can_have_are_refused(free: list[str], told: str) -> None:
    with pytest.raises(GPipeCompilerError, match=re.escape(told)) as caught:
        Wish.parse(free)
    assert caught.value.hint


@pytest.mark.slow
def test_all_sizes_but_some_are_free() -> None:
    images, target = pictures(16, 12)

    def free(*fix: str, free: tuple[str, ...] = ()) -> list[str]:
        model = Segmenter()
        graph = gpc.trace(
            model, (images,), target=target, loss_fn=F.cross_entropy, free=free, fix=fix
        )
        return [size.name for size in graph.sizes]

    assert free() == ["x.2", "x.3", "target.1", "target.2"]
    assert free("x.3") == ["x.2", "target.1", "target.2"]
    assert free("all") == []
    assert free("all", free=("x.2", "target.1")) == ["x.2", "target.1"]
    with pytest.raises(GPipeCompilerError, match=r"--fix x\.7"):
        free("x.7")
    with pytest.raises(GPipeCompilerError, match=r"--free and --fix both name x\.3"):
        free("x.3", free=("x.3",))


class LongCondition(nn.Module):
    """Compares a size by a formula of a hundred operations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if sum(x.shape[1] // part for part in range(2, 40)) == 1:
            y = 2 * y
        return self.second(y)


def test_a_size_in_a_long_condition_is_free_where_it_is_asked_for() -> None:
    x = torch.randn(SAMPLES, 8, 4)

    def sizes(*free: str) -> list[str]:
        graph = gpc.trace(LongCondition(), (x,), target=x.cos(), loss_fn=F.mse_loss, free=free)
        return [size.name for size in graph.sizes]

    assert sizes() == []
    assert sizes("x.1", "target.1") == ["x.1"]


MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) + torch.arange(x.shape[1])[:, None]


def build_model():
    return Model()


def example_inputs():
    return torch.randn(6, 5, 4)


def example_target():
    return torch.randn(6, 5, 4)


def loss_fn(output, target):
    return nn.functional.mse_loss(output, target)
"""


def test_the_command_compares_at_other_sizes_and_the_plan_lists_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    words = [str(tmp_path / "model.py"), "--stages", "2", "-o", str(tmp_path / "made")]
    free = ["--free", "Size=x.1", "--free", "Size=target.1"]
    assert compile_command([*words, *free]) == 0
    assert "Size 4" in capsys.readouterr().out  # the second batch
    plan = Plan.from_json((tmp_path / "made" / "plan.json").read_text())
    assert plan.sizes == (("Size", 5),)


def test_the_command_names_all_sizes_of_an_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    words = [str(tmp_path / "model.py"), "--stages", "2", "-o", str(tmp_path / "made")]
    names = ["--input", "x=BATCHxTOKENSx4:float32", "--input", "target=BATCHxTOKENSxWIDTH"]
    assert compile_command([*words, *names, "--at", "tokens=7"]) == 0
    plan = Plan.from_json((tmp_path / "made" / "plan.json").read_text())
    assert plan.sizes == (("tokens", 7),)
    capsys.readouterr()
    for other in ("y=BATCHxTOKENS", "x=BATCHxTOKENS", "x=NxTx5", "x=NxTxT", "x=NxTxD:int64"):
        assert compile_command([*words, "--dry-run", "--input", other]) == 2
        assert f"--input {other}" in " ".join(capsys.readouterr().err.split())
    assert compile_command([*words, "--dry-run", "--input", "x=NxINxD"]) == 2
    assert "a word of Python's own" in capsys.readouterr().err


def test_the_plan_is_for_the_sizes_that_are_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, made = tmp_path / "model.py", tmp_path / "made"
    model.write_text(MODEL)
    words = [str(model), "--stages", "2", "-o", str(made), "--force"]
    assert compile_command([*words, "--free", "tokens=x.1", "--at", "tokens=300"]) == 0
    plan = Plan.from_json((made / "plan.json").read_text())
    assert plan.sizes == (("tokens", 300),)
    model.write_text(MODEL.replace("6, 5, 4", "6, 300, 4"))
    assert compile_command([*words, "--free", "tokens=x.1"]) == 0
    longer = Plan.from_json((made / "plan.json").read_text())
    assert plan.prediction.peak_bytes == longer.prediction.peak_bytes
    assert plan.crossings == longer.crossings

    capsys.readouterr()
    assert compile_command([*words, "--at", "tokens=300"]) == 2
    assert "no size of this name" in capsys.readouterr().err
    assert compile_command([*words, "--at", "x.1=1"]) == 2
    assert "at least 2" in capsys.readouterr().err


def test_a_size_that_the_model_does_not_take_is_not_planned_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    branch = "        assert x.shape[1] < 40\n        return"
    (tmp_path / "model.py").write_text(
        MODEL.replace("        return self.second", f"{branch} self.second")
    )
    words = [str(tmp_path / "model.py"), "--stages", "2", "--dry-run"]
    assert compile_command([*words, "--at", "x.1=39"]) == 0
    assert compile_command([*words, "--at", "x.1=40"]) == 2
    assert "assert x.shape[1] < 40" in capsys.readouterr().err


class Folded(nn.Module):
    """Folds tokens into the batch and back, by a size that its end no longer has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens = x.shape[:2]
        y = self.first(x.reshape(samples * tokens, -1))
        return self.last(y.tanh()).reshape(samples, tokens, -1)


def test_a_call_without_a_target_needs_none_for_its_sizes(tmp_path: Path) -> None:
    model, batch = Folded(), (torch.randn(SAMPLES, 6, 4), torch.randn(SAMPLES, 6, 3))
    package = package_of(model, batch, F.mse_loss, tmp_path / "made", stages=2)
    x = torch.randn(SAMPLES, 9, 4)
    with package.Pipeline() as pipe:
        pipe.load_state_dict(model.state_dict())
        pipe.eval()
        torch.testing.assert_close(pipe(x), model(x))


def test_sizes_that_have_to_be_equal_are_one() -> None:
    """Torch itself leaves it at a demand where each was flattened with the batch."""
    x, target = torch.randn(SAMPLES, 6, 4), torch.randint(4, (SAMPLES, 6))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    graph = gpc.trace(model, (x,), target=target, loss_fn=language_loss)
    assert [size.name for size in graph.sizes] == ["input.1"]


def test_a_size_of_which_a_slice_goes_from_either_end_stays_fixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is left of it where nothing was padded: `[:, :-0]`."""
    text = MODEL.replace("import torch\n", "import torch\nfrom torch.nn import functional as F\n")
    padded = """
        more = -x.shape[1] % 4
        y = F.pad(self.first(x), (0, 0, 0, more)).view(x.shape[0], -1, 4, 8)
        return self.second(y.softmax(2).flatten(1, 2)[:, :-more])
"""
    body = text.split("def forward(self, x):")
    after = body[1].split("\n\n\ndef build_model")[1]
    (tmp_path / "model.py").write_text(
        f"{body[0]}def forward(self, x):{padded}\n\ndef build_model{after}"
    )
    words = [str(tmp_path / "model.py"), "--stages", "2", "--dry-run"]
    assert compile_command(words) == 0
    assert "free sizes" not in capsys.readouterr().out
    assert compile_command([*words, "--free", "x.1", "--free", "target.1"]) == 1
    assert "model.py:14" in capsys.readouterr().err


class Resized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 2, 2, 2), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        return F.interpolate(self.second(self.first(x)), size=(height, width))


def test_sizes_at_the_end_of_a_shape_have_the_users_names(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    package_of(Resized(), pictures(16, 12), F.cross_entropy, folder, stages=2)
    text = "".join(stage.read_text() for stage in sorted(folder.glob("stage_*.py")))
    assert "height = x.shape[2]\n" in text, text
    assert "width = x.shape[3]\n" in text, text
