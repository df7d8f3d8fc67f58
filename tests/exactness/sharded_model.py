"""A model for replicas that divide its weights, trained by `run.py`, and the plain loop beside it.

Its embedding is tied to its head, which lies in another stage. Rows do not divide evenly, a vector
has fewer of them than there are replicas, and a parameter is a number; one is frozen.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

STEPS, SAMPLES, TOKENS = 20, 12, 5
WORDS, WIDTH = 23, 9
CLIP = 0.5
BLOCK_BYTES = 8 * (2 * 2 * WIDTH * WIDTH + 2 * WIDTH + WIDTH + 2 * WIDTH + 1)
"""Of the weights of a block, its two layers, its norm and its gate."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x + self.gate * self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.scale * x + self.shift)


def build_model():
    torch.manual_seed(0)
    return Model().double()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    words, following = torch.randint(WORDS, (2, SAMPLES, TOKENS), generator=generator)
    following[: step % 5] = -100  # so that replicas count differently
    return words, following


def example_inputs():
    return batch(0)[0]


def example_target():
    return batch(0)[1]


def loss_fn(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def make_optimizer(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def train_data():
    return [batch(step) for step in range(STEPS)]


def log(step, _):
    """Kills the process, where it is asked to, once."""
    asked = os.environ.get("KILLED_AT", "")
    if asked and step == int(asked) and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def plain():
    """The weights after all steps of a plain loop, and its losses."""
    model = build_model()
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for words, following in train_data():
        optimizer.zero_grad()
        loss = loss_fn(model(words), following)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return model.state_dict(), losses
