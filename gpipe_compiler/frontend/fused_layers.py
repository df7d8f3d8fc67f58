"""Encoders that torch computes as one kernel in eval mode, and what it does under autocast.

Without gradients an `nn.TransformerEncoderLayer` calls a kernel of its own. Under the autocast of a
CPU its residuals are in 16 bits, where the layer's own ops have them in 32; under that of a GPU
torch does not call it, and packs nothing that is padded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from gpipe_compiler.frontend.state import isolated
from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.ir.ops import called

_forward = nn.TransformerEncoderLayer.forward


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
        # That of `frontend.padded_encoder`, by which a graph has zeros where there is padding.
        if op.module in encoders and called(op.call) == "masked_fill":
            return _told(op.module, op)
    return ""


def _told(path: str, op: Op) -> str:
    return f"{path}, {op.source.brief}" if op.source is not None else path


def _has_kernel(layer: nn.Module) -> bool:
    """Whether torch's own forward has a kernel for a layer, as torch asks it."""
    if not isinstance(layer, nn.TransformerEncoderLayer) or type(layer).forward is not _forward:
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
