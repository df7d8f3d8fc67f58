"""Holds the emitted package against the original model.

The model runs here, in plain PyTorch (`validate/reference.py`); the package runs in a process
of its own in which this compiler cannot be imported. Compared are of one training step the loss,
every gradient, every buffer and the weights after an optimizer step; and the outputs in eval mode.
These cost half as much again as a step, so of a model that is trained they are compared on the
second batch, and on the example where there is no second one. How close is close enough stands in
`runtime/train/comparison.py`.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from gpipe_compiler.errors import UnsplittableError, ValidationError, summary
from gpipe_compiler.frontend.check import refuse_late_checkpoints
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.materialise import known, materialised
from gpipe_compiler.frontend.signature import Signature
from gpipe_compiler.frontend.state import state_table
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.trace_errors import BOTH_WAYS, by_values
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.branches import required_lines
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.ir.sizes import other_sizes
from gpipe_compiler.passes.batch_rules import taken_together
from gpipe_compiler.passes.free_sizes import required
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.core.devices import intra_op_threads
from gpipe_compiler.runtime.core.required import BranchError
from gpipe_compiler.runtime.core.weights import apart, save_file, write_file
from gpipe_compiler.runtime.spec import Precision
from gpipe_compiler.runtime.train.check import INPUT, MICROBATCHES
from gpipe_compiler.runtime.train.comparison import (
    ROUNDING,
    ComparedKind,
    Row,
    Tensors,
    dense,
    is_finite,
    pack,
)
from gpipe_compiler.runtime.train.loading import ANEW
from gpipe_compiler.runtime.train.process import return_memory
from gpipe_compiler.validate.launching import Launch, fresh
from gpipe_compiler.validate.plain_run import batch_of, device_of, least_samples
from gpipe_compiler.validate.reference import reference_of, refuse_unlike_parts
from gpipe_compiler.validate.rounding import rounding_of, with_other_sums
from gpipe_compiler.validate.second_batch import OtherBatch, other_batches, other_numbers


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
    per_microbatch: bool = False,
    launch: Launch = fresh,
) -> Validation:
    """Runs the package in `directory` against the subject's model, or a copy that has numbers.

    The package is called on the example inputs, and on a second batch where plain PyTorch takes
    one. The model stays as it is.

    Args:
        per_microbatch: take a loss that micro-batches cannot give for that of each by itself.
        launch: runs the package; one on a GPU is always run in a new process.

    Raises:
        ValidationError: when the package cannot be run. Other differences are reported, not raised.
        UnsplittableError: when micro-batches cannot give the loss of the mini-batch.
    """
    on_meta = state_table(subject.model).on_meta
    subject, weights = _with_numbers(subject, plan, seed)
    if on_meta and plan.training:
        entry = Entry(subject, training=True, reduces=False)
        refuse_late_checkpoints(plan.known_graph, subject, entry, 2)
    threads = max(1, torch.get_num_threads() // len(plan.orders))
    with intra_op_threads(threads):
        try:
            second, note = _second_reference(subject, plan, seed, per_microbatch)
        except UnsplittableError:
            if not per_microbatch:
                refuse_unlike_parts(subject, plan, seed)  # by the example, where that shows it too
            raise
        expected, notes = reference_of(
            subject,
            plan,
            seed,
            per_microbatch=per_microbatch,
            left_to_package=True,
            step_alone=plan.training and bool(second) and not per_microbatch,
        )
    if subject.pretrained is not None and subject.pretrained.stored:
        folder = subject.pretrained.folder
        notes = (*notes, f"compared with numbers made up here: no weight of {folder} was read")
    batches = [_Reference(expected), *second]
    # Where the model ran and with as many threads: other kernels round in another way.
    device, count = device_of(subject.model), len(plan.orders)

    def rows_of(batches: Sequence[_Reference]) -> tuple[Row, ...]:
        with tempfile.TemporaryDirectory(prefix="gpipe-validate-") as scratch:
            report = Path(scratch, "report.json")
            options = [*_files(batches, weights, Path(scratch)), "--report", report, "--seed", seed]
            if on_meta:
                options += ["--weights", ANEW]
            run_check(
                directory,
                [*options, "--devices", ",".join([str(device)] * count)],
                threads=threads * count,
                launch=launch if device.type == "cpu" else fresh,
            )
            rows = json.loads(report.read_text())
        return tuple(Row(**row | {"faults": tuple(row["faults"])}) for row in rows)

    try:
        rows = rows_of(batches)
    except ValidationError:
        if not per_microbatch:
            refuse_unlike_parts(subject, plan, seed)
        raise
    if not all(row.passed for row in rows):
        if not per_microbatch:
            refuse_unlike_parts(subject, plan, seed)
        with intra_op_threads(threads):
            rows = rows_of([_with_rounding(batch, subject, plan, seed) for batch in batches])
    return Validation(rows, (*notes, note))


@dataclass(frozen=True, eq=False, slots=True)
class _Reference:
    """What the model gives on a batch.

    Attributes:
        batch: None for the example.
        names: of its inputs.
        rounding: how far rounding alone moves entries of each tensor, where that was measured.
    """

    expected: Tensors
    batch: OtherBatch | None = None
    names: tuple[str, ...] = ()
    rounding: Mapping[ComparedKind, Mapping[str, float]] = field(default_factory=dict)

    def packed(self) -> dict[str, torch.Tensor]:
        """The tensors under the names that a reference file gives them."""
        given: dict[str, torch.Tensor] = {}
        if self.batch is not None:
            pairs = zip(self.names, self.batch.inputs, strict=True)
            given = {f"{INPUT}{name}": tensor.clone().contiguous() for name, tensor in pairs}
            given[MICROBATCHES] = torch.tensor(self.batch.microbatches)
        return {
            **pack(self.expected),
            **given,
            **{
                f"{ROUNDING}{kind.value}/{name}": torch.tensor(size, dtype=torch.float64)
                for kind, group in self.rounding.items()
                for name, size in group.items()
            },
        }


def _files(
    batches: Sequence[_Reference], weights: Mapping[str, torch.Tensor] | None, folder: Path
) -> list[object]:
    """The options of `run.py check` for references and weights, which are written to a folder."""
    options: list[object] = []
    for number, batch in enumerate(batches):
        reference = folder / f"reference_{number}.safetensors"
        write_file(apart(batch.packed()), reference)
        options += ["--reference", reference]
    if weights is not None:
        save_file(weights, folder / "weights.safetensors")
        options += ["--load", folder / "weights.safetensors"]
    return options


def _with_rounding(known: _Reference, subject: Subject, plan: Plan, seed: int) -> _Reference:
    """The reference with what rounding alone moves its entries by."""

    def results(model: nn.Module) -> Tensors:
        moved = dataclasses.replace(subject, model=model)
        return reference_of(moved, plan, seed, other=known.batch, per_microbatch=True)[0]

    rounding = rounding_of(subject.model, results)
    rounding = with_other_sums(rounding, known.expected, plan)
    return dataclasses.replace(known, rounding=rounding)


def _second_reference(
    subject: Subject, plan: Plan, seed: int, per_microbatch: bool
) -> tuple[list[_Reference], str]:
    """The model's results on the batch most unlike the example that it takes.

    Returns:
        One reference, or none where plain PyTorch takes no such batch; and what is compared, or why
        nothing is.
    """
    entry, graph = Entry(subject, training=False), plan.known_graph
    group = taken_together(graph).samples
    least = max(1, least_samples(plan) // group)
    numbers = [
        (group * count, parts)
        for count, parts in other_numbers(plan.batch_size // group, plan.microbatches, least)
    ]
    met = ""
    others = other_sizes(graph.sizes, required(graph))
    resized = [(sizes, entry.signature.at(graph.inputs, sizes)) for sizes in others]
    few = plan.microbatch_size
    for batch in other_batches(entry, numbers, seed, resized, few):
        refuse_other_way(graph, batch_of(plan, entry.signature, batch).parts(entry.signature))
        try:
            expected, _ = reference_of(
                subject, plan, seed, other=batch, per_microbatch=per_microbatch
            )
        except UnsplittableError as error:
            problem = f"on a second batch ({batch.what}): {error.problem}"
            raise UnsplittableError(problem, location=error.location, hint=error.hint) from error
        except Exception as error:  # whatever the user's code raises
            met = met or f"of {batch.what}: {summary(error)}"
            continue
        found = (tensor for group in expected.values() for tensor in group.values())
        if not all(is_finite(dense(tensor)) for tensor in found):
            met = met or f"of {batch.what}: it gives numbers that are not finite"
            continue
        names = tuple(source.name for source in entry.signature.inputs)
        instead = f" (the model rejects one {met})" if met else ""
        note = f"compared on a second batch too: {batch.what}{instead}"
        if plan.precision is Precision.FP32:
            # How weights follow from gradients, the first batch has shown.
            expected = {k: group for k, group in expected.items() if k is not ComparedKind.WEIGHT}
        small = _at_least(subject, plan, seed, entry.signature)
        return [_Reference(expected, batch, names), *small], note
    why = f"the model rejects a second batch {met}" if met else "no input has a batch dimension"
    return [], f"the example alone was compared: {why}"


def _at_least(subject: Subject, plan: Plan, seed: int, own: Signature) -> Iterator[_Reference]:
    """The model's results where sizes are the least that they can be."""
    graph = plan.known_graph
    if not graph.least:
        return
    names = tuple(source.name for source in own.inputs)
    examples = {size.name: size.example for size in graph.sizes}
    small = own.at(graph.inputs, {**examples, **graph.least})
    batch = OtherBatch(tuple(small.samples(plan.batch_size)), plan.microbatches, "the least sizes")
    yield _Reference(reference_of(subject, plan, seed, other=batch)[0], batch, names)


