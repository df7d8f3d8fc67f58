"""Buffers that a model makes in its first call, for the sizes of what it is given."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from gpipe_compiler.frontend.comparable_runs import other_values
from gpipe_compiler.frontend.signature import Signature
from gpipe_compiler.frontend.state import isolated, transient_buffers
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.quiet import quiet

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
