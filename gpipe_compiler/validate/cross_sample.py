"""The error for a model whose samples depend on each other, with the op in which they meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.batch_dims import FoundBatch
from gpipe_compiler.frontend.comparable_runs import MANY, EvenDraws, with_other_weights
from gpipe_compiler.frontend.own_statements import TORCHS_NAMESPACES
from gpipe_compiler.frontend.user_code import line_of_forward
from gpipe_compiler.ir import FunctionCall, Graph, Mode, Op, ops_within
from gpipe_compiler.ir.own_functions import OwnFunction
from gpipe_compiler.passes.batch_gates import first_gate
from gpipe_compiler.passes.cross_sample_ops import batchnorm_ops, mixing_ops
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.plan import Plan
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.spec import BatchNorm
from gpipe_compiler.validate.rounding import double
from gpipe_compiler.validate.some_samples import (
    PARTS,
    SAMPLES,
    first_numbering,
    mixing_among,
    on_meta,
    refuse_numbering_in_loss,
    values_of,
    values_of_parts,
)

ALONE = (
    "compile with --microbatches 1, or accept with --per-microbatch that every micro-batch is "
    "taken by itself"
)


def refuse_mixing(found: FoundBatch, plan: Plan) -> None:
    """Refuses a plan with several micro-batches of samples that depend on each other.

    Raises:
        ModelError: naming the input and its dimension, and the line of the op at fault.
    """
    parts = plan.microbatches * (plan.replicas if plan.training else 1)
    graph = plan.graph
    assert graph is not None
    if parts == 1:
        return
    op = _first_mixing(graph, found.subject.model) if found.mixes else first_numbering(graph)
    if not found.mixes and op is None:
        _refuse_gates(graph)
        refuse_numbering_in_loss(graph)
        if plan.training:
            _refuse_mixing_in_training(plan, graph, found.subject.model)
        return
    first = next(source for source in graph.inputs if source.batched)
    what = "the model" if op is None else op.name
    raise ModelError(
        f"{what} takes the samples of a batch together, if they lie in dimension "
        f"{first.batch_dim} of {first.name}: outputs for some of them are not those rows of the "
        "outputs for all; no other dimension was found along which they are",
        location=line_of_forward(found.subject.model) if op is None else op.source,
        hint=(_OBSERVING if op is not None and "_obs_" in op.name else "")
        + f"say with --batch-dim {first.name}=1 which dimension is the batch, and with "
        "--batch-dim NAME=none which inputs all samples share; compile with --microbatches 1; or "
        "accept with --per-microbatch that every micro-batch is taken by itself",
    )


_OBSERVING = (
    "freeze observers, which take the range of all samples, once they have seen enough: "
    "model.apply(torch.ao.quantization.disable_observer); or "
)


def _refuse_gates(graph: Graph) -> None:
    """Refuses bounds on what is taken over the batch, whatever the example shows."""
    op = first_gate(graph)
    if op is not None:
        raise ModelError(
            f"{op.name} sets a bound to what is taken over the samples of a batch together: a "
            "micro-batch may lie on another side of it than the batch",
            location=op.source,
            hint=ALONE,
        )


def _refuse_mixing_in_training(plan: Plan, graph: Graph, model: nn.Module) -> None:
    """Refuses what takes samples together in training alone.

    Beside BatchNorm, which hides what follows, and where something writes to buffers, that is left
    to validation; so is what takes the whole mini-batch by `BatchNorm.EXACT`.
    """
    joint = plan.batchnorm is BatchNorm.EXACT and mixing_ops(graph) - graph.loss_only
    if on_meta(graph) or joint:
        return
    _refuse_mixing_backward(graph)
    if not any(map(differs_in_training, graph.ops)):
        return
    if batchnorm_ops(graph, model) or effects(graph).state_writes:
        return
    op = _first_in_training(graph)
    if op is not None:
        raise ModelError(
            f"{op.name} takes the samples of a batch together in training: what it makes of some "
            "of them is not those rows of what it makes of all",
            location=op.source,
            hint=ALONE,
        )


def _refuse_mixing_backward(graph: Graph) -> None:
    """Refuses a hook, or a function with a backward of its own, that takes gradients together."""
    owners = list(ops_with_own_backward(graph))
    if not owners:
        return
    wide = {name: double(tensor) for name, tensor in graph.tensors.items()}

    def run(rows: Sequence[int]) -> object:
        with torch.no_grad(), EvenDraws():
            return values_of(graph, wide, rows, SAMPLES, training=True)

    try:
        with torch.random.fork_rng(), quiet():
            torch.manual_seed(0)
            found = function_that_mixes(run, SAMPLES, PARTS)
    except Exception:  # noqa: BLE001  # whatever the user's ops raise
        return
    if found is None:
        return
    what = "a hook on gradients" if found.is_hook else f"the backward of {found.name}"
    raise ModelError(
        f"{what} takes the samples of a batch together: what it makes of some of their gradients "
        "is not those rows of what it makes of all, or does not add up to it",
        location=next((op.source for op, own in owners if own == found.function), None),
        hint=f"{ALONE}; a bound on the gradient of each sample is exact",
    )


def differs_in_training(op: Op) -> bool:
    """Whether an op does something else in training, what it draws and writes apart."""
    inner = ops_within(op)
    return any(one.mode is not Mode.ALWAYS or one.has_choices for one in inner)


def _first_in_training(graph: Graph) -> Op | None:
    """The first op in training that makes rows which are wrong, of those that the loss takes.

    None where they are right, or where that is not seen: where the graph does not run in 64 bits.
    """
    wide = {name: double(tensor) for name, tensor in graph.tensors.items()}
    runs = values_of_parts(graph, wide, SAMPLES, PARTS, training=True)
    return next((both.root() for both in runs if any(map(both.is_wrong, graph.loss_inputs))), None)


def _first_mixing(graph: Graph, model: nn.Module) -> Op | None:
    """The first op in eval mode that takes rows which are right and makes some that are not.

    None where it cannot be found: on meta, or where the graph does not run on so few samples. What
    the first weights hide is looked for with others.
    """
    if on_meta(graph):
        return None
    moved = with_other_weights(model)
    first: Mapping[str, torch.Tensor] = {}
    others = first if moved is None else dict(moved.named_parameters())
    tried = ((SAMPLES, first), (SAMPLES, others), (MANY, first))
    found = (mixing_among(graph, count, other) for count, other in tried)
    return next((op for op in found if op is not None), None)


# --- functions whose own backward takes the samples of a batch together ---------------------------

_Operator = torch._ops.OpOverload

_SCALES = (1e-6, 1e-3, 1.0, 1e3, 1e6)
"""By which gradients are larger than those of a normal distribution."""

_TOLERANCE = 0.02
"""Of the largest entry: the backward may round to 16 bits."""


@dataclass(frozen=True, eq=False)
class _Called:
    """One call of a function that has a backward of its own."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    @property
    def name(self) -> str:
        own = self.function
        return own.cls.__name__ if isinstance(own, OwnFunction) else str(own)

    @property
    def is_hook(self) -> bool:
        """Whether its forward is its argument, and its backward a hook on the gradient."""
        return isinstance(self.function, OwnFunction) and bool(self.function.text)


