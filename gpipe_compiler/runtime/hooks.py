"""The user's own file: where training data and the optimizer come from."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from .errors import PipelineError, UsageError

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class UserHooks:
    """What the user's file offers; None for what it does not.

    Attributes:
        train_data: gives an iterable of (inputs, target) batches, anew at every call.
        make_optimizer: gives an optimizer for some parameters.
    """

    name: str = ""
    train_data: Callable[[], Iterable[object]] | None = None
    make_optimizer: MakeOptimizer | None = None

    @classmethod
    def load(cls, source: str | None) -> UserHooks:
        """Import the file (`/path/model.py`) or module (`package.module`); None for no hooks.

        Raises:
            PipelineError: when it is gone or cannot be imported.
        """
        if source is None:
            return cls()
        module = _import(source)
        return cls(
            source, getattr(module, "train_data", None), getattr(module, "make_optimizer", None)
        )

    def batches(self) -> Iterator[tuple[object, object]]:
        """Batches for ever, pass after pass over the user's data.

        Raises:
            PipelineError: when the data is empty.
            UsageError: when a batch is no pair of inputs and target.
        """
        while self.train_data is not None:
            empty = True
            for batch in self.train_data():
                if not isinstance(batch, tuple | list) or len(batch) != 2:
                    raise UsageError(
                        f"train_data() of {self.name} gives a {type(batch).__name__}",
                        hint="every batch is a pair: (inputs, target)",
                    )
                empty = False
                yield batch[0], batch[1]
            if empty:
                raise PipelineError(f"train_data() of {self.name} gives no batches")


def _import(source: str) -> ModuleType:
    path = Path(source)
    try:
        if path.suffix != ".py":
            return importlib.import_module(source)
        if not path.is_file():
            raise PipelineError(
                f"{source}, which offers the data or the optimizer, is gone",
                hint="put it back, or write a loop of your own with the package's Pipeline",
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
    except Exception as error:  # whatever the user's file raises
        raise PipelineError(
            f"importing {source} failed: {type(error).__name__}: {error}"
        ) from error
