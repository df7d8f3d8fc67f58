"""Builds the model of a Hugging Face folder on the meta device: none of its weights are read."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from gpipe_compiler.errors import GPipeCompilerError, ModelError, UsageError, summary
from gpipe_compiler.frontend.adapters import adapted
from gpipe_compiler.frontend.examples import Call, check_call, parse_inputs
from gpipe_compiler.frontend.initial import catch_up, on_meta_throughout, recording
from gpipe_compiler.frontend.source import described, example_call, offered
from gpipe_compiler.frontend.stored_names import FolderNames
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.task_example import TASKS, Task, completed
from gpipe_compiler.frontend.user_code import ModelSpec, import_user_code
from gpipe_compiler.options import LossChoice
from gpipe_compiler.runtime.wording import listed

CONFIG = "config.json"
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """What is asked of a folder.

    Attributes:
        task: one of `TASKS`; None for that of the model that the folder was written from.
        dtype: of the weights, one of `DTYPES`.
        peft: the `adapter_config.json` of adapters that are trained in place of the weights.
        hooks: a file that offers data, optimizer and the like, as a model file does.
        copy_weights: whether the package is to have copies of the weights.
    """

    task: str | None = None
    dtype: str = "auto"
    peft: Path | None = None
    hooks: Path | None = None
    copy_weights: bool = False


def is_folder(model: str) -> bool:
    """Whether a MODEL argument names a folder with a configuration."""
    return (Path(model) / CONFIG).is_file()


def load_folder(
    folder: Path,
    options: FolderOptions,
    *,
    input_specs: Sequence[str] = (),
    training: bool = True,
    loss: LossChoice = LossChoice.MODEL,
) -> Subject:
    """The model of a folder, on meta, with one example call.

    Args:
        input_specs: as for a model file; inputs that the task needs besides are made up.

    Raises:
        UsageError: for a task that there is not, or a library that is not installed.
        ModelError: when the folder or the user's file is at fault.
    """
    library = installed("transformers")
    config = _config(library, folder)
    task, cls = _class_of(library, config, folder, options.task, training=training)
    spec = ModelSpec(None, folder.resolve().name, "")
    module = ModuleType("no hooks")
    if options.hooks is not None:
        spec = ModelSpec.parse(str(options.hooks))
        module = import_user_code(spec)
    with recording() as seen, _of_library(f"building {cls.__name__} of {folder}"):
        dtype = _dtype(options.dtype, config)
        base = _built(cls, config, dtype)
        own = cls.__name__ in (config.architectures or ())
        names = FolderNames.read(base, folder, own=own)
        built = base
        adapter = None
        if options.peft is not None:
            adapter = adapted(base, installed("peft"), options.peft, training=training)
            built = adapter.model
        initial = seen.steps_of(built)
    config.architectures = [cls.__name__]
    config.dtype = dtype
    pretrained = names.pretrained(adapter, config.to_json_string())
    model, initial = on_meta_throughout(built, initial)
    labels = training and loss is LossChoice.MODEL and offered(module, "loss_fn") is None
    call = _call(spec, module, input_specs)
    with _of_library("making an example call"):
        call = completed(task, call, config, labels=labels)
    check_call(base, call, "the example call")
    subject = described(spec, module, model, initial, call, training=training, loss=loss)
    return dataclasses.replace(
        subject,
        name=folder.resolve().name,
        pretrained=dataclasses.replace(pretrained, copied_weights=options.copy_weights),
    )


def installed(name: str) -> Any:
    """A library of Hugging Face's.

    Raises:
        UsageError: with the line that installs it, where it is not there.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"a folder of Hugging Face's needs {name}, which cannot be imported: {error}",
            hint="pip install 'gpipe-compiler[huggingface]'",
        ) from error


@contextlib.contextmanager
def _of_library(what: str) -> Iterator[None]:
    """Turns what a library raises for a folder into a ModelError."""
    try:
        yield
    except GPipeCompilerError:
        raise
    except Exception as error:  # whatever the library raises
        raise ModelError(f"{what} fails: {summary(error)}") from error


def _config(library: Any, folder: Path) -> Any:
    with _of_library(f"reading {folder / CONFIG}"):
        config = library.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"{folder} holds quantised weights, which are not trained by themselves",
            hint="take the folder of the model before quantisation",
        )
    return config


def _class_of(
    library: Any, config: Any, folder: Path, asked: str | None, *, training: bool
) -> tuple[Task, Any]:
    """The task, and the class of the model that has it.

    Raises:
        UsageError: for a task that the architecture has no model for.
        ModelError: when the folder does not say its own.
    """
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    known: dict[str, tuple[str, ...]] = {}
    for name, task in TASKS.items():
        found = getattr(tables, task.table).get(config.model_type, ())
        known[name] = (found,) if isinstance(found, str) else tuple(found)
    has = listed([name for name, classes in known.items() if classes], "or") or "none known here"
    if asked is not None:
        if not known[asked]:
            problem = f"--task {asked}: a {config.model_type} model has no head for it"
            raise UsageError(problem, hint=f"it has one for {has}")
        own = [name for name in config.architectures or () if name in known[asked]]
        return TASKS[asked], getattr(library, own[0] if own else known[asked][0])
    for architecture in config.architectures or ():
        for name, classes in known.items():
            if architecture not in classes:
                continue
            if training and TASKS[name].labels is None:
                raise ModelError(
                    f"{folder} was written from {architecture}, which has no head and no loss",
                    hint=f"--task says which head it gets ({has}), --mode infer that it gets none",
                )
            return TASKS[name], getattr(library, architecture)
    said = listed(config.architectures or (), "or")
    raise ModelError(
        f"{folder / CONFIG} names {said or 'no architecture'}, for which no task is known here",
        hint=f"--task names one ({has}), or write a model.py that builds the model",
    )


def _dtype(asked: str, config: Any) -> torch.dtype:
    """The type of the weights: as asked, or as from_pretrained takes it."""
    said = getattr(config, "dtype", None) if asked == "auto" else asked
    found = getattr(torch, said, None) if isinstance(said, str) else said
    return found if isinstance(found, torch.dtype) else torch.float32


def _built(cls: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """The model on meta, its tensors filled as a new model's."""
    own = copy.deepcopy(config)
    # Keys and values of earlier calls serve generation; a package computes whole texts.
    for part in (own, getattr(own, "text_config", None)):
        if part is not None and hasattr(part, "use_cache"):
            part.use_cache = False
    with torch.device("meta"):
        built: nn.Module = cls._from_config(own, dtype=dtype)
    catch_up(built)
    return built


def _call(spec: ModelSpec, module: ModuleType, specs: Sequence[str]) -> Call:
    """What the user says of the example call; nothing, where he says nothing."""
    if specs:
        return parse_inputs(specs)
    if offered(module, "example_inputs") is not None:
        return example_call(spec, module)
    return (), {}