def has_own_backward(function: object) -> bool:
    """Whether a function is one of the user's, or an operator that is not of torch's own."""
    if isinstance(function, torch._ops.OpOverload):
        return function.namespace not in TORCHS_NAMESPACES
    return isinstance(function, OwnFunction)


def ops_with_own_backward(graph: Graph) -> Iterator[tuple[Op, Callable[..., Any]]]:
    """The ops of a graph that call such functions, regions included."""
    for op in graph.ops:
        for inner in ops_within(op):
            if isinstance(inner.call, FunctionCall) and has_own_backward(inner.call.function):
                yield op, inner.call.function


def function_that_mixes(
    run: Callable[[Sequence[int]], object], samples: int, parts: Sequence[Sequence[int]]
) -> _Called | None:
    """A call whose forward gives rows of their own samples, and whose backward does not.

    Args:
        run: runs a graph on these samples, of this number.
        parts: all of the samples, told apart.
    """
    whole = _calls(run, range(samples))
    shorter = [_calls(run, part) for part in parts]
    if any(len(calls) != len(whole) for calls in shorter):
        return None
    for number, call in enumerate(whole):
        others = [calls[number] for calls in shorter]
        split = _Split(call, others, samples, parts)
        if (call.is_hook or split.forward_splits()) and not split.backward_splits():
            return call
    return None


def _calls(run: Callable[[Sequence[int]], object], rows: Sequence[int]) -> list[_Called]:
    found: list[_Called] = []
    within = False

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
            nonlocal within
            if within or not has_own_backward(function):
                return original(function, *args, **kwargs)
            given = tuple(map(_copied, (*args, *_in_order(function, len(args), kwargs))))
            found.append(_Called(function, given))
            within = True  # what it calls goes back by its own backward
            try:
                return original(function, *args, **kwargs)
            finally:
                within = False

        return call

    with (
        mock.patch.object(OwnFunction, "__call__", noting(OwnFunction.__call__)),
        mock.patch.object(_Operator, "__call__", noting(_Operator.__call__)),
    ):
        run(rows)
    return found


def _in_order(
    function: Callable[..., Any], given: int, kwargs: Mapping[str, object]
) -> Iterator[object]:
    """The arguments after those that are given by their places."""
    if isinstance(function, _Operator):
        for argument in function._schema.arguments[given:]:
            yield kwargs.get(argument.name, argument.default_value)


