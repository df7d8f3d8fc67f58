"""The tasks of Hugging Face's models, and an example call for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gpipe_compiler.frontend.examples import Call

BATCH, LENGTH = 8, 128
"""Samples of an example, and the words of each, where the model takes as many."""

Labels: TypeAlias = Callable[[Tensor, Any], Mapping[str, Tensor]]
"""The labels for the main input of an example, and the configuration of the model."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a model is for.

    Attributes:
        table: of the classes of models for it, in transformers.
        labels: what the loss compares with; None for a model without a head.
        image: whether the main input is one.
    """

    table: str
    labels: Labels | None
    image: bool = False


def _same(ids: Tensor, config: Any) -> Mapping[str, Tensor]:
    return {"labels": ids.clone()}


def _words(ids: Tensor, config: Any) -> Mapping[str, Tensor]:
    return {"labels": torch.randint(config.get_text_config().vocab_size, ids.shape)}


def _classes(main: Tensor, config: Any) -> Mapping[str, Tensor]:
    regression = config.num_labels == 1 or config.problem_type == "regression"
    if regression or config.problem_type == "multi_label_classification":
        shape = (len(main),) if config.num_labels == 1 else (len(main), config.num_labels)
        return {"labels": torch.rand(shape).round()}
    return {"labels": torch.randint(config.num_labels, (len(main),))}


def _word_classes(ids: Tensor, config: Any) -> Mapping[str, Tensor]:
    return {"labels": torch.randint(config.num_labels, ids.shape)}


def _positions(ids: Tensor, config: Any) -> Mapping[str, Tensor]:
    samples, length = ids.shape
    return {f"{end}_positions": torch.randint(length, (samples,)) for end in ("start", "end")}


TASKS: Mapping[str, Task] = {
    "causal-lm": Task("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _same),
    "masked-lm": Task("MODEL_FOR_MASKED_LM_MAPPING_NAMES", _same),
    "seq2seq-lm": Task("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _words),
    "sequence-classification": Task("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", _classes),
    "token-classification": Task("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", _word_classes),
    "question-answering": Task("MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES", _positions),
    "image-classification": Task(
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _classes, image=True
    ),
    "no-head": Task("MODEL_MAPPING_NAMES", None),
}
"""By what `--task` calls them."""


def completed(task: Task, call: Call, config: Any, *, labels: bool) -> Call:
    """An example call with all that a model for a task needs; what is given stays, but for numbers
    that are made up: words are those of the vocabulary, and masks leave the ends of some texts out.

    Args:
        labels: whether the loss is that of the model.
    """
    args, kwargs = call
    if args:
        return call
    main = "pixel_values" if task.image else "input_ids"
    if main not in kwargs and not kwargs:
        kwargs = {main: _image(config) if task.image else _text(config)}
    given = {name: _filled(name, item, config) for name, item in kwargs.items()}
    example = given.get(main)
    labelled = any(name == "labels" or name.endswith("_positions") for name in given)
    if labels and not labelled and task.labels is not None and isinstance(example, Tensor):
        given |= task.labels(example, config)
    return args, given


def _image(config: Any) -> Tensor:
    size = getattr(config, "image_size", None) or 224
    sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(BATCH, getattr(config, "num_channels", 3), *sides)


def _text(config: Any) -> Tensor:
    most = getattr(config.get_text_config(), "max_position_embeddings", None) or LENGTH
    return torch.zeros(BATCH, min(LENGTH, most), dtype=torch.int64)


def _filled(name: str, item: object, config: Any) -> object:
    """An input with numbers as it has them in use."""
    if not isinstance(item, Tensor) or item.dtype != torch.int64 or item.ndim < 2:
        return item
    if name.endswith("input_ids"):
        padding = getattr(config, "pad_token_id", None)
        words = torch.randint(config.get_text_config().vocab_size, item.shape)
        if padding is not None:  # from which models tell where a text ends
            words[words == padding] = (padding + 1) % config.get_text_config().vocab_size
        return words
    if name.endswith("attention_mask"):
        mask = torch.ones_like(item)
        mask[1::2, item.shape[1] - item.shape[1] // 4 :] = 0
        return mask
    return item
