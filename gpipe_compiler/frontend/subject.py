"""What is to be compiled: a model, one example call, and how it is trained."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import nn

from gpipe_compiler.errors import SourceLocation, UsageError
from gpipe_compiler.frontend.python_state import PythonState, shared_state
from gpipe_compiler.frontend.structure import map_tensors
from gpipe_compiler.options import LossChoice
from gpipe_compiler.runtime.core.assembly import Assembly
from gpipe_compiler.runtime.spec import Steps

LossFunction = Callable[[object, object], torch.Tensor]
"""`loss_fn(output, target)`, as the user's file offers it."""


def takes(function: Callable[..., object], arguments: int) -> bool:
    """Whether a function or module can be called with so many arguments, as far as it says."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        inspect.signature(called, follow_wrapped=False).bind(*[None] * arguments)
    except (TypeError, ValueError):
        return False
    return True


def _forward_with_target(module: nn.Module, output: object, target: object) -> torch.Tensor:
    loss: torch.Tensor = type(module).forward(module, output)
    return loss


def _with_target(loss_fn: Callable[..., torch.Tensor]) -> LossFunction:
    if isinstance(loss_fn, nn.Module):
        module = copy.copy(loss_fn)  # still a module: its buffers and weights are looked at
        module.forward = MethodType(_forward_with_target, module)
        return module

    @functools.wraps(loss_fn)
    def of_output(output: object, target: object) -> torch.Tensor:
        return loss_fn(output)

    return of_output


@dataclass(frozen=True, slots=True)
class Hooks:
    """Where the user's own file stands, for the hooks that a package has a copy of.

    Attributes:
        file: absolute path of the file, or None for an importable module.
        module: dotted name of the module, "" for a file.
        names: which of `train_data`, `eval_data`, `make_optimizer`, `make_scheduler`,
            `make_state`, `metrics` and `log` it offers.
    """

    file: Path | None
    module: str
    names: frozenset[str]

    @property
    def where(self) -> str:
        """The file or module, for messages."""
        return self.module if self.file is None else self.file.name


@dataclass(frozen=True, slots=True)
class NearlyALoss:
    """What in the user's file looks like a misspelt `loss_fn`, as Python would name it there."""

    name: str
    location: SourceLocation | None


