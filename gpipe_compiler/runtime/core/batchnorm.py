"""Deferred BatchNorm: running statistics that change once a mini-batch, by those of all of it.

Each micro-batch is normalised by its own mean and variance. The running statistics take over what
torch's BatchNorm would have taken from the whole mini-batch: the mean, and the *unbiased* variance,
over all its samples and positions, of what the layer was given. `num_batches_tracked` goes up by
one a mini-batch. Where the layer's inputs depend on how layers before it normalise, the statistics
are those of the inputs it really had. This is GPipe's way (arXiv 1811.06965, section 2.2), and
torchgpipe's `DeferredBatchNorm` but for two things: torchgpipe takes the biased variance, as a
difference of squares.

No model has to change: BatchNorm modules and calls of `torch.nn.functional.batch_norm` are watched
while a stage's forward runs. Layers that normalise in their own code, and InstanceNorm, keep to
micro-batches.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .written import Copies, WrittenBuffers

Gather = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""The tensors (float64, one dimension) of all replicas, in their order, given this replica's."""

COUNTER = "num_batches_tracked"
"""What torch's BatchNorm calls the number of mini-batches it has seen."""

_ARGUMENTS: Mapping[Any, tuple[str, ...]] = {
    F.batch_norm: (
        *("input", "running_mean", "running_var", "weight", "bias"),
        *("training", "momentum", "eps"),
    ),
    torch.batch_norm: (
        *("input", "weight", "bias", "running_mean", "running_var"),
        *("training", "momentum", "eps", "cudnn_enabled"),
    ),
}
"""The functions that normalise a batch, and the order of their arguments."""


def alone(own: torch.Tensor) -> Sequence[torch.Tensor]:
    """`Gather` for a single replica."""
    return (own,)


@dataclass(slots=True)
class _Layer:
    """One call of BatchNorm in a stage's forward, over the micro-batches of a mini-batch.

    Attributes:
        names: the running mean and variance, by the stage's own names.
        momentum: the weight of this mini-batch in the running statistics.
        counts: for each micro-batch the values per channel.
        means, variances: of these values, by channel.
    """

    names: tuple[str, str]
    momentum: float
    counts: list[int] = field(default_factory=list)
    means: list[torch.Tensor] = field(default_factory=list)
    variances: list[torch.Tensor] = field(default_factory=list)

    def rows(self) -> torch.Tensor:
        """For each micro-batch a row: count, means, sums of squared deviations; in float64."""
        means = torch.stack(self.means).double()
        counts = means.new_tensor(self.counts)[:, None]
        squares = torch.stack(self.variances).double() * (counts - 1)
        # One value alone has no variance; torch's is nan.
        return torch.cat([counts, means, squares.where(counts > 1, 0.0)], 1)


class DeferredStatistics:
    """What the BatchNorm layers of one stage see in one mini-batch.

    Made for one run and dropped with it, so a run that fails leaves nothing behind.

    Args:
        names: the stage's own names of its state to the model's.
    """

    def __init__(self, module: nn.Module, names: Mapping[str, str]) -> None:
        self._module = module
        buffers = [name for name, _ in module.named_buffers(remove_duplicate=False)]
        counters = [n for n in buffers if names.get(n, n).rpartition(".")[2] == COUNTER]
        self._counters = WrittenBuffers(module, counters)
        self._counted: Copies | None = None
        self._layers: dict[tuple[str, int], _Layer] = {}

    @contextlib.contextmanager
    def forward(self, *, again: bool) -> Iterator[None]:
        """Active while the stage's forward of a micro-batch runs, once or `again`.

        Every forward counts on copies. Those of the first one are taken over in the end: it stands
        for the mini-batch.
        """
        counters = self._counters.copies()
        if self._counted is None:
            self._counted = counters
        with self._counters.replaced(counters):
            buffers = dict(self._module.named_buffers(remove_duplicate=False))
            with _Watch(buffers, None if again else self._layers):
                yield

    def commit(self, gather: Gather = alone) -> None:
        """Let the running statistics take over those of the mini-batch, after its last forward.

        Args:
            gather: joins the statistics of the replicas; all replicas call it, once for a stage
                with BatchNorm.
        """
        if self._counted is not None:
            self._counters.take_over(self._counted)
        layers = list(self._layers.values())
        if not layers:
            return
        own = [_combine(layer.rows()) for layer in layers]
        sizes = [row.numel() for row in own]
        replicas = [torch.split(joined, sizes) for joined in gather(torch.cat(own))]
        buffers = dict(self._module.named_buffers(remove_duplicate=False))
        for layer, *rows in zip(layers, *replicas, strict=True):
            total = _combine(torch.stack(rows))
            channels = total.numel() // 2
            mean, squares = total[1 : 1 + channels], total[1 + channels :]
            unbiased = squares / (total[0] - 1)
            for name, new in zip(layer.names, (mean, unbiased), strict=True):
                running = buffers[name]
                kept = (1 - layer.momentum) * running.double()
                running.copy_(kept + layer.momentum * new)


