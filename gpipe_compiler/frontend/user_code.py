"""Imports the user's file and calls its functions; what goes wrong there is told by its line."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import itertools
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from torch import nn
from torch.library import Library

from gpipe_compiler.errors import GPipeCompilerError, ModelError, SourceLocation, UsageError
from gpipe_compiler.frontend.locate import calling_line, is_asked_by_user, is_own, is_users, line_of
from gpipe_compiler.frontend.own_statements import TORCHS_NAMESPACES
from gpipe_compiler.runtime.wording import ending, text_of
from gpipe_compiler.text.escaping import is_text


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A MODEL argument: `model.py`, `model.py:factory`, `package.module:factory`.

    Attributes:
        file: absolute path, None for an importable module.
        module: dotted name, "" for a file.
        factory: the function that builds the model, "" where the argument names none.
    """

    file: Path | None
    module: str
    factory: str

    @classmethod
    def parse(cls, text: str) -> ModelSpec:
        """The model that a user means by `text`.

        Raises:
            UsageError: when `text` is no such argument, or names a file that does not exist.
        """
        head, colon, factory = text.rpartition(":")
        if not colon:
            head, factory = text, ""
        if not head or (colon and not factory.isidentifier()):
            raise UsageError(
                f"{text!r} names no model",
                hint="write model.py, model.py:factory or package.module:factory",
            )
        path = Path(head)
        if path.suffix == ".py" or path.exists() or os.sep in head:
            return cls(_existing_file(path), "", factory)
        if not all(part.isidentifier() for part in head.split(".")):
            raise UsageError(f"{head!r} is neither a Python file nor the name of a module")
        return cls(None, head, factory)

    @property
    def stem(self) -> str:
        """A short name for the model."""
        if self.file is not None:
            return self.file.stem
        return self.factory or self.module.rpartition(".")[2]

    @property
    def where(self) -> str:
        """The file or module, for messages."""
        return str(self.file) if self.file is not None else self.module


def _existing_file(path: Path) -> Path:
    if path.is_file():
        return path.resolve()
    if path.is_dir():
        raise UsageError(
            f"{path} is a directory, not a Python file",
            hint=f"name the file that builds the model, such as {path / 'model.py'}; a folder of "
            "Hugging Face's has a config.json",
        )
    nearby = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
    listing = f"; {path.parent.resolve()} has {', '.join(nearby[:8])}" if nearby else ""
    raise UsageError(
        f"there is no file {path}{listing}", hint="check the path, it is relative to here"
    )


def import_user_code(spec: ModelSpec) -> ModuleType:
    """Runs the user's file, or imports the module.

    As when Python runs a script, the file's folder (for a module, the current directory) stays on
    `sys.path`: functions of the file may import its neighbours later on.

    Raises:
        ModelError: when that fails, with the line of the user's program that does.
    """
    if spec.file is None:
        _importable(Path.cwd())
        with located(f"the import of {spec.module}"):
            try:
                return importlib.import_module(spec.module)
            except ModuleNotFoundError as error:
                if error.name and f"{spec.module}.".startswith(f"{error.name}."):
                    raise _no_module(error.name) from error
                raise
    _importable(spec.file.parent)
    return _run_file(spec.file)


def _importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _no_module(missing: str) -> UsageError:
    return UsageError(
        f"there is no module {missing}",
        hint="the current directory and the installed packages were searched",
    )


def _run_file(file: Path) -> ModuleType:
    name = _module_name(file)
    module_spec = importlib.util.spec_from_file_location(name, file)
    if module_spec is None or module_spec.loader is None:
        raise ModelError(f"{file} is no Python source file", hint="name a .py, .onnx or .json file")
    module = importlib.util.module_from_spec(module_spec)
    # dataclasses, pickle and inspect look a class's module up by its name while the file runs.
    before = sys.modules.get(name)
    sys.modules[name] = module
    linecache.checkcache(str(file))
    libraries: list[Library] = []
    module_spec.loader_state = libraries
    try:
        with located(f"running {file.name}"), _noting(libraries):
            if b"\0" in file.read_bytes():  # of which Python says what it likes, by its version
                raise SyntaxError("source code cannot contain null bytes")
            _unregister(getattr(before, "__spec__", None))
            module_spec.loader.exec_module(module)
    except GPipeCompilerError:
        _unregister(module_spec)
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before
        raise
    return module


