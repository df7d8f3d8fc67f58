"""Where in a model its calls of torch are made, as they are recorded: its modules and regions."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from gpipe_compiler.frontend.locate import source_here
from gpipe_compiler.ir import Autocast, Context, NoGrad, Region

REGIONS = "gpipe_compiler_regions"
"""Key of node.meta: the `Region`s around the node, outermost first."""

CHECKPOINT = "gpipe_compiler_checkpoint"
"""Key of node.meta: number of the outermost checkpoint that the node was made in."""

LAYER = "gpipe_compiler_layer"
"""Key of node.meta: number of the layer, of those left out at random, that the node is part of."""

_MODEL = "model"


def local_path(path: str) -> str:
    """A path inside the entry as the user's model calls it: `model.layer1` is `layer1`."""
    return "" if path == _MODEL else path.removeprefix(f"{_MODEL}.")


@dataclass(frozen=True, eq=False, slots=True)
class _Entered:
    """A region that is open.

    Attributes:
        before: the other setting of gradients, for a region that sets them.
    """

    region: Region
    before: bool


class Position:
    """Where in the model calls are made now, and where in the graph their nodes stand.

    Attributes:
        checkpoint: number of the outermost checkpoint that is open.
        gradients: whether autograd records.
    """

    def __init__(self, graph: fx.Graph, *, gradients: bool) -> None:
        """Outside of every module and region."""
        self.checkpoint: int | None = None
        self.gradients = gradients
        self._graph = graph
        self._regions: tuple[_Entered, ...] = ()
        self._entered = Counter[object]()
        self._modules: list[tuple[str, str, int]] = []
        self._turns = Counter[str]()

    def origin(self) -> dict[str, Any]:
        """What is noted of a node that is made now: its line, and what it is made in."""
        meta: dict[str, Any] = {
            "source": source_here(self.users),
            REGIONS: tuple(entered.region for entered in self._regions),
            "modules": tuple(self._modules),
        }
        if self.checkpoint is not None:
            meta[CHECKPOINT] = self.checkpoint
        return meta

    @property
    def users(self) -> list[str]:
        """The paths of the user's own modules that are being called, the outermost first."""
        return [
            local_path(path) for path, made, _ in self._modules if not made.startswith("torch.")
        ]

    @property
    def place(self) -> tuple[object, ...]:
        """The calls of modules that are being made, the outermost first."""
        return tuple(self._modules)

    @property
    def module(self) -> str:
        """The path of the innermost module that is called; "" outside of all."""
        return self._modules[-1][0] if self._modules else ""

    @contextlib.contextmanager
    def inside(self, path: str, kind: str) -> Iterator[None]:
        """In a call of a module.

        Args:
            kind: the qualified name of its class.
        """
        self._modules.append((path, kind, self._turns[path]))
        self._turns[path] += 1
        try:
            yield
        finally:
            self._modules.pop()

    def set_gradients(self, enabled: bool) -> None:
        """From now on autograd records, or does not."""
        if enabled == self.gradients:
            return
        own = next(
            (
                entered
                for entered in reversed(self._regions)
                if isinstance(entered.region.context, NoGrad) and entered.before == enabled
            ),
            None,
        )
        self.gradients = enabled
        if own is None:
            self.enter(NoGrad(enabled), before=not enabled)
        else:
            self._leave(own)

    def enter(self, context: Context, *, before: bool = False) -> None:
        """A region begins.

        Args:
            before: the other setting of gradients, for a region that sets them.
        """
        path, _, turn = self._modules[-1] if self._modules else ("", "", 0)
        count = self._entered[path, turn]
        self._entered[path, turn] += 1
        region = Region(context, local_path(path), f"{turn}.{count}")
        self._regions = (*self._regions, _Entered(region, before))

    def leave_autocast(self) -> None:
        """The innermost region of autocast ends."""
        inside_out = reversed(self._regions)
        self._leave(next(own for own in inside_out if isinstance(own.region.context, Autocast)))

    def _leave(self, own: _Entered) -> None:
        """A region ends; those that were entered later go on as others."""
        place = self._regions.index(own)
        self._regions, later = self._regions[:place], self._regions[place + 1 :]
        for other in later:
            self.enter(other.region.context, before=other.before)

    @contextlib.contextmanager
    def at_the_start(self) -> Iterator[None]:
        """Nodes that are made inside stand before all others, in no module and no region."""
        modules, self._modules = self._modules, []
        regions, self._regions = self._regions, ()
        first = next(
            (n for n in self._graph.nodes if n.op not in GIVEN and not asks_input(n)), None
        )
        try:
            with contextlib.nullcontext() if first is None else self._graph.inserting_before(first):
                yield
        finally:
            self._modules, self._regions = modules, regions


GIVEN = ("placeholder", "get_attr")


def asks_input(node: fx.Node) -> bool:
    """Whether a node asks an input for its size, which is recorded once, at the start."""
    asked = node.args[0] if node.target == "size" and len(node.args) == 2 else None
    return isinstance(asked, fx.Node) and asked.op == "placeholder"
