"""A causal language model on texts of any length, padded to the longest of their batch."""

import torch
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH, PADDING = 13, 8, -100


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build_model():
    torch.manual_seed(0)
    return Model()


def texts(lengths, seed):
    """A batch of texts of these lengths: words, and the words that follow."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (len(lengths), max(lengths) + 1), generator=generator)
    following = words[:, 1:].clone()
    for row, length in enumerate(lengths):
        following[row, length:] = PADDING
    return words[:, :-1], following


def example_inputs():
    return texts([6, 5, 6, 3], 0)[0]


def example_target():
    return texts([6, 5, 6, 3], 0)[1]


def loss_fn(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PADDING)


def make_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


def train_data():
    yield texts([3, 9, 4, 8, 2], 1)
    yield texts([2, 2], 2)
    short, long = texts([4, 2, 3], 3), texts([30, 25], 4)
    yield [short[0], long[0]], [short[1], long[1]]
    yield texts([17, 1, 5, 6], 5)


def eval_data():
    yield texts([5, 7], 6)
    yield texts([21, 4, 2], 7)
