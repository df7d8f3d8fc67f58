"""All the ways of passing inputs at once: a dict, a mask, None, a number, keyword arguments.

    gpipe-compile examples/inputs.py --stages 2

Scores documents against each other's topics: sentences of word vectors, some of them padding, and
a few numbers known of each document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DIM = 32
TOPICS = 5
LAYERS = 3
SENTENCE = 12
FACTS = 6
BATCH = 8
SEED = 0

Inputs = tuple[tuple[dict[str, Tensor]], dict[str, object]]


class Mixer(nn.Module):
    """Attention among the words that are no padding, then a feed-forward layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.feed = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, padding: Tensor | None, scale: float) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1) * scale
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, :], float("-inf"))
        x = x + scores.softmax(dim=-1) @ self.value(x)
        return x + self.feed(self.norm(x))


class DocumentModel(nn.Module):
    """`document` holds "words" (batch, sentence, dim) and "facts" (batch, facts)."""

    def __init__(self, dim: int, topics: int, layers: int) -> None:
        super().__init__()
        self.facts = nn.Linear(FACTS, dim)
        self.mixers = nn.ModuleList(Mixer(dim) for _ in range(layers))
        self.topic = nn.Linear(dim, topics)
        self.length = nn.Linear(dim, 1)

    def forward(
        self,
        document: dict[str, Tensor],
        prior: Tensor | None = None,
        *,
        padding: Tensor | None = None,
        scale: float = 1.0,
    ) -> dict[str, Tensor]:
        x = document["words"] + self.facts(document["facts"])[:, None, :]
        for mixer in self.mixers:
            x = mixer(x, padding, scale)
        if padding is None:
            summary = x.mean(dim=1)
        else:
            words = (~padding).unsqueeze(-1).to(x.dtype)
            summary = (x * words).sum(dim=1) / words.sum(dim=1)
        topic = self.topic(summary)
        if prior is not None:
            topic = topic + prior
        return {"topic": topic, "length": self.length(summary).squeeze(-1)}


def build_model(dim: int = DIM, topics: int = TOPICS, layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(SEED)
    return DocumentModel(dim, topics, layers)


def example_inputs(batch: int = BATCH) -> Inputs:
    return _documents(batch, SEED)[0]


def example_target(batch: int = BATCH) -> dict[str, Tensor]:
    return _documents(batch, SEED)[1]


def loss_fn(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    topic = F.cross_entropy(output["topic"], target["topic"])
    return topic + 0.1 * F.mse_loss(output["length"], target["length"])


def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=3e-3)


def train_data() -> Iterator[tuple[Inputs, dict[str, Tensor]]]:
    """Batches of documents for ever."""
    seed = SEED
    while True:
        seed += 1
        yield _documents(BATCH, seed)


def _documents(batch: int, seed: int) -> tuple[Inputs, dict[str, Tensor]]:
    """Documents whose words lean towards the axis of their topic."""
    generator = torch.Generator().manual_seed(seed)
    topics = torch.randint(TOPICS, (batch,), generator=generator)
    lengths = torch.randint(1, SENTENCE + 1, (batch,), generator=generator)
    words = torch.randn(batch, SENTENCE, DIM, generator=generator)
    words = words + 2 * F.one_hot(topics, DIM)[:, None, :]
    padding = torch.arange(SENTENCE)[None, :] >= lengths[:, None]
    document = {"words": words, "facts": torch.randn(batch, FACTS, generator=generator)}
    kwargs: dict[str, object] = {"prior": None, "padding": padding, "scale": DIM**-0.5}
    return ((document,), kwargs), {"topic": topics, "length": lengths / SENTENCE}