@contextlib.contextmanager
def _noting(libraries: list[Library]) -> Iterator[None]:
    """Notes every library of operators that is made.

    Raises:
        ModelError: where the user's file has torch's own operators compute something else.
    """
    make: Any = Library.__init__
    implement: Any = Library.impl

    def noted(library: Library, *args: Any, **kwargs: Any) -> None:
        make(library, *args, **kwargs)
        libraries.append(library)

    def implemented(library: Library, name: Any, function: Any, key: str = "", **more: Any) -> Any:
        where = calling_line() if is_asked_by_user() else None
        key = key or library.dispatch_key
        if library.ns in TORCHS_NAMESPACES and key != "Meta" and where:
            raise ModelError(
                f"the file replaces what torch's operator {str(name).removeprefix('aten::')} "
                "computes: a package calls torch as it is",
                location=where,
                hint="make an operator of your own with torch.library.custom_op, and call that",
            )
        return implement(library, name, function, key, **more)

    with (
        mock.patch.object(Library, "__init__", noted),
        mock.patch.object(Library, "impl", implemented),
    ):
        yield


def _unregister(run: ModuleSpec | None) -> None:
    """Takes the operators back that an earlier run of a file registered: torch takes no second."""
    for library in getattr(run, "loader_state", None) or ():
        library._destroy()


def _module_name(file: Path) -> str:
    """The file's own stem, so that its classes pickle, unless that is another module's name."""
    stem = file.stem
    loaded = sys.modules.get(stem)
    same = loaded is not None and getattr(loaded, "__file__", None) == str(file)
    taken = stem in sys.stdlib_module_names or (loaded is not None and not same)
    if stem.isidentifier() and not taken:
        return stem
    return "_model_" + "".join(c if c.isalnum() else "_" for c in stem)


