"""What a pipeline is asked for: steps, losses, evaluations, and the model's outputs; and how it is
a module of torch, for what takes models, such as averages of weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn

from ..errors import UsageError
from ..spec import PipelineSpec
from .call import CallArgs
from .execution import Execution
from .gradients import (
    PipelineScaler,
    deferred,
    hooks_once,
    refuse_deferred,
    refuse_transforms,
)
from .inputs import Inputs
from .local_stages import LocalStages
from .loss_weights import LossWeigher
from .random import seed_in_eval
from .reducer import Reducer, collected
from .request import RandomKey, RunRequest
from .session import HeldState
from .shards import Shards

_MEMBERS = ("_parameters", "_buffers", "_modules")
"""Where a module of torch keeps what it holds."""


def without_effect() -> UsageError:
    """The error for what would change how a layer computes."""
    return UsageError(
        "a part of a pipeline holds tensors under the model's names and computes nothing: its "
        "mode, its hooks, and what takes the place of its tensors would be without effect",
        hint="write into its tensors (parameter.data.copy_(...)), call train() and eval() of "
        "the pipeline, and compile a model that has the hooks, masks or frozen layers",
    )


class ModelPart(nn.Module):
    """A part of the model by its name: it holds tensors, and layers are in the stages.

    So what would change how a layer computes is refused here.
    """

    def _refuse(self, *_: object, **__: object) -> Any:
        raise without_effect()

    __setattr__ = train = forward = _refuse
    register_parameter = register_buffer = add_module = _refuse
    register_forward_hook = register_forward_pre_hook = _refuse
    register_full_backward_hook = register_full_backward_pre_hook = _refuse


class ModelNames(nn.Module):
    """A module with the parameters and buffers that a process holds, under the model's own names.

    Its submodules are parts that hold these. What else is assigned to it is a plain attribute,
    whatever the model calls its parts.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, torch.Tensor | nn.Module):
            held = vars(self)
            if any(name in held.get(kind, ()) for kind in _MEMBERS):
                raise without_effect()
        object.__setattr__(self, name, value)

    def check_places(self) -> None:
        """UsageError where other tensors stand in for those of the stages, as `functional_call` has
        it."""
        if any(table.get(name) is not tensor for table, name, tensor in self._places):
            raise without_effect()

    def train(self, mode: bool = True) -> Self:
        """Note the mode, in every part."""
        for part in self.modules():
            vars(part)["training"] = mode
        return self

    def hold(self, stages: LocalStages, weigher: LossWeigher) -> None:
        """Take the tensors of these stages for its own, and nothing else that it held before.

        Args:
            weigher: takes over what a loaded state says of its own.
        """

        def load(_: nn.Module, state: Mapping[str, torch.Tensor], prefix: str, *__: object) -> None:
            items = state.items()
            weigher.load({k.removeprefix(prefix): x for k, x in items if k.startswith(prefix)})

        tree = _tree_of(stages)
        for part in tree.modules():
            part.__class__ = ModelPart
        vars(self).update(vars(tree))
        self._held = tuple(stages.parameters().values())
        tables = [table for part in tree.modules() for table in (part._parameters, part._buffers)]
        self._places = [(table, *item) for table in tables for item in table.items()]
        self.register_load_state_dict_pre_hook(load)  # type: ignore[no-untyped-call]  # torch
        self._no_parameter = nn.Parameter(torch.empty(0))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters held here, each once: what an optimizer is made of.

        A process whose stages train none gives an empty one besides, for torch's optimizers.
        """
        found = list(super().parameters(recurse))
        if not any(parameter.requires_grad for parameter in found):
            found.append(self._no_parameter)
        return iter(found)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What `to`, `cuda`, `half` and the like call: refused, unless nothing changes by it."""
        held = [*super().parameters(recurse), *self.buffers(recurse)]
        for device, dtype in dict.fromkeys((tensor.device, tensor.dtype) for tensor in held):
            made = fn(torch.empty(0, device=device, dtype=dtype))
            if (made.device, made.dtype) != (device, dtype):
                raise UsageError(
                    f"weights of a pipeline that are {dtype} on {device} stay so: that is where "
                    "their stage computes",
                    hint="say where and how when it is made: Pipeline(devices=..., precision=...)",
                )
        return self


