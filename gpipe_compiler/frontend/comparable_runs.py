"""Runs of a model that can be compared with each other, and that show what it computes.

What is random is the same for every sample, however many samples there are. And a model is run with
other weights than those that it begins with: these may hide what it computes, for behind a gate of
zero, such as a residual branch or an adapter begins with, anything may happen to the samples of a
batch. What differs between two runs, and is no rounding, is told in words.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from gpipe_compiler.dispatching import PlainDispatchMode
from gpipe_compiler.frontend.probing import DISTINCT, repeated
from gpipe_compiler.frontend.state import isolated
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.train.comparison import ComparedKind, compare, dense

_CHANCES = ("p", "dropout_p")


class EvenDraws(PlainDispatchMode):
    """Lets ops draw one and the same number everywhere, and drop nothing.

    Two runs of a model on different samples can then be compared. Floating draws are 0.5, integers
    the smallest that can be drawn, permutations leave everything in place.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one kernel, and evens out what it draws."""
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **given)
        name = func.overloadpacket.__name__
        names = (argument.name for argument in func._schema.arguments)
        arguments = {**dict(zip(names, args, strict=False)), **given}
        if "dropout" in name or "attention" in name:
            chances = {key: 0.0 for key in _CHANCES if key in arguments}
            return func(**{**arguments, **chances})
        drawn = func(*args, **given)
        for tensor in tree_leaves(drawn):
            if not isinstance(tensor, torch.Tensor):
                continue
            if name == "randperm":
                tensor.copy_(torch.arange(len(tensor)))
            elif tensor.is_floating_point():
                tensor.fill_(0.5)
            else:
                tensor.fill_(arguments.get("low", 0))
        return drawn


def are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal but for rounding."""
    rows = compare({ComparedKind.OUTPUT: {"": other}}, {ComparedKind.OUTPUT: {"": one}})
    return all(row.passed for row in rows)


def double(tensor: torch.Tensor) -> torch.Tensor:
    """Floats in 64 bits; anything else as it is."""
    return tensor.double() if tensor.is_floating_point() else tensor


def generator_states() -> list[torch.Tensor]:
    """Where torch's own generators stand: they move on when anything is drawn."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.extend(torch.cuda.get_rng_state_all())
    return states


def host_state() -> tuple[object, ...]:
    """That of the generators of Python and, where it is loaded, of NumPy."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    name, keys, *rest = numpy.random.get_state()
    return random.getstate(), (name, keys.tobytes(), *rest)


def restore_host(state: tuple[Any, ...]) -> None:
    """Puts these generators back to where they stood."""
    random.setstate(state[0])
    numpy = sys.modules.get("numpy")
    if numpy is not None and len(state) > 1:
        name, keys, *rest = state[1]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


@contextlib.contextmanager
def host_draws_alike() -> Iterator[None]:
    """Around a run in which Python and NumPy draw what they draw in any other such run."""
    kept = host_state()
    random.seed(_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_SEED)
    try:
        yield
    finally:
        restore_host(kept)


MANY = 129
"""Samples of a trial of what shows beyond a number of samples, as where the first 64 are masked."""

_MANY_S = 0.3
"""Seconds that such a trial may take, by those of one of few samples; else it has fewer samples."""

_KNOWN_S = 10.0
"""The same where a rule is known that decides by a batch's size."""


def larger_batch(few: int, seconds: float) -> int:
    """The samples of a larger trial, by the seconds that one of few took; 0 for no trial."""
    samples = min(MANY, int(few * _MANY_S / max(seconds, 1e-6)))
    return samples if samples > 2 * few else 0


def may_be_tried(samples: int, few: int, seconds: float) -> bool:
    """Whether a trial of this size is worth its time, by the seconds that one of few samples took.

    Its size is one at which a known rule decides otherwise.
    """
    return samples * seconds <= _KNOWN_S * few


LARGEST_COPIED = 1 << 30
"""Bytes of parameters up to which a model is copied to be given other weights."""

_SHARE = 0.1
"""How far weights are moved, as a share of their size, and of that at which layers begin."""

_SEED = 20262


