"""`torch.cond`, `while_loop`, `scan` and `map` as the branches and loops that they stand for."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gpipe_compiler.errors import TraceError, at_code
from gpipe_compiler.frontend.locate import calling_line

# Each of these takes the place of the code of torch's own, which users import by its name: it runs
# among the names of torch's module, and takes what it needs from nowhere else.


def _cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    return true_fn(*operands) if pred else false_fn(*operands)


def _while_loop(cond_fn: Any, body_fn: Any, carried_inputs: Any) -> Any:
    while cond_fn(*carried_inputs):
        carried_inputs = body_fn(*carried_inputs)
    from gpipe_compiler.frontend.control_flow import refuse_gradients

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
    changed: list[tuple[Any, Any]] = []
    try:
        for name, instead in _AS_PYTHON.items():
            own: Any = getattr(torch._higher_order_ops, name)
            if [*inspect.signature(own).parameters] == [*inspect.signature(instead).parameters]:
                changed.append((own, own.__code__))
                own.__code__ = instead.__code__
        yield
    finally:
        for own, code in changed:
            own.__code__ = code
