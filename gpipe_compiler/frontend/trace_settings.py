"""How torch is set while a model is traced.

`torch.cond`, `while_loop`, `scan` and `map` run as the branches and loops that they stand for.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from gpipe_compiler.errors import TraceError, at_code
from gpipe_compiler.frontend.locate import calling_line
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
    lstm = mock.patch.object(torch._VF, "lstm", _with_states_as_given(torch._VF.lstm))
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


def _with_states_as_given(lstm: Callable[..., Any]) -> Callable[..., Any]:
    """An LSTM whose states are of the shapes that it was given."""

    def run(*args: Any) -> Any:
        given = next(item for item in args if isinstance(item, tuple | list))
        output, *states = lstm(*args)
        shaped = (
            state if state.ndim == old.ndim else state.reshape(old.shape)
            for state, old in zip(states, given, strict=True)
        )
        return output, *shaped

    return run


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


# --- control flow ---------------------------------------------------------------------------------

# Each of these takes the place of the code of torch's own, which users import by its name: it runs
# among the names of torch's module, and takes what it needs from nowhere else.


def _cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    from gpipe_compiler.frontend.trace_settings import with_zero_gradients

    if pred:
        return with_zero_gradients(pred, true_fn(*operands), lambda: false_fn(*operands))
    return with_zero_gradients(pred == 0, false_fn(*operands), lambda: true_fn(*operands))


def _while_loop(cond_fn: Any, body_fn: Any, carried_inputs: Any) -> Any:
    while cond_fn(*carried_inputs):
        carried_inputs = body_fn(*carried_inputs)
    from gpipe_compiler.frontend.trace_settings import refuse_gradients

    refuse_gradients(carried_inputs)
    return carried_inputs


def _scan(combine_fn: Any, init: Any, xs: Any, *, dim: int = 0, reverse: bool = False) -> Any:
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    taken = tree_leaves(xs)
    if not taken:
        return init, []
    place = dim % taken[0].ndim
    steps = range(taken[0].shape[place])
    carry, made = init, []
    for step in reversed(steps) if reverse else steps:
        carry, out = combine_fn(carry, tree_map(lambda x: x.select(place, step), xs))  # noqa: B023
        made.append(out)
    if reverse:
        made.reverse()

    def stacked(*outs: Any) -> Any:
        return torch.stack(outs, place if place <= outs[0].ndim else 0)

    return carry, tree_map(stacked, *made)


def _map(f: Any, xs: Any, *args: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    rows = range(tree_leaves(xs)[0].shape[0])
    made = [f(tree_map(lambda x: x[row], xs), *args) for row in rows]  # noqa: B023
    return tree_map(lambda *outs: torch.stack(outs), *made)


_AS_PYTHON: Mapping[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "map": _map,
}


def with_zero_gradients(pred: Any, taken: Any, other: Callable[[], Any]) -> Any:
    """What a way of `torch.cond` gives, with gradients of zero for what the other alone reads.

    Of a condition that is no tensor, torch knows the way taken alone, and so does this.

    Args:
        pred: true, for the way taken.
        taken: what that way gives.
        other: gives what the other way does.
    """
    if not (torch.is_grad_enabled() and isinstance(pred, torch.Tensor)):
        return taken
    spare = other()
    if _read_by(spare) <= _read_by(taken):
        return taken
    # Of the number that `where` leaves out, the gradient is zero, and so is that of what made it.
    return tree_map(lambda mine, its: torch.where(pred, mine, its), taken, spare)


def _read_by(made: object) -> set[object]:
    """Where the gradients of tensors end: a node of autograd for each that was made by none."""
    waiting = [item.grad_fn for item in tree_leaves(made) if isinstance(item, torch.Tensor)]
    seen, ends = set[object](), set[object]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [before for before, _ in node.next_functions]
        waiting += following
        if not following:
            ends.add(node)
    return ends


def refuse_gradients(carried: object) -> None:
    """Raises a TraceError where what a `while_loop` gives is differentiated.

    Torch's own gradients, a prototype, are not those of the loop where its body reads weights.
    """
    if not torch.is_grad_enabled():
        return
    if any(isinstance(item, torch.Tensor) and item.requires_grad for item in tree_leaves(carried)):
        where = calling_line()
        raise TraceError(
            f"the model trains through torch's while_loop{at_code(where)}, whose gradients in "
            "plain PyTorch are not always those of the loop",
            location=where,
            hint="use a Python loop of a fixed number of steps, or torch's scan",
        )


@contextlib.contextmanager
def control_flow_of_python() -> Iterator[None]:
    """Has what torch would compile, to run it, run as Python does; so a trace can follow it."""
    with running_as(
        (getattr(torch._higher_order_ops, name), instead) for name, instead in _AS_PYTHON.items()
    ):
        yield


@contextlib.contextmanager
def running_as(pairs: Iterable[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Lets functions run others' code, by whatever name a model has them.

    Args:
        pairs: a function, and one of the same parameters and defaults, of whose module's names its
            code reads none.
    """
    changed: list[tuple[Any, Any]] = []
    try:
        for own, instead in pairs:
            if [*inspect.signature(own).parameters] == [*inspect.signature(instead).parameters]:
                changed.append((own, own.__code__))
                own.__code__ = instead.__code__
        yield
    finally:
        for own, code in changed:
            own.__code__ = code