def with_other_weights(model: nn.Module) -> nn.Module | None:
    """A copy of a model in which every parameter that is trained has moved a little.

    None where none is trained, the model has no numbers, or too many to be copied.
    """
    parameters = list(model.parameters())
    size = sum(parameter.nbytes for parameter in parameters)
    trained = any(map(_is_trained, parameters))
    if not trained or size > LARGEST_COPIED or any(p.is_meta for p in parameters):
        return None
    copied = isolated(model)
    random = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in filter(_is_trained, copied.parameters()):
            count, step = parameter.numel(), _step(parameter)
            noise = torch.randn(min(count, DISTINCT), generator=random).to(parameter)
            if parameter.is_contiguous():
                # Noise for all of it at once would take as much memory as it does.
                for piece in torch.split(parameter.view(-1), DISTINCT):
                    piece.add_(noise[: len(piece)], alpha=step)
            else:
                parameter.add_(repeated(noise, parameter.shape), alpha=step)
    return copied


def settles_in_eval(subject: Subject) -> bool:
    """Whether parameters that forward writes to in eval mode are after a second call what they were
    after the first, as those under a mask are; of other weights than the first ones."""
    model = with_other_weights(isolated(subject.model).eval())
    if model is None:
        return False
    try:
        with torch.no_grad(), torch.random.fork_rng(), quiet():
            own = subject.with_example(torch.clone)
            model(*own.args, **own.kwargs)
            before = [parameter.clone() for parameter in model.parameters()]
            model(*own.args, **own.kwargs)
    except Exception:  # noqa: BLE001  # whatever the user's code raises
        return False
    return all(map(torch.equal, before, model.parameters()))


