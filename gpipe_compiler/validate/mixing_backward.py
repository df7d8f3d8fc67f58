"""Finds functions whose own backward takes the samples of a batch together, as hooks that clip do.

A bound on the norm of all gradients shows only where they exceed it. So gradients of many sizes go
through each function, for all samples and for some of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from gpipe_compiler.frontend.comparable_runs import generator_states
from gpipe_compiler.frontend.own_statements import TORCHS_NAMESPACES
from gpipe_compiler.ir import FunctionCall, Graph, Op
from gpipe_compiler.ir.own_functions import OwnFunction

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

    def run(
        self, args: Sequence[Any], given: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Sequence[Any]]:
        """What the function gives, and the gradients of what is not integers."""
        leaves = [item.clone().requires_grad_() if _is_float(item) else item for item in args]
        with torch.enable_grad():
            made: Any = self.function(*leaves)
        if given is None:
            return made, ()
        wanted = [leaf for leaf in leaves if _is_float(leaf)]
        return made, torch.autograd.grad(made, wanted, given, allow_unused=True)

    def backward_draws(self) -> bool:
        """Whether the backward draws random numbers."""
        made = self.run(self.args)[0]
        ends = []
        for given in (None, torch.randn_like(made)):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.run(self.args, given)
                ends.append(generator_states())
        return any(not torch.equal(*pair) for pair in zip(*ends, strict=True))


def has_own_backward(function: object) -> bool:
    """Whether a function is one of the user's, or an operator that is not of torch's own."""
    if isinstance(function, torch._ops.OpOverload):
        return function.namespace not in TORCHS_NAMESPACES
    return isinstance(function, OwnFunction)


def ops_with_own_backward(graph: Graph) -> Iterator[tuple[Op, Callable[..., Any]]]:
    """The ops of a graph that call such functions."""
    for op in graph.ops:
        if isinstance(op.call, FunctionCall) and has_own_backward(op.call.function):
            yield op, op.call.function


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
        like = self.call.run(self.call.args)[0]
        dim = _grown(like, self.call.run(self._args(0))[0])
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
            self.call.run(self.call.args, given)[1],
            self.call.run(self._args(1), self._rows(given, dim, self.parts[1]))[1],
        )
        return row is None or _alike(self._rows(row, dim, self.parts[1]), of_part)

    def _comes_to(self, given: torch.Tensor, pieces: Sequence[torch.Tensor]) -> bool:
        """Whether the gradients of the pieces are those of the whole, or add up to them."""
        whole = self.call.run(self.call.args, given)[1]
        made = [self.call.run(self._args(n), piece)[1] for n, piece in enumerate(pieces)]
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
