"""A pipeline and the plain loop side by side: every result of every mini-batch is compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from unittest import mock

import torch
from random_models import Recipe, call_of
from random_packages import Layout
from random_training import PlainLoop, Training
from torch import Tensor, nn

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.core.transport import LocalEndpoint
from gpipe_compiler.runtime.schedule.actions import Transfer
from gpipe_compiler.runtime.spec import PipelineSpec, Precision
from gpipe_compiler.runtime.train.comparison import flat_tensors


class Held:
    """A pipeline compared with the plain loop, step by step.

    Training in doubles runs from the first weights to the last. In narrower types a rounding may
    become another choice of a class, so there the plain model goes on from the pipeline's weights
    after every step that was compared.
    """

    def __init__(self, plain: PlainLoop, pipe: Pipeline, layout: Layout) -> None:
        self.plain = plain
        self.pipe = pipe
        self.dtype = layout.dtype
        self.exact = 1e-9 if layout.wide and not plain.half else 1e-4
        self.coarse: Mapping[str, float] = {}
        if plain.half:
            # Sums that are rounded to 16 bits: of several owners, or of micro-batches beside the
            # whole mini-batch.
            summed = [item.name for item in pipe.local_stages.shared]
            if plain.takes_whole:
                summed = [name for name, _ in plain.model.named_parameters()]
            self.coarse = dict.fromkeys(summed, 0.1)
        self.parameters = dict(plain.model.named_parameters())

    def batch(self, seed: int, size: int, weight: float) -> None:
        """Loss, outputs and gradients of one mini-batch."""
        expected = self.plain.run(seed, size, self.dtype, weight, train=True)
        call = call_of(self.plain.recipe, size, seed=seed, dtype=self.dtype)
        inputs = call.args, dict(call.kwargs)
        loss, outputs = self.pipe.step_with_outputs(inputs, call.target, weight=weight)
        self._same(f"loss of batch {seed}", {"loss": loss}, {"loss": expected.loss})
        self._same(f"outputs of batch {seed}", flat_tensors(outputs), expected.outputs)
        self._same(f"gradients after batch {seed}", self._found(), self._expected())
        self._same(f"buffers after batch {seed}", self._buffers(), self._plain_buffers())

    def evaluate(self, seed: int, size: int) -> None:
        """Loss and outputs in the mode that the model is in."""
        expected = self.plain.run(seed, size, self.dtype, 1.0, train=False)
        call = call_of(self.plain.recipe, size, seed=seed, dtype=self.dtype)
        inputs = call.args, dict(call.kwargs)
        loss, outputs = self.pipe.evaluate_with_outputs(inputs, call.target)
        self._same("evaluated loss", {"loss": loss}, {"loss": expected.loss})
        self._same("evaluated outputs", flat_tensors(outputs), expected.outputs)

    def clip(self, norm: float) -> None:
        """Clips both, and compares what the norm was."""
        trained = [p for p in self.parameters.values() if p.grad is not None]
        expected = nn.utils.clip_grad_norm_(trained, norm)
        found = self.pipe.clip_grad_norm_(norm)
        within = 0.1 if self.coarse else self.exact
        self._same("norm", {"norm": found}, {"norm": expected}, within)
        self._same("clipped gradients", self._found(), self._expected(), within)

    def weights(self, before: Mapping[str, Tensor]) -> None:
        """Weights after a step of the optimizer, differences measured by what it moved."""
        found = {name: p.detach() for name, p in self.pipe.named_parameters()}
        within = 0.1 if self.coarse else self.exact
        for name, parameter in found.items():
            expected = self.parameters[name].detach()
            moved = float((expected - before[name]).abs().max())
            allowed = within * moved + 4 * torch.finfo(expected.dtype).eps * _size(expected)
            allowed += self.exact * 1e-2
            difference = float((parameter - expected).abs().max())
            assert difference <= allowed, f"weight {name} is off by {difference:.3g} of {moved:.3g}"
        if self.exact > 1e-9:
            with torch.no_grad():
                for name, parameter in found.items():
                    self.parameters[name].copy_(parameter)

    def snapshot(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def _found(self) -> dict[str, Tensor]:
        return {n: p.grad for n, p in self.pipe.named_parameters() if p.grad is not None}

    def _expected(self) -> dict[str, Tensor]:
        held = {name for name, _ in self.pipe.named_parameters()}
        grads = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        assert set(grads) <= held, f"the pipeline does not hold {set(grads) - held}"
        return grads

    def _buffers(self) -> dict[str, Tensor]:
        known = self._plain_buffers()
        return {name: b for name, b in self.pipe.named_buffers() if name in known}

    def _plain_buffers(self) -> dict[str, Tensor]:
        held = {name for name, _ in self.pipe.named_buffers()}
        return {name: b for name, b in self.plain.model.named_buffers() if name in held}

    def _same(
        self,
        what: str,
        found: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        within: float | None = None,
    ) -> None:
        missing, new = expected.keys() - found.keys(), found.keys() - expected.keys()
        assert not missing, f"{what}: {missing} is missing"
        assert not new, f"{what}: {new} is not the plain loop's"
        floor = 1e-2 * max((_size(t) for t in expected.values()), default=0.0)
        for name, tensor in expected.items():
            own = found[name]
            assert own.shape == tensor.shape, f"{what}: {name} is {tuple(own.shape)}"
            assert own.dtype == tensor.dtype, f"{what}: {name} is of {own.dtype}"
            if not tensor.is_floating_point():
                assert torch.equal(own, tensor), f"{what}: {name}"
                continue
            share = within or max(self.exact, self.coarse.get(name, 0.0))
            share = max(share, 8 * torch.finfo(tensor.dtype).eps)
            allowed = share * (_size(tensor) + floor)
            torch.testing.assert_close(
                own.double(),
                tensor.double(),
                rtol=0,
                atol=allowed,
                equal_nan=True,
                msg=lambda text, name=name: f"{what}: {name}: {text}",
            )


def _size(tensor: Tensor) -> float:
    """The largest finite entry."""
    wide = tensor.detach().double().abs()
    return float(wide.where(wide.isfinite(), 0.0).max()) if wide.numel() else 0.0


def optimizer_of(parameters: Iterator[nn.Parameter], training: Training) -> torch.optim.Optimizer:
    """One in which no rounding of a gradient of zero becomes a step."""
    if training.adam:
        return torch.optim.AdamW(parameters, lr=0.02, eps=1e-2)
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.01)


def hold_training(recipe: Recipe, training: Training, held: Held) -> None:
    """Trains both, comparing all the way."""
    plain, pipe = held.plain, held.pipe
    trained = (p for p in plain.model.parameters() if p.requires_grad)
    optimizers = optimizer_of(trained, training), optimizer_of(pipe.parameters(), training)
    least = 2 if "batch_norm" in {step.kind for step in recipe.steps} else 1
    sizes = [max(size, least) for size in training.sizes]
    for first in range(0, len(sizes), training.accumulate):
        batches = sizes[first : first + training.accumulate]
        for number, size in enumerate(batches, first):
            mode = number != training.eval_step
            plain.model.train(mode)
            pipe.train(mode)
            held.batch(1 + number, size, 1 / len(batches))
        if training.clip is not None:
            held.clip(training.clip)
        before = held.snapshot()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        held.weights(before)
    for mode in (True, False):
        plain.model.train(mode)
        pipe.train(mode)
        held.evaluate(99, sizes[-1])


@contextlib.contextmanager
def crossings_checked(spec: PipelineSpec, precision: Precision) -> Iterator[None]:
    """Around a run in threads: what crosses is what processes would prepare to receive."""
    crossings = {crossing.value: crossing for crossing in spec.crossings}
    send: Callable[..., None] = LocalEndpoint.send
    sent: list[tuple[Transfer, Tensor]] = []

    def watched(self: LocalEndpoint, transfer: Transfer, tensor: Tensor | None) -> None:
        if tensor is not None:
            sent.append((transfer, tensor))
        send(self, transfer, tensor)

    with mock.patch.object(LocalEndpoint, "send", watched):
        yield
    for transfer, tensor in sent:
        crossing = crossings[transfer.value]
        if precision is spec.precision is Precision.FP32:
            assert tensor.dtype is crossing.dtype, f"{transfer} is of {tensor.dtype}"
        one = crossing.shape_for(1, spec.microbatch_size, {})
        shape = tuple(tensor.shape)
        if crossing.batch_dim is not None:
            samples = shape[crossing.batch_dim] // max(one[crossing.batch_dim], 1)
            one = crossing.shape_for(samples, spec.microbatch_size, {})
        assert shape == one, f"{transfer} is {shape}, told {one}"
