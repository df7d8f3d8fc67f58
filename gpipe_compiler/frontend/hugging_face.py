"""Builds the model of a Hugging Face folder on the meta device: none of its weights are read.

The folder says the model's task, or the user does; there is an example call for each.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn

from gpipe_compiler.errors import GPipeCompilerError, ModelError, UsageError, summary
from gpipe_compiler.frontend.examples import Call, check_call, parse_inputs
from gpipe_compiler.frontend.initial import catch_up, on_meta_throughout, recording
from gpipe_compiler.frontend.source import described, example_call, offered
from gpipe_compiler.frontend.stored_names import FolderNames, adapted
from gpipe_compiler.frontend.subject import Subject
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
    call = _call(spec, module, input_specs, config)
    with _of_library("making an example call"):
        call = completed(task, call, config, cls.main_input_name, labels=labels)
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


def _call(spec: ModelSpec, module: ModuleType, specs: Sequence[str], config: Any) -> Call:
    """What the user says of the example call; nothing, where he says nothing.

    Of inputs whose sizes alone are said, words are those of the vocabulary, and masks leave the
    ends of some texts out.
    """
    if specs:
        args, kwargs = parse_inputs(specs)
        return args, {name: _filled(name, item, config) for name, item in kwargs.items()}
    if offered(module, "example_inputs") is not None:
        return example_call(spec, module)
    return (), {}


# --- tasks ----------------------------------------------------------------------------------------

BATCH, LENGTH = 8, 128
"""Samples of an example, and the words of each, where the model takes as many."""

AUDIO, TRANSCRIPT = 16_000, 16
"""Samples of a second of sound, as speech models take it, and the words said in it, about."""

CHOICES = 4

Labels: TypeAlias = Callable[[torch.Tensor, Any], Mapping[str, torch.Tensor]]
"""The labels for the main input of an example, and the configuration of the model."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a model is for.

    Attributes:
        table: of the classes of models for it, in transformers.
        labels: what the loss compares with; None for a model without a head.
        choices: texts for each sample; 0 for one.
    """

    table: str
    labels: Labels | None
    choices: int = 0


def _same(ids: torch.Tensor, config: Any) -> Mapping[str, torch.Tensor]:
    return {"labels": ids.clone()}


def _words(main: torch.Tensor, config: Any) -> Mapping[str, torch.Tensor]:
    shape = main.shape if main.dtype == torch.int64 else (len(main), TRANSCRIPT)
    return {"labels": _vocabulary(torch.zeros(shape), config)}


def _classes(main: torch.Tensor, config: Any) -> Mapping[str, torch.Tensor]:
    regression = config.num_labels == 1 or config.problem_type == "regression"
    if regression or config.problem_type == "multi_label_classification":
        shape = (len(main),) if config.num_labels == 1 else (len(main), config.num_labels)
        return {"labels": torch.rand(shape).round()}
    return {"labels": torch.randint(config.num_labels, (len(main),))}


def _word_classes(ids: torch.Tensor, config: Any) -> Mapping[str, torch.Tensor]:
    return {"labels": torch.randint(config.num_labels, ids.shape)}


def _pixel_classes(image: torch.Tensor, config: Any) -> Mapping[str, torch.Tensor]:
    return {"labels": torch.randint(config.num_labels, (len(image), *image.shape[-2:]))}


def _chosen(ids: torch.Tensor, config: Any) -> Mapping[str, torch.Tensor]:
    return {"labels": torch.randint(ids.shape[1], (len(ids),))}


def _positions(ids: torch.Tensor, config: Any) -> Mapping[str, torch.Tensor]:
    samples, length = ids.shape
    return {f"{end}_positions": torch.randint(length, (samples,)) for end in ("start", "end")}


TASKS: Mapping[str, Task] = {
    "causal-lm": Task("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _same),
    "masked-lm": Task("MODEL_FOR_MASKED_LM_MAPPING_NAMES", _same),
    "seq2seq-lm": Task("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _words),
    "sequence-classification": Task("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", _classes),
    "token-classification": Task("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", _word_classes),
    "question-answering": Task("MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES", _positions),
    "multiple-choice": Task("MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES", _chosen, CHOICES),
    "image-classification": Task("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _classes),
    "semantic-segmentation": Task("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES", _pixel_classes),
    "audio-classification": Task("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", _classes),
    "speech-seq2seq": Task("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", _words),
    "ctc": Task("MODEL_FOR_CTC_MAPPING_NAMES", _words),
    "no-head": Task("MODEL_MAPPING_NAMES", None),
}
"""By what `--task` calls them."""


def completed(task: Task, call: Call, config: Any, main: str, *, labels: bool) -> Call:
    """An example call with all that a model for a task needs; what is given stays.

    Args:
        main: the input that the model cannot do without.
        labels: whether the loss is that of the model.

    Raises:
        UsageError: when how large the main input is cannot be told.
    """
    args, kwargs = call
    if args:
        return call
    given = dict(kwargs) or {main: _filled(main, _main_input(main, task, config), config)}
    example = given.get(main)
    labelled = any(name == "labels" or name.endswith("_positions") for name in given)
    if labels and not labelled and task.labels is not None and isinstance(example, torch.Tensor):
        given |= task.labels(example, config)
    return args, given


def _main_input(name: str, task: Task, config: Any) -> torch.Tensor:
    """An example of what a model computes with, of a size as its configuration has it."""
    bands = getattr(config, "num_mel_bins", None)
    frames = getattr(config, "max_length", None)
    match name:
        case "input_ids":
            text = config.get_text_config()
            most = getattr(text, "max_position_embeddings", None) or LENGTH
            choices = (task.choices,) if task.choices else ()
            return torch.zeros(BATCH, *choices, min(LENGTH, most), dtype=torch.int64)
        case "pixel_values":
            size = getattr(config, "image_size", None) or 224
            sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
            return torch.randn(BATCH, getattr(config, "num_channels", 3), *sides)
        case "input_values" if bands and frames:  # a picture of sound
            return torch.randn(BATCH, frames, bands)
        case "input_values":
            return torch.randn(BATCH, AUDIO)
        case "input_features" if bands and hasattr(config, "max_source_positions"):
            return torch.randn(BATCH, bands, 2 * config.max_source_positions)
    raise UsageError(
        f"a {config.model_type} model computes with {name}, whose sizes its configuration does not "
        "tell",
        hint=f"say them, such as --input {name}={BATCH}x100x80; labels too",
    )


def _filled(name: str, item: object, config: Any) -> object:
    """An input with numbers as it has them in use."""
    if not isinstance(item, torch.Tensor) or item.dtype != torch.int64 or item.ndim < 2:
        return item
    if name.endswith("input_ids"):
        return _vocabulary(item, config)
    if name.endswith("attention_mask"):
        mask = torch.ones_like(item)
        mask[1::2, item.shape[1] - item.shape[1] // 4 :] = 0
        return mask
    return item


def _vocabulary(like: torch.Tensor, config: Any) -> torch.Tensor:
    """Words of the vocabulary, of the shape of a tensor, none of which is padding: from that
    models tell where a text ends."""
    size = config.get_text_config().vocab_size
    words = torch.randint(size, like.shape)
    padding = getattr(config, "pad_token_id", None)
    if padding is not None:
        words[words == padding] = (padding + 1) % size
    return words
