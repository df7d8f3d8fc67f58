"""Takes ops out of their graph to run them alone, each distinct one once.

Two ops are the same to a cost model when they call the same thing with the same constants on
tensors of the same shape, strides, dtype and need of gradients. ResNet-50's 175 ops are 70 such.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.ir.forms import OpForms
from gpipe_compiler.passes.dry_run import DryRun, tensors_in
from gpipe_compiler.passes.repeats import ShortenedGraph


@dataclass(frozen=True, slots=True)
class IsolatedOp:
    """An op with what it reads in a dry run.

    Attributes:
        inputs: fake values that it reads, by name, as the dry run left them.
        states: fake parameters and buffers that it reads, by name.
    """

    run: DryRun
    op: Op
    inputs: Mapping[str, Any]
    states: Mapping[str, torch.Tensor]


def distinct(graph: Graph, run: DryRun) -> Iterator[tuple[IsolatedOp, tuple[str, ...]]]:
    """Each distinct op of the mode that `run` has, with the names of all that are the same.

    Args:
        run: of the graph, or of its short form (`passes.repeats`).
    """
    environment = run.run(graph.batch_size)
    forms = OpForms(run.graph)
    groups: dict[Hashable, list[Op]] = {}
    for op in run.graph.ops:
        if run.interpreter.runs(op):
            groups.setdefault(_signature(forms, run, op, environment), []).append(op)
    represented: dict[str, list[str]] = {}
    if len(run.graph.ops) < len(graph.ops):
        blocks = ShortenedGraph(graph)
        for op, name, _ in blocks.known():
            represented.setdefault(name, []).append(op.name)
    for ops in groups.values():
        first = ops[0]
        inputs = {name: environment[name] for name in first.inputs if name in environment}
        states = {name: run.states[name] for name in first.states(run.graph.modules)}
        names = tuple(name for op in ops for name in represented.get(op.name, (op.name,)))
        yield IsolatedOp(run, first, inputs, states), names


@dataclass(frozen=True, slots=True)
class Copies:
    """Fresh tensors to run an op on.

    Attributes:
        environment: what the op reads, by name.
        leaves: the tensors to differentiate by, parameters not among them.
    """

    environment: Mapping[str, Any]
    leaves: tuple[torch.Tensor, ...]


def copies(values: Mapping[str, Any], make: Callable[[torch.Tensor], torch.Tensor]) -> Copies:
    """Values with every tensor made anew by `make`, the same tensor once.

    Where the original needs a gradient, what the op gets is a copy of a leaf, so that the op may
    write in place.
    """
    made: dict[int, torch.Tensor] = {}
    leaves: list[torch.Tensor] = []

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            leaf = make(tensor)
            if tensor.requires_grad:
                leaves.append(leaf.requires_grad_())
                leaf = leaf.clone() if _is_dense(leaf) else leaf
            made[id(tensor)] = leaf
        return made[id(tensor)]

    environment = {
        name: fresh(value)
        if isinstance(value, torch.Tensor)
        else tree_map_only(torch.Tensor, fresh, value)
        for name, value in values.items()
    }
    return Copies(environment, tuple(leaves))


def differentiable(returned: object) -> tuple[torch.Tensor, ...]:
    """The tensors in what an op returned that a backward can start from, each once."""
    unique = {id(t): t for t in tensors_in(returned) if t.requires_grad}
    return tuple(unique.values())


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


def _signature(
    forms: OpForms, run: DryRun, op: Op, environment: Mapping[str, Any]
) -> tuple[Hashable, ...]:
    """Equal for ops that are the same to a cost model."""
    known: dict[int, int] = {}

    def place(tensor: torch.Tensor) -> int:
        return known.setdefault(id(tensor), len(known))

    def form(leaf: Any) -> Hashable:
        if not isinstance(leaf, torch.Tensor):
            return type(leaf), repr(leaf)
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad, place(leaf)

    read, structure = tree_flatten([environment.get(name) for name in op.reads])
    states = [place(run.states[name]) for name in op.states(run.graph.modules)]
    return forms.key(op), repr(structure), tuple(map(form, read)), tuple(states)
