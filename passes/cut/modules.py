"""The modules that the nodes of a problem stand in, and how many of them a cut opens.

A call of a module is *opened* by a cut when its nodes lie in more than one stage. Which of two cuts
opens less is a comparison of numbers, the first that differs deciding:

- how many calls at depth 1 are opened, then at depth 2, and so on. Only modules count that have
  nodes of their own, which stand in no module further inside: a layer that adds a residual, a
  module made of convolutions. The depth of a call is the number of such calls around it, itself
  included.
- how many *containers*: modules that only call others, such as a list of layers, a `Sequential` of
  blocks. A part of one reads like the whole, so a cut between two layers opens nothing that
  counts before these.

What holds all nodes, as the model itself does, is opened by every cut and counts nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModuleNodes:
    """One call of a module.

    Attributes:
        depth: as above; 0 for a container.
    """

    path: str
    nodes: tuple[int, ...]
    depth: int


def module_calls(
    paths: Sequence[str], turn: Callable[[int, str], int] = lambda node, path: 0
) -> tuple[ModuleNodes, ...]:
    """The calls that a cut may open or not, each set of nodes once.

    Args:
        paths: of every node, the module whose forward it stands in.
        turn: of a node and a module around it, how many calls of that came before.
    """
    calls: dict[tuple[str, int], list[int]] = {}
    for node, path in enumerate(paths):
        for prefix in _prefixes(path):
            calls.setdefault((prefix, turn(node, prefix)), []).append(node)
    own = set(enumerate(paths))
    found: dict[tuple[int, ...], tuple[str, bool]] = {}
    for (path, _), nodes in calls.items():
        counts = any((node, path) in own for node in nodes)
        if 1 < len(nodes) < len(paths) and (counts or tuple(nodes) not in found):
            found[tuple(nodes)] = path, counts
    around: dict[str, list[set[int]]] = {}
    for call, (path, counts) in found.items():
        if counts:
            around.setdefault(path, []).append(set(call))
    return tuple(
        ModuleNodes(
            path,
            nodes,
            counts * sum(nodes[0] in other for p in _prefixes(path) for other in around.get(p, ())),
        )
        for nodes, (path, counts) in found.items()
    )


def _prefixes(path: str) -> Iterator[str]:
    """The modules around a module, itself last; not the model."""
    parts = path.split(".") if path else []
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def opened(modules: Sequence[ModuleNodes], stage_of: Sequence[int]) -> tuple[ModuleNodes, ...]:
    return tuple(m for m in modules if len({stage_of[node] for node in m.nodes}) > 1)


def openness(modules: Sequence[ModuleNodes], stage_of: Sequence[int]) -> tuple[int, ...]:
    """How much a cut opens, to be compared with that of other cuts of the same problem."""
    depths = [module.depth for module in opened(modules, stage_of)]
    deepest = max((module.depth for module in modules), default=0)
    return *(depths.count(depth) for depth in range(1, deepest + 1)), depths.count(0)
