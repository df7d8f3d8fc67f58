"""How torch is set while a model is traced."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.frontend.control_flow import control_flow_of_python
from gpipe_compiler.quiet import quiet


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """What torch.compile has compiled runs as it is written: its compiler follows modes, too."""
    loaded = "torch._dynamo" in sys.modules
    stance = torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()
    with stance, control_flow_of_python():
        yield


@contextlib.contextmanager
def tracing_settings() -> Iterator[None]:
    """Torch is quiet while it traces, and takes `torch.einsum` for one call.

    Failures are explained here, and not by torch.
    Where opt_einsum is installed, torch has it choose the order of contractions by the sizes, the
    batch among them: the package finds its own, as the model does at every call. On torch 2.11 the
    states of an LSTM have a dimension more in a trace, and targets that are probabilities have
    their sizes fixed by a cross entropy. nn.Transformer looks into the values of its masks, to
    choose a kernel: here it applies them. Attention takes comparisons of sizes, which are no bools
    here, as `is_causal=length > 1`.
    """
    lstm = mock.patch.object(torch._VF, "lstm", _lstm)
    soft = mock.patch.object(torch._C._nn, "cross_entropy_loss", _cross_entropy)
    in_order = mock.patch.object(torch.backends, "opt_einsum", SimpleNamespace(enabled=False))
    masks = mock.patch.object(nn.modules.transformer, "_detect_is_causal_mask", _is_causal)
    with contextlib.ExitStack() as around:
        around.enter_context(as_written())
        around.enter_context(contextlib.redirect_stderr(io.StringIO()))
        attention = mock.patch.object(F, "scaled_dot_product_attention", _attention)
        for setting in (quiet(), in_order, lstm, soft, masks, attention):
            around.enter_context(setting)
        yield


def _is_causal(_mask: object, is_causal: bool | None = None, _size: object = None) -> bool:
    """Whether the user says that a mask is causal."""
    return is_causal is True


_own_attention: Any = F.scaled_dot_product_attention


def _attention(*args: Any, **named: Any) -> Any:
    """Attention; whether it is causal is settled for the example, and demanded of other sizes."""

    def settled(item: Any) -> Any:
        return bool(item) if isinstance(item, torch.SymBool) else item

    named = {key: settled(item) for key, item in named.items()}
    return _own_attention(*map(settled, args), **named)


_own_lstm = torch._VF.lstm


def _lstm(*args: Any) -> Any:
    """The output and the states of an LSTM, these of the shapes that it was given."""
    given = next(item for item in args if isinstance(item, tuple | list))
    output, *states = _own_lstm(*args)
    shaped = (
        state if state.ndim == old.ndim else state.reshape(old.shape)
        for state, old in zip(states, given, strict=True)
    )
    return output, *shaped


_own_cross_entropy: Any = torch._C._nn.cross_entropy_loss


def _cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    smoothing: float,
) -> Any:
    """A cross entropy; of probabilities it is written out where torch would fix their sizes."""
    if torch.__version__ >= "2.13" or not target.is_floating_point():
        return _own_cross_entropy(logits, target, weight, reduction, ignore_index, smoothing)
    dim = min(1, logits.ndim - 1)
    # Under autocast it computes in 32 bits, and so does this, by the type of the target.
    logs = torch.log_softmax(logits, dim, dtype=torch.promote_types(logits.dtype, target.dtype))
    if smoothing:
        target = target * (1 - smoothing) + smoothing / logits.shape[dim]
    if weight is not None:
        logs = logs * weight.reshape([-1 if d == dim else 1 for d in range(logits.ndim)])
    losses = -(logs * target).sum(dim)
    return (losses, losses.mean(), losses.sum())[reduction]
