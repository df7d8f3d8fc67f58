"""What was filled on meta is replayed: the same numbers, or others from the same distribution."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_compiler.frontend.init_program import UNKNOWN
from gpipe_compiler.frontend.initial import recording, tensors_of_model
from gpipe_compiler.runtime.core.building import replay
from gpipe_compiler.runtime.spec import Steps

Make = Callable[[], Tensor]


class Holder(nn.Module):
    """A model of one tensor."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.register_buffer("it", make().detach())


def steps_of(build: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Steps]]:
    with recording() as seen, torch.device("meta"):
        model = build()
    return model, seen.steps_of(model)


def replayed(steps: Steps, like: Tensor, name: str = "it", seed: int = 0) -> Tensor:
    made = torch.full_like(like, 77)
    with torch.random.fork_rng():
        replay(made, name, steps, seed)
    return made


def sinusoids() -> Tensor:
    table = torch.zeros(7, 4)
    place = torch.arange(7).unsqueeze(1)
    rate = torch.exp(torch.arange(0, 4, 2) * (-math.log(1e4) / 4))
    table[:, 0::2] = torch.sin(place * rate)
    table[:, 1::2] = torch.cos(place * rate)
    return table.unsqueeze(0)


def relative_index() -> Tensor:
    grid = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")).flatten(1)
    apart = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0).contiguous()
    apart[:, :, 0] += 1
    apart[:, :, 0] *= 5
    return apart.sum(-1)


EXACT: dict[str, Make] = {
    "zeros": lambda: torch.zeros(3, 4),
    "ones of integers": lambda: torch.ones(3, dtype=torch.int64),
    "full": lambda: torch.full((2, 3), 2.5),
    "infinite": lambda: torch.full((4, 4), float("-inf")).triu_(1),
    "causal mask": lambda: torch.tril(torch.ones(5, 5, dtype=torch.bool)).view(1, 1, 5, 5),
    "rotary": lambda: torch.outer(
        torch.arange(6).float(), 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8)
    ).cos(),
    "sinusoids": sinusoids,
    "relative index": relative_index,
    "eye": lambda: torch.eye(3, 4),
    "linspace": lambda: torch.linspace(0, 1, 5),
    "slopes": lambda: torch.pow(2.0, -torch.arange(1, 9).float()),
    "data": lambda: torch.tensor([[1.0, 2.0], [3.0, 4.5]]),
    "data of integers": lambda: torch.tensor([3, 1, 2])[None].expand(2, -1).contiguous(),
    "scaled": lambda: 1e-6 * torch.ones(4),
    "overwritten": lambda: torch.randn(4).zero_().add_(2),
    "part": lambda: _with_part(torch.zeros(5, 6)),
    "column": lambda: _with_column(torch.ones(5, 6)),
    "transposed": lambda: torch.arange(6).view(2, 3).t(),
    "half": lambda: torch.linspace(0, 3, 7).half(),
    "concatenated": lambda: torch.cat([torch.zeros(2), torch.ones(3)]).repeat(2, 1),
    "clamped": lambda: torch.arange(10.0).clamp_(2, 5),
    "eye_": lambda: nn.init.eye_(torch.empty(3, 3)),
    "dirac_": lambda: nn.init.dirac_(torch.empty(3, 3, 3)),
    "where": lambda: torch.where(torch.arange(5) > 2, 1.0, -1.0),
    "masked_fill": lambda: torch.zeros(3, 3).masked_fill(torch.eye(3).bool(), 9.0),
}


def _with_part(tensor: Tensor) -> Tensor:
    tensor[1:3, 2:5].fill_(4.0)
    tensor[4] = 1.0
    tensor[0, 0] = 7
    return tensor


def _with_column(tensor: Tensor) -> Tensor:
    tensor[:, 2].mul_(3.0)
    return tensor


@pytest.mark.parametrize("label", EXACT)
def test_what_is_not_random_is_computed_again(label: str) -> None:
    expected = EXACT[label]()
    _, steps = steps_of(lambda: Holder(EXACT[label]))

    assert torch.equal(replayed(steps["it"], expected), expected)


SIZE = (300, 200)
RANDOM: dict[str, Make] = {
    "normal_": lambda: torch.empty(SIZE).normal_(1.0, 0.02),
    "uniform_": lambda: torch.empty(SIZE).uniform_(-0.25, 0.5),
    "randn": lambda: torch.randn(SIZE) * 0.3,
    "rand": lambda: torch.rand(SIZE),
    "bernoulli_": lambda: torch.empty(SIZE).bernoulli_(0.3),
    "exponential_": lambda: torch.empty(SIZE).exponential_(2.0),
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(SIZE), std=0.02),
    "cut short": lambda: nn.init.trunc_normal_(torch.empty(SIZE), 0.0, 1.0, -0.5, 1.0),
    "by hand": lambda: (
        torch.empty(SIZE).uniform_(-0.9, 0.9).erfinv_().mul_(0.1).add_(0.5).clamp_(0.4, 0.7)
    ),
    "kaiming": lambda: nn.init.kaiming_normal_(torch.empty(SIZE), nonlinearity="relu"),
    "xavier": lambda: nn.init.xavier_uniform_(torch.empty(SIZE), gain=2.0),
    "orthogonal_": lambda: nn.init.orthogonal_(torch.empty(SIZE), gain=1.5),
    "sparse_": lambda: nn.init.sparse_(torch.empty(SIZE), 0.4, std=0.2),
    "scaled": lambda: torch.empty(SIZE).normal_(0.0, 1.0).div_(math.sqrt(48)),
    "permuted": lambda: torch.randperm(60000).view(SIZE).float() / 60000,
    "half": lambda: torch.empty(SIZE).normal_(0.0, 0.02).half(),
}


