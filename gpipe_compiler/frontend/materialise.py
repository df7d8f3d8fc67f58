"""A model on meta, given memory and numbers, so that it can be run like any other."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import nn

from gpipe_compiler.frontend.init_program import UNKNOWN
from gpipe_compiler.frontend.initial import tensors_of_model
from gpipe_compiler.frontend.signature import read_signature
from gpipe_compiler.frontend.state import copied_model
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.runtime.core.building import replay, seed_of

_SCALE = 0.02
"""Standard deviation of the parameters of which nobody knows how they begin."""


def real_example(subject: Subject) -> dict[str, torch.Tensor]:
    """The tensors of the example call by input name, as the user's file gives them.

    Those that it has on meta, too, are made up: normally distributed, integers and booleans 0 or 1,
    which is in range for any embedding with two entries and any index.
    """
    whole = with_real_example(subject)
    return dict(read_signature(whole, on_meta=False).named())


def with_real_example(subject: Subject) -> Subject:
    """The subject with real tensors in its example call; its model stays where it is."""
    example = subject.example
    call = (
        (subject.args, subject.kwargs, subject.target)
        if example is None
        else (example.args, example.kwargs, example.target)
    )
    number = itertools.count()

    def real(tensor: torch.Tensor) -> torch.Tensor:
        return _made_up(tensor, next(number)) if tensor.is_meta else tensor

    args, kwargs, target = call
    called = dataclasses.replace(subject, args=args, kwargs=kwargs, target=target, example=None)
    return called.with_example(real)


def _made_up(tensor: torch.Tensor, number: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(number)
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=random).to(tensor.dtype)
    return torch.randint(0, 2, tensor.shape, generator=random).to(tensor.dtype)


def materialised(subject: Subject, seed: int) -> Subject:
    """The subject with a copy of its model on the CPU, filled as a package with this seed is.

    Parameters of which it is not known how they begin are random.

    Raises:
        TraceError: when Python cannot copy the model.
    """
    model = subject.model
    memo: dict[int, Any] = {}
    with torch.random.fork_rng():
        for name, tensor in tensors_of_model(model):
            memo[id(tensor)] = _filled(tensor, name, subject, seed)
    return dataclasses.replace(with_real_example(subject), model=copied_model(model, memo))


def _filled(tensor: torch.Tensor, name: str, subject: Subject, seed: int) -> torch.Tensor:
    memory = torch.empty_like(tensor, device="cpu", requires_grad=False)
    steps = subject.initial.get(name)
    if steps and steps != UNKNOWN:
        replay(memory, name, steps, seed)
    elif isinstance(tensor, nn.Parameter) and memory.is_floating_point():
        random = torch.Generator().manual_seed(seed_of(name, seed))
        memory.normal_(0.0, _SCALE, generator=random)
    else:
        memory.zero_()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(memory, requires_grad=tensor.requires_grad)
    return memory


def known(subject: Subject) -> bool:
    """Whether it is known of every tensor on meta how it begins."""
    names = (name for name, _ in tensors_of_model(subject.model))
    return all(subject.initial.get(name, ()) not in ((), UNKNOWN) for name in names)