def other_values(tensor: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Values of the same type within the range of a tensor's own; about it where all are equal."""
    flat = tensor.detach().cpu().reshape(-1)
    if not len(flat):
        return tensor
    if not tensor.is_floating_point() and not tensor.is_complex() and bool((flat == flat[0]).all()):
        ends = min(int(flat[0]), 0), max(int(flat[0]), 1) + 1
        made = torch.randint(*ends, flat.shape, generator=random)
    elif tensor.dtype == torch.bool or tensor.is_complex() or not bool(flat.isfinite().all()):
        made = flat[torch.randperm(len(flat), generator=random)]
    elif not tensor.is_floating_point():
        ends = int(flat.min()), int(flat.max()) + 1
        made = torch.randint(*ends, flat.shape, generator=random).to(flat.dtype)
    else:
        low, high = flat.min().double(), flat.max().double()
        share = torch.rand(flat.shape, generator=random, dtype=torch.float64)
        if low < high:
            made = low + (high - low) * share
        else:
            made = low * (0.5 + share) if low else 2 * share - 1
    return made.to(tensor.dtype).reshape(tensor.shape).to(tensor.device)


def _is_trained(parameter: nn.Parameter) -> bool:
    """Whether it can be moved: for numbers of 8 bits torch has no sums."""
    fractions = parameter.is_floating_point() or parameter.is_complex()
    return parameter.requires_grad and fractions and parameter.itemsize > 1


def _step(parameter: torch.Tensor) -> float:
    """How far an entry moves: with a matrix of zeros as with one that has begun at random."""
    narrow = parameter.itemsize < torch.float32.itemsize
    norm = torch.linalg.vector_norm(parameter, dtype=torch.float32 if narrow else None)
    if not norm.isfinite():
        entries = parameter.abs().nan_to_num(0, 0, 0)
        norm = torch.linalg.vector_norm(entries, dtype=torch.float64)
    size = float(norm) / math.sqrt(max(parameter.numel(), 1))
    inputs = parameter[0].numel() if parameter.dim() > 1 and len(parameter) else 1
    return _SHARE * max(size, 1 / math.sqrt(max(inputs, 1)))


# --- what differs ---------------------------------------------------------------------------------

Results: TypeAlias = Mapping[str, torch.Tensor | None]
"""What a run gave, by readable name."""

GRADIENT = "gradient of "
"""What the names of gradients begin with."""

_EPSILONS = 128
"""Roundings of the largest element that a result may be off: graph and model run the same kernels
in the same order, and only the order in which gradients are summed may differ. A dropped term is
off by a share of the element, which is 10,000 times more."""

_NOISE = 16
"""Roundings of the largest gradient of all that a gradient may be off, or consist of and be zero: a
sum whose terms cancel, as for a bias before a BatchNorm or a weight of what is normalised next, is
left with the rounding of its terms, which are as large as those of other gradients. Such ones are
compared again in double precision, where a difference that is no rounding is still there."""


def different(expected: Results, actual: Results) -> Iterator[tuple[str, str]]:
    """Names of what differs, and how, in words."""
    for name in dict.fromkeys((*expected, *actual)):
        if name not in expected or name not in actual:
            yield name, f"{name} is given by the {'graph' if name in actual else 'model'} only"
            continue
        one, other = expected[name], actual[name]
        if one is None or other is None:
            if one is not other:
                yield name, f"{name} is None in the {'model' if one is None else 'graph'} only"
        elif one.layout != other.layout:
            yield name, f"{name} is {other.layout} instead of {one.layout}"
        elif one.shape != other.shape or one.dtype != other.dtype:
            yield (
                name,
                f"{name} is {tuple(other.shape)} {other.dtype} "
                f"instead of {tuple(one.shape)} {one.dtype}",
            )
        elif not one.is_meta and not _equal(dense(one), dense(other)):
            yield name, f"{name} is off by {_distance(dense(one), dense(other)):.3g}"


def is_noise(names: Iterable[str], expected: Results, actual: Results) -> bool:
    """Whether all of these are gradients, in both no larger than the rounding of others."""
    return all(
        name.startswith(GRADIENT) and _is_rounding(tensor, expected)
        for name in names
        for tensor in (expected.get(name), actual.get(name))
    )


def may_be_rounding(names: Iterable[str], expected: Results, actual: Results) -> bool:
    """Whether all of these are gradients, and differ by no more than the rounding of others."""
    pairs = ((name, expected.get(name), actual.get(name)) for name in names)
    return all(
        name.startswith(GRADIENT)
        and one is not None
        and other is not None
        and (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, other.layout)
        and _is_rounding(dense(one) - dense(other), expected)
        for name, one, other in pairs
    )


def _is_rounding(tensor: torch.Tensor | None, run: Results) -> bool:
    """Whether a tensor is no larger than the rounding of the largest gradient of a run."""
    if tensor is None or not tensor.is_floating_point():
        return False
    gradients = [tensor for name, tensor in run.items() if name.startswith(GRADIENT)]
    largest = max(map(_largest, gradients), default=0.0)
    return _largest(tensor) <= _NOISE * torch.finfo(tensor.dtype).eps * largest


def _largest(tensor: torch.Tensor | None) -> float:
    if tensor is None or tensor.is_meta or not tensor.numel():
        return 0.0
    return float(dense(tensor).abs().nan_to_num(torch.inf).max())


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bitwise equality, or up to rounding of the largest element."""
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    largest = one.abs().nan_to_num(0, 0, 0).max().item() if one.numel() else 0.0
    tolerance = _EPSILONS * torch.finfo(one.dtype).eps * largest
    return torch.allclose(other, one, rtol=0, atol=tolerance, equal_nan=True)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one.double() - other.double()).abs().max().item() if one.numel() else 0.0


# --- in 64 bits -----------------------------------------------------------------------------------


@contextlib.contextmanager
def widening(narrow: Collection[torch.dtype]) -> Iterator[None]:
    """Around a model in 64 bits: what it casts to these types stays in 64, and autocast is off."""
    with torch._C._DisableAutocast(), _Widened(narrow):
        yield


class _Widened(PlainDispatchMode):
    """Every op that is to make one of some types makes 64 bits."""

    def __init__(self, narrow: Collection[torch.dtype]) -> None:
        super().__init__()
        self._narrow = narrow

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        wide, named = tree_map(self._widened, (tuple(args), kwargs or {}))
        return func(*wide, **named)

    def _widened(self, argument: Any) -> Any:
        is_narrow = isinstance(argument, torch.dtype) and argument in self._narrow
        return torch.float64 if is_narrow else argument
