"""Takes ops out of their graph to run them alone, each distinct one once.

Two ops are the same to a cost model when they call the same thing with the same constants on
tensors of the same shape, strides, dtype and need of gradients. ResNet-50's 175 ops are 70 such.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.ir.arguments import has_gradient, tensors_in
from gpipe_compiler.ir.forms import OpForms
from gpipe_compiler.ir.repeats import ShortenedGraph, shortest
from gpipe_compiler.passes.dry_run import DryRun
from gpipe_compiler.passes.observe import Form, SeenValue, Storage, observed


@dataclass(frozen=True, slots=True)
class IsolatedOp:
    """An op with what it reads in a dry run.

    Attributes:
        inputs: the values that it reads, by name; tensors on the meta device, with the forms and
            needs of gradients that they have at the end of the run.
        states: fake parameters and buffers that it reads, by name.
    """

    run: DryRun
    op: Op
    inputs: Mapping[str, Any]
    states: Mapping[str, torch.Tensor]
    writes: bool


def distinct(graph: Graph) -> Iterator[tuple[IsolatedOp, tuple[str, ...]]]:
    """Each distinct op of the graph's own mode, with the names of all that are the same."""
    seen = observed(graph)
    run = DryRun.of(shortest(graph), training=graph.loss is not None)
    forms = OpForms(run.graph)
    groups: dict[Hashable, list[IsolatedOp]] = {}
    for op in run.graph.ops:
        if op.name in seen.ops:
            read = {name: seen.values[name] for name in op.inputs if name in seen.values}
            states = {name: run.states[name] for name in op.states(run.graph.modules)}
            isolated = IsolatedOp(run, op, _on_meta(read), states, bool(seen.ops[op.name].written))
            groups.setdefault(_signature(forms, isolated), []).append(isolated)
    represented: dict[str, list[str]] = {}
    if len(run.graph.ops) < len(graph.ops):
        for op, name, _ in ShortenedGraph(graph).known():
            represented.setdefault(name, []).append(op.name)
    for same in groups.values():
        names = (one.op.name for one in same)
        yield same[0], tuple(n for name in names for n in represented.get(name, (name,)))


def _on_meta(read: Mapping[str, SeenValue]) -> dict[str, Any]:
    """Values with meta tensors of their forms, one for those that are the same tensor."""
    made: dict[Hashable, torch.Tensor] = {}

    def leaf(seen: object, storages: Iterator[Storage]) -> object:
        if not isinstance(seen, Form):
            return seen
        key = next(storages), seen
        if key not in made:
            empty = torch.empty_strided(seen.shape, seen.stride, dtype=seen.dtype, device="meta")
            made[key] = empty.requires_grad_(seen.requires_grad)
        return made[key]

    def tensors(value: SeenValue) -> object:
        storages = iter(value.storages)
        if value.nest is None:
            return leaf(value.seen, storages)
        return tree_unflatten([leaf(seen, storages) for seen in value.seen], value.nest)

    return {name: tensors(value) for name, value in read.items()}


@dataclass(frozen=True, slots=True)
class Copies:
    """Fresh tensors to run an op on.

    Attributes:
        leaves: the tensors to differentiate by, parameters not among them.
    """

    environment: Mapping[str, Any]
    leaves: tuple[torch.Tensor, ...]


def copies(
    isolated: IsolatedOp, values: Mapping[str, Any], make: Callable[[torch.Tensor], torch.Tensor]
) -> Copies:
    """The values that an op reads with every tensor made anew by `make`, the same tensor once.

    Where the original needs a gradient, an op that writes in place gets a copy of a leaf.
    """
    made: dict[int, torch.Tensor] = {}
    leaves: list[torch.Tensor] = []

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            leaf = make(tensor)
            if tensor.requires_grad:
                leaves.append(leaf.requires_grad_())
                leaf = leaf.clone() if isolated.writes and _is_dense(leaf) else leaf
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
    unique = {id(t): t for t in tensors_in(returned) if has_gradient(t)}
    return tuple(unique.values())


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


def _signature(forms: OpForms, isolated: IsolatedOp) -> tuple[Hashable, ...]:
    """Equal for ops that are the same to a cost model."""
    known: dict[int, int] = {}

    def place(tensor: torch.Tensor) -> int:
        return known.setdefault(id(tensor), len(known))

    def form(leaf: Any) -> Hashable:
        if not isinstance(leaf, torch.Tensor):
            return type(leaf), repr(leaf)
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad, place(leaf)

    op = isolated.op
    read, structure = tree_flatten([isolated.inputs.get(name) for name in op.reads])
    names = op.states(isolated.run.graph.modules)
    states = [place(isolated.states[name]) for name in names]
    return forms.key(op), repr(structure), tuple(map(form, read)), tuple(states)
