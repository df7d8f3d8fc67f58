"""The plain model with deferred BatchNorm: running statistics of the mini-batch, once a step."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_SIGNATURE = inspect.signature(F.batch_norm)
_COUNTER = "num_batches_tracked"


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
