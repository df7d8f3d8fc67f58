"""What the nodes of a recorded graph call, make and write to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import fx

from gpipe_compiler.frontend.growing_graph import WRITES
from gpipe_compiler.ir.arguments import storage_key, tensors_in


def name_of(node: fx.Node) -> str:
    """The name of the method or function that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def made_by(node: fx.Node) -> set[int]:
    """The memory of what a node makes, by `storage_key`."""
    return set(map(storage_key, tensors_in(node.meta.get("val"))))


def written_by(node: fx.Node) -> set[int]:
    """The memory that a node writes to, by `storage_key`."""
    return set(map(storage_key, node.meta.get(WRITES, ())))


def nodes_from(node: fx.Node) -> Iterator[fx.Node]:
    """A node and those after it."""
    while node.op != "root":
        yield node
        node = node.next


def stays_in(tensor: torch.Tensor, nodes: Iterable[fx.Node]) -> bool:
    """Whether none of some nodes writes to a tensor."""
    memory = storage_key(tensor)
    return not any(memory in written_by(node) for node in nodes)
