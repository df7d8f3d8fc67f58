"""What a model does in other precisions than the one it is traced in.

A model may look at types (`x.to(y.dtype)`, `torch.finfo(x.dtype).min`), and then its trace holds
what they were. So the model is run in every precision, on fake tensors, and the runs are held
against each other, call by call. A type that differs was read from a tensor before: the trace
reads it there too. Where anything else differs, the model is another program in that precision.
"""

from __future__ import annotations

import builtins
import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from gpipe_compiler.frontend.casts import READS, CastWatch, TorchCall
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.growing_graph import EVENT
from gpipe_compiler.frontend.locate import location
from gpipe_compiler.frontend.position import CHECKPOINT, REGIONS
from gpipe_compiler.frontend.recompute import activations_kept
from gpipe_compiler.frontend.state import isolated
from gpipe_compiler.frontend.surroundings import Place, ambient, as_exported, kind_of
from gpipe_compiler.ir.interpret import recurrent_forms
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.core.precision import lower_dtype
from gpipe_compiler.runtime.spec import Precision

_LOWER = (Precision.BF16, Precision.FP16)

_LIMITS = ("min", "max", "eps", "tiny", "smallest_normal", "resolution")
"""Fields of torch.finfo."""


@dataclass(frozen=True, slots=True)
class Follow:
    """A constant of the trace that follows the type of a tensor.

    Attributes:
        event: number of the call that it is passed to.
        constant: as it is in the trace.
        read: number of the event that read the type.
        field: of `torch.finfo` of that type; "" for the type itself.
    """

    event: int
    constant: object
    read: int
    field: str


@dataclass(frozen=True)
class Account:
    """How the runs of a model in all precisions compare.

    Attributes:
        unlike: the precisions in which the model is another program than in fp32, and where.
        follows: what a program for all the others has to read when it runs.
        asked: whether that program is the model's answer to autocast being on; in fp32 it is the
            same but for regions without effect.
        calls: what the events of that program have in common with those of its trace.
    """

    unlike: Mapping[Precision, str]
    follows: tuple[Follow, ...] = ()
    asked: bool = False
    calls: tuple[object, ...] = ()


SAME = Account({})
"""Of a model that looks at no types."""

_BAKED = dict.fromkeys(_LOWER, "its trace holds types of fp32")


def account(entry: Entry, *, gradients: bool = True) -> Account:
    """Holds the runs of an entry's model in all precisions against the one in fp32.

    Args:
        gradients: whether the runs are recorded by autograd.
    """
    plain = _run(entry, None, gradients)
    if plain is None:
        return Account(dict.fromkeys(_LOWER, "it cannot be run on tensors without numbers"))
    if not any(isinstance(event.function, str) for event in plain):
        return SAME
    base, asked = plain, False
    if any(event.function == "autocast" for event in plain):
        answered = _run(entry, torch.float32, gradients)
        asked = answered is not None and _effective(answered) == _effective(plain)
        base = answered if asked and answered is not None else plain
    runs: dict[Precision, Sequence[TorchCall]] = {}
    unlike: dict[Precision, str] = {}
    for precision in _LOWER:
        run = _run(entry, lower_dtype(precision), gradients)
        fault = "it cannot be run there" if run is None else _other_calls(base, run)
        if run is None or fault:
            unlike[precision] = fault
        else:
            runs[precision] = run
    follows: list[Follow] = []
    ways: dict[tuple[object, int], int] = {}
    for number, event in enumerate(base):
        for place, constant in enumerate(event.constants):
            others = {p: run[number].constants[place] for p, run in runs.items()}
            differing = [p for p, other in others.items() if not _same(constant, other)]
            if not differing:
                continue
            follow = _source(number, place, base, tuple(runs.values()))
            if follow is not None:
                follows.append(follow)
                ways[event.key, place] = number - follow.read
                continue
            for precision in differing:
                unlike[precision] = f"it passes {others[precision]} at {_where(event)}"
                del runs[precision]
    follows += _alike(base, tuple(runs.values()), ways, {item.event for item in follows})
    return Account(unlike, tuple(follows), asked, tuple(event.key for event in base))


def _run(entry: Entry, dtype: torch.dtype | None, gradients: bool) -> list[TorchCall] | None:
    """The events of a run under autocast to a type; None where the model cannot be run."""
    own, signature = entry.model, entry.signature
    samples = signature.samples(max(signature.batch_size, 2))
    kind = kind_of(entry)
    fakes = Place.of(kind)
    try:
        for place in (fakes,) if entry.states.on_meta else (fakes, None):
            with contextlib.ExitStack() as around:
                around.enter_context(quiet())
                around.enter_context(torch.random.fork_rng())
                around.enter_context(torch.set_grad_enabled(gradients))
                around.enter_context(as_exported())
                try:
                    entry.model = isolated(own) if place is None else place.moved(own)
                    watch = CastWatch(entry, traced=False)
                    inputs = [tensor.clone() for tensor in samples]
                    if place is not None:
                        inputs = list(map(place.to, inputs))
                        around.enter_context(place.mode)
                        around.enter_context(recurrent_forms())
                    around.enter_context(ambient(dtype, kind))
                    around.enter_context(watch.watching())
                    around.enter_context(activations_kept())
                    entry(*inputs)
                except Exception:  # whatever the user's code raises on tensors without numbers
                    continue
            return watch.events
    finally:
        entry.model = own
    return None


