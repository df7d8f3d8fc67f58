"""Layers that a model leaves out at random, as Python decides by a draw: both ways in one graph.

The model is recorded with all such layers, then without every other one, and without the others.
What is missing there are the layers; what is read there in place of what they make is passed on.
Some more records, of other layers left out together, have to be what follows from that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from gpipe_compiler.errors import SourceLocation, TraceError
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.growing_graph import EFFECT, decided
from gpipe_compiler.frontend.position import GIVEN, LAYER, REGIONS, asks_input
from gpipe_compiler.frontend.recorded_nodes import made_by, written_by
from gpipe_compiler.frontend.recorder import Recorder
from gpipe_compiler.frontend.state import same_constant
from gpipe_compiler.ir.arguments import storage_key
from gpipe_compiler.ir.left_out import unless
from gpipe_compiler.ir.symbolic import same_shape
from gpipe_compiler.runtime.core.random import may_draw


def decided_by_draws(where: SourceLocation | None, more: str = "") -> TraceError:
    """The refusal of a model that draws to decide what it runs."""
    return TraceError(
        "the model draws numbers by torch to decide in Python what it runs, as LayerDrop does"
        + (more and f", and {more}")
        + ": a stage would hold what one draw led to",
        location=where,
        hint="set the chance to 0 (layerdrop=0.0); switch off a cache (use_cache=False), which "
        "shows what layers ran; or draw for every sample and choose by torch.where, as "
        "stochastic depth does; for inference alone --mode infer takes the model as it is",
    )


def write_both_ways(entry: Entry, base: Recorder, record: Callable[[], Recorder]) -> None:
    """Writes into a recorded graph what happens where layers are left out.

    Args:
        base: what was recorded with all of them.
        record: records the entry again, without the layers that it is told to leave out.

    Raises:
        TraceError: where the model does more than leave out a layer, naming the line that decides.
    """
    program = _Program.of(base)
    everyone = tuple(range(len(base.decisions)))
    layers: dict[int, _Layer] = {}

    def compare(numbers: Sequence[int], *, learns: bool = False) -> None:
        entry.left_out = numbers
        try:
            other = _Program.of(record())
        finally:
            entry.left_out = ()
        if learns:
            layers.update((number, _span(program, other, number)) for number in numbers)
        _Comparison(program, other, [layers[number] for number in numbers], learns).run()

    learned = dict.fromkeys((everyone[::2], everyone[1::2]))
    half = len(everyone) // 2
    together = (everyone, everyone[:half], everyone[half:], *(everyone[n::3] for n in range(3)))
    for pattern in filter(None, learned):
        compare(pattern, learns=True)
    for pattern in filter(None, dict.fromkeys(together)):
        if pattern not in learned:
            compare(pattern)
    found = [layers[number] for number in everyone]
    for layer in found:
        _refuse_effects(entry, program, layer)
    draw_on_host(base.graph)
    _write(program, found, keeps=bool(entry.keeps))
    base.sweep()


@dataclass(frozen=True)
class _Layer:
    """The nodes of a layer, by their places in the program.

    Attributes:
        marker: the node that decides.
        stands_for: what is passed on in place of what a node of the layer makes.
    """

    marker: fx.Node
    start: int
    end: int
    stands_for: dict[int, Hashable] = field(default_factory=dict)

    def __contains__(self, place: object) -> bool:
        return isinstance(place, int) and self.start <= place < self.end

    def refusal(self, more: str) -> TraceError:
        """Why it cannot be left out."""
        return decided_by_draws(self.marker.meta["source"], more)


@dataclass(frozen=True)
class _Program:
    """What was recorded: nodes in order, without those that read what is there before.

    Attributes:
        given: the nodes of inputs.
    """

    recorder: Recorder
    nodes: Sequence[fx.Node]
    places: dict[fx.Node, int]
    given: dict[Hashable, fx.Node]

    @classmethod
    def of(cls, recorder: Recorder) -> _Program:
        every = list(recorder.graph.nodes)
        nodes = [node for node in every if node.op not in GIVEN and not asks_input(node)]
        places = {node: place for place, node in enumerate(nodes)}
        given: dict[Hashable, fx.Node] = {
            ("input", node.target): node for node in every if node.op == "placeholder"
        }
        return cls(recorder, nodes, places, given)

    def stretch(self, number: int) -> tuple[int, int]:
        """From which place on a decision matters, and up to where the next one does."""
        start, *later = (self.places[node] for node in self.recorder.decisions[number:])
        return start + 1, later[0] if later else len(self.nodes)

    def key(self, node: fx.Node) -> Hashable:
        """What a node is in every record: its place, or what it reads."""
        if node in self.places:
            return self.places[node]
        if node.op == "placeholder":
            return "input", node.target
        if asks_input(node):
            return "size", node.args[0].target, node.args[1]  # type: ignore[union-attr]  # a node
        return "state", node.target

    def at(self, key: Hashable) -> fx.Node | None:
        """The node that makes a value; None for what is there before, and no input."""
        return self.nodes[key] if isinstance(key, int) else self.given.get(key)


def _span(program: _Program, other: _Program, number: int) -> _Layer:
    """The layer of the decision of this number, by how many nodes are missing where it is not."""
    marker = program.recorder.decisions[number]
    refusal = decided_by_draws(marker.meta["source"], "runs something else instead")
    if len(program.recorder.decisions) != len(other.recorder.decisions):
        raise refusal
    (start, until), (begin, end) = (item.stretch(number) for item in (program, other))
    missing = (until - start) - (end - begin)
    if missing < 0:
        raise refusal
    return _Layer(marker, start, start + missing)


@dataclass
class _Comparison:
    """Holds a record without some layers against the program with all of them.

    Attributes:
        learns: whether what is read in place of what they make is to be found out.
    """

    program: _Program
    other: _Program
    layers: Sequence[_Layer]
    learns: bool

    def run(self) -> None:
        """Raises a TraceError where one is not what follows from the other."""
        gone = {place for layer in self.layers for place in range(layer.start, layer.end)}
        kept = [node for place, node in enumerate(self.program.nodes) if place not in gone]
        self._matching = dict(zip(self.other.nodes, kept, strict=False))
        pairs = zip(kept, self.other.nodes, strict=False)
        wrong = next((one for one, same in pairs if not self._alike(one, same)), None)
        if wrong is None and len(kept) == len(self.other.nodes):
            return
        place = len(self.program.nodes) if wrong is None else self.program.places[wrong]
        before = [layer for layer in self.layers if layer.start <= place]
        raise (before or self.layers)[-1].refusal("more than a layer depends on it")

    def _alike(self, one: fx.Node, same: fx.Node) -> bool:
        return (
            (one.op, one.target) == (same.op, same.target)
            and _around(one) == _around(same)
            and _form(one.meta.get("val")) == _form(same.meta.get("val"))
            and self._matches((one.args, one.kwargs), (same.args, same.kwargs))
        )

    def _matches(self, one: Any, same: Any) -> bool:
        match one, same:
            case fx.Node(), fx.Node():
                return self._node(one, same)
            case slice(), slice():
                one, same = ((s.start, s.stop, s.step) for s in (one, same))
                return self._matches(one, same)
            case dict(), dict():
                return one.keys() == same.keys() and all(
                    self._matches(item, same[key]) for key, item in one.items()
                )
            case (tuple() | list(), tuple() | list()):
                return len(one) == len(same) and all(map(self._matches, one, same))
        return one is same or (type(one) is type(same) and repr(one) == repr(same))

    def _node(self, one: fx.Node, same: fx.Node) -> bool:
        other = self._matching.get(same)
        found = self.other.key(same) if other is None else self.program.key(other)
        wanted = self.program.key(one)
        while layer := next((layer for layer in self.layers if wanted in layer), None):
            assert isinstance(wanted, int)
            if self.learns:
                return layer.stands_for.setdefault(wanted, found) == found
            wanted = layer.stands_for.get(wanted)
        if one.op == same.op == "get_attr":
            mine, theirs = self._constant(self.program, one), self._constant(self.other, same)
            if mine is not None and theirs is not None:
                return same_constant(mine, theirs)
        return wanted == found

    def _constant(self, program: _Program, node: fx.Node) -> torch.Tensor | None:
        return program.recorder.tensors.constants.get(str(node.target))


def _around(node: fx.Node) -> tuple[object, ...]:
    """The line of a node, and what it runs in."""
    source = node.meta.get("source")
    line = source and (source.file, source.line)
    paths = tuple(path for path, _, _ in node.meta.get("modules", ()))
    return line, paths, tuple(region.context for region in node.meta.get(REGIONS, ()))


def _form(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return str(tuple(value.shape)), value.dtype, value.device
    if isinstance(value, tuple | list):
        return [_form(item) for item in value]
    return str(value)


def _refuse_effects(entry: Entry, program: _Program, layer: _Layer) -> None:
    """Raises a TraceError where a layer does more than make what is read of it."""
    lent = (node for node in program.recorder.graph.nodes if node.op in GIVEN)
    before = set().union(*map(made_by, (*program.nodes[: layer.start], *lent)))
    for node in program.nodes[layer.start : layer.end]:
        written = written_by(node)
        if written & before or (node.meta.get(EFFECT) and not written and not _draws(entry, node)):
            raise layer.refusal(
                "a layer that it leaves out writes to a buffer or to another tensor"
            )
    passed: set[int] = set()
    for place, key in layer.stands_for.items():
        made, given = (
            node and node.meta["val"] for node in (program.nodes[place], program.at(key))
        )
        if not isinstance(made, torch.Tensor) or not isinstance(given, torch.Tensor):
            raise layer.refusal("something else than a tensor stands in for a layer")
        alike = same_shape(made.shape, given.shape) and made.dtype == given.dtype
        if not alike or (given.requires_grad and not made.requires_grad):
            raise layer.refusal("what stands in for it is of another shape or type")
        passed.update(map(storage_key, (made, given)))
    for node in program.nodes[layer.end :]:
        if passed & written_by(node):
            raise layer.refusal("what a layer makes is written to in place")


def _draws(entry: Entry, node: fx.Node) -> bool:
    """Whether a node that has an effect can only have drawn."""
    if node.op == "call_module":
        return next(entry.get_submodule(str(node.target)).buffers(), None) is None
    method = isinstance(node.target, str)
    return may_draw(getattr(torch.Tensor, str(node.target)) if method else node.target)


def draw_on_host(graph: fx.Graph) -> None:
    """Lets what only decides stay on the CPU: a GPU would have Python wait for it.

    And what is drawn for nothing, as it decides in the other mode.
    """
    deciding: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        for_nothing = node.meta.get(EFFECT) and not node.users and not node.all_input_nodes
        if (
            node.target is decided
            or for_nothing
            or (node.users and deciding.issuperset(node.users))
        ):
            deciding.add(node)
            if isinstance(node.kwargs.get("device"), torch.device):
                node.kwargs = {**node.kwargs, "device": "cpu"}


def _write(program: _Program, layers: Sequence[_Layer], *, keeps: bool) -> None:
    """Writes what is passed on where layers are left out, and takes away what marks decisions."""
    graph, now = program.recorder.graph, dict[Hashable, fx.Node]()
    for number, layer in enumerate(layers):
        label = str(number)
        inside = program.nodes[layer.start : layer.end]
        for node in inside:
            node.meta[LAYER] = label
        meta = {**layer.marker.meta, LAYER: label}
        condition = layer.marker.args[0]
        assert isinstance(condition, fx.Node)
        with graph.inserting_before(layer.marker):
            if keeps and inside:
                value = torch.logical_not(condition.meta["val"])
                condition = graph.call_function(torch.logical_not, (condition,))
                condition.meta.update({**layer.marker.meta, "val": value})
        for place, key in layer.stands_for.items():
            made, given = program.nodes[place], now.get(key) or program.at(key)
            with graph.inserting_before(program.nodes[layer.end]):
                chosen = graph.call_function(unless, (condition, made, given))
            chosen.meta.update({**meta, "val": made.meta["val"]})
            for user in [*made.users]:
                if user is not chosen and user not in inside:
                    user.replace_input_with(made, chosen)
            now[place] = chosen
    for node in list(graph.nodes):
        if node.target is decided:
            graph.erase_node(node)
