"""Attention is called with the options that models of Hugging Face call it with, mask or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gpipe_compiler.compile import trace
from gpipe_compiler.ir import ByMode, FunctionCall
from gpipe_compiler.options import LossChoice
from gpipe_compiler.passes.pass_setting import PassSetting
from gpipe_compiler.passes.pipeline import transform

transformers = pytest.importorskip("transformers")

LENGTH = 12
SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SIZES, **HEADS}),
    "qwen2": ("Qwen2", {**SIZES, **HEADS}),
    "gemma": ("Gemma", {**SIZES, **HEADS, "head_dim": 4}),
    "mistral": ("Mistral", {**SIZES, **HEADS, "sliding_window": 5}),
    "mistral with a longer window": ("Mistral", {**SIZES, **HEADS, "sliding_window": LENGTH + 1}),
    "mistral without a window": ("Mistral", {**SIZES, **HEADS, "sliding_window": None}),
    "gpt2": (
        "GPT2",
        {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 4, "use_cache": False},
    ),
}

QUICK = ("llama", "mistral", "gpt2")


class Calls(TorchFunctionMode):
    """The options of every call of attention, and the shapes of their masks."""

    def __init__(self) -> None:
        super().__init__()
        self.options: list[dict[str, object]] = []
        self.masks: list[tuple[int, ...] | None] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.options.append(said(kwargs or {}))
            mask = (kwargs or {}).get("attn_mask")
            self.masks.append(None if mask is None else tuple(mask.shape))
        return func(*args, **(kwargs or {}))


def said(options: dict[str, Any]) -> dict[str, object]:
    """What says which keys a query sees, and how heads are shared."""
    mask = options.get("attn_mask")
    return {
        "masked": mask is not None,
        "is_causal": bool(options.get("is_causal", False)),
        "enable_gqa": bool(options.get("enable_gqa", False)),
    }


def built(family: str, settings: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**settings)
    name = f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, name)(config).eval()


# A window is wider than some texts only: what a length that is free may be is not known.
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_attention_is_called_as_the_model_calls_it(name: str) -> None:
    model = built(*MODELS[name])
    ids = torch.randint(0, 50, (4, LENGTH))
    with Calls() as own, torch.no_grad():
        model(ids)
    fix = ("all",) if name == "mistral with a longer window" else ()
    graph = trace(model, (), {"input_ids": ids}, training=False, fix=fix)
    simple = transform(graph, PassSetting(2))

    found = [
        said(dict(op.call.kwargs))
        for op in simple.ops
        if isinstance(op.call, FunctionCall) and op.call.function is F.scaled_dot_product_attention
    ]
    assert not any(isinstance(item, ByMode) for options in found for item in options.values())
    assert found == own.options


def test_biases_of_t5_are_held_once_and_not_for_every_sample() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        use_cache=False,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    inputs = {
        name: torch.randint(0, 50, (4, LENGTH)) for name in ("input_ids", "decoder_input_ids")
    }
    with Calls() as own, torch.no_grad():
        model(**inputs)
    graph = trace(model, (), inputs, training=False, loss=LossChoice.MODEL)
    simple = transform(graph, PassSetting(2))

    found = {
        simple.values[op.call.kwargs["attn_mask"].name].shape
        for op in simple.ops
        if isinstance(op.call, FunctionCall) and "attn_mask" in op.call.kwargs
    }
    assert found == set(own.masks)