@dataclass(frozen=True, eq=False, slots=True)
class Example:
    """The tensors of one example call, as the user's file gives them."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    target: object = None


@dataclass(frozen=True, slots=True)
class SizeNames:
    """What the sizes of an input are called, by `--input input_ids=BATCHxTOKENS:int64`.

    Attributes:
        words: a name for each dimension, or the number that it is.
        dtype: as torch calls it; None where it is not said.
    """

    text: str
    words: tuple[str, ...]
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """Which dimensions of the inputs are to stay free, beside the batch.

    Attributes:
        everything: all that the model treats generally, but for those that are fixed.
        fixed: such as `input_ids.1`.
        places: such as `input_ids.1`, to the name of the size; those of one name are equal.
        must: the places that the user asks to be free, which the model may not fix.
        at: by the names of sizes, what they are to be in the example.
        names: by the name of an input, what its sizes are called.
    """

    everything: bool = True
    fixed: frozenset[str] = frozenset()
    places: Mapping[str, str] = field(default_factory=dict)
    must: frozenset[str] = frozenset()
    at: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, SizeNames] = field(default_factory=dict)

    @property
    def needed(self) -> Wish:
        """Only those that have to be free."""
        return dataclasses.replace(
            self,
            everything=False,
            fixed=frozenset(),
            places={place: self.places[place] for place in self.must},
        )

    @classmethod
    def parse(
        cls,
        texts: Sequence[str],
        fixed: Sequence[str] = (),
        at: Sequence[tuple[str, int]] = (),
    ) -> Wish:
        """What `--free` says: `input_ids.1`, `tokens=input_ids.1`; `--fix`: that, or `all`; `--at`.

        Raises:
            UsageError: for a name that no variable of Python's can have, or the same as another's;
                for what both name.
        """
        places: dict[str, str] = {}
        for text in texts:
            name, equals, place = text.rpartition("=")
            variable = name.replace(".", "_")
            if equals and (not variable.isidentifier() or keyword.iskeyword(variable)):
                raise UsageError(
                    f"--free {text}: {name!r} cannot be the name of a size",
                    hint="give it as in tokens=input_ids.1: letters, digits and _, and no word of "
                    "Python's own",
                )
            places[place] = name or place
        for one, other in itertools.combinations(dict.fromkeys(places.values()), 2):
            if one.replace(".", "_") == other.replace(".", "_"):
                raise UsageError(
                    f"--free: the sizes {one} and {other} would be one variable",
                    hint="give one of them another name, as in tokens=input_ids.1",
                )
        for both in places.keys() & {*fixed}:
            raise UsageError(f"--free and --fix both name {both}", hint="leave one of them out")
        return cls(
            "all" not in fixed, frozenset(fixed) - {"all"}, places, frozenset(places), dict(at)
        )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where the numbers of a tensor are.

    Attributes:
        made: how it is made of tensors of files, by their keys; of one alone, as it is, mostly.
        files: of each of these, in order.
    """

    made: Assembly
    files: tuple[Path, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Pretrained:
    """The weights of a model in a folder, and what is to lie beside them when they are exported.

    Attributes:
        stored: by the names of tensors in the model; empty for a folder without weights.
        anew: the names of those that the folder does not hold, and that begin as in a new model.
        exported: by the keys of files that are written of a trained model, how each is made of
            tensors, by their names.
        adapter: whether these are adapters, in a file of peft's.
        texts: the files to lie beside the weights, by name.
        copies: those that are copied.
        copied_weights: whether the package is to have copies of the weights.
    """

    folder: Path
    stored: Mapping[str, StoredTensor]
    anew: frozenset[str]
    exported: Mapping[str, Assembly]
    adapter: bool
    texts: Mapping[str, str]
    copies: tuple[Path, ...]
    copied_weights: bool = False


_NOT_LOOKED_AT: PythonState = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Subject:
    """A model and all that is known about how it is called.

    Attributes:
        args, kwargs: one example call; tensors may stand inside nested tuples, lists and dicts,
            everything that is no tensor is part of the traced program.
        target: what `loss_fn` compares the output with; any nest of tensors, or None.
        loss_fn: None where the model returns its own loss (a dict or dataclass with `loss`). One
            that takes the output alone is called as the others are.
        training: whether a loss is traced at all; a model that has none is refused.
        loss: SUM_OF_SQUARES trains on that of the outputs, in place of any other loss.
        nearly_a_loss: what the user's file may mean by `loss_fn`, where that is not there.
        make_optimizer: of the user's file, to see what its optimizer remembers.
        example: the real tensors of the call where `args`, `kwargs` and `target` were moved to meta
            because the model stands there; None everywhere else.
        initial: for a model on meta: by name, how its tensors got their numbers when it was built
            (see `frontend/initial.py`).
        batch_dims: by the name of an input, its dimension that is the batch, or None where all
            samples share it. What is not in it is found out (`frontend/batch_dims.py`).
        free: the dimensions of inputs that are to stay free, beside the batch.
        state: inputs that a session holds between calls, each with the output that it becomes.
        keeps: for a model that leaves layers out at random, what Python is told for a layer to run;
            all run then in every run of an entry. None where it decides by itself.
        pretrained: where the numbers of a model on meta are, that was built from a folder of
            Hugging Face's; None for any other.
        began: what copies of the model share of its Python state, before any of them was called;
            looked at when the first subject of the model is made.
        probes: what entries have found out by running the model, by its mode. A changed copy of a
            subject begins with none.
    """

    name: str
    model: nn.Module
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    target: object = None
    loss_fn: LossFunction | None = None
    training: bool = True
    loss: LossChoice = LossChoice.MODEL
    nearly_a_loss: NearlyALoss | None = None
    hooks: Hooks | None = None
    make_optimizer: Callable[..., object] | None = None
    example: Example | None = None
    initial: Mapping[str, Steps] = field(default_factory=dict)
    batch_dims: Mapping[str, int | None] = field(default_factory=dict)
    free: Wish = Wish()
    state: Mapping[str, str] = field(default_factory=dict)
    keeps: bool | None = None
    pretrained: Pretrained | None = None
    began: PythonState = field(default_factory=lambda: _NOT_LOOKED_AT, repr=False)
    probes: dict[bool, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.began is _NOT_LOOKED_AT:
            object.__setattr__(self, "began", shared_state(self.model, self.loss_fn))
        own = self.loss_fn
        if own is not None and takes(own, 1) and not takes(own, 2):
            object.__setattr__(self, "loss_fn", _with_target(own))

    def fixed(self) -> Subject:
        """The same with no dimension free but those that have to be."""
        changed = dataclasses.replace(self, free=self.free.needed)
        changed.probes.update(self.probes)  # what its entries have found out holds for it too
        return changed

    def with_example(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Subject:
        """The same with every tensor of its example call changed."""
        return dataclasses.replace(
            self,
            args=tuple(map_tensors(change, item) for item in self.args),
            kwargs={name: map_tensors(change, item) for name, item in self.kwargs.items()},
            target=map_tensors(change, self.target),
        )
