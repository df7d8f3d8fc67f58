"""Of peft: one adapter of every kind on a small Llama."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from foreign.model import Foreign

TARGETS = ["q_proj", "v_proj"]
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4, "target_modules": TARGETS}),
    "lora-dropout": ("LoraConfig", {"r": 4, "target_modules": TARGETS, "lora_dropout": 0.1}),
    "dora": ("LoraConfig", {"r": 4, "target_modules": TARGETS, "use_dora": True}),
    "lora-embedding": (
        "LoraConfig",
        {"r": 4, "target_modules": ["embed_tokens", "up_proj"], "modules_to_save": ["lm_head"]},
    ),
    "ia3": ("IA3Config", {"target_modules": TARGETS, "feedforward_modules": []}),
    "loha": ("LoHaConfig", {"r": 4, "target_modules": TARGETS}),
    "lokr": ("LoKrConfig", {"r": 4, "target_modules": TARGETS}),
    "oft": ("OFTConfig", {"oft_block_size": 8, "target_modules": TARGETS}),
    "boft": ("BOFTConfig", {"boft_block_size": 8, "target_modules": TARGETS}),
    "vera": ("VeraConfig", {"r": 8, "target_modules": ["q_proj"]}),
    "adalora": ("AdaLoraConfig", {"target_modules": TARGETS, "total_step": 100}),
    "fourierft": ("FourierFTConfig", {"n_frequency": 20, "target_modules": TARGETS}),
    "ln": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
}
WORDS, TOKENS = 99, 12


def names() -> list[str]:
    """One of every kind of adapter."""
    return list(ADAPTERS)


def foreign(name: str) -> Foreign:
    """The adapted model of a name."""
    import peft
    import transformers

    kind, settings = ADAPTERS[name]

    def build() -> nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
        base = transformers.LlamaForCausalLM(config)
        adapter = getattr(peft, kind)(task_type="CAUSAL_LM", **settings)
        made: nn.Module = peft.get_peft_model(base, adapter)
        return made

    def inputs(samples: int) -> dict[str, torch.Tensor]:
        words = torch.randint(WORDS, (samples, TOKENS))
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}

    return Foreign(build, inputs)
