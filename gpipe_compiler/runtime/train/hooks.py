"""The user's own file: where training data, the optimizer and the like come from."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..checkpoint.progress import Stateful
from ..errors import PipelineError
from ..wording import said

if TYPE_CHECKING:
    from ..core.pipeline import Pipeline

HOOKS = "hooks"
"""The folder of a package with the user's own file, and with those that it imports."""

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
Result = TypeVar("Result")
Argument = TypeVar("Argument")


@dataclass(frozen=True)
class UserHooks:
    """What the user's file offers, under the names of these attributes; None for what it does not.

    Attributes:
        train_data: gives an iterable of (inputs, target) batches, anew at every call: one pass;
            where it takes `rank` and `world`, that replica's share of each.
        eval_data: the same, for evaluation.
        make_optimizer: gives an optimizer for some parameters.
        make_scheduler: gives a learning-rate scheduler for an optimizer, to be stepped after every
            step of the optimizer; a ReduceLROnPlateau after every evaluation.
        make_state: gives an object with `state_dict` and `load_state_dict`, or a dict of such by
            name, for the pipeline and the optimizer: what is part of a checkpoint besides.
        metrics: gives numbers by name for the model's output on a batch of `eval_data`, and the
            target.
        log: is called on rank 0 after every step, with its number and numbers by name.
    """

    name: str = ""
    train_data: Callable[..., Iterable[object]] | None = None
    eval_data: Callable[..., Iterable[object]] | None = None
    make_optimizer: MakeOptimizer | None = None
    make_scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    make_state: Callable[[Pipeline, torch.optim.Optimizer], object] | None = None
    metrics: Callable[[object, object], Mapping[str, float]] | None = None
    log: Callable[[int, dict[str, float]], object] | None = None

    @classmethod
    def load(cls, source: str | None, directory: Path) -> UserHooks:
        """Import the file (`hooks/model.py`) or module (`package.module`); None for no hooks.

        Args:
            directory: of the package, from which the path starts.

        Raises:
            PipelineError: when it is gone or cannot be imported.
        """
        if source is None:
            return cls()
        if source.endswith(".py"):
            source = str(directory / source)
        elif (directory / HOOKS).is_dir():
            sys.path.insert(0, str(directory / HOOKS))
        module = _import(source)
        offered = {field.name: getattr(module, field.name, None) for field in fields(cls)[1:]}
        if not is_log(offered["log"]):
            offered["log"] = None
        # A name may be that of a module, as after `from sklearn import metrics`.
        return cls(source, *(item if callable(item) else None for item in offered.values()))

    def optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The user's optimizer.

        Raises:
            PipelineError: when his code raises, or gives something else.
        """
        assert self.make_optimizer is not None
        return self._made("make_optimizer", torch.optim.Optimizer, self.make_optimizer, parameters)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """The user's learning-rate scheduler; raises as `optimizer`."""
        assert self.make_scheduler is not None
        return self._made("make_scheduler", LRScheduler, self.make_scheduler, optimizer)

    def states(self, pipe: Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Stateful]:
        """The user's own objects that are part of a checkpoint, by name; raises as `optimizer`."""
        if self.make_state is None:
            return {}
        with self._explained("make_state"):
            made = self.make_state(pipe, optimizer)
        named: dict[str, Any] = made if type(made) is dict else {type(made).__name__: made}
        for name, item in named.items():
            if not (type(name) is str and name and "." not in name and has_state(item)):
                raise PipelineError(
                    f"make_state() of {self.name} gives a {type(item).__name__} called {name!r}",
                    hint="give an object with state_dict() and load_state_dict(), or a dict of "
                    "such by names without dots",
                )
        return named

    def measured(self, output: object, target: object) -> dict[str, float]:
        """The user's metrics of a batch, none where he has none; raises as `optimizer`."""
        if self.metrics is None:
            return {}
        with self._explained("metrics"):
            return {str(name): float(x) for name, x in self.metrics(output, target).items()}

    def logged(self, step: int, numbers: dict[str, float]) -> None:
        """Calls the user's `log`, where he has one; raises as `optimizer`."""
        if self.log is not None:
            with self._explained("log"):
                self.log(step, numbers)

    def _made(
        self, name: str, kind: type[Result], make: Callable[[Argument], object], argument: Argument
    ) -> Result:
        with self._explained(name):
            made = make(argument)
        if not isinstance(made, kind):
            raise PipelineError(
                f"{name}() of {self.name} gives a {type(made).__name__}, not a {kind.__name__}"
            )
        return made

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Raises errors with the last line of the user's own file that led to them."""
        try:
            yield
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            frames = traceback.walk_tb(error.__traceback__)
            own = (self.name, f"user_{Path(self.name).stem}")
            lines = [line for frame, line in frames if frame.f_globals.get("__name__") in own]
            where = f", line {lines[-1]}," if lines else ""
            problem = f"{name}() of {self.name}{where} failed: {said(error)}"
            raise PipelineError(problem) from error


def has_state(item: object) -> bool:
    """Whether an object gives and takes its state."""
    methods = (getattr(item, name, None) for name in ("state_dict", "load_state_dict"))
    return all(callable(method) for method in methods)


def is_log(item: object) -> bool:
    """Whether what a file has under the name `log` is the hook, and not `math.log` or a logger."""
    if not callable(item):
        return False
    written = (inspect.unwrap(getattr(item, "func", item)), item.__call__)
    if not any(hasattr(function, "__code__") for function in written):
        return False  # not in Python
    try:
        inspect.signature(item).bind(1, {})
    except (TypeError, ValueError):
        return False
    return True


def _import(source: str) -> ModuleType:
    path = Path(source)
    try:
        if path.suffix != ".py":
            return importlib.import_module(source)
        if not path.is_file():
            raise PipelineError(
                f"{source}, which offers the data or the optimizer, is not there",
                hint="name it where it lies: --hooks FILE; or put it there, with the files of "
                "yours that it imports",
            )
        # Files beside it are importable from it, as when Python runs it.
        sys.path.insert(0, str(path.parent))
        name = f"user_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise PipelineError(f"{source} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    except PipelineError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = f"pip install {error.name}, or put it beside the file if it is yours"
        raise PipelineError(f"importing {source} failed: {said(error)}", hint=hint) from error