@contextlib.contextmanager
def located(what: str) -> Iterator[None]:
    """Turns whatever the user's code raises inside into a `ModelError` with the user's line.

    Args:
        what: the doing that fails, a noun: "running model.py", "build_model()".
    """
    try:
        yield
    except GPipeCompilerError:
        raise
    except SyntaxError as error:
        raise _syntax_error(error, what) from error
    except SystemExit as error:
        raise ModelError(
            f"{what} ends the program with exit({error.code!r})",
            location=line_of(error, in_program=True),
            hint='put what only a script should do under `if __name__ == "__main__":`',
        ) from error
    except ImportError as error:
        raise ModelError(
            f"{what} fails{ending(error)}",
            location=line_of(error, in_program=True),
            hint=_import_hint(error),
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may raise anything
        raise ModelError(
            f"{what} raises {type(error).__name__}: {_first_line(error)}",
            location=line_of(error, in_program=True),
            hint=way_out(_first_line(error))
            or "the line is the last of your own; run the file with Python to see all of it",
        ) from error


def way_out(raised: str) -> str:
    """What helps against what torch raises, where that is known."""
    if "ctc_loss" in raised:
        return (
            "give the targets of CTC one row for each sample, padded to the longest: a single row "
            "of all targets has no part for some of the samples"
        )
    if "differentiated Tensors" in raised:
        return (
            "no stage differentiates by itself, and examples ask for no gradients: write the "
            "derivative with torch's operators; or as a torch.autograd.Function of your own, which "
            "a stage holds whole"
        )
    if "doesn't require gradient" in raised or "does not require grad" in raised:
        return (
            "it also runs without gradients, as in every evaluation: ask first for "
            "output.requires_grad"
        )
    if "out of meta tensor" in raised or "called on meta tensors" in raised:
        return NEEDS_NUMBERS
    if "could not create a primitive" in raised:
        return (
            "PyTorch has no kernel for this layer in this type on this processor, and does not "
            "look first; an LSTM in 16 bits needs AVX-512: compile with --precision fp32, build "
            "the model in torch.float32, or compile on a processor that has it"
        )
    return ""


NEEDS_NUMBERS = "the line reads numbers, and a model on meta has none: build it on the CPU"

RUNS_ALONE = "it must run by itself before it can be compiled"

RUNS_ON_FEWER = (
    "micro-batches are some of the samples, in any number: give rows that belong together a "
    "dimension of their own, (B, T, ...) in place of (B * T, ...), and flatten that in forward"
)


def raised(what: str, error: Exception, on: str, hint: str) -> ModelError:
    """The error for model code that raises on something, in the user's words where it is known.

    Args:
        hint: the way out where no better one is known.
    """
    return ModelError(
        f"{what} raises {type(error).__name__} {on}{ending(error)}",
        location=line_of(error),
        hint=way_out(text_of(error)) or hint,
    )


def error_of_user(error: BaseException) -> ModelError | None:
    """What to say of an error that arose in model code; None for any other, a fault of ours.

    That code is called in many places: a module's `forward` and `train`, the `__eq__` of its class.
    An error is its own where it, and not this compiler, has called what raises.
    """
    frames = traceback.extract_tb(error.__traceback__)
    last_own = max((at for at, frame in enumerate(frames) if is_own(frame.filename)), default=-1)
    users = [frame for frame in frames[last_own + 1 :] if is_users(frame.filename)]
    if last_own < 0 or not users:
        return None
    try:
        with located(f"{users[0].name}()"):
            raise error
    except ModelError as found:
        return found


def _first_line(error: BaseException) -> str:
    return text_of(error).strip().partition("\n")[0] or "(no message)"


def _syntax_error(error: SyntaxError, what: str) -> ModelError:
    text = (error.text or "").strip()
    file = error.filename
    shown = f" in `{text}`" if text else ""
    return ModelError(
        f"{'this is' if file else f'{what} fails: it is'} no valid Python: {error.msg}{shown}",
        location=SourceLocation(file, error.lineno or 1, code=text) if file else None,
        hint=f"this is Python {sys.version_info.major}.{sys.version_info.minor}",
    )


def _import_hint(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"install it into this environment ({sys.executable} -m pip install {package})"
    return "the module is there, but not that name in it; check its version"


def definition(function: object) -> SourceLocation | None:
    """Where a function or class of the user's stands; None for what is not written in Python."""
    try:
        code = inspect.unwrap(function) if callable(function) else function
        file = inspect.getsourcefile(code)  # type: ignore[arg-type]  # raises TypeError for the rest
        line = inspect.getsourcelines(code)[1]  # type: ignore[arg-type]  # as above
    except (OSError, TypeError):
        return None
    return SourceLocation(file, line, getattr(code, "__qualname__", "")) if file else None


def line_of_forward(model: nn.Module) -> SourceLocation | None:
    """Where the forward of a model's class stands; None for one that torch.jit has compiled."""
    return definition(getattr(type(model), "forward", None))


def refuse_unwritable_names(model: nn.Module) -> None:
    """Refuses names of modules and of their tensors that no file could hold."""
    for module in model.modules():
        # By keys(): those of TorchScript are no dicts.
        tables = module._modules.keys(), module._parameters.keys(), module._buffers.keys()
        for name in itertools.chain(*tables):
            if not is_text(name):
                raise ModelError(
                    f"{name!r} of {type(module).__name__} cannot be written to a file in UTF-8: "
                    "half of a surrogate pair is no character",
                    location=definition(type(model)),
                    hint="give it another name",
                )
