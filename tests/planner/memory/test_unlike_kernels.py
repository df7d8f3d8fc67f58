"""Models whose kernels take other memory than torch's fake tensors tell, against real runs.

Peaks are those of the emitted package in training, as torch's own allocator tells them
(`helpers/live_bytes.py`); workspaces are what the kernel itself returns.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.compile import CompileOptions, compile  # noqa: A004  # its name
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.options import RematChoice
from gpipe_compiler.passes.fakes import lstm_workspace_bytes
from tests.helpers.processors import lstm_in_16_bits

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from live_memory import Case, count

ALLOWED = 0.005
"""The share by which a prediction may be off here."""

DTYPES = [torch.float32, *([torch.bfloat16] if lstm_in_16_bits() else [])]

ONEDNN = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch runs LSTMs without oneDNN"
)


class Recurrent(nn.Module):
    """A recurrent layer, and a linear one on what it makes last."""

    def __init__(self, kind: type[nn.RNNBase], *, both_ways: bool) -> None:
        super().__init__()
        self.layer = kind(24, 32, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(64 if both_ways else 32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Words(nn.Module):
    """A table of words with sparse gradients, read at two places."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, 32, padding_idx=padding, sparse=True)
        self.head = nn.Linear(32, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        words = self.table(tokens).mean(1) + self.table(tokens[:, 1:7] + 1000).sum(1)
        return self.head(torch.tanh(words))


class Bags(nn.Module):
    """Weighted sums of words with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(2000, 32, mode="sum", sparse=True)
        self.head = nn.Linear(32, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        words = self.table(tokens, per_sample_weights=(tokens % 3).float())
        return self.head(torch.tanh(words))


def peaks(
    model: nn.Module, x: torch.Tensor, remat: RematChoice, folder: Path, microbatches: int = 4
) -> tuple[int, int]:
    """The predicted peak of a package of one stage, and the measured one."""
    batch = x, torch.randn(len(x), 8)
    subject = Subject("unlike", model, (x,), target=batch[1], loss_fn=F.mse_loss)
    options = CompileOptions(1, microbatches, remat=remat, validate=False)
    package = folder / f"unlike_{folder.name}"
    made = compile(subject, options, package)
    live, _ = count(Case(str(package), batch, options.counted_optimizer.value))
    return made.plan.prediction.memory[0].peak, live


@ONEDNN
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("steps", "samples", "width", "hidden"), [(1, 1, 3, 4), (9, 5, 40, 64), (4, 3, 512, 20)]
)
def test_an_lstms_workspace_is_that_of_its_kernel(
    steps: int, samples: int, width: int, hidden: int, dtype: torch.dtype
) -> None:
    weights = [p.detach() for p in nn.LSTM(width, hidden, dtype=dtype).parameters()]
    taken = torch.randn(steps, samples, width, dtype=dtype)
    state = torch.zeros(1, samples, hidden, dtype=dtype)
    found = torch.ops.aten.mkldnn_rnn_layer(
        taken, *weights, state, state, False, [], 2, hidden, 1, True, False, False, True
    )
    assert lstm_workspace_bytes(found[0], taken, state) == found[3].untyped_storage().nbytes()


@ONEDNN
@pytest.mark.parametrize("remat", [RematChoice.NONE, RematChoice.FULL])
def test_the_peak_of_an_lstm(remat: RematChoice, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Recurrent(nn.LSTM, both_ways=remat is RematChoice.NONE)
    told, live = peaks(model, torch.randn(16, 10, 24), remat, tmp_path)
    assert told == pytest.approx(live, rel=ALLOWED)


def test_the_peak_of_a_gru(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Recurrent(nn.GRU, both_ways=False)
    told, live = peaks(model, torch.randn(8, 4, 24), RematChoice.NONE, tmp_path, 2)
    assert told == pytest.approx(live, rel=ALLOWED)


@pytest.mark.parametrize(("padding", "remat"), [(None, RematChoice.NONE), (0, RematChoice.FULL)])
def test_the_peak_where_sparse_gradients_grow(
    padding: int | None, remat: RematChoice, tmp_path: Path
) -> None:
    """No word comes twice and none is padding, which both would leave out rows of a sum."""
    torch.manual_seed(0)
    tokens = torch.randperm(999)[: 24 * 40].reshape(24, 40) + 1
    model = Words(padding)
    told, live = peaks(model, tokens, remat, tmp_path, microbatches=6)
    table = model.table.weight.numel() * 4
    assert live - table > 1.5 * 24 * 46 * (4 * 32 + 8)  # sums of whole batches are made
    assert told == pytest.approx(live, rel=ALLOWED)


def test_the_peak_where_sparse_gradients_of_bags_grow(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens = torch.randperm(999)[: 24 * 40].reshape(24, 40)
    model = Bags()
    told, live = peaks(model, tokens, RematChoice.NONE, tmp_path, microbatches=6)
    assert live - model.table.weight.numel() * 4 > 24 * 40 * (4 * 32 + 8)
    assert told == pytest.approx(live, rel=ALLOWED)
