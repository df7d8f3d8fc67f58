"""Models on meta that are too large to be given numbers: the same with fewer layers is compared."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from gpipe_compiler.errors import GPipeCompilerError, UnsplittableError, ValidationError
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.materialise import materialised, with_real_example
from gpipe_compiler.frontend.shorten import shortened
from gpipe_compiler.frontend.signature import read_signature
from gpipe_compiler.frontend.subject import Example, Subject
from gpipe_compiler.plan import Plan
from gpipe_compiler.validate.launching import Launch
from gpipe_compiler.validate.package import Validation, validate
from gpipe_compiler.validate.plain_run import least_samples

LARGEST_MATERIALISED = 1 << 30
"""Bytes of parameters up to which a model on meta is given numbers, to be validated."""

_KEPT = (8, 4, 3, 2)
"""Repetitions that are left of a block, the first number whose model is small enough."""

_MICROBATCHES = 4
"""Micro-batches that are compared at most."""

_SLOW_S = 3.0
"""Processor seconds of a forward of one sample from which on nothing is compared: a step of all
micro-batches, forward and backward, on two batches, here and in the package, takes minutes."""


Repackage = Callable[[Subject, int, Path], Plan]
"""Writes the package of a subject, with a number of micro-batches, to a folder; gives its plan."""


def why_not_materialised(plan: Plan) -> str:
    """Why a model on meta is too large to be validated; "" where it is not."""
    size = sum(state.bytes for state in plan.known_graph.state.values())
    if size <= LARGEST_MATERIALISED:
        return ""
    return (
        f"the model is on the meta device, and its {size / 2**30:.1f} GiB of parameters are too "
        f"much to be filled and run here (the limit is {LARGEST_MATERIALISED >> 30} GiB)"
    )


def _shorter(subject: Subject) -> tuple[Subject, str] | None:
    """The subject with as many repetitions as can be filled with numbers, and how many these are;
    None where none can."""
    for kept in _KEPT:
        short, what = subject, list[str]()
        while found := shortened(short, least=kept + 1, kept=kept):
            short = found.subject
            what += (
                f"{run.short.kept} of the {run.count} repetitions in {run.path or 'it'}"
                for run in found.runs
            )
            if _bytes(short.model) <= LARGEST_MATERIALISED:
                return short, " and ".join(what)
    return None


def too_large_to_fill(model: nn.Module) -> bool:
    """Whether a model on meta takes more memory than is filled with numbers here."""
    return _bytes(model) > LARGEST_MATERIALISED


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
        package: compiles the shortened model as the whole one was.

    Raises:
        ValidationError: when the package of the shortened model does not run.
    """
    found = _shorter(subject)
    if found is None:
        return "no list of equal layers makes it small enough with fewer of them"
    short, what = found
    least = least_samples(plan)
    microbatches = min(plan.microbatches, _MICROBATCHES)
    few = _with_samples(short, microbatches * least)
    if _is_slow(few, seed):
        return f"even with {what}, one sample takes over {_SLOW_S:g} seconds here"
    try:
        with tempfile.TemporaryDirectory(prefix="gpipe-validate-") as scratch:
            folder = Path(scratch, "package")
            made = package(few, microbatches, folder)
            held = validate(
                few, made, folder, seed=seed, per_microbatch=per_microbatch, launch=launch
            )
    except (UnsplittableError, ValidationError):
        raise
    except GPipeCompilerError as error:
        return f"with {what} it cannot be compiled: {error.problem}"
    note = (
        f"the whole model is too large to be filled with numbers here: compared was the same model "
        f"with {what}, on {microbatches * least} samples"
    )
    return dataclasses.replace(held, notes=(note, *held.notes))


def _with_samples(subject: Subject, count: int) -> Subject:
    real = with_real_example(subject)
    signature = read_signature(real, on_meta=False)
    args, kwargs, target = signature.rebuild(signature.samples(count))
    given = Example(args, kwargs, target)
    called = dataclasses.replace(subject, args=args, kwargs=kwargs, target=target, example=given)
    return called.with_example(lambda tensor: tensor.to("meta"))


def _is_slow(subject: Subject, seed: int) -> bool:
    entry = Entry(materialised(subject, seed), training=False)
    started = time.process_time()
    with torch.no_grad():
        entry(*entry.signature.samples(1))
    return time.process_time() - started > _SLOW_S
