"""Holds the package of a model too large to be given numbers against the model, shortened.

Most models of that size repeat one block. The same model with fewer repetitions is compiled with
the same schedule into as many stages, and that package is compared with it.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from gpipe_compiler.errors import GPipeCompilerError, ValidationError
from gpipe_compiler.frontend.entry import make_entry
from gpipe_compiler.frontend.materialise import materialised, with_real_example
from gpipe_compiler.frontend.shorten import shortened
from gpipe_compiler.frontend.signature import read_signature
from gpipe_compiler.frontend.subject import Example, Subject
from gpipe_compiler.plan import Plan
from gpipe_compiler.validate.launching import Launch
from gpipe_compiler.validate.package import LARGEST_MATERIALISED, Validation, validate_materialised
from gpipe_compiler.validate.plain_run import least_samples

_KEPT = (8, 4, 3, 2)
"""Repetitions that are left of a block, the first number whose model is small enough."""

_MICROBATCHES = 4
"""Micro-batches that are compared at most."""

_SLOW_S = 3.0
"""Processor seconds of a forward of one sample from which on nothing is compared: a step of all
micro-batches, forward and backward, on two batches, here and in the package, takes minutes."""


Repackage = Callable[[Subject, int, Path], Plan]
"""Writes the package of a subject, with a number of micro-batches, to a folder; gives its plan."""


@dataclass(frozen=True, eq=False, slots=True)
class Shorter:
    """A subject with fewer repetitions, and a description of how many."""

    subject: Subject
    what: str


def shorter(subject: Subject) -> Shorter | None:
    """The subject with as many repetitions as can be filled with numbers; None where none can."""
    for kept in _KEPT:
        short = shortened(subject, least=kept + 1, kept=kept)
        if short is not None and _bytes(short.subject.model) <= LARGEST_MATERIALISED:
            runs = (
                f"{run.kept} of the {run.count} repetitions in {run.path}" for run in short.runs
            )
            return Shorter(short.subject, " and ".join(runs))
    return None


def _bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def validate_shortened(
    subject: Subject,
    plan: Plan,
    package: Repackage,
    *,
    seed: int,
    per_microbatch: bool,
    launch: Launch,
) -> Validation | str:
    """What was compared of a shortened model; or why nothing was.

    Args:
        plan: of the whole model.
        package: compiles the shortened model as the whole one was.

    Raises:
        ValidationError: when the package of the shortened model does not run.
    """
    short = shorter(subject)
    if short is None:
        return "it has no blocks that repeat, to be compared with fewer of them"
    least = least_samples(plan)
    microbatches = min(plan.microbatches, _MICROBATCHES)
    few = _with_samples(short.subject, microbatches * least)
    if _is_slow(few, seed):
        return f"even with {short.what}, one sample takes over {_SLOW_S:g} seconds here"
    try:
        with tempfile.TemporaryDirectory(prefix="gpipe-validate-") as scratch:
            folder = Path(scratch, "package")
            made = package(few, microbatches, folder)
            found = validate_materialised(
                few, made, folder, seed=seed, per_microbatch=per_microbatch, launch=launch
            )
    except ValidationError:
        raise
    except GPipeCompilerError as error:
        return f"with {short.what} it cannot be compiled: {error.problem}"
    note = (
        f"the whole model is too large to be filled with numbers here: compared was the same model "
        f"with {short.what}, on {microbatches * least} samples"
    )
    return dataclasses.replace(found, notes=(note, *found.notes))


def _with_samples(subject: Subject, count: int) -> Subject:
    """The subject with this number of samples in its example."""
    real = with_real_example(subject)
    signature = read_signature(real, on_meta=False)
    args, kwargs, target = signature.rebuild(signature.samples(count))
    given = Example(args, kwargs, target)
    called = dataclasses.replace(subject, args=args, kwargs=kwargs, target=target, example=given)
    return called.with_example(lambda tensor: tensor.to("meta"))


def _is_slow(subject: Subject, seed: int) -> bool:
    entry = make_entry(materialised(subject, seed), training=False)
    started = time.process_time()
    with torch.no_grad():
        entry(*entry.signature.samples(1))
    return time.process_time() - started > _SLOW_S
