"""Finds the ops that mix samples: the result of one sample depends on the others.

BatchNorm in train mode is one; so are a mean over the batch and a product of all samples with all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.contents import prefixes
from gpipe_compiler.passes.observe import observed
from gpipe_compiler.passes.op_watch import KernelRun


def mixing_ops(graph: Graph) -> frozenset[str]:
    """Names of the ops that mix samples in the graph's own mode; those of the loss apart.

    Where the loss is that of the whole batch, whatever it is, the op that makes it is among them.

    It runs at the graph's batch size and at twice that. A kernel mixes when it reads a tensor that
    grows with the samples and what it returns does not double: BatchNorm returns its statistics,
    one for each channel, while those of InstanceNorm and LayerNorm grow with the samples. Not seen
    is what mixes samples and keeps their number: a softmax, a sum or a shift along the batch.
    """
    once, twice = (observed(graph, times * graph.batch_size).ops for times in (1, 2))
    found = (name for name, op in once.items() if _mix(op.kernels, twice[name].kernels))
    mixing = frozenset(found) - graph.loss_only
    if graph.loss is None or not graph.loss.over_batch:
        return mixing
    return mixing | {graph.producer[graph.loss.value].name}


def _mix(once: Sequence[KernelRun], twice: Sequence[KernelRun]) -> bool:
    return len(once) == len(twice) and any(map(_mixes, once, twice))


def batchnorm_ops(graph: Graph, model: nn.Module) -> frozenset[str]:
    """Names of the ops that belong to BatchNorm: torch's own kernels, and what its layers do.

    Args:
        model: which the graph was traced from; its layers are looked up, subclasses included.
    """
    return frozenset(
        name
        for name, op in observed(graph).ops.items()
        if any("batch_norm" in kernel.name for kernel in op.kernels)
    ) | _made_in_layers(graph, model)


def made_in_batchnorm(graph: Graph, model: nn.Module, ops: Collection[str]) -> bool:
    """Whether all of these ops are made in BatchNorm layers of the model."""
    return _made_in_layers(graph, model).issuperset(ops)


def _made_in_layers(graph: Graph, model: nn.Module) -> frozenset[str]:
    layers = {path for path, module in model.named_modules() if isinstance(module, _BatchNorm)}
    made_in = {op.name: prefixes(op.path) for op in graph.ops}
    return frozenset(name for name, paths in made_in.items() if not layers.isdisjoint(paths))


def _mixes(once: KernelRun, twice: KernelRun) -> bool:
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