def _copied(item: object) -> object:
    return item.detach().clone() if isinstance(item, torch.Tensor) else item


@dataclass(frozen=True, eq=False)
class _Split:
    """A call for all samples beside those for parts of them."""

    call: _Called
    others: Sequence[_Called]
    samples: int
    parts: Sequence[Sequence[int]]

    def forward_splits(self) -> bool:
        """Whether what it gives for some samples is those rows of what it gives for all."""
        with torch.no_grad():
            whole = self.call.function(*self.call.args)
            given = [other.function(*self._args(n)) for n, other in enumerate(self.others)]
        if not isinstance(whole, torch.Tensor):
            return False
        dim = _grown(whole, given[0])
        dims = [_grown(*pair) for pair in zip(self.call.args, self.others[0].args, strict=True)]
        if dim is None and any(found is not None for found in dims):
            return False  # such as a mean: how its gradients are shared is up to the loss
        pairs = zip(given, self.parts, strict=True)
        return all(
            isinstance(made, torch.Tensor) and _alike(self._rows(whole, dim, part), made)
            for made, part in pairs
        )

    def backward_splits(self) -> bool:
        """Whether gradients for the parts come to those for all, whatever their size."""
        like = self._run(self.call.args)[0]
        dim = _grown(like, self._run(self._args(0))[0])
        for scale in _SCALES:
            given = scale * torch.randn_like(like)
            if dim is None:
                first = scale * torch.randn_like(like)
                pieces = [first, given - first]
            else:
                pieces = [self._rows(given, dim, part) for part in self.parts]
            if not self._comes_to(given, pieces):
                return False
        if dim is None or not self.call.is_hook:
            return True
        # What is not finite in one sample may not reach the others.
        given = torch.randn_like(like)
        given.select(dim, 0).fill_(math.inf)
        (row, *_), (of_part, *_) = (
            self._run(self.call.args, given)[1],
            self._run(self._args(1), self._rows(given, dim, self.parts[1]))[1],
        )
        return row is None or _alike(self._rows(row, dim, self.parts[1]), of_part)

    def _comes_to(self, given: torch.Tensor, pieces: Sequence[torch.Tensor]) -> bool:
        """Whether the gradients of the pieces are those of the whole, or add up to them."""
        whole = self._run(self.call.args, given)[1]
        made = [self._run(self._args(n), piece)[1] for n, piece in enumerate(pieces)]
        wanted = [item for item in self.call.args if _is_float(item)]
        shorter = [item for item in self.others[0].args if _is_float(item)]
        for place, gradient in enumerate(whole):
            of_parts = [gradients[place] for gradients in made]
            if gradient is None or any(piece is None for piece in of_parts):
                continue
            dim = _grown(wanted[place], shorter[place])
            if dim is None:
                if not _alike(gradient, torch.stack(of_parts).sum(0)):
                    return False
            elif not all(
                _alike(self._rows(gradient, dim, part), piece)
                for part, piece in zip(self.parts, of_parts, strict=True)
            ):
                return False
        return True

    def _run(
        self, args: Sequence[Any], given: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Sequence[Any]]:
        """What the function gives, and the gradients of what is not integers."""
        leaves = [item.clone().requires_grad_() if _is_float(item) else item for item in args]
        with torch.enable_grad():
            made: Any = self.call.function(*leaves)
        if given is None:
            return made, ()
        wanted = [leaf for leaf in leaves if _is_float(leaf)]
        return made, torch.autograd.grad(made, wanted, given, allow_unused=True)

    def _args(self, number: int) -> list[Any]:
        return [
            self._rows(item, _grown(item, other), self.parts[number])
            if isinstance(item, torch.Tensor)
            else other
            for item, other in zip(self.call.args, self.others[number].args, strict=True)
        ]

    def _rows(self, tensor: torch.Tensor, dim: int | None, chosen: Sequence[int]) -> torch.Tensor:
        if dim is None:
            return tensor
        each = tensor.shape[dim] // self.samples
        rows = [sample * each + row for sample in chosen for row in range(each)]
        return tensor.index_select(dim, torch.tensor(rows))


def _is_float(item: object) -> bool:
    return isinstance(item, torch.Tensor) and item.is_floating_point()


def _grown(whole: object, part: object) -> int | None:
    """The dimension in which a tensor is larger for more samples."""
    if not isinstance(whole, torch.Tensor) or not isinstance(part, torch.Tensor):
        return None
    pairs = zip(whole.shape, part.shape, strict=True)
    return next((dim for dim, (more, few) in enumerate(pairs) if more != few), None)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not _is_float(one):
        return torch.equal(one, other)
    allowed = _TOLERANCE * float(one.abs().nan_to_num(0, 0, 0).max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=allowed, equal_nan=True)
