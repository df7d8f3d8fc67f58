"""`nn.TransformerEncoder` in eval mode without gradients: padded sequences, and kernels of its own.

It packs padded sequences into nested tensors, which no trace follows, where all are padded at their
ends alone (`enable_nested_tensor`). What comes of it is what its layers compute, but zero where
there is padding.

Its layers call a kernel of torch's own. Under the autocast of a CPU their residuals are in 16 bits,
where the layer's own ops have them in 32; under that of a GPU torch does not call it, and packs
nothing that is padded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses import FakeTensor

from gpipe_compiler.frontend.state import isolated
from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.ir.ops import called

PACKS = "with enable_nested_tensor=False an nn.TransformerEncoder packs nothing"

_forward = nn.TransformerEncoder.forward

_NEVER = -1e4
"""What is added to the score of a position that the softmax is to give nothing, or less than it."""


def packed(at_ends: torch.Tensor, some: torch.Tensor | None = None) -> bool:
    """Whether sequences are packed.

    Args:
        at_ends: whether all are padded at their ends, if at all.
        some: whether they are, and some are padded: else it makes no difference.
    """
    return at_ends.is_meta or isinstance(at_ends, FakeTensor) or bool(at_ends)


def _evaluated(
    encoder: nn.TransformerEncoder,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> torch.Tensor:
    """As torch's own `forward`, but for nested tensors."""
    padding = src_key_padding_mask
    if padding is None or mask is not None or src.dim() != 3 or not _packs(encoder):
        return _forward(encoder, src, mask, padding, is_causal)
    pad = padding if padding.dtype is torch.bool else padding != 0
    at_ends = (pad[:, 1:] | ~pad[:, :-1]).all()
    if padding.dtype is not torch.bool:
        at_ends = at_ends & (~pad | (padding <= _NEVER)).all()
    if not packed(at_ends, at_ends & pad.any()):
        return _forward(encoder, src, mask, padding, is_causal)
    norm = encoder.norm
    with mock.patch.dict(encoder._modules, norm=None):
        output = _forward(encoder, src, None, padding, is_causal)
    output = output.masked_fill(pad.unsqueeze(-1), 0.0)
    return output if norm is None else norm(output)


def _packs(encoder: nn.TransformerEncoder) -> bool:
    """Whether the settings of an encoder, and of torch, let it pack what is padded."""
    first: Any = encoder.layers[0]
    enabled = torch.backends.mha.get_fastpath_enabled() and not torch.is_autocast_enabled()
    return enabled and encoder.use_nested_tensor and not first.training


@contextlib.contextmanager
def unpacked() -> Iterator[None]:
    """Lets encoders compute what they evaluate to without nested tensors."""
    with mock.patch.object(nn.TransformerEncoder, "forward", _evaluated):
        yield


_layer_forward = nn.TransformerEncoderLayer.forward


def fused_layers(graph: Graph, model: nn.Module) -> dict[bool, str]:
    """By mode (training or not), the first layer that is computed so, with its line."""
    if not torch.backends.mha.get_fastpath_enabled():
        return {}
    layers = {path: layer for path, layer in model.named_modules() if _has_kernel(layer)}
    if not layers:
        return {}
    states = isolated(model, share_parameters=True).train().named_modules()
    training = {path for path, module in states if module.training}
    found: dict[bool, str] = {}
    for op in graph.ops:
        path = next((path for path in _paths(op) if path in layers), None)
        if path is None:
            continue
        found.setdefault(False, _told(path, op))
        frozen = not any(tensor.requires_grad for tensor in layers[path].parameters())
        if graph.loss is not None and frozen and path not in training:
            found.setdefault(True, _told(path, op))
    return found


def packing_encoder(graph: Graph, model: nn.Module) -> str:
    """The first encoder that packs what is padded when it is evaluated, with its line, or ""."""
    encoders = {
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor
    }
    for op in graph.ops:
        # That of `frontend.encoders`, by which a graph has zeros where there is padding.
        if op.module in encoders and called(op.call) == "masked_fill":
            return _told(op.module, op)
    return ""


def _told(path: str, op: Op) -> str:
    return f"{path}, {op.source.brief}" if op.source is not None else path


def _has_kernel(layer: nn.Module) -> bool:
    """Whether torch's own forward has a kernel for a layer, as torch asks it."""
    if (
        not isinstance(layer, nn.TransformerEncoderLayer)
        or type(layer).forward is not _layer_forward
    ):
        return False
    attention = layer.self_attn
    return bool(
        attention.batch_first
        and attention.in_proj_bias is not None
        and attention._qkv_same_embed_dim
        and attention.num_heads % 2 == 0
        and layer.activation_relu_or_gelu
        and layer.norm1.eps == layer.norm2.eps
        and not any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())
    )


def _paths(op: Op) -> Iterator[str]:
    """The modules that an op is made in, from the inmost one out."""
    path = op.module
    while path:
        yield path
        path = path.rpartition(".")[0]