def _with_numbers(
    subject: Subject, plan: Plan, seed: int
) -> tuple[Subject, Mapping[str, torch.Tensor] | None]:
    """The subject, a model on meta given numbers; and the weights that its package is to load.

    Where it is known how every tensor begins, the package begins by itself, so that this is
    compared too: None.
    """
    if not state_table(subject.model).on_meta:
        return subject, None
    real = materialised(subject, seed)
    if known(subject):
        return real, None
    graph = plan.known_graph
    used = {name for op in graph.ops for name in op.states(graph.modules)}
    weights = real.model.state_dict()
    return real, {name: tensor for name, tensor in weights.items() if name in used}


def run_check(
    directory: Path, options: Sequence[object], *, threads: int, launch: Launch = fresh
) -> None:
    """`run.py check` of a package, where this compiler cannot be imported.

    Raises:
        ValidationError: when the package cannot be run. Differences are not raised.
    """
    words = [str(word) for word in (directory / "run.py", "check", *options)]
    return_memory()
    ended = launch(words, threads=threads)
    if ended.code not in (0, 3):
        raise ValidationError(
            f"the package does not run: exit code {ended.code}\n{ended.errors.strip()}"
        )


# --- branches on values --------------------------------------------------------------------------


def refuse_other_way(graph: Graph, parts: Sequence[Sequence[torch.Tensor]]) -> None:
    """Refuses a graph whose branches go another way for some of these micro-batches.

    Raises:
        TraceError: naming the line that decides.
    """
    lines = required_lines(graph.ops)
    if not lines or graph.on_meta:
        return
    for training in (True, False) if graph.loss is not None else (False,):
        for part in parts:
            tensors = {name: tensor.clone() for name, tensor in graph.tensors.items()}
            named = dict(zip((source.name for source in graph.inputs), part, strict=True))
            try:
                with torch.no_grad(), torch.random.fork_rng():
                    Interpreter(graph, tensors, training).run(named, keep=())
            except BranchError as error:
                raise by_values(lines[error.line], BOTH_WAYS) from error
            except Exception:  # noqa: BLE001  # plain PyTorch shows what the model rejects
                return
