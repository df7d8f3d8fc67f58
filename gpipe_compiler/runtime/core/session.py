"""Calls of a pipeline that follow one another, with state that each hands to the next."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..errors import UsageError
from ..sizes import Sizes, shape_at, sizes_in, value_at
from ..spec import Leaf, PipelineSpec, Structure
from ..wording import listed
from .inputs import Inputs, is_listed, passed_to
from .nest import Path, items_of
from .request import Values

if TYPE_CHECKING:
    from .call import Call
    from .pipeline import Pipeline


@dataclass
class HeldState:
    """What this process holds between the calls of a session.

    Attributes:
        samples: in each micro-batch; () before the first call.
        sizes: that only the state has, by name.
        values: by micro-batch, what its stages take.
    """

    samples: tuple[int, ...] = ()
    sizes: Sizes = field(default_factory=dict)
    values: Sequence[Values] = ()

    def check(self, spec: PipelineSpec, samples: tuple[int, ...]) -> None:
        """Raises UsageError for a call of other samples than those whose state is held."""
        if self.samples and self.samples != samples:
            raise UsageError(
                f"{spec.name}: the state of this session is that of {sum(self.samples)} samples, "
                f"and this call has {sum(samples)}",
                hint="begin another session, or pass the state of these samples",
            )

    def given(
        self, spec: PipelineSpec, devices: Mapping[int, torch.device], call: Call
    ) -> Sequence[Values]:
        """What a call takes, by micro-batch: what is held, or else nothing yet."""
        if self.samples:
            return self.values
        pairs = zip(call.samples, call.sizes, strict=True)
        return [_nothing_yet(spec, devices, samples, sizes) for samples, sizes in pairs]

    def take(self, spec: PipelineSpec, call: Call, made: Sequence[Sequence[Values]]) -> None:
        """Holds what a call has made of the state: on every device, by micro-batch."""
        self.values = [
            {
                state.past: own[m][state.present]
                for own in made
                for state in spec.carried
                if state.present in own[m]
            }
            for m in range(len(call.samples))
        ]
        self.samples, shapes = call.samples, {state.past: state.shape for state in spec.carried}
        own = _own_sizes(spec).items()
        self.sizes = {n: value_at(shapes[past][dim], call.sizes[0]) for n, (past, dim) in own}


class Session:
    """One conversation, or one stream of sound: what a call gives as state, the next one takes.

        talk = pipe.session()
        for tokens in ...:
            outputs = talk({"input_ids": tokens})   # without the state

    State stays with the stage that makes it, on its device. The first call is given some like any
    other input, or begins with none: with zero elements in every dimension that grows. A later call
    that is given some takes that in place of what is held. Every call is of the same samples, in
    their order. Under torchrun every rank makes the same calls, and rank 0 passes inputs.

    Raises:
        UsageError: for a pipeline whose model was compiled without state.
    """

    def __init__(self, pipe: Pipeline) -> None:
        spec = pipe.spec
        if not spec.carried:
            raise UsageError(f"{spec.name} has no state: compile it with --state PAST=PRESENT")
        _check_places(spec, pipe.placement)
        self._pipe = pipe
        self._held = HeldState(sizes=dict.fromkeys(_own_sizes(spec), 0))
        self._lock = threading.Lock()

    def __call__(self, inputs: Inputs = None) -> object:
        """What the model returns, None in place of the state; under torchrun on rank 0.

        Raises:
            UsageError: for inputs that do not fit.
            StageError: when a stage fails; the state is then what it was.
        """
        with self._lock:
            return self._pipe.in_session(inputs, self._held)


def _own_sizes(spec: PipelineSpec) -> dict[str, tuple[str, int]]:
    """The sizes that only state has, by name, each with the input and the dimension that it is."""
    names = {state.past for state in spec.carried}
    sizes = (size for source in spec.inputs for size in sizes_in(source.shape or ()))
    return {size.name: size.of for size in sizes if size.of[0] in names}


def _nothing_yet(
    spec: PipelineSpec, devices: Mapping[int, torch.device], samples: int, sizes: Sizes
) -> Values:
    """The state before the first call of a micro-batch: of zero elements.

    Args:
        devices: of the stages whose state it is.

    Raises:
        UsageError: for state that has no dimension that grows.
    """
    made: Values = {}
    sources = {source.name: source for source in spec.inputs}
    for state in spec.carried:
        source = sources[state.past]
        shape = list(shape_at(source.shape or (), sizes))
        if 0 not in shape:
            raise UsageError(
                f"{spec.name} begins with state that its caller gives: nothing says what "
                f"{state.past} is at first",
                hint="pass it in the first call of the session",
            )
        if source.batch_dim is not None:
            shape[source.batch_dim] = samples
        for stage, device in devices.items():
            if state.past in spec.stages[stage].inputs:
                made[state.past] = torch.zeros(shape, dtype=source.dtype, device=device)
    return made


def _check_places(spec: PipelineSpec, placement: Sequence[int]) -> None:
    """Raises UsageError where state would have to go from one device to another."""
    for state in spec.carried:
        readers = {placement[i] for i, s in enumerate(spec.stages) if state.past in s.inputs}
        makers = {placement[i] for i, s in enumerate(spec.stages) if state.present in s.outputs}
        if len(readers | makers) > 1:
            raise UsageError(
                f"{state.past} is read on device {min(readers)}, and {state.present}, which it "
                f"becomes, is made on device {max(makers | readers)}",
                hint="have what reads and makes it in one stage, as with --keep-together MODULE",
            )


def begins_anew(spec: PipelineSpec, inputs: Inputs) -> bool:
    """Whether a call of a session is given its state.

    Raises:
        UsageError: where it is given a part of it.
    """
    if is_listed(spec, inputs):
        raise UsageError(
            f"{spec.name}: a call of a session is one batch, and not a list of micro-batches"
        )
    carried = {state.past for state in spec.carried}
    passed = carried & passed_to(spec, inputs, None).keys()
    missing = sorted(carried - passed)
    if passed and missing:
        raise UsageError(
            f"{spec.name}: a call of a session is given all of its state, or none: here "
            f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        )
    return bool(passed)


def without_state(spec: PipelineSpec) -> Structure:
    """What the model returns, None in place of the state."""
    places = {state.place for state in spec.carried}

    def without(item: Structure, path: Path) -> Structure:
        leaves = [(*path, *rest) for rest, _ in items_of(item, Leaf)]
        if leaves and places.issuperset(leaves):
            return None
        match item:
            case dict():
                return {key: without(held, (*path, key)) for key, held in item.items()}
            case list() | tuple():
                return type(item)(without(held, (*path, i)) for i, held in enumerate(item))
        return item

    return without(spec.outputs, ())