def registered_names(held: Collection[str], aliases: Mapping[str, str]) -> list[str]:
    """All names of some tensors, in the order in which a pipeline registers them.

    Of several names of a tensor torch's modules give the first: that is to be the model's.

    Args:
        held: the model's names, stage by stage.
        aliases: further names of tied tensors to these.
    """
    tied = set(aliases.values())
    further = (alias for alias, name in aliases.items() if name in held)
    return [*sorted(held, key=lambda name: name not in tied), *further]


def _tree_of(stages: LocalStages) -> nn.Module:
    """Modules within modules, as the model's names say, around the tensors of these stages."""
    tree, state, held = nn.Module(), stages.state_dict(), stages.tensors()
    aliases = stages.spec.aliases
    for name in registered_names(held, aliases):
        tensor = held[aliases.get(name, name)]
        *path, own = name.split(".")
        holder = tree
        for part in path:
            if part not in dict(holder.named_children()):
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        if isinstance(tensor, nn.Parameter):
            holder.register_parameter(own, tensor)
        else:
            holder.register_buffer(own, tensor, persistent=name in state)
    parts = dict(tree.named_modules())
    for member in stages.spec.reordered:
        around, _, own = member.rpartition(".")
        if around in parts:  # other processes may hold it
            for members in (vars(parts[around])[kind] for kind in _MEMBERS):
                if own in members:
                    members[own] = members.pop(own)
    return tree