def _effective(events: Sequence[TorchCall]) -> list[tuple[object, ...]]:
    """The events without regions in which autocast is off, and without looks at it."""
    kept: list[tuple[object, ...]] = []
    idle: list[bool] = []
    for event in events:
        name = getattr(event.function, "__name__", event.function)
        if name == "_enter_autocast":
            idle.append(False in event.constants[2:3])
            if idle[-1]:
                continue
        elif (name == "_exit_autocast" and idle and idle.pop()) or name == "autocast":
            continue
        kept.append((*event.key, event.constants, event.dtype))
    return kept


def _other_calls(base: Sequence[TorchCall], other: Sequence[TorchCall]) -> str:
    """Where two runs first do not make the same call; "" where they make the same ones."""
    for one, two in zip(base, other, strict=False):
        if one.key != two.key or len(one.constants) != len(two.constants):
            return f"it goes another way before {_where(two)}"
    if len(base) != len(other):
        longer = max(base, other, key=len)
        return f"it goes another way at {_where(longer[min(len(base), len(other))])}"
    return ""


def _where(event: TorchCall) -> str:
    place = location(event.file, event.line)
    return f"{place.file}:{place.line} `{place.code}`"


def _same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and one == other


def _source(
    number: int, place: int, base: Sequence[TorchCall], others: Sequence[Sequence[TorchCall]]
) -> Follow | None:
    """Which of the types read before an event a constant of it follows: the latest that fits."""
    runs = (base, *others)
    wanted = [run[number].constants[place] for run in runs]
    fields = ("",) if isinstance(wanted[0], torch.dtype) else _LIMITS
    for read in range(number - 1, -1, -1):
        types = [run[read].dtype for run in runs]
        if not all(dtype is not None and dtype.is_floating_point for dtype in types):
            continue
        for name in fields:
            if all(map(_same, wanted, (_field(dtype, name) for dtype in types))):
                return Follow(number, wanted[0], read, name)
    return None


def _alike(
    base: Sequence[TorchCall],
    others: Sequence[Sequence[TorchCall]],
    ways: Mapping[tuple[object, int], int],
    known: Collection[int],
) -> Iterator[Follow]:
    """Constants that no precision changes, at lines that read them elsewhere: layers are alike.

    Args:
        ways: the constants that follow a type, by their lines, and how many events before it is
            read.
    """
    for number, event in enumerate(base):
        for place in range(0 if number in known else len(event.constants)):
            before = ways.get((event.key, place))
            found = _source(number, place, base, others) if before is not None else None
            if found is not None and number - found.read == before:
                yield found


def _field(dtype: torch.dtype | None, name: str) -> object:
    assert dtype is not None
    return getattr(torch.finfo(dtype), name) if name else dtype


def follow(graph: fx.Graph, found: Account, events: Sequence[TorchCall]) -> Mapping[Precision, str]:
    """Lets constants of a trace follow the types that they come from.

    Returns:
        The precisions that the trace is not for, and why.
    """
    if not found.calls:
        return found.unlike
    if tuple(event.key for event in events[: len(found.calls)]) != found.calls:
        return _BAKED
    for item in found.follows:
        made = [node for node in graph.nodes if node.meta.get(EVENT) == item.event]
        source = next((n for n in graph.nodes if item.read in n.meta.get(READS, ())), None)
        if made and not (source is not None and _replaced(graph, made, source, item)):
            where = _where(events[item.event])
            return {other: f"{text}, for {where}" for other, text in _BAKED.items()}
    return found.unlike


def only_in(precision: Precision) -> Account:
    """Of a model that was traced in the one precision in which it is another program."""
    others = [other for other in Precision if other is not precision]
    return Account(dict.fromkeys(others, f"it was traced in {precision.value}, where it differs"))


def _replaced(graph: fx.Graph, nodes: Sequence[fx.Node], source: fx.Node, item: Follow) -> bool:
    """Writes the type of a node's value, or a field of it, for a constant of some other nodes."""
    holding = [
        node
        for node in nodes
        if any(_same(item.constant, leaf) for leaf in tree_leaves((node.args, node.kwargs)))
    ]
    if not holding:
        return False
    with graph.inserting_before(holding[0]):
        value = graph.call_function(builtins.getattr, (source, "dtype"))
        if item.field:
            limits = graph.call_function(torch.finfo, (value,))
            limits.meta = _origin(holding[0])
            value.meta = _origin(holding[0])
            value = graph.call_function(builtins.getattr, (limits, item.field))
        value.meta = _origin(holding[0])

    def change(leaf: Any) -> Any:
        return value if _same(item.constant, leaf) else leaf

    for node in holding:
        node.args, node.kwargs = tree_map(change, (node.args, node.kwargs))
    return True


def _origin(node: fx.Node) -> dict[str, Any]:
    kept = ("source", "modules", REGIONS, CHECKPOINT)
    return {key: node.meta[key] for key in kept if key in node.meta}
