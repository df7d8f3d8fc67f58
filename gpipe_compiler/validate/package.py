"""Holds the emitted package against the original model.

The model runs here, in plain PyTorch (`validate/reference.py`); the package runs in a process
of its own in which this compiler cannot be imported. Compared are the outputs in eval mode, and of
one training step the loss, every gradient, every buffer and the weights after an optimizer step.
How close is close enough stands in `runtime/train/comparison.py`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from gpipe_compiler.errors import ValidationError, summary
from gpipe_compiler.frontend.entry import make_entry
from gpipe_compiler.frontend.materialise import known, materialised, weights_of
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.core.devices import intra_op_threads
from gpipe_compiler.runtime.core.weights import save_file as save_weights
from gpipe_compiler.runtime.train.check import INPUT
from gpipe_compiler.runtime.train.comparison import Row, dense, pack
from gpipe_compiler.validate.launching import Launch, fresh
from gpipe_compiler.validate.plain_run import device_of, least_samples
from gpipe_compiler.validate.reference import reference_of, refuse_unlike_parts
from gpipe_compiler.validate.second_batch import other_batches, other_size


@dataclass(frozen=True, slots=True)
class Validation:
    """What was compared and how close it came.

    Attributes:
        notes: what a reader should know, such as that the model mixes samples.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether everything is within tolerance."""
        return all(row.passed for row in self.rows)

    def __str__(self) -> str:
        return "\n".join(
            f"{row.what}: {row.compared} compared, largest difference {row.largest_difference:.2g}"
            for row in self.rows
        )


def validate(
    subject: Subject,
    plan: Plan,
    directory: Path,
    *,
    seed: int = 0,
    weights: Mapping[str, torch.Tensor] | None = None,
    per_microbatch: bool = False,
    launch: Launch = fresh,
) -> Validation:
    """Runs the package in `directory` against the subject's model.

    The package is called on the example inputs, and on a second batch where plain PyTorch takes
    one. The model stays as it is.

    Args:
        weights: what the package is to load first, by the model's names.
        per_microbatch: take a loss that micro-batches cannot give for that of each by itself.
        launch: runs the package; one on a GPU is always run in a new process.

    Raises:
        ValidationError: when the package cannot be run, or micro-batches cannot give the loss of
            the mini-batch. Other differences are reported, not raised.
    """
    threads = max(1, torch.get_num_threads() // len(plan.orders))
    with intra_op_threads(threads):
        expected, notes = reference_of(subject, plan, seed, per_microbatch=per_microbatch)
        second, note = _second_reference(subject, plan, seed, per_microbatch)
    with tempfile.TemporaryDirectory(prefix="gpipe-validate-") as scratch:
        report = Path(scratch, "report.json")
        options: list[object] = ["--report", report, "--seed", seed]
        for number, tensors in enumerate([pack(expected), *second]):
            reference = Path(scratch, f"reference_{number}.safetensors")
            save_file(tensors, reference)
            options += ["--reference", reference]
        if weights is not None:
            save_weights(weights, Path(scratch, "weights.safetensors"))
            options += ["--load", Path(scratch, "weights.safetensors")]
        # Where the model ran and with as many threads: other kernels round in another way.
        device, count = device_of(subject.model), len(plan.orders)
        run_check(
            directory,
            [*options, "--devices", ",".join([str(device)] * count)],
            threads=threads * count,
            launch=launch if device.type == "cpu" else fresh,
        )
        rows = tuple(
            Row(**row | {"faults": tuple(row["faults"])}) for row in json.loads(report.read_text())
        )
    if not per_microbatch and not all(row.passed for row in rows):
        refuse_unlike_parts(subject, plan, seed)
    return Validation(rows, (*notes, note))


def _second_reference(
    subject: Subject, plan: Plan, seed: int, per_microbatch: bool
) -> tuple[list[dict[str, torch.Tensor]], str]:
    """The model's results on the batch most unlike the example that it takes, with its inputs.

    Returns:
        One reference as `run.py check` reads it, or none where plain PyTorch takes no such batch;
        and what is compared, or why nothing is.

    Raises:
        ValidationError: when micro-batches cannot give the loss of that batch.
    """
    entry = make_entry(subject, training=False)
    size = other_size(plan.batch_size, plan.microbatches, least_samples(plan))
    met = ""
    for batch in other_batches(entry, plan.batch_size, size, seed):
        try:
            expected, _ = reference_of(
                subject, plan, seed, inputs=batch.inputs, per_microbatch=per_microbatch
            )
        except ValidationError as error:
            problem = f"on a second batch ({batch.what}): {error.problem}"
            raise ValidationError(problem, location=error.location, hint=error.hint) from error
        except Exception as error:  # whatever the user's code raises
            met = met or f"of {batch.what}: {summary(error)}"
            continue
        found = (tensor for group in expected.values() for tensor in group.values())
        if not all(bool(dense(tensor).isfinite().all()) for tensor in found):
            met = met or f"of {batch.what}: it gives numbers that are not finite"
            continue
        names = (f"{INPUT}{source.name}" for source in entry.signature.inputs)
        given = {n: t.clone().contiguous() for n, t in zip(names, batch.inputs, strict=True)}
        instead = f" (the model rejects one {met})" if met else ""
        note = f"compared on a second batch too: {batch.what}{instead}"
        return [{**pack(expected), **given}], note
    why = f"the model rejects a second batch {met}" if met else "no input has a batch dimension"
    return [], f"the example alone was compared: {why}"


LARGEST_MATERIALISED = 1 << 30
"""Bytes of parameters up to which a model on meta is given numbers, to be validated."""


def validate_materialised(
    subject: Subject,
    plan: Plan,
    directory: Path,
    *,
    seed: int = 0,
    per_microbatch: bool = False,
    launch: Launch = fresh,
) -> Validation:
    """Runs the package of a model on meta against a copy of the model that has numbers.

    Where it is known how every tensor begins, the package begins by itself, so that this is
    compared too; otherwise it is given the copy's weights.

    Raises:
        ValidationError: as `validate` does.
    """
    real = materialised(subject, seed)
    weights = None
    if not known(subject):
        assert plan.graph is not None
        graph = plan.graph
        used = {name for op in graph.ops for name in op.states(graph.modules)}
        weights = {name: tensor for name, tensor in weights_of(real).items() if name in used}
    return validate(
        real,
        plan,
        directory,
        seed=seed,
        weights=weights,
        per_microbatch=per_microbatch,
        launch=launch,
    )


def why_not_materialised(plan: Plan) -> str:
    """Why a model on meta is too large to be validated; "" where it is not."""
    assert plan.graph is not None
    size = sum(state.bytes for state in plan.graph.state.values())
    if size <= LARGEST_MATERIALISED:
        return ""
    return (
        f"the model is on the meta device, and its {size / 2**30:.1f} GiB of parameters are too "
        f"much to be filled and run here (the limit is {LARGEST_MATERIALISED >> 30} GiB)"
    )


def run_check(
    directory: Path, options: Sequence[object], *, threads: int, launch: Launch = fresh
) -> None:
    """`run.py check` of a package, where this compiler cannot be imported.

    Args:
        threads: of the process.

    Raises:
        ValidationError: when the package cannot be run. Differences are not raised.
    """
    words = [str(word) for word in (directory / "run.py", "check", *options)]
    ended = launch(words, threads=threads)
    if ended.code not in (0, 3):
        raise ValidationError(
            f"the package does not run: exit code {ended.code}\n{ended.errors.strip()}"
        )
