"""The arguments of a MODEL that is a folder of Hugging Face's."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gpipe_compiler.errors import UsageError
from gpipe_compiler.runtime.core.typed import path

if TYPE_CHECKING:
    from gpipe_compiler.frontend.hugging_face import FolderOptions

_NAMES = ("task", "dtype", "peft", "hooks", "copy_weights")


def folder_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("of a Hugging Face folder")
    group.add_argument(
        "--task",
        metavar="TASK",
        help="what the model is for: causal-lm, masked-lm, seq2seq-lm, sequence-classification, "
        "token-classification, question-answering, image-classification, no-head (default: that "
        "of the model that the folder was written from)",
    )
    group.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="of the weights; auto: as from_pretrained takes them (default %(default)s)",
    )
    group.add_argument(
        "--peft",
        metavar="FILE",
        type=path,
        help="an adapter_config.json of peft's, as of LoRA: adapters alone are trained",
    )
    group.add_argument(
        "--hooks",
        metavar="FILE",
        type=path,
        help="a Python file that offers train_data() and the like, as a model file does",
    )
    group.add_argument(
        "--copy-weights",
        action="store_true",
        help="copy the weights into the package, which else refers to the folder's files",
    )


def folder_options(arguments: argparse.Namespace) -> FolderOptions:
    """What is asked of a folder.

    Raises:
        UsageError: for a task that is not known.
    """
    from gpipe_compiler.frontend.hugging_face import FolderOptions
    from gpipe_compiler.frontend.task_example import TASKS

    if arguments.task not in (None, *TASKS):
        raise UsageError(f"--task {arguments.task}: known are {', '.join(TASKS)}")
    return FolderOptions(
        arguments.task, arguments.dtype, arguments.peft, arguments.hooks, arguments.copy_weights
    )


def refuse_folder_options(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raises a UsageError where a model that is no folder is given options of one."""
    given = options_given(arguments, parser, _NAMES)
    if given:
        raise UsageError(
            f"{', '.join(given)}: {arguments.model} is no folder with a config.json",
            hint="these are for folders of Hugging Face's; a model file builds its model itself",
        )


def options_given(
    arguments: argparse.Namespace, parser: argparse.ArgumentParser, names: Iterable[str]
) -> list[str]:
    """Those of some options, as they are typed, that do not have the parser's defaults."""
    given = (name for name in names if getattr(arguments, name) != parser.get_default(name))
    return [f"--{name.replace('_', '-')}" for name in given]
