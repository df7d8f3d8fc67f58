"""The stages of a package one after another in plain autograd: all but the pipelining."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..core.batchnorm import DeferredStatistics
from ..core.building import build_stage
from ..core.full_batch import joint_stages
from ..core.inputs import Inputs, bind_call
from ..core.local_stages import LocalStages
from ..core.loss_weights import LossWeigher, summed, terms_of
from ..core.options import ExecutionOptions
from ..core.outputs import join, rebuild
from ..core.pipeline import Pipeline
from ..core.precision import autocast
from ..core.random import OverDraws, SeededRandom, seed_in_eval
from ..core.request import Values
from ..core.stored_weights import Weights
from ..core.wiring import inputs_for, most_work, output_leaves
from ..core.written import WrittenBuffers
from ..spec import BatchNorm, LossSpec, PipelineSpec, Precision, covers
from .comparison import ComparedKind, Tensors, flat_tensors

LEARNING_RATE = 1.0
"""Of the optimizer step in a check: the weights move by their gradients."""

LOSS_SCALE = 1024.0
"""In a check of fp16: a power of two rounds nothing, and this one is far from overflow."""


def run_stages(pipe: Pipeline, weights: Weights, inputs: Inputs, target: object) -> Tensors:
    """The expected results of a pipeline: outputs, and all that a training step changes.

    On the CPU; in 16 bits where the pipeline computes, as autocast differs between devices.
    """
    spec, device = pipe.spec, torch.device("cpu")
    if pipe.options.precision is not Precision.FP32:
        device = next((tensor.device for _, tensor in pipe.named_parameters()), device)
    modules = [build_stage(stage, weights, device, pipe.seed) for stage in spec.stages]
    stages = _Stages(spec, modules, pipe.options, device, pipe.seed)
    needed = inputs_for(spec, most_work(spec))
    call = bind_call(inputs, target, spec, needed, pipe.microbatches)
    evaluated = stages.evaluate(call.parts)
    outputs = {
        leaf.value: join(leaf, [values[leaf.value] for values in evaluated], call.samples)
        for leaf in output_leaves(spec.outputs)
    }
    returned = rebuild(spec.outputs, outputs, call.samples, call.sizes[0], training=False)
    results: Tensors = {ComparedKind.OUTPUT: flat_tensors(returned)}
    if spec.loss is None:
        return results
    if pipe.options.batchnorm is BatchNorm.EXACT and joint_stages(spec.stages):
        call = bind_call(inputs, target, spec, needed, 1)
    weigher = LossWeigher(spec, weights, pipe.seed)
    weighed = weigher.weigh(call)
    shares = weigher.shares(weighed, summed(weighed))
    return {**results, **stages.train(spec.loss, call.parts, shares)}


@contextlib.contextmanager
def kept_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undoes what is written to buffers: the step that follows starts from the model's own."""
    buffers = [buffer for module in modules for buffer in module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    yield
    for buffer, content in zip(buffers, before, strict=True):
        buffer.copy_(content)


def after_step(stages: LocalStages, scale: float = 1.0) -> Tensors:
    """Gradients, buffers, and the weights that are trained or that forward writes to, moved by the
    gradients: a step of `torch.optim.SGD`, which to construct imports dynamo, for a second.

    Args:
        scale: of the gradients.
    """
    gradients = {n: p.grad for n, p in stages.parameters().items() if p.grad is not None}
    with torch.no_grad():
        for name, gradient in gradients.items() if scale != 1 else ():
            gradients[name] = gradient / scale
        for name, parameter in stages.parameters().items():
            if name in gradients:
                parameter.add_(gradients[name], alpha=-LEARNING_RATE)
    weights = {
        stages.spec.stages[index].named(own): parameter.detach()
        for index, module in stages.modules.items()
        for own, parameter in module.named_parameters()
        if parameter.requires_grad or covers(stages.spec.stages[index].writes, own)
    }
    return {
        ComparedKind.GRADIENT: gradients,
        ComparedKind.BUFFER: stages.buffers(),
        ComparedKind.WEIGHT: weights,
    }


@dataclass(frozen=True)
class _Stages:
    """All the stages, on one device."""

    spec: PipelineSpec
    modules: Sequence[nn.Module]
    options: ExecutionOptions
    device: torch.device
    seed: int

    def evaluate(self, parts: Sequence[Values]) -> list[Values]:
        """What the stages hand out in eval mode, micro-batch by micro-batch."""
        for module in self.modules:
            module.eval()
        once = self._once()
        found = []
        with torch.no_grad(), kept_buffers(self.modules):
            for part in parts:
                for written in once:
                    written.begin()
                found.append(self._forward(0, part, None, {})[0])
        return found

    def _once(self) -> list[WrittenBuffers]:
        pairs = zip(self.modules, self.spec.stages, strict=True)
        return [WrittenBuffers(module, stage.once) for module, stage in pairs if stage.once]

    def train(
        self, loss: LossSpec, parts: Sequence[Values], weights: Sequence[Sequence[float]]
    ) -> Tensors:
        """One training step.

        Args:
            weights: for each micro-batch those of its loss's terms. One of weight 0 may be nan:
                nothing in it counts.
        """
        for module in self.modules:
            module.train()
        held = LocalStages(self.spec, dict(enumerate(self.modules)))
        deferred: dict[int, DeferredStatistics] = {}
        if self.options.batchnorm is BatchNorm.DEFERRED:
            pairs = zip(self.modules, self.spec.stages, strict=True)
            deferred = {
                index: DeferredStatistics(module, stage.renamed)
                for index, (module, stage) in enumerate(pairs)
            }
        scale = LOSS_SCALE if self.options.precision is Precision.FP16 else 1.0
        losses: list[torch.Tensor] = []
        once = self._once()
        for microbatch, (part, own) in enumerate(zip(parts, weights, strict=True)):
            for written in once:
                written.begin()
            _, terms = self._forward(microbatch, part, loss, deferred)
            weighed = zip(terms, own, strict=True)
            weighted = [term.reshape(()) * weight for term, weight in weighed if weight]
            if weighted:
                whole = torch.stack(weighted).sum()
                torch.autograd.backward(whole * scale)
                losses.append(whole.detach())
        for statistics in deferred.values():
            statistics.commit()
        # Of the type of its terms, as the pipeline gives it.
        total = torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)
        for item in held.shared:
            item.finish()
        return {ComparedKind.LOSS: {"loss": total}, **after_step(held, scale)}

    def _forward(
        self,
        microbatch: int,
        inputs: Values,
        loss: LossSpec | None,
        deferred: Mapping[int, DeferredStatistics],
    ) -> tuple[Values, tuple[torch.Tensor, ...]]:
        """Every value that a stage hands out, and the terms of the loss where it is asked for."""
        terms: tuple[torch.Tensor, ...] = ()
        values = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        training = any(module.training for module in self.modules)
        seed = self.seed if training else seed_in_eval(self.seed, 0)
        random = SeededRandom(seed, 0, microbatch, ())
        for index, (stage, module) in enumerate(zip(self.spec.stages, self.modules, strict=True)):
            random.numbers, random.shared = stage.randoms(training=training)
            random.position = 0
            with contextlib.ExitStack() as around:
                if index in deferred:
                    around.enter_context(deferred[index].forward(again=False))
                around.enter_context(OverDraws(random))
                around.enter_context(autocast(self.options.precision, self.device))
                returned = module(*(values[name] for name in stage.inputs))
                single = len(stage.outputs) == 1
                values.update(zip(stage.outputs, (returned,) if single else returned, strict=True))
                if loss is not None and loss.separate and module is self.modules[-1]:
                    arguments = (values[name] for name in stage.loss_inputs)
                    terms = terms_of(module.loss(*arguments))  # type: ignore[operator]  # the last stage of a pipeline with a loss has this method
        if loss is not None and not loss.separate:
            terms = (values[loss.value],)
        return values, terms
