"""A backward in two parts: gradients of what a stage received first, those of parameters later.

The gradients of what was received are what other devices wait for; those of the parameters fill
the bubbles (Zero Bubble, Qi et al., arXiv 2401.10241). Autograd knows one backward. Its graph is
told apart here:

    carriers     nodes on the way from the outputs to what was received
    branches     carriers from which an edge leads away, to parameters alone

The first part runs the carriers, and keeps the gradients that arrive at the branches. The second
runs each branch again with that gradient, for its parameters alone. A node is told by the engine
which of its gradients are wanted, so a matrix product or a convolution of either part is computed
once. Parameters that several branches lead to are made in the first part, and so are those behind
what lies in Python (`torch.autograd.Function`), which runs once. Nodes that make all gradients in
one kernel (norms, on some devices) run in both parts. Hooks of parameters and of modules run once.
One on a tensor in between may run in both parts: it may look on, but not change gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .recompute import SegmentTensor

Edge: TypeAlias = tuple[Node, int]
"""A node of a backward graph, and the number of the gradient that arrives at it."""


@dataclass(frozen=True, slots=True)
class Branch:
    """What the second part runs of one node.

    Attributes:
        gradients: what arrived at its edges in the first part.
        parameters: those that it alone leads to.
    """

    edges: tuple[Edge, ...]
    gradients: tuple[torch.Tensor, ...]
    parameters: tuple[torch.Tensor, ...]


class WeightPart:
    """The second part of a backward: adds to the gradients of the parameters, once."""

    def __init__(self, branches: Sequence[Branch] = ()) -> None:
        self._branches = list(branches)

    def run(self) -> None:
        """Run it; what a branch has kept is let go as soon as it has run."""
        self._branches.reverse()
        while self._branches:
            branch = self._branches.pop()
            torch.autograd.backward(
                _edges(branch.edges), branch.gradients, inputs=branch.parameters
            )
            del branch


def split_backward(
    roots: Sequence[torch.Tensor | GradientEdge],
    gradients: Sequence[torch.Tensor],
    leaves: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor | None], WeightPart]:
    """Run the first part.

    Args:
        roots: what the forward made.
        leaves: what was received; without any, the first part runs what lies between the layers.

    Returns:
        The gradients of the leaves by name, None being zeros; and the second part.
    """
    if not roots:
        return dict.fromkeys(leaves), WeightPart()
    ends = [one if isinstance(one, GradientEdge) else get_gradient_edge(one) for one in roots]
    graph = _Graph.of(ends, leaves.values())
    parts = _Parts.of(graph)
    targets = map(get_gradient_edge, (*leaves.values(), *parts.at_once))
    wanted = [*targets, *_edges(parts.arriving)]
    found: Sequence[torch.Tensor | None]
    if wanted:
        later = bool(parts.parameters)
        found = torch.autograd.grad(ends, wanted, gradients, retain_graph=later, allow_unused=True)
        if later:
            spent = graph.carriers.difference(parts.parameters)
            _release(node for node in graph.order if node in spent)
    else:
        found = ()
    count, end = len(leaves), len(leaves) + len(parts.at_once)
    for parameter, gradient in zip(parts.at_once, found[count:end], strict=True):
        if gradient is not None:
            _accumulate(parameter, gradient)
    given = list(zip(graph.root_edges, gradients, strict=True))
    branches = parts.branches(given, dict(zip(parts.arriving, found[end:], strict=True)))
    return dict(zip(leaves, found[:count], strict=True)), WeightPart(branches)


@dataclass(frozen=True)
class _Graph:
    """A backward graph, told apart.

    Attributes:
        order: every node, after all that it leads to.
        following: where the edges of each node lead.
        carriers: the nodes on the way to what was received. Where nothing was, those in which two
            ways meet, and all before them: a way that never meets another is a parameter's own.
    """

    root_edges: tuple[Edge, ...]
    order: Sequence[Node]
    following: Mapping[Node, Sequence[Edge]]
    carriers: frozenset[Node]

    @classmethod
    def of(cls, roots: Iterable[GradientEdge], leaves: Iterable[torch.Tensor]) -> _Graph:
        root_edges = tuple((root.node, root.output_nr) for root in roots)
        order, following = _walk(node for node, _ in root_edges)
        carriers = {get_gradient_edge(leaf).node for leaf in leaves}.intersection(following)
        received = bool(carriers)
        for node in order:
            edges = following[node]
            meeting = not received and len(edges) > 1
            if meeting or any(target in carriers for target, _ in edges):
                carriers.add(node)
        return cls(root_edges, order, following, frozenset(carriers))


def _walk(roots: Iterable[Node]) -> tuple[list[Node], dict[Node, list[Edge]]]:
    order: list[Node] = []
    following: dict[Node, list[Edge]] = {}
    stack: list[tuple[Node, bool]] = [(node, False) for node in roots]
    while stack:
        node, left = stack.pop()
        if left:
            order.append(node)
        elif node not in following:
            edges = [(target, number) for target, number in node.next_functions if target]
            following[node] = edges
            stack.append((node, True))
            stack.extend((target, False) for target, _ in edges if target not in following)
    return order, following


@dataclass(slots=True)
class _Group:
    """Parameters whose ways from the carriers meet, or one alone.

    Attributes:
        users: the carriers from which such a way leads away; None for an output that is nothing but
            parameters.
    """

    nodes: list[Node]
    users: set[Node | None] = field(default_factory=set)

    def parameters(self) -> list[torch.Tensor]:
        return [_variable(node) for node in self.nodes if _is_end(node)]


@dataclass(frozen=True)
class _Parts:
    """Who makes the gradient of which parameter, and when.

    Attributes:
        parameters: by the branch that alone leads to them, in the second part. The branch None
            stands for the outputs themselves.
        at_once: what is made in the first part.
        arriving: the edges at which gradients are kept for the second part.
    """

    graph: _Graph
    parameters: Mapping[Node | None, Sequence[torch.Tensor]]
    at_once: Sequence[torch.Tensor]
    arriving: Sequence[Edge]

    @classmethod
    def of(cls, graph: _Graph) -> _Parts:
        parameters: dict[Node | None, list[torch.Tensor]] = {}
        at_once: list[torch.Tensor] = []
        for group in _groups(graph):
            held = group.parameters()
            user, *others = group.users
            if others or isinstance(user, BackwardCFunction):
                at_once.extend(held)
            elif held:
                parameters.setdefault(user, []).extend(held)
        arriving: dict[Edge, None] = {}
        for edges in (graph.root_edges, *graph.following.values()):
            arriving.update((edge, None) for edge in edges if edge[0] in parameters)
        return cls(graph, parameters, at_once, tuple(arriving))

    def branches(
        self,
        given: Sequence[tuple[Edge, torch.Tensor]],
        arrived: Mapping[Edge, torch.Tensor | None],
    ) -> list[Branch]:
        """The second part, from the outputs on."""
        kept: dict[Node | None, list[tuple[Edge, torch.Tensor]]] = {}
        if None in self.parameters:
            kept[None] = [pair for pair in given if pair[0][0] not in self.graph.carriers]
        for edge, gradient in arrived.items():
            if gradient is not None:
                kept.setdefault(edge[0], []).append((edge, gradient))
        return [
            Branch(
                tuple(edge for edge, _ in kept[node]),
                tuple(gradient for _, gradient in kept[node]),
                tuple(self.parameters[node]),
            )
            for node in (None, *reversed(self.graph.order))
            if kept.get(node)
        ]


def _groups(graph: _Graph) -> list[_Group]:
    """The parameters that carriers or outputs lead to."""
    group_of: dict[Node, _Group] = {}
    for node in graph.order:
        if node in graph.carriers:
            continue
        below = {id(group_of[target]): group_of[target] for target, _ in graph.following[node]}
        group, *others = below.values() if below else [_Group([])]
        for other in others:
            group.nodes.extend(other.nodes)
            group_of.update(dict.fromkeys(other.nodes, group))
        group.nodes.append(node)
        group_of[node] = group
    ways: list[tuple[Node | None, Edge]] = [(None, edge) for edge in graph.root_edges]
    ways.extend((node, edge) for node in graph.carriers for edge in graph.following[node])
    for user, edge in ways:
        if edge[0] not in graph.carriers:
            group_of[edge[0]].users.add(user)
    return list({id(group): group for group in group_of.values()}.values())


def _is_end(node: Node) -> bool:
    """Whether it adds to the gradient of a parameter."""
    return node.name() == "torch::autograd::AccumulateGrad"


def _variable(end: Node) -> torch.Tensor:
    parameter: torch.Tensor = end.variable  # type: ignore[attr-defined]  # nodes that add have it
    return parameter


def _edges(edges: Iterable[Edge]) -> list[GradientEdge]:
    return [GradientEdge(node, number) for node, number in edges]


@torch.no_grad()
def _accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient that has passed the hooks of its parameter, as autograd would."""
    if parameter.grad is None:
        parameter.grad = gradient.clone()
    elif parameter.grad.is_sparse and not gradient.is_sparse:
        parameter.grad = gradient + parameter.grad
    else:
        parameter.grad += gradient
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)


def _release(nodes: Iterable[Node]) -> None:
    """Let go of what nodes have saved that will not run again.

    Nodes that come after them in the backward hold them by their edges.
    """
    names: dict[type[Node], list[str]] = {}
    for node in nodes:
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(node) if name.startswith("_raw_saved_")]
        for name in names[kind]:
            saved = getattr(node, name)
            for item in saved if isinstance(saved, tuple | list) else (saved,):
                # Saved tensors that are None, or that somebody else has hooks on, refuse.
                with contextlib.suppress(RuntimeError):
                    if isinstance(item.data, SegmentTensor):
                        item.data.release()
                    else:
                        item.register_hooks(_nothing, _gone)


def _nothing(tensor: torch.Tensor) -> None:
    """What is kept of a saved tensor that nobody asks for again."""


def _gone(kept: None) -> torch.Tensor:
    raise RuntimeError("this part of the backward has run, and what it had saved is gone")
