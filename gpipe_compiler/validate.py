"""Holds the emitted package against the original model.

The model runs here, in plain PyTorch and micro-batch by micro-batch; the package runs in a process
of its own in which this compiler cannot be imported. Compared are the outputs in eval mode, and of
one training step the loss, every gradient, every buffer and the weights after an optimizer step.
How close is close enough stands in `runtime/comparison.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from gpipe_compiler.draws import Draws
from gpipe_compiler.errors import ValidationError
from gpipe_compiler.frontend.entry import Entry, make_entry
from gpipe_compiler.frontend.materialise import known, materialised, weights_of
from gpipe_compiler.frontend.recompute import activations_kept
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.plan import Plan
from gpipe_compiler.reference import MiniBatchStatistics, autocast, takes_whole_batch
from gpipe_compiler.runtime.check import intra_op_threads
from gpipe_compiler.runtime.comparison import (
    Kind,
    Row,
    Tensors,
    compare,
    flat_tensors,
    pack,
)
from gpipe_compiler.runtime.inputs import join
from gpipe_compiler.runtime.random import SeededRandom
from gpipe_compiler.runtime.spec import BatchNorm, Leaf, Precision
from gpipe_compiler.runtime.stages_in_a_row import LOSS_SCALE
from gpipe_compiler.runtime.weights import save_file as save_weights
from gpipe_compiler.splitting import Losses, explain, loss_shares, suspected

_ISOLATED = """
import runpy, sys
sys.modules["gpipe_compiler"] = None
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


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
) -> Validation:
    """Runs the package in `directory` against the subject's model.

    The package is called on the example inputs. The model stays as it is.

    Args:
        weights: what the package is to load first, by the model's names.
        per_microbatch: take a loss that micro-batches cannot give for that of each by itself.

    Raises:
        ValidationError: when the package cannot be run, or micro-batches cannot give the loss of
            the mini-batch. Other differences are reported, not raised.
    """
    threads = max(1, torch.get_num_threads() // len(plan.orders))
    with intra_op_threads(threads):
        expected, notes = reference_of(subject, plan, seed, per_microbatch=per_microbatch)
    with tempfile.TemporaryDirectory(prefix="gpipe-validate-") as scratch:
        reference, report = Path(scratch, "reference.safetensors"), Path(scratch, "report.json")
        save_file(pack(expected), reference)
        options: list[object] = ["--reference", reference, "--report", report, "--seed", seed]
        if weights is not None:
            save_weights(weights, Path(scratch, "weights.safetensors"))
            options += ["--load", Path(scratch, "weights.safetensors")]
        _run_package(
            directory,
            options,
            devices=[_device(subject.model)] * len(plan.orders),
            threads=threads,
        )
        rows = tuple(
            Row(**row | {"faults": tuple(row["faults"])}) for row in json.loads(report.read_text())
        )
    return Validation(rows, notes)


LARGEST_MATERIALISED = 1 << 30
"""Bytes of parameters up to which a model on meta is given numbers, to be validated."""


def validate_materialised(
    subject: Subject, plan: Plan, directory: Path, *, seed: int = 0, per_microbatch: bool = False
) -> Validation:
    """Runs the package of a model on meta against a copy of the model that has numbers.

    Where it is known how every tensor begins, the package begins by itself, so that this is
    compared too; otherwise it is given the copy's weights.

    Raises:
        ValidationError: as `validate` does.
    """
    real = materialised(subject, seed)
    if known(subject):
        return validate(real, plan, directory, seed=seed, per_microbatch=per_microbatch)
    assert plan.graph is not None
    graph = plan.graph
    used = {name for op in graph.ops for name in op.states(graph.modules)}
    weights = {name: tensor for name, tensor in weights_of(real).items() if name in used}
    return validate(
        real, plan, directory, seed=seed, weights=weights, per_microbatch=per_microbatch
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


def reference_of(
    subject: Subject, plan: Plan, seed: int, *, per_microbatch: bool = False
) -> tuple[Tensors, tuple[str, ...]]:
    """What the package of a plan must come to, by the model in plain PyTorch; and notes on it.

    Raises:
        ValidationError: when micro-batches cannot give the loss of the mini-batch, unless that is
            accepted.
    """
    entry = make_entry(subject, training=False)
    shares = _shares(entry, plan) if plan.training else ()
    assert plan.graph is not None
    draws = Draws.of(plan.graph, seed)
    expected, notes, losses = _evaluate(entry, plan, shares, draws)
    error = None
    if losses is not None and draws.any and plan.microbatches > 1:
        error = suspected(plan.graph)
    elif losses is not None and not losses.equal:
        error = explain(plan.graph, losses)
    if error is not None:
        if not per_microbatch:
            raise error
        notes = (*notes, f"accepted with --per-microbatch: {error.problem}")
    if plan.training:
        trained = _train_step(make_entry(subject, training=True), plan, shares, seed)
        expected = {**expected, **trained}
    return expected, notes


def _shares(entry: Entry, plan: Plan) -> tuple[float, ...]:
    """The weight of each micro-batch's loss."""
    assert plan.graph is not None
    graph = plan.graph
    names = [source.name for source in entry.signature.inputs]
    parts = _split(entry, entry.signature.samples(plan.batch_size), plan)
    states = {**graph.tensors, **dict(entry.model.named_buffers())}
    return loss_shares(graph, states, [dict(zip(names, part, strict=True)) for part in parts])


def _run_package(
    directory: Path, options: Sequence[object], *, devices: Sequence[torch.device], threads: int
) -> None:
    """`run.py check` in a process of its own, in which this compiler cannot be imported.

    Its stages compute where the model did and with as many threads, since other kernels round in
    another way.
    """
    run_check(
        directory,
        [*options, "--devices", ",".join(map(str, devices))],
        threads=threads * len(devices),
    )


def run_check(directory: Path, options: Sequence[object], *, threads: int) -> None:
    """`run.py check` of a package, where this compiler cannot be imported.

    Args:
        threads: of the process.

    Raises:
        ValidationError: when the package cannot be run. Differences are not raised.
    """
    command = [sys.executable, "-c", _ISOLATED, directory / "run.py", "check", *options]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = str(threads)
    finished = subprocess.run(
        [str(word) for word in command],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
    )
    if finished.returncode not in (0, 3):
        raise ValidationError(
            f"the package does not run: exit code {finished.returncode}\n{finished.stderr.strip()}"
        )


def _device(model: nn.Module) -> torch.device:
    """Where the model stands."""
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


def _evaluate(
    entry: Entry, plan: Plan, shares: Sequence[float], draws: Draws
) -> tuple[Tensors, tuple[str, ...], Losses | None]:
    """The model's outputs in eval mode, for the whole batch where that equals its parts.

    And the losses of both, where there is a loss.
    """
    with torch.no_grad():
        # Every run starts from the same inputs and buffers: a model may write to both.
        (whole,) = _runs(entry, [tuple(entry.signature.samples(plan.batch_size))], plan, draws)
        parts = [whole]
        if plan.microbatches > 1:
            inputs = entry.signature.samples(plan.batch_size)
            parts = _runs(entry, _split(entry, inputs, plan), plan, draws)
    losses = None
    if whole.loss is not None and shares:
        made = tuple(part.loss for part in parts if part.loss is not None)
        losses = Losses(whole.loss, made, tuple(shares))
    outputs = [part.outputs for part in parts]
    if not all(whole.outputs.keys() == output.keys() for output in outputs):
        raise ValidationError("the model returns another structure for a micro-batch")
    joined = {
        name: _join([output[name] for output in outputs], tensor)
        for name, tensor in whole.outputs.items()
    }
    if draws.any:
        return {Kind.OUTPUT: joined}, (draws.note,), losses
    rows = compare({Kind.OUTPUT: joined}, {Kind.OUTPUT: whole.outputs})
    if all(row.passed for row in rows):
        return {Kind.OUTPUT: whole.outputs}, (), losses
    note = (
        "the outputs of the model for a batch are not those of its micro-batches put together: "
        "it mixes samples, and the package is held against its outputs for the micro-batches"
    )
    return {Kind.OUTPUT: joined}, (note,), losses


@dataclass(frozen=True, slots=True)
class _Run:
    """What one call of the model gives; copies, for the next call may overwrite the originals."""

    loss: torch.Tensor | None
    outputs: Mapping[str, torch.Tensor]


def _runs(
    entry: Entry, calls: Sequence[tuple[torch.Tensor, ...]], plan: Plan, draws: Draws
) -> list[_Run]:
    """One call for each micro-batch; the buffers are afterwards what they were."""
    before = [buffer.clone() for buffer in entry.model.buffers()]
    found = []
    for microbatch, inputs in enumerate(calls):
        with draws.seeded(microbatch):
            found.append(_run(entry, inputs, plan))
    for buffer, content in zip(entry.model.buffers(), before, strict=True):
        buffer.copy_(content)
    return found


def _run(entry: Entry, inputs: Sequence[torch.Tensor], plan: Plan) -> _Run:
    with autocast(plan.precision, _device(entry.model)):
        leaves = entry(*inputs)
    loss = leaves.pop(0).clone() if entry.has_loss else None
    found = flat_tensors(entry.outputs(leaves))
    return _Run(loss, {name: tensor.clone() for name, tensor in found.items()})


def _join(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
    """The outputs for micro-batches as one, along the dimension in which the whole is larger."""
    first = parts[0].shape
    grown = next((d for d, size in enumerate(whole.shape) if first[d] != size), None)
    return join(Leaf("", batch_dim=grown), parts, [1.0] * len(parts))


def _split(
    entry: Entry, inputs: Sequence[torch.Tensor], plan: Plan
) -> list[tuple[torch.Tensor, ...]]:
    """The inputs of every micro-batch, each with memory of its own."""
    # One replica takes the whole batch here.
    size = plan.batch_size // plan.microbatches
    return [
        tuple(
            (tensor[start : start + size] if source.batched else tensor).clone()
            for source, tensor in zip(entry.signature.inputs, inputs, strict=True)
        )
        for start in range(0, plan.batch_size, size)
    ]


def _train_step(entry: Entry, plan: Plan, shares: Sequence[float], seed: int) -> Tensors:
    """Loss, gradients, buffers and weights of one step of plain PyTorch.

    Args:
        shares: the weight of each micro-batch's loss; one of weight 0 may be nan, and does not
            count.
    """
    parts = _split(entry, entry.signature.samples(plan.batch_size), plan)
    if takes_whole_batch(plan):
        parts, shares = [tuple(entry.signature.samples(plan.batch_size))], (1.0,)
    statistics = MiniBatchStatistics(entry.model)
    deferred = plan.batchnorm is BatchNorm.DEFERRED
    scale = LOSS_SCALE if plan.precision is Precision.FP16 else 1.0
    trainable = {
        name: tensor for name, tensor in entry.model.named_parameters() if tensor.requires_grad
    }
    gradients: dict[str, torch.Tensor] = {}
    losses = []
    for microbatch, part in enumerate(parts):
        with contextlib.ExitStack() as around:
            around.enter_context(activations_kept())
            around.enter_context(SeededRandom(seed, 0, microbatch, numbers=()))
            around.enter_context(statistics.microbatch() if deferred else contextlib.nullcontext())
            around.enter_context(autocast(plan.precision, _device(entry.model)))
            loss = entry(*part)[0]
        loss = loss * shares[microbatch]
        if not shares[microbatch]:
            continue
        losses.append(loss.detach())
        for name, gradient in _gradients(loss * scale, trainable).items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    if deferred:
        statistics.commit()
    gradients = {name: gradient / scale for name, gradient in gradients.items()}
    return {
        Kind.LOSS: {"loss": torch.stack(losses).sum() if losses else torch.zeros(())},
        Kind.GRADIENT: gradients,
        Kind.BUFFER: dict(entry.model.named_buffers()),
        Kind.WEIGHT: {
            name: tensor.detach() - gradients[name] if name in gradients else tensor.detach()
            for name, tensor in trainable.items()
        },
    }


def _gradients(
    loss: torch.Tensor, parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The gradient of each parameter that the loss depends on."""
    if not loss.requires_grad:
        return {}
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: gradient
        for name, gradient in zip(parameters, found, strict=True)
        if gradient is not None
    }
