"""A Hugging Face GPT-2, built from a configuration; it returns its own loss.

    pip install 'gpipe-compiler[huggingface]'
    gpipe-compile examples/gpt2_huggingface.py --stages 2

There is no `loss_fn`: given labels, the model's output holds the loss that is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 512
SEQUENCE = 64
DIM = 128
HEADS = 4
LAYERS = 4
BATCH = 8
SEED = 0


def build_model(
    vocabulary: int = VOCABULARY,
    sequence: int = SEQUENCE,
    dim: int = DIM,
    heads: int = HEADS,
    layers: int = LAYERS,
) -> nn.Module:
    torch.manual_seed(SEED)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=sequence,
        n_embd=dim,
        n_head=heads,
        n_layer=layers,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,  # the cache of keys and values serves generation, not training
    )
    return GPT2LMHeadModel(config)


def example_inputs(
    batch: int = BATCH, sequence: int = SEQUENCE, vocabulary: int = VOCABULARY
) -> dict[str, Tensor]:
    return _counting(batch, sequence, vocabulary, SEED)


def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def train_data() -> Iterator[tuple[dict[str, Tensor], None]]:
    """Sequences that count upwards in steps of one to nine, for ever; the model has the target."""
    seed = SEED
    while True:
        seed += 1
        yield _counting(BATCH, SEQUENCE, VOCABULARY, seed), None


def _counting(batch: int, sequence: int, vocabulary: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(vocabulary, (batch, 1), generator=generator)
    steps = torch.randint(1, 10, (batch, 1), generator=generator)
    tokens = (starts + steps * torch.arange(sequence)) % vocabulary
    return {"input_ids": tokens, "labels": tokens.clone()}
