"""Sizes of a graph that are free: named dimensions of its inputs that may differ from call to call.

What follows from them is an expression of `runtime.sizes`. The number of samples is a size too
where it stands in such an expression; by itself it goes by a value's `batch_dim`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.ir.arguments import Argument, BatchMultiple, leaves
from gpipe_compiler.runtime.sizes import (
    Dim,
    Expression,
    Operation,
    Operator,
    Requirement,
    Size,
    sizes_in,
)

BATCH = Size("batch", of=("", 0), example=0)
"""Stands for the samples in a micro-batch."""


UNKNOWN_LINE = "by an operator of torch's, called at a line that is not known"
"""Stands where a requirement's line does."""


LARGEST_BATCH = 1 << 20
"""Samples beyond which no batch is expected: larger numbers are compared with something else."""


@dataclass(frozen=True, slots=True)
class SampleRule:
    """A line that distinguishes batches, or samples, by nothing that a sample holds.

    Attributes:
        samples: from how many on it may do something else.
    """

    samples: int
    source: SourceLocation | None = None


def in_order(rules: Iterable[SampleRule]) -> tuple[SampleRule, ...]:
    """Those of different numbers, the smallest first."""
    by_number = {rule.samples: rule for rule in rules}
    return tuple(by_number[number] for number in sorted(by_number))


def is_free(dim: object) -> bool:
    """Whether a number follows from free sizes: from others than the number of samples."""
    return isinstance(dim, Expression) and any(size != BATCH for size in dim.sizes())


def named(shapes: Iterable[Iterable[Dim]]) -> tuple[Size, ...]:
    """The sizes in shapes, each once."""
    return tuple(dict.fromkeys(size for shape in shapes for size in sizes_in(tuple(shape))))


_STEPS = (-1, 1, -2, 2, -4, 4, -8, 8, -16, 16, -32, 32)

SMALLEST = 2
"""torch takes a dimension of one for a constant, which broadcasts."""


def other_sizes(
    sizes: Sequence[Size], requires: Iterable[Requirement]
) -> tuple[dict[str, int], ...]:
    """Sizes near the example's that are others and fulfil what is required, each by another step;
    and larger ones alone, for models that are told how much of the example is no padding.

    Those that are equal in the example change together, as torch may ask for that and not say so;
    where no step does, they stay. () where all do.
    """
    example, required = {size.name: size.example for size in sizes}, tuple(requires)
    steps = _STEPS, tuple(step for step in _STEPS if step > 0)
    near, larger = (_changed(sizes, required, each) for each in steps)
    distinct = (near,) if near == larger else (near, larger)
    return tuple(found for found in distinct if found != example)


def _changed(
    sizes: Sequence[Size], required: Sequence[Requirement], steps: Sequence[int]
) -> dict[str, int]:
    found = {size.name: size.example for size in sizes}
    for place, example in enumerate(dict.fromkeys(found.values())):
        equal = [size.name for size in sizes if size.example == example]
        for step in (*steps[place % 4 :], *steps[: place % 4]):
            tried = found | dict.fromkeys(equal, example + step)
            if example + step >= SMALLEST and all(item.holds(tried) for item in required):
                found = tried
                break
    return found


_MOST_TRIED = 3
"""Groups of sizes up to which every choice among them is tried."""


def least_sizes(
    sizes: Sequence[Size],
    requires: Sequence[Requirement],
    fits: Callable[[Mapping[str, int]], bool],
) -> dict[str, int]:
    """By name, the least that sizes can be, where that is below SMALLEST.

    Those that are equal in the example are tried together. Each is tried by itself, and then with
    the others; a size that has to follow, as that of a mask over old and new tokens, goes along.

    Args:
        fits: whether some can be these numbers while the others are as in the example.
    """
    groups = []
    least: dict[str, int] = {}

    def tried(numbers: Mapping[str, int]) -> bool:
        whole = _with_dependent(sizes, numbers, requires)
        if whole is None or not fits(whole):
            return False
        for name in whole.keys() - numbers:
            least[name] = min(whole[name], least.get(name, SMALLEST))
        return True

    for example in dict.fromkeys(size.example for size in sizes):
        names = [size.name for size in sizes if size.example == example]
        fitting = [number for number in range(SMALLEST) if tried(dict.fromkeys(names, number))]
        if SMALLEST - 1 in fitting:
            groups.append(dict.fromkeys(names, fitting[0]))
    count = len(groups)
    choices = [count] if count > _MOST_TRIED else range(2, count + 1)
    together = [
        {name: number for group in chosen for name, number in group.items()}
        for several in choices
        for chosen in itertools.combinations(groups, several)
    ]
    if not all(map(tried, together)):
        return {}
    least |= {name: number for group in groups for name, number in group.items()}
    return {name: number for name, number in least.items() if number < SMALLEST}


def _with_dependent(
    sizes: Sequence[Size], numbers: Mapping[str, int], requires: Sequence[Requirement]
) -> dict[str, int] | None:
    """Numbers of some sizes that fulfil what is required while the others are as in the example:
    where they do not, with a further one, nearest to its example; None where that is not enough."""
    examples = {size.name: size.example for size in sizes}

    def hold(tried: Mapping[str, int]) -> bool:
        found = {**examples, **tried}
        return all(demand.holds(found) for demand in requires)

    if hold(numbers):
        return dict(numbers)
    largest = sum(examples.values())
    others = {name: number for name, number in examples.items() if name not in numbers}
    for example in dict.fromkeys(others.values()):
        names = [name for name, number in others.items() if number == example]
        for number in sorted(range(largest), key=lambda number: abs(number - example)):
            tried = {**numbers, **dict.fromkeys(names, number)}
            if hold(tried):
                return tried
    return None


def at_batch(dim: Dim, samples: int) -> Dim:
    """A dimension for a number of samples, in terms of the other sizes alone."""
    if dim == BATCH:
        return samples
    if not isinstance(dim, Operation):
        return dim
    left, right = at_batch(dim.left, samples), at_batch(dim.right, samples)
    if isinstance(left, int) and isinstance(right, int):
        return dim.applied(left, right)
    return Operation(dim.applied, left, right)


def grows_with_batch(number: object) -> bool:
    """Whether a template of a number is a fixed multiple of the samples."""
    if isinstance(number, Operation) and number.applied is Operator.MULTIPLY:
        sides = number.left, number.right
        return sum(map(grows_with_batch, sides)) == 1 == sum(BATCH in sizes_in((s,)) for s in sides)
    return isinstance(number, BatchMultiple) or number == BATCH


def asked(template: Argument) -> tuple[Dim, ...]:
    """The numbers in a template that vary from call to call, that of the samples among them."""
    return tuple(
        BATCH if isinstance(leaf, BatchMultiple) else leaf
        for leaf in leaves(template)
        if isinstance(leaf, BatchMultiple | Expression)
    )


def follows(dim: Dim, known: Collection[Dim]) -> bool:
    """Whether a number can be computed from dimensions that are known."""
    if isinstance(dim, int) or dim in known:
        return True
    return isinstance(dim, Operation) and follows(dim.left, known) and follows(dim.right, known)


def is_told(template: Argument, known: Collection[Dim]) -> bool:
    """Whether the numbers in a template follow from sizes that are known."""
    return all(follows(dim, known) for dim in asked(template))
