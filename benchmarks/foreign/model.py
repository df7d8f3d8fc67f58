"""What a foreign model is here: its class from its library, a batch, and what it is trained on."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

LIBRARIES = ("torchvision", "timm", "transformers", "senses", "diffusers", "peft", "idioms")


@dataclass(frozen=True)
class Foreign:
    """A model as its user would write it down.

    Attributes:
        inputs, target: of a batch of that many samples, drawn by torch's generator.
        loss: `loss_fn(output, target)`; None for a model that returns its own.
        samples: of the example.
        options: of the command.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], object]
    loss: Callable[..., torch.Tensor] | None = None
    target: Callable[[int], object] | None = None
    samples: int = 8
    options: str = ""
    hooks: Mapping[str, object] = field(default_factory=dict)

    def user_file(self) -> dict[str, object]:
        """What stands in the user's model file."""
        target = self.target
        found: dict[str, object] = {
            "build_model": self.build,
            "example_inputs": lambda: self.inputs(self.samples),
            **self.hooks,
        }
        if self.loss is not None:
            found["loss_fn"] = self.loss
            found["example_target"] = lambda: None if target is None else target(self.samples)
        return found


def names(patterns: Collection[str] = ("*",)) -> Iterator[str]:
    """Those that match a pattern of a shell, as LIBRARY:NAME; other libraries are not imported."""
    for library in LIBRARIES:
        if not any(fnmatch.fnmatch(library, pattern.partition(":")[0]) for pattern in patterns):
            continue
        module = importlib.import_module(f"foreign.in_{library}")
        for name in (f"{library}:{name}" for name in module.names()):
            if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                yield name


def foreign(name: str) -> Foreign:
    """The model of a name."""
    library, _, own = name.partition(":")
    module: Any = importlib.import_module(f"foreign.in_{library}")
    made: Foreign = module.foreign(own)
    return made


def images(size: int, channels: int = 3) -> Callable[[int], torch.Tensor]:
    """Batches of square images."""
    return lambda samples: torch.randn(samples, channels, size, size)


def classes(count: int) -> Callable[[int], torch.Tensor]:
    """A class a sample."""
    return lambda samples: torch.randint(count, (samples,))


def cross_entropy(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Of the logits; those of auxiliary heads count 0.4, as their authors say."""
    if isinstance(output, torch.Tensor):
        return F.cross_entropy(output, target)
    if isinstance(output, dict):
        output = tuple(output.values())
    first, *others = (item for item in output if item is not None)
    return F.cross_entropy(first, target) + 0.4 * sum(F.cross_entropy(o, target) for o in others)


def squares(output: Any, target: torch.Tensor) -> torch.Tensor:
    """The mean squared error, of what the output is called or is first in it."""
    if isinstance(output, dict):
        output = next(iter(output.values()))
    while not isinstance(output, torch.Tensor):
        output = output[0]
    return F.mse_loss(output, target)
