"""The blocks of a stage, run through torch.compile.

A block is a module whose class a package wrote: a layer, or a part of one. Those of one class share
the code that is compiled for it, so a stage of 30 layers compiles one of them. What lies between
blocks, the loss, and every block that draws random numbers run as without: the masks of dropout are
then the same, however often a forward runs. So do blocks with buffers that training writes, whose
copies stand in for them (`written.py`), and those inside of which a segment begins that is
recomputed.

A second forward (`recompute.py`) has to save as many tensors as the first, so that where stages
have segments every size of the inputs gets code of its own.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import _pop_mode_temporarily

from ..errors import PipelineError, UsageError
from ..schedule.choosing import splits_backward
from ..spec import ScheduleKind, StageSpec, WeightSharding, covers
from ..wording import first_line
from .random import SeededRandom
from .written import stand_in


def refuse_compiled(schedule: ScheduleKind, sharding: WeightSharding) -> None:
    """Makes sure that blocks may have forwards and backwards of their own.

    Raises:
        UsageError: for a schedule whose backward has two parts, and for weights that are gathered
            block by block.
    """
    if sharding is WeightSharding.FULL:
        raise UsageError(
            "--compile: with --shard full a block has its weights only while it runs, and "
            "torch.compile keeps them for its backward",
            hint="use --shard optimizer, or leave --compile out",
        )
    if splits_backward(schedule):
        raise UsageError(
            f"--compile: the schedule {schedule.value} makes the gradients of parameters after all "
            "others, and torch.compile makes both at once",
            hint="use --schedule gpipe, 1f1b or interleaved, or leave --compile out",
        )


def check_compiler(devices: Collection[torch.device]) -> None:
    """Compiles a function on each kind of device.

    Raises:
        PipelineError: where that fails, as without a C++ compiler, or Triton on a GPU.
    """
    for kind, device in {device.type: device for device in devices}.items():

        def small(x: torch.Tensor) -> torch.Tensor:
            return (x.sin() + 1) * x

        try:
            torch.compile(small, fullgraph=True)(torch.ones(8, device=device))
        except Exception as error:  # whatever a compiler that is not there raises
            needs = "Triton, and a C compiler" if kind != "cpu" else "a C++ compiler such as g++"
            raise PipelineError(
                f"--compile: torch.compile does not work here on {kind}: {first_line(error)}",
                hint=f"it needs {needs}; or leave --compile out",
            ) from error


class CompiledBlocks:
    """Those of one stage.

    Attributes:
        chosen: by whether the stage trains, the blocks that are compiled; known once `watch` has
            seen a forward, or at once where nothing is drawn.
    """

    def __init__(self, module: nn.Module, spec: StageSpec) -> None:
        self.chosen: dict[bool, tuple[nn.Module, ...]] = {}
        self._module = module
        self._spec = spec
        self._compiled: dict[type[nn.Module], Callable[..., Any]] = {}
        self._draws: set[int] = set()

    def knows(self, random: SeededRandom | None) -> bool:
        """Whether it is known which blocks are compiled in the mode that the module is in."""
        training = self._module.training
        if training not in self.chosen and random is None:
            self.chosen[training] = self._choose(training=training)
        return training in self.chosen

    @contextlib.contextmanager
    def watch(self, random: SeededRandom) -> Iterator[None]:
        """Around a forward in which every block runs as it is: finds out which draw."""
        self._draws = set()
        with self._instead(self._candidates(), functools.partial(self._note, random)):
            yield
        training = self._module.training
        self.chosen[training] = self._choose(training=training)
        self._draws = set()

    def compiled(self, random: SeededRandom | None) -> contextlib.AbstractContextManager[None]:
        """Around a forward whose blocks are compiled."""
        run = self._run if random is None else self._run_apart
        return self._instead(self.chosen[self._module.training], run)

    @contextlib.contextmanager
    def _instead(self, blocks: Iterable[nn.Module], run: Callable[..., Any]) -> Iterator[None]:
        """`run` stands in for the forward of some blocks, and is given the block first."""
        with contextlib.ExitStack() as around:
            for block in blocks:
                stand_in(around, block, "forward", functools.partial(run, block))
            yield

    def _note(self, random: SeededRandom, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        drawn = random.position
        result = type(block).forward(block, *args, **kwargs)
        if random.position != drawn:
            self._draws.add(id(block))
        return result

    def _run(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kind = type(block)
        if kind not in self._compiled:
            dynamic = False if self._spec.segments else None
            self._compiled[kind] = torch.compile(kind.forward, dynamic=dynamic)
        return self._compiled[kind](block, *args, **kwargs)

    def _run_apart(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The same without the mode in which functions draw, which would be compiled too."""
        with _pop_mode_temporarily():
            return self._run(block, *args, **kwargs)

    def _candidates(self) -> tuple[nn.Module, ...]:
        """The modules that may be blocks: those around others before these."""
        found = [block for block in self._module.modules() if _is_written(block)]
        return tuple(found[1:] if len(found) > 1 else found)

    def _choose(self, *, training: bool) -> tuple[nn.Module, ...]:
        names = {id(module): name for name, module in self._module.named_modules()}
        written = self._spec.writes if training else ()
        within: set[int] = set()
        found: list[nn.Module] = []
        for block in self._candidates():
            path = names[id(block)]
            inside = f"{path}." if path else ""
            state = (f"{inside}{own}" for own, _ in block.named_buffers())
            if (
                id(block) in within
                or id(block) in self._draws
                or any(covers(written, name) for name in state)
                or any(segment.startswith(inside) for segment in self._spec.segments)
            ):
                continue
            found.append(block)
            within.update(map(id, block.modules()))
        if not found:
            name = type(self._module).__name__
            text = (
                f"{name} has no block for torch.compile: all draw random numbers, or are written to"
            )
            warnings.warn(text, stacklevel=2)
        return tuple(found)


def _is_written(module: nn.Module) -> bool:
    """Whether a module runs the forward of a class that is none of torch's own."""
    as_it_was = "forward" not in vars(module) and module._compiled_call_impl is None
    return as_it_was and not type(module).__module__.startswith("torch.")
