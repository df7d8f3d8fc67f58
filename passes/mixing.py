"""Finds the ops in which samples meet: what one sample comes to depends on the others.

BatchNorm in train mode is one; so are a mean over the batch and a product of all samples with all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe_compiler.ir import Graph, ModuleCall, Op
from gpipe_compiler.passes.blocks import per_op, shortest
from gpipe_compiler.passes.dry_run import DryRun, tensors_in
from gpipe_compiler.passes.watch import DispatchWatch


def mixing_ops(graph: Graph) -> frozenset[str]:
    """Names of the ops that mix samples in the graph's own mode; those of the loss apart.

    It runs at the graph's batch size and at twice that. A kernel mixes when it reads a tensor that
    grows with the samples and what it returns does not double: BatchNorm returns its statistics,
    one for each channel, while those of InstanceNorm and LayerNorm grow with the samples. Not seen
    is what mixes samples and keeps their number: a softmax, a sum or a shift along the batch.

    Raises:
        ModelError: naming the op that cannot run.
    """
    once, twice = (_kernels(graph, size) for size in (graph.batch_size, 2 * graph.batch_size))
    mixes = {
        name: len(once[name]) == len(twice[name]) and any(map(_mixes, once[name], twice[name]))
        for name in once
    }
    found = (name for name, mixing in per_op(graph, mixes).items() if mixing)
    return frozenset(found) - graph.loss_only


def batchnorm_ops(graph: Graph, model: nn.Module) -> frozenset[str]:
    """Names of the ops that belong to BatchNorm: torch's own kernels, and what its layers do.

    Args:
        model: which the graph was traced from; it tells the layers, subclasses included.
    """
    kernels = per_op(graph, _kernels(graph, graph.batch_size))
    return frozenset(
        op.name
        for op in graph.ops
        if any("batch_norm" in kernel.name for kernel in kernels.get(op.name, ()))
    ) | _made_in_layers(graph, model)


def made_in_batchnorm(graph: Graph, model: nn.Module, ops: Collection[str]) -> bool:
    """Whether all of these ops are made in BatchNorm layers of the model."""
    return _made_in_layers(graph, model).issuperset(ops)


def _made_in_layers(graph: Graph, model: nn.Module) -> frozenset[str]:
    layers = {path for path, module in model.named_modules() if isinstance(module, _BatchNorm)}
    return frozenset(op.name for op in graph.ops if any(path in layers for path in _paths(op)))


def _paths(op: Op) -> Iterator[str]:
    """The modules that an op is made in, from the inmost one out."""
    path = op.call.module if isinstance(op.call, ModuleCall) else op.module
    while path:
        yield path
        path = path.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class _Kernel:
    """One kernel that ran: how many elements it read and returned, tensor by tensor."""

    name: str
    read: tuple[int, ...]
    returned: tuple[int, ...]


def _mixes(once: _Kernel, twice: _Kernel) -> bool:
    if once.name != twice.name or once.name.startswith("new_"):  # only asks for dtype and device
        return False
    grows = any(more > few for few, more in zip(once.read, twice.read, strict=False))
    if not grows:
        return False
    if len(once.returned) != len(twice.returned):  # one tensor for each sample
        return sum(twice.returned) != 2 * sum(once.returned)
    return any(
        few > 0 and more != 2 * few for few, more in zip(once.returned, twice.returned, strict=True)
    )


class _KernelWatch(DispatchWatch):
    """Notes every kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[_Kernel] = []

    def saw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: object
    ) -> None:
        """Notes one kernel; of what it returns, the first tensor and all floating ones.

        Some attention kernels return the state of a random generator besides.
        """
        results = tensors_in(returned)
        meant = [t for t in results if t is results[0] or t.dtype.is_floating_point]
        name = func.overloadpacket.__name__
        self.seen.append(_Kernel(name, _elements(tensors_in((args, kwargs))), _elements(meant)))


def _elements(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in tensors)


def _kernels(graph: Graph, batch_size: int) -> Mapping[str, Sequence[_Kernel]]:
    """The kernels of every op of the shortest graph that runs, in order."""
    return graph.once(("kernels", batch_size), lambda: _seen_kernels(graph, batch_size))


def _seen_kernels(graph: Graph, batch_size: int) -> Mapping[str, Sequence[_Kernel]]:
    run = DryRun.of(shortest(graph), training=graph.loss is not None)
    watch = _KernelWatch()
    found: dict[str, list[_Kernel]] = {}

    def observer(op: Op, execute: Callable[[], Any]) -> Any:
        watch.seen = []
        with watch:
            returned = execute()
        found[op.name] = watch.seen
        return returned

    run.run(batch_size, observer)
    return found
