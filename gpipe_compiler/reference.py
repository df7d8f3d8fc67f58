"""The plain model, computing as a plan says: in 16 bits, or with BatchNorm over the mini-batch.

What a package does step by step and stage by stage is done here the long way, by other means, so
that the two can be held against each other.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.mixing import mixing_ops
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.spec import BatchNorm, Precision

_LOWER = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
_SIGNATURE = inspect.signature(F.batch_norm)
_COUNTER = "num_batches_tracked"


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Around one call of the model, its loss included."""
    if precision is Precision.FP32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, _LOWER[precision])


def takes_whole_batch(plan: Plan) -> bool:
    """Whether exact BatchNorm is that of the model on the mini-batch in one piece.

    Where samples never meet and nothing is written, micro-batches come to the same, each with
    random numbers of its own.
    """
    assert plan.graph is not None
    return plan.batchnorm is BatchNorm.EXACT and _needs_whole_batch(plan.graph)


def _needs_whole_batch(graph: Graph) -> bool:
    return bool(mixing_ops(graph) or effects(graph).state_writes)


class MiniBatchStatistics:
    """Running statistics that change once, by those of all micro-batches put together.

    While micro-batches run, what every BatchNorm is given is kept, and its running statistics stay
    as they are. At the end torch's own BatchNorm runs once on all that was kept.
    """

    def __init__(self, model: nn.Module) -> None:
        buffers = dict(model.named_buffers())
        self._buffers = {id(buffer) for buffer in buffers.values()}
        self._counters = [b for name, b in buffers.items() if name.split(".")[-1] == _COUNTER]
        self._seen: list[list[Mapping[str, Any]]] = []

    @contextlib.contextmanager
    def microbatch(self) -> Iterator[None]:
        """Around the model's call on one micro-batch; the first of them alone is counted."""
        before = [counter.clone() for counter in self._counters]
        watch = _Inputs(self._buffers)
        with watch:
            yield
        if self._seen:
            for counter, value in zip(self._counters, before, strict=True):
                counter.copy_(value)
        self._seen.append(watch.calls)

    @torch.no_grad()
    def commit(self) -> None:
        """After the last micro-batch: every BatchNorm takes the mini-batch's statistics."""
        for calls in zip(*self._seen, strict=True):
            first = calls[0]
            F.batch_norm(
                torch.cat([call["input"] for call in calls]),
                first["running_mean"],
                first["running_var"],
                training=True,
                momentum=first["momentum"],
                eps=first["eps"],
            )


class _Inputs(TorchFunctionMode):
    """Keeps what every BatchNorm with running statistics is called with."""

    def __init__(self, buffers: set[int]) -> None:
        super().__init__()
        self._buffers = buffers
        self.calls: list[Mapping[str, Any]] = []

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs one function of torch; a BatchNorm on copies of its running statistics."""
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        bound = _SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if not given["training"] or id(given["running_mean"]) not in self._buffers:
            return func(*args, **kwargs)
        self.calls.append({**given, "input": given["input"].detach().clone()})
        copies = {name: given[name].clone() for name in ("running_mean", "running_var")}
        return func(**{**given, **copies})