@pytest.mark.parametrize("label", RANDOM)
def test_what_is_random_has_the_same_distribution(label: str) -> None:
    torch.manual_seed(1)
    expected = RANDOM[label]()
    _, steps = steps_of(lambda: Holder(RANDOM[label]))

    if label == "sparse_" and torch.__version__ < (2, 13):
        assert steps["it"] == UNKNOWN  # it goes on on meta, index by random index
        return
    made = replayed(steps["it"], expected)

    one, other = made.double().flatten().sort().values, expected.double().flatten().sort().values
    assert made.dtype == expected.dtype
    assert not torch.equal(made, expected)
    # Two samples of 60,000: Kolmogorov and Smirnov's distance has a chance of 1e-5 beyond 0.0142.
    ranks = torch.searchsorted(other, one, right=True).double() / other.numel()
    own = torch.searchsorted(one, one, right=True).double() / one.numel()
    assert (ranks - own).abs().max() < 0.0142
    assert float((one.mean() - other.mean()).abs()) < 0.03 * float(other.std())


def test_a_function_that_a_later_torch_leaves_out_on_meta_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rather than that the tensor holds what was in it before."""
    later = "def later_(tensor):\n    return tensor if tensor.is_meta else tensor.fill_(5)"
    monkeypatch.setattr(nn.init, "later_", None, raising=False)
    exec(later, vars(nn.init))

    _, steps = steps_of(lambda: Holder(lambda: nn.init.later_(torch.zeros(3))))

    assert steps["it"] == UNKNOWN


def test_an_orthogonal_matrix_is_orthogonal() -> None:
    _, steps = steps_of(lambda: Holder(lambda: nn.init.orthogonal_(torch.empty(6, 6))))

    made = replayed(steps["it"], torch.empty(6, 6))

    torch.testing.assert_close(made @ made.T, torch.eye(6))


def test_simple_steps_read_well() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(9, 4, padding_idx=2), nn.LayerNorm(4))
        nn.init.normal_(model[0].weight, std=0.02)
        return model

    _, steps = steps_of(build)

    assert steps == {
        "0.weight": (("normal_", 0.0, 0.02),),
        "1.weight": (("fill_", 1.0),),
        "1.bias": (("zero_",),),
    }


def test_a_padding_row_is_zero() -> None:
    _, steps = steps_of(lambda: nn.Embedding(9, 4, padding_idx=2))

    assert steps == {"weight": (("normal_", 0.0, 1.0), ("at", (2,), "zero_"))}
    made = replayed(steps["weight"], torch.empty(9, 4))
    assert torch.equal((made == 0).all(dim=1).nonzero().flatten(), torch.tensor([2]))


def test_copies_draw_the_same_numbers_and_others_do_not() -> None:
    def build() -> nn.Module:
        first = nn.Linear(3, 3)
        return nn.ModuleDict(
            {"first": first, "twin": copy.deepcopy(first), "other": nn.Linear(3, 3)}
        )

    model, steps = steps_of(build)
    made = {
        name: replayed(steps[name], torch.empty(tensor.shape), name)
        for name, tensor in tensors_of_model(model)
    }

    assert torch.equal(made["first.weight"], made["twin.weight"])
    assert torch.equal(made["first.bias"], made["twin.bias"])
    assert not torch.equal(made["first.weight"], made["other.weight"])


def test_weight_norm_begins_as_the_weight() -> None:
    """The size of each row is computed from the very numbers that its direction is drawn from."""
    model, steps = steps_of(
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))  # type: ignore[no-untyped-call]  # torch does not say
    )
    made = {
        name.rpartition(".")[2]: replayed(steps[name], torch.empty(tensor.shape), name)
        for name, tensor in tensors_of_model(model)
    }

    torch.testing.assert_close(made["original0"], made["original1"].norm(dim=1, keepdim=True))


def test_seeds_and_names_make_other_numbers() -> None:
    _, steps = steps_of(lambda: Holder(lambda: torch.randn(8)))
    like = torch.empty(8)

    first = replayed(steps["it"], like)

    assert torch.equal(first, replayed(steps["it"], like))
    assert not torch.equal(first, replayed(steps["it"], like, seed=1))
    assert not torch.equal(first, replayed(steps["it"], like, name="that"))


def test_real_tensors_are_not_watched() -> None:
    with recording() as seen:
        torch.manual_seed(0)
        model = nn.LSTM(3, 4)
    torch.manual_seed(0)
    plain = nn.LSTM(3, 4)

    assert not seen.events
    assert seen.steps_of(model) == {}
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_what_cannot_be_replayed_is_unknown_and_what_nobody_wrote_has_no_steps() -> None:
    large = torch.arange(5000.0)

    def build() -> nn.Module:
        model = nn.Module()
        model.empty = nn.Parameter(torch.empty(3))
        model.filled = nn.Parameter(torch.empty(5000))
        with torch.no_grad():
            model.filled.copy_(large)
        return model

    _, steps = steps_of(build)

    assert steps == {"empty": (), "filled": UNKNOWN}
