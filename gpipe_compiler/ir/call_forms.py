"""What calls of modules are but for names and numbers: calls of one form are those of one block."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from gpipe_compiler.ir.arguments import Argument
from gpipe_compiler.ir.blocks import BlockCall
from gpipe_compiler.ir.forms import Constant, Former, LocalSizes
from gpipe_compiler.ir.graph import Graph
from gpipe_compiler.ir.sizes import asked, is_free
from gpipe_compiler.ir.values import ValueKind
from gpipe_compiler.runtime.sizes import Dim


class CallFormer(Former):
    """The forms of the parts of a call.

    Attributes:
        read: the values that the call does not make, as often as its parts read them.
    """

    def __init__(self, call: BlockCall, places: Mapping[str, str], around: int) -> None:
        super().__init__(call.path, places, around)
        made = {value for part in call.parts for value in part.outputs}
        self._given = {v for part in call.parts for v in part.inputs if v not in made}
        self.read: list[str] = []

    def number(self, name: str) -> int:
        if name in self._given:
            self.read.append(name)
            return -1
        return super().number(name)


@dataclass(frozen=True)
class Given:
    """What is known of a value that a call is given.

    Attributes:
        kind: tensor or number.
        batch: where its samples are, and how many of the call's they are.
        template: what it is, where it follows from shapes.
        dims: where else its sizes stand, of calls that read such off shapes.
    """

    kind: ValueKind
    batch: Hashable
    template: str
    dims: Hashable


@dataclass(frozen=True, eq=False)
class CallForm:
    """A call, and what it is but for names and numbers.

    Attributes:
        inside: all but which of the values that it is given is read where.
        read: those, as often as they are read.
        given: what is known of each that is an input of the call, in that order.
        constants: the numbers.
    """

    call: BlockCall
    inside: Hashable
    read: tuple[str, ...]
    given: Mapping[str, Given | None]
    constants: tuple[Constant, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """What the call is given, each value once."""
        return tuple(self.given)

    @property
    def key(self) -> Hashable:
        """Equal for calls of one form."""
        numbers: dict[str, int] = {}
        read = tuple(numbers.setdefault(name, len(numbers)) for name in self.read)
        given = tuple((numbers.get(name), known) for name, known in self.given.items())
        return self.inside, read, given


def known_of_inputs(
    graph: Graph, templates: Mapping[str, Argument], call: BlockCall
) -> dict[str, Given | None]:
    """What is known of the values that a call is given, None of those that the graph knows not."""
    inputs = tuple(dict.fromkeys(call.inputs))
    sizes = LocalSizes.of(graph, inputs)
    read = [templates[value] for value in inputs if value in templates]
    shapes = any(is_free(dim) for template in read for dim in asked(template))
    found: dict[str, Given | None] = {}
    for name in inputs:
        value = graph.values.get(name)
        if value is None:
            found[name] = None
            continue
        template = repr(sizes.relative(templates[name])) if name in templates else ""
        dim = value.batch_dim
        ratio = 0.0 if dim is None else value.shape[dim] / graph.batch_size / sizes.base
        batch = None if dim is None else (dim, value.splittable, ratio)
        dims = tuple(sizes.places.get(dim) for dim in value.dims) if shapes else ()
        found[name] = Given(value.kind, batch, template, dims)
    return found


def repeated_inputs(
    graph: Graph, templates: Mapping[str, Argument], call: CallForm, other: CallForm
) -> tuple[str, ...] | None:
    """What a call is given as one of the block of another, which reads more values than it does.

    So `attention(x, x)` is a call of what `attention(x, context)` calls. None where it is not.
    """
    if call.inside != other.inside or len(call.read) != len(other.read):
        return None
    own = dict(zip(other.read, call.read, strict=True))
    if tuple(own[name] for name in other.read) != call.read:
        return None
    inputs = tuple(own.get(name, "") for name in other.inputs)
    if {*inputs} != {*call.inputs}:
        return None
    for name, known in other.given.items():
        mine = call.given[own[name]]
        if known is None or mine is None:
            if known is not mine:
                return None
        elif (known.kind, known.batch) != (mine.kind, mine.batch):
            return None
    return inputs if _same_sizes(graph, templates, call, other, own) else None


def _same_sizes(
    graph: Graph,
    templates: Mapping[str, Argument],
    call: CallForm,
    other: CallForm,
    own: Mapping[str, str],
) -> bool:
    """Whether what follows from sizes in one call follows from the same sizes in the other.

    Args:
        own: the values of the call, by those of the other.
    """
    mine = LocalSizes.of(graph, call.inputs)
    as_mine: dict[Dim, set[Dim]] = {}
    for theirs, name in own.items():
        value, ours = graph.values.get(theirs), graph.values.get(name)
        if value is None or ours is None:
            continue
        if len(value.dims) != len(ours.dims):
            return False
        for dim, here in zip(value.dims, ours.dims, strict=True):
            as_mine.setdefault(dim, set()).add(here)
    one = {dim: here.pop() for dim, here in as_mine.items() if is_free(dim) and len(here) == 1}
    places = {dim: mine.places[here] for dim, here in one.items() if here in mine.places}
    theirs_here = LocalSizes(LocalSizes.of(graph, other.inputs).base, places)
    pairs = [(templates.get(theirs), templates.get(name)) for theirs, name in own.items()]
    return all(
        repr(theirs_here.relative(theirs)) == repr(mine.relative(name)) for theirs, name in pairs
    )
