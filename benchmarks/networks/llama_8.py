"""A Llama of 8 layers, small; a file for gpipe-compile."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

WORDS, SAMPLES, LENGTH = 1000, 8, 32


def build_model(layers: int = 8, width: int = 64, heads: int = 4) -> nn.Module:
    """A Llama with half as many heads for keys and values."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def example_inputs() -> dict[str, torch.Tensor]:
    """Words by number."""
    return {"input_ids": torch.randint(0, WORDS, (SAMPLES, LENGTH))}


def example_target() -> torch.Tensor:
    """The word that is to follow each."""
    return torch.randint(0, WORDS, (SAMPLES, LENGTH))


def loss_fn(output: object, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over all words."""
    logits: torch.Tensor = output.logits  # type: ignore[attr-defined]  # as transformers return it
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
