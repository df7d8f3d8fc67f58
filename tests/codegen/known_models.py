"""Models that everybody knows, small, and what each is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from loading import load_script
from torch import Tensor, nn

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCH, LENGTH, WORDS = 8, 16, 64


@dataclass(frozen=True)
class Known:
    """A model, its example inputs and its loss, the model's own where there is none.

    Attributes:
        most: lines that none of four stages is to have, nor what they have in common.
    """

    model: nn.Module
    most: int
    args: tuple[Tensor, ...] = ()
    kwargs: dict[str, Tensor] | None = None
    target: Tensor | None = None
    loss_fn: Callable[[Any, Any], Tensor] | None = None


def _example(name: str) -> ModuleType:
    return load_script(EXAMPLES / f"{name}.py", f"known_{name}")


def _words() -> Tensor:
    return torch.randint(WORDS, (BATCH, LENGTH))


SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def _hugging_face(kind: str, inputs: dict[str, Tensor], most: int, **sizes: Any) -> Known:
    import transformers

    config, _, head = kind.partition("For")
    made = getattr(transformers, f"{config}Config")(**sizes)
    return Known(getattr(transformers, f"{config}For{head}")(made), most, kwargs=inputs)


def _language(kind: str, layers: int, most: int, **sizes: Any) -> Known:
    inputs = {"input_ids": _words(), "labels": _words()}
    own = SIZES | {"num_hidden_layers": layers} | sizes
    return _hugging_face(f"{kind}ForCausalLM", inputs, most, **own)


def _t5() -> Known:
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4}
    sizes |= {"vocab_size": WORDS, "use_cache": False, "decoder_start_token_id": 0}
    inputs = {"input_ids": _words(), "labels": _words()}
    return _hugging_face("T5ForConditionalGeneration", inputs, 250, **sizes)


def _swin() -> Known:
    sizes: dict[str, Any] = {"image_size": 64, "patch_size": 2, "embed_dim": 16, "num_labels": 5}
    sizes |= {"depths": [2, 2, 4], "num_heads": [2, 2, 4], "window_size": 4}
    inputs = {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.randint(5, (8,))}
    return _hugging_face("SwinForImageClassification", inputs, 305, **sizes)


def _resnet() -> Known:
    model = _example("resnet50").ResNet((3, 4, 6, 3), 10, 8)
    images, target = torch.randn(BATCH, 3, 64, 64), torch.randint(10, (BATCH,))
    return Known(model, 60, (images,), target=target, loss_fn=F.cross_entropy)


def _inception() -> Known:
    made = _example("inception")
    images, target = made.example_inputs(BATCH), made.example_target(BATCH)
    model = made.build_model(width=8, blocks=6)
    return Known(model, 76, (images,), target=target, loss_fn=made.loss_fn)


def _unet() -> Known:
    made = _example("unet")
    images, target = torch.randn(BATCH, 3, 32, 32), torch.rand(BATCH, 1, 32, 32).round()
    return Known(made.UNet(4, 8, 2), 55, (images,), target=target, loss_fn=made.loss_fn)


QUICK: dict[str, Callable[[], Known]] = {
    "llama_2": lambda: _language("Llama", 2, 96),
    "resnet50": _resnet,
}
SLOW: dict[str, Callable[[], Known]] = {
    "inception": _inception,
    "llama_8": lambda: _language("Llama", 8, 115),
    "llama_32": lambda: _language("Llama", 32, 115),
    "mixtral": lambda: _language("Mixtral", 4, 175, num_local_experts=4),
    "swin": _swin,
    "t5": _t5,
    "unet": _unet,
}
