"""Finds which dimension of every input is the batch, and proves it by running the model.

The dimensions are right when the samples are independent along them (`batch_proof.py`). Choices are
tried in this order: what the user said; dimension 0 of all inputs that share its size; then the
dimensions of the first input with several, one after the other, with those of the other inputs that
have the same size. Of an input with more than one such dimension the one in the same place is tried
first, then dimension 0, then the others, and at last that all samples share it. The dimension of a
target is that along which the loss is the mean or the sum over the samples.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gpipe_compiler.frontend.batch_proof import Dims, Proof, Verdict
from gpipe_compiler.frontend.comparable_runs import other_values
from gpipe_compiler.frontend.materialise import materialised, with_real_example
from gpipe_compiler.frontend.python_state import hooks_kept
from gpipe_compiler.frontend.shorten import shortened
from gpipe_compiler.frontend.signature import Signature, read_signature
from gpipe_compiler.frontend.state import isolated, state_table, transient_buffers
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.user_code import refuse_unwritable_names
from gpipe_compiler.quiet import quiet

LARGEST_FILLED = 1 << 30
"""Bytes of parameters up to which a model on meta is given numbers for the proof."""

_MOST_TRIALS = 24
"""Choices of dimensions that are tried."""

_LONGEST_S = 60.0
"""Seconds after which no further choice is tried."""


@dataclass(frozen=True)
class FoundBatch:
    """A subject whose batch dimensions are known.

    Attributes:
        subject: with `batch_dims` for every input.
        mixes: whether samples depend on each other along dimension 0 (or along what the user said),
            and along no other choice are they independent.
        unproven: why nothing was tried, "" where it was.
    """

    subject: Subject
    mixes: bool = False
    unproven: str = ""

    @property
    def note(self) -> str:
        """Which dimensions are the batch, where they are others than 0 or not proven."""
        dims = self.subject.batch_dims
        if self.unproven:
            return f"dimension 0 is taken for the batch, unproven: {self.unproven}"
        if not any(dims.values()):
            return ""
        shared = [name for name, dim in dims.items() if dim is None]
        named = [f"dimension {dim} of {name}" for name, dim in dims.items() if dim is not None]
        return ", ".join(named) + (
            f"; shared by all samples: {', '.join(shared)}" if shared else ""
        )


def find_batch_dims(subject: Subject) -> FoundBatch:
    """The subject with the batch dimension of every input; the model object stays as it is.

    Raises:
        UsageError: when the user says a dimension that an input does not have.
        TraceError: when the model cannot be copied.
        ModelError: when no file could hold one of its names.
    """
    refuse_unwritable_names(subject.model)
    said, runnable = subject.batch_dims, _runnable(subject)
    signature = read_signature(subject if runnable is None else runnable, on_meta=False)
    choices = list(itertools.islice(_choices(signature, said), _MOST_TRIALS))
    if runnable is None:
        return FoundBatch(_with(subject, signature, choices[0]), unproven=_TOO_LARGE)
    if all(dim is None for dim in choices[0]):
        return FoundBatch(_with(subject, signature, choices[0]))
    proof = Proof(runnable, signature)
    with hooks_kept(subject.model):
        best, verdict = _best(proof, choices)
        dims = _with_target(proof, best, said)
    if runnable.model is subject.model:
        subject = with_made_buffers(subject, signature, proof.model)
    return FoundBatch(_with(subject, signature, dims), mixes=verdict is Verdict.MIXES)


_TOO_LARGE = (
    f"the model is on the meta device, and more than {LARGEST_FILLED >> 30} GiB are too much to be "
    "filled with numbers here"
)


def _best(proof: Proof, choices: Sequence[Dims]) -> tuple[Dims, Verdict]:
    """The first choice along which samples are independent; the first of all where none is.

    One along which targets have samples too goes before others: a mean over channels is that of
    parts of them as well.
    """
    targets = [n for n, source in enumerate(proof.signature.inputs) if _is_target(source.path)]
    first = proof.judge(choices[0])
    best, verdict, started = choices[0], first, time.monotonic()
    for wanted in (True, False):
        for choice in choices:
            if all(choice[place] is not None for place in targets) is not wanted:
                continue
            if time.monotonic() - started > _LONGEST_S:
                return best, verdict
            found = first if choice is choices[0] else proof.judge(choice)
            if found >= Verdict.ROWS:
                return choice, found
    return best, verdict


def _with(subject: Subject, signature: Signature, dims: Dims) -> Subject:
    names = [source.name for source in signature.inputs]
    return dataclasses.replace(subject, batch_dims=dict(zip(names, dims, strict=True)))


def _runnable(subject: Subject) -> Subject | None:
    """The subject with a model that has numbers; of a large one on meta, with fewer equal layers.

    None where that is too large too.
    """
    if not state_table(subject.model).on_meta:
        return with_real_example(subject)
    if _bytes(subject.model) > LARGEST_FILLED:
        short = shortened(subject)
        if short is None or _bytes(short.subject.model) > LARGEST_FILLED:
            return None
        subject = short.subject
    return materialised(subject, seed=0)


def _bytes(model: nn.Module) -> int:
    return sum(state.bytes for state in state_table(model).states.values())


def _choices(signature: Signature, said: Mapping[str, int | None]) -> Iterator[Dims]:
    """Dimensions of all inputs in the order in which they are tried; the likeliest of targets."""
    tried: set[Dims] = set()
    for size, preferred in _batches(signature, said):
        options = [
            _options(signature, place, size, preferred, said)
            for place, source in enumerate(signature.inputs)
        ]
        for source, found in zip(signature.inputs, options, strict=True):
            if _is_target(source.path):
                del found[1:]
        for choice in _fewest_changes(options):
            if choice not in tried:
                tried.add(choice)
                yield choice


def _is_target(path: Sequence[str | int]) -> bool:
    return path[0] == "target"


def _batches(signature: Signature, said: Mapping[str, int | None]) -> Iterator[tuple[int, int]]:
    """Sizes that the batch may have, each with the dimension that is looked at first for it."""
    pairs = list(zip(signature.inputs, signature.examples, strict=True))
    for source, example in pairs:
        dim = said.get(source.name)
        if dim is not None:
            yield example.shape[dim], dim
            return
    yield signature.batch_size, 0
    shapes = [example.shape for source, example in pairs if not _is_target(source.path)]
    several = [shape for shape in shapes if len(shape) > 1]
    for dim, size in enumerate(next(iter(several or shapes), ())):
        yield size, dim


def _options(
    signature: Signature, place: int, size: int, preferred: int, said: Mapping[str, int | None]
) -> list[int | None]:
    """The dimensions of an input that may be the batch of this size, the likeliest first."""
    name, shape = signature.inputs[place].name, signature.examples[place].shape
    if name in said:
        return [said[name]]
    order = dict.fromkeys([preferred, 0, *range(len(shape))])
    return [*(dim for dim in order if dim < len(shape) and shape[dim] == size), None]


def _fewest_changes(options: Sequence[Sequence[int | None]]) -> list[Dims]:
    """One option for each input: the first of all, then ever more others; the first of these."""
    places = itertools.product(*(range(len(found)) for found in options))
    few = sorted(
        itertools.islice(places, 1 << 12), key=lambda place: (sum(map(bool, place)), place)
    )
    return [
        tuple(found[index] for found, index in zip(options, place, strict=True))
        for place in few[:_MOST_TRIALS]
    ]


def _with_target(proof: Proof, dims: Dims, said: Mapping[str, int | None]) -> Dims:
    """The choice with the dimensions of targets along which the loss adds up."""
    signature = proof.signature
    size, preferred = next(
        (example.shape[dim], dim)
        for example, dim in zip(signature.examples, dims, strict=True)
        if dim is not None
    )
    options: list[list[int | None]] = [
        _options(signature, place, size, preferred, said) if _is_target(source.path) else [dim]
        for place, (source, dim) in enumerate(zip(signature.inputs, dims, strict=True))
    ]
    likeliest = tuple(found[0] for found in options)
    if all(len(found) <= 2 for found in options):
        return likeliest
    choices = _fewest_changes(options)
    verdicts = proof.judge_losses(choices)
    best = max(verdicts)
    return choices[verdicts.index(best)] if best > Verdict.FAILS else likeliest


_SEED = 20262


def with_made_buffers(subject: Subject, signature: Signature, called: nn.Module) -> Subject:
    """The subject whose model has the buffers that a call makes of another shape than they had.

    Those only that no checkpoint holds, and that are the same in both modes and for other values
    of the inputs; where others are made the subject is as it was.

    Args:
        called: a copy of the model, after a call.
    """
    held, found = dict(subject.model.named_buffers()), dict(called.named_buffers())
    names = [n for n, own in held.items() if n in found and found[n].shape != own.shape]
    if not names or not transient_buffers(subject.model).issuperset(names):
        return subject
    random = torch.Generator().manual_seed(_SEED)
    batches = (signature.examples, [other_values(x, random) for x in signature.examples])
    try:
        made = [
            _made(subject.model, signature, inputs, names, training=training)
            for inputs, training in itertools.product(batches, (False, True))
        ]
    except Exception:  # noqa: BLE001  # whatever the user's code raises: the trace explains it
        return subject
    first = made[0]
    if not all(torch.equal(one[name], first[name]) for one in made for name in names):
        return subject
    model = isolated(subject.model, share_parameters=True)
    for name, tensor in first.items():
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, tensor)
    return dataclasses.replace(subject, model=model)


@torch.no_grad()
def _made(
    model: nn.Module,
    signature: Signature,
    inputs: Sequence[torch.Tensor],
    names: Sequence[str],
    *,
    training: bool,
) -> Mapping[str, torch.Tensor]:
    """These buffers after the first call of a model."""
    fresh = isolated(model).train(training)
    args, kwargs, _ = signature.rebuild([tensor.clone() for tensor in inputs])
    with torch.random.fork_rng(), quiet():
        fresh(*args, **kwargs)
    return {name: fresh.get_buffer(name) for name in names}