class Calls(ModelNames):
    """A pipeline as it is called; under torchrun every rank makes the same calls.

    Attributes:
        spec: of the pipeline.
        seed: of dropout and the like.
        step_number: how many steps of training there were.
        local_stages: the stages held here.
        scaler: of fp16; it does nothing in other precisions.
        execution: runs a call.
    """

    spec: PipelineSpec
    seed: int
    step_number: int
    local_stages: LocalStages
    scaler: PipelineScaler
    execution: Execution
    _shards: Shards | None
    _reducer: Reducer | None
    _draws_in_eval: bool
    _calls: int  # in eval mode since the last step
    _read: int  # what `note_read` was told for the next call

    def step(
        self, inputs: Inputs = None, target: object = None, *, weight: float = 1.0
    ) -> torch.Tensor:
        """Forward and backward of a mini-batch: adds to `.grad` of every parameter.

        Loss and gradients are those of the whole mini-batch, also where micro-batches differ in
        size or in what their loss is a mean over. Under torchrun every rank gets the loss, and only
        rank 0 passes inputs. Inputs and targets that require gradients get theirs, with `weight`
        and the scale of fp16, where they are passed: of replicas, each for its share.

        Args:
            inputs: a tensor; a tuple of positional arguments; a dict of keyword arguments; or the
                pair (tuple, dict). A batch of fewer samples than micro-batches is run as fewer.
                A list of these is the micro-batches, each of which may have sizes of its own.
            target: what the loss compares with; a list for a list of micro-batches.
            weight: of this mini-batch's gradients, as 1/N when they are accumulated over N of them;
                the loss is returned without it.

        Raises:
            UsageError: for inputs that do not fit.
            StageError: when the model's code raises.
            TransportError: when another process is gone.
        """
        return self.step_with_outputs(inputs, target, weight=weight, outputs=False)[0]

    def step_with_outputs(
        self,
        inputs: Inputs = None,
        target: object = None,
        *,
        weight: float = 1.0,
        outputs: bool = True,
    ) -> tuple[torch.Tensor, object]:
        """As `step`, and what the model returns besides; under torchrun on rank 0 only.

        For a list of micro-batches it is a list of what the model returns for each.
        """
        return self._step(inputs, target, weight, outputs=outputs)

    def _step(
        self,
        inputs: Inputs,
        target: object,
        weight: float = 1.0,
        *,
        outputs: bool = False,
        deferred: bool = False,
    ) -> tuple[torch.Tensor, object]:
        scale = weight * self.scaler.get_scale()
        with (
            self._gathered(),
            hooks_once(self._held, self._reducer, deferred=deferred),
            collected(self.local_stages.shared, self._reducer),
        ):
            terms, found = self._run(RunRequest.TRAIN, inputs, target, outputs, scale, deferred)
        self.step_number += 1
        self._calls = 0
        assert terms is not None  # training makes a loss, or raises
        return _sum_of(terms), found

    def loss(self, inputs: Inputs = None, target: object = None) -> torch.Tensor:
        """As `step`, for loops that call `backward()` of a loss: only that adds the gradients.

        Forward and backward of every micro-batch run here. `backward()`, which every rank calls
        alike and once, multiplies the gradients by that of the loss, as in `(loss / 4).backward()`.
        They are averaged over replicas in `no_sync` too; what `step` has left there to be averaged,
        only `step` averages. Where gradients are disabled, it is `evaluate`.

        Raises:
            UsageError: as `step`; in fp16; and where inputs require gradients.
        """
        if not torch.is_grad_enabled():
            return self.evaluate(inputs, target)
        refuse_deferred(self.scaler)
        if self._shards is not None:
            self._shards.refuse_kept()
        with contextlib.nullcontext() if self._reducer is None else self._reducer.pause(False):
            return deferred(
                lambda: self._step(inputs, target, deferred=True)[0], list(self.parameters())
            )

    def evaluate(self, inputs: Inputs = None, target: object = None) -> torch.Tensor:
        """The loss of a mini-batch, without gradients; every rank gets it.

        Stages are in train or eval mode as `train()` and `eval()` say.
        """
        return self.evaluate_with_outputs(inputs, target, outputs=False)[0]

    def evaluate_with_outputs(
        self, inputs: Inputs = None, target: object = None, *, outputs: bool = True
    ) -> tuple[torch.Tensor, object]:
        """As `evaluate`, and what the model returns besides; under torchrun on rank 0 only."""
        terms, found = self.evaluate_terms(inputs, target, outputs=outputs)
        return _sum_of(terms), found

    def evaluate_terms(
        self, inputs: Inputs = None, target: object = None, *, outputs: bool = True
    ) -> tuple[torch.Tensor, object]:
        """The same, with the terms of the loss that `loss_weights` counts for, in a row."""
        terms, found = self._run(RunRequest.EVALUATE, inputs, target, outputs)
        assert terms is not None  # evaluation makes a loss, or raises
        return terms, found

    def forward(self, inputs: Inputs = None) -> object:
        """What the model returns, without gradients; under torchrun on rank 0, None elsewhere.

        Stages are in train or eval mode as `train()` and `eval()` say. Where an output of the batch
        does not follow from those of its micro-batches, eval mode takes the batch in one piece.
        """
        return self._run(RunRequest.INFER, inputs, None, True)[1]

    def in_session(self, inputs: Inputs, held: HeldState) -> object:
        """As a call, with the state of a session and without it in what is returned."""
        return self._run(RunRequest.INFER, inputs, None, True, session=held)[1]

    def _run(
        self,
        work: RunRequest,
        inputs: Inputs,
        target: object,
        outputs: bool,
        loss_scale: float = 1.0,
        deferred: bool = False,
        session: HeldState | None = None,
    ) -> tuple[torch.Tensor | None, object]:
        refuse_transforms()
        self.check_places()
        seed = self.seed
        if not (self.training or work is RunRequest.TRAIN):
            if self._draws_in_eval:
                seed = seed_in_eval(seed, self._calls)
            self._calls += 1
        key = RandomKey(seed, self.step_number)
        read, self._read = self._read, 0
        call = CallArgs(
            work,
            self.training,
            inputs,
            target,
            outputs,
            key,
            loss_scale,
            read,
            deferred,
            session,
        )
        with self._gathered():
            self.local_stages.spread()
            return self.execution.run(call)

    def _gathered(self, *, blocks: bool = False) -> contextlib.AbstractContextManager[None]:
        """Around what computes with the weights; or with all of them at once."""
        if self._shards is None:
            return contextlib.nullcontext()
        return self._shards.gathered(blocks=blocks)


def _sum_of(terms: torch.Tensor) -> torch.Tensor:
    return terms[0] if len(terms) == 1 else terms.sum()
