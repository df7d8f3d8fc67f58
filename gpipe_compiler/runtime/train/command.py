"""The command of a package: `run.py train | infer | check | bench | export`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.progress import seed_all
from ..core.pipeline import Pipeline
from ..core.precision import layers_by_ops
from ..core.stored_weights import Weights
from ..core.topology import replicas_by_default
from ..core.typed import Version, from_environment
from ..errors import AgreedError, CheckpointError, PipelineError, StageError, UsageError
from ..spec import PipelineSpec
from ..wording import printable_message
from .arguments import input_choice, parser_for, train_options
from .check import check_pipeline, format_rows, write_rows
from .data import example_call
from .hooks import UserHooks
from .inference import bench, infer
from .loading import (
    HUGGING_FACE,
    check_place,
    export,
    load_weights,
    open_weights,
    save_model,
)
from .process import exit_code, exit_code_of, give_back_memory, keep_memory, say
from .told import planned_to_give_back
from .train import TrainOptions, train

FAILED_CHECK = 3
INTERRUPTED = 130
LINGER_S = 1.0
"""Seconds that a rank without a message of its own waits before it exits."""

_AGREED = (UsageError, AgreedError, CheckpointError)
"""Errors that every rank raises alike: rank 0 prints them."""


def main(
    spec: PipelineSpec,
    directory: Path,
    weights: Path | None,
    hooks: str | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Run the command and return its exit code.

    Args:
        weights: the folder of its weights; None for stages that initialise themselves.
        hooks: the user's own file in the directory, or the name of a module, that offers what
            `UserHooks` names.

    Returns:
        0 when done, 1 when the model or a process failed, 2 for wrong usage, 3 for a failed check,
        128 + n when signal n has ended training.
    """

    def obey() -> int:
        parser = parser_for(spec)
        parser.add_argument("--version", action=Version, directory=directory)
        arguments = parser.parse_args(argv)
        command = _Command(spec, directory, weights, hooks, arguments)
        try:
            with layers_by_ops():
                return command.reporting(command.run)
        except KeyboardInterrupt:
            print("\nstopped", file=sys.stderr)
            return INTERRUPTED

    return exit_code_of(obey)


@dataclass(frozen=True)
class _Command:
    """One command of a package; the fields are those of `main`."""

    spec: PipelineSpec
    directory: Path
    weights: Path | None
    hooks: str | None
    arguments: argparse.Namespace

    def reporting(self, act: Callable[[], int]) -> int:
        """The exit code of `act`; an error is printed at once, before the pipeline is closed."""
        try:
            return act()
        except BrokenPipeError:
            raise  # nobody reads on
        except (PipelineError, OSError) as error:
            if self.arguments.traceback:
                raise
            rank = os.environ.get("RANK", "")
            others = rank.isdecimal() and int(rank) > 0
            if not (others and isinstance(error, _AGREED)):
                who = f"rank {rank}: " if rank else ""
                said = str(error)
                if isinstance(error, OSError) and error.filename:
                    said = f"{error.filename}: {error.strerror}"
                print(printable_message(f"{who}error: {said}"), file=sys.stderr, flush=True)
                if isinstance(error, StageError):
                    print("  --traceback shows where in the stage", file=sys.stderr, flush=True)
            else:
                # torchrun ends all ranks as soon as one has ended, and rank 0 has the message.
                time.sleep(LINGER_S)
            return error.exit_code if isinstance(error, PipelineError) else 1

    def run(self) -> int:
        arguments, spec = self.arguments, self.spec
        if arguments.command == "export":
            export(
                *(spec, arguments.checkpoint, arguments.output),
                directory=self.directory,
                hugging_face=arguments.format == HUGGING_FACE,
                shard_bytes=arguments.shard_size,
            )
            return 0
        if planned_to_give_back(self.directory):
            give_back_memory()
        else:
            keep_memory()
        weights = open_weights(self.weights, arguments.weights)
        if arguments.command == "check":
            # Tensors alone are compared: libraries that have the model's classes take long to
            # import.
            spec = dataclasses.replace(spec, classes=())
        user = UserHooks()
        options = None
        if arguments.command == "train":
            # Before the user's file is imported: a seed that it sets itself has the last word.
            seed_all(arguments.seed)
            own = arguments.hooks and str(arguments.hooks.absolute())
            user = UserHooks.load(own or self.hooks, self.directory)
            options = train_options(arguments, user)
        with Pipeline(
            spec,
            weights,
            devices=arguments.devices,
            microbatches=arguments.microbatches,
            schedule=arguments.schedule,
            remat=arguments.remat,
            batchnorm=arguments.batchnorm,
            precision=arguments.precision,
            seed=arguments.seed,
            data_parallel=1 if options is None else self._replicas(),
            sharding=None if options is None else arguments.shard,
            compile_blocks=arguments.compile,
            timeout_s=arguments.timeout,
        ) as pipe:
            if options is not None:
                return self.reporting(lambda: self._train(pipe, weights, user, options))
            return self.reporting(lambda: self._work(pipe, weights))

    def _replicas(self) -> int:
        asked: int | None = self.arguments.data_parallel
        return asked or replicas_by_default(self.spec, from_environment("WORLD_SIZE", 1))

    def _load(self, pipe: Pipeline, weights: Weights | None) -> None:
        if self.arguments.load is not None:
            load_weights(pipe, self.arguments.load, weights)
        if pipe.rank == 0:
            say(pipe.describe())

    def _train(
        self, pipe: Pipeline, weights: Weights | None, hooks: UserHooks, options: TrainOptions
    ) -> int:
        if self.arguments.save is not None and pipe.rank == 0:
            check_place(self.arguments.save)
        self._load(pipe, weights)
        signal = train(pipe, self.directory, hooks, options)
        if signal:
            return exit_code(signal)
        if self.arguments.save is not None:
            save_model(pipe, self.arguments.save)
        return 0

    def _work(self, pipe: Pipeline, weights: Weights | None) -> int:
        """Everything but training."""
        self._load(pipe, weights)
        arguments, directory, choice = self.arguments, self.directory, input_choice(self.arguments)
        if arguments.command == "infer":
            infer(pipe, directory, choice, arguments.output)
            return 0
        if arguments.command == "bench":
            bench(
                *(pipe, directory, choice, arguments.steps, arguments.report),
                stages=arguments.stages,
                calibration=arguments.calibrate,
            )
            return 0
        inputs, target = example_call(pipe.spec, directory, choice)
        rows = check_pipeline(pipe, weights, inputs, target, arguments.reference)
        passed = all(row.passed for row in rows)
        if pipe.rank == 0 or not passed:
            say(format_rows(rows))
        if arguments.report is not None and pipe.rank == 0:
            write_rows(rows, arguments.report)
        return 0 if passed else FAILED_CHECK