class _Watch(TorchFunctionMode):
    """Takes the statistics of every BatchNorm call, and keeps its running statistics from it.

    A momentum of 1 makes torch's own kernel leave a micro-batch's mean and unbiased variance in
    what it takes for running statistics, so nothing is computed twice.

    Args:
        buffers: of the stage, by own names.
        layers: where statistics go, by name of the running mean and number of the call; None to
            drop them.
    """

    def __init__(
        self, buffers: Mapping[str, torch.Tensor], layers: dict[tuple[str, int], _Layer] | None
    ) -> None:
        super().__init__()
        self._names = {id(buffer): name for name, buffer in buffers.items()}
        self._memory = {buffer.untyped_storage().data_ptr() for buffer in buffers.values()}
        self._layers = layers
        self._calls: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one torch function; a BatchNorm on running statistics without them."""
        order = _ARGUMENTS.get(func)
        if order is None:
            return func(*args, **(kwargs or {}))
        given = {**dict(zip(order, args, strict=False)), **(kwargs or {})}
        if not given.get("training", False) or not self._keeps(given.get("running_mean")):
            return func(**given)
        mean = torch.zeros_like(given["running_mean"])
        variance = torch.zeros_like(given["running_var"])
        statistics = {"running_mean": mean, "running_var": variance, "momentum": 1.0}
        result = func(**{**given, **statistics})
        names = tuple(self._names[id(given[key])] for key in ("running_mean", "running_var"))
        self._add(names, given.get("momentum", 0.1), given["input"], mean, variance)
        return result

    def _keeps(self, running: torch.Tensor | None) -> bool:
        """Whether running statistics outlive the call: those that are made for it do not."""
        if running is None:
            return False
        if id(running) in self._names:
            return True
        if running.untyped_storage().data_ptr() in self._memory:
            raise RuntimeError(
                "deferred BatchNorm needs running statistics that are buffers of their own, and "
                "these are a part of one; give each layer its own, or use batchnorm micro"
            )
        return False

    def _add(
        self,
        names: tuple[str, ...],
        momentum: float,
        given: torch.Tensor,
        mean: torch.Tensor,
        variance: torch.Tensor,
    ) -> None:
        call = self._calls[names[0]]
        self._calls[names[0]] += 1
        if self._layers is None:
            return
        layer = self._layers.get((names[0], call))
        if layer is None:
            layer = self._layers[names[0], call] = _Layer((names[0], names[1]), momentum)
        layer.counts.append(given.numel() // mean.numel())
        layer.means.append(mean)
        layer.variances.append(variance)


def _combine(rows: torch.Tensor) -> torch.Tensor:
    """The row of all samples together, from those of disjoint sets of them.

    The deviations of the sets' means join those inside the sets (Chan, Golub and LeVeque, 1979):
    no difference of large numbers is taken.
    """
    channels = rows.shape[1] // 2
    count, means, squares = rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels :]
    total = count.sum()
    mean = (count * means).sum(0) / total
    between = (count * (means - mean).square()).sum(0)
    return torch.cat([total.reshape(1), mean, squares.sum(0) + between])
