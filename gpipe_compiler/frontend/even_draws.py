"""Random numbers that are the same for every sample, however many samples there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gpipe_compiler.dispatching import PlainDispatchMode

_CHANCES = ("p", "dropout_p")


class EvenDraws(PlainDispatchMode):
    """Lets ops draw one and the same number everywhere, and drop nothing.

    Two runs of a model on different samples can then be compared. Floating draws are 0.5, integers
    the smallest that can be drawn, permutations leave everything in place.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs one kernel, and evens out what it draws."""
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **given)
        name = func.overloadpacket.__name__
        names = (argument.name for argument in func._schema.arguments)
        arguments = {**dict(zip(names, args, strict=False)), **given}
        if "dropout" in name or "attention" in name:
            chances = {key: 0.0 for key in _CHANCES if key in arguments}
            return func(**{**arguments, **chances})
        drawn = func(*args, **given)
        for tensor in tree_leaves(drawn):
            if not isinstance(tensor, torch.Tensor):
                continue
            if name == "randperm":
                tensor.copy_(torch.arange(len(tensor)))
            elif tensor.is_floating_point():
                tensor.fill_(0.5)
            else:
                tensor.fill_(arguments.get("low", 0))
        return drawn


def generator_states() -> list[torch.Tensor]:
    """Where torch's own generators stand: they move on when anything is drawn."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.extend(torch.cuda.get_rng_state_all())
    return states
