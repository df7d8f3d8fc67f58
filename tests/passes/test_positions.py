"""What tensors of positions are said to hold at one size is what they hold at other sizes."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler.ir import Ref
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.positions.coordinates import (
    Affine,
    Cases,
    Compared,
    Condition,
    Element,
    Every,
    Negated,
    distances,
    is_causal,
)
from gpipe_compiler.passes.positions.known import Positions
from gpipe_compiler.passes.shapes import annotate

COMPARES = (operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne)
SHAPES = (
    (lambda b, x: b.method("view", x, 1, -1)),
    (lambda b, x: b.method("unsqueeze", x, -1)),
    (lambda b, x: b.call(operator.getitem, x, (None, slice(None)))),
)


def number_at(affine: Affine, place: tuple[int, ...]) -> float:
    return affine.offset + sum(w * i for w, i in zip(affine.weights, place, strict=True))


def holds(condition: Condition, place: tuple[int, ...]) -> bool:
    match condition:
        case Compared(left=left, equal=equal):
            value = number_at(left, place)
            return value == 0 if equal else value <= 0
        case Every(parts=parts):
            return all(holds(part, place) for part in parts)
        case Negated(part=part):
            return not holds(part, place)
        case bool():
            return condition


def element_at(element: Element, place: tuple[int, ...]) -> float:
    if not isinstance(element, Cases):
        return holds(element, place)
    (value,) = [number_at(affine, place) for when, affine in element.cases if holds(when, place)]
    return value


Drawn = list[tuple[int, int, int, int]]


def arithmetic(builder: Any, recipe: Drawn, length: int) -> Any:
    """A graph of some ops on positions; the recipe says which, on what, and with what number."""
    b = builder(x=torch.zeros(3, 2))
    row = b.call(torch.arange, length)
    made = [SHAPES[0](b, row), SHAPES[1](b, row), SHAPES[2](b, row)]
    masks = [b.call(operator.le, made[0], made[1])]
    for kind, one, other, constant in recipe:
        first, second = made[one % len(made)], made[other % len(made)]
        mask, mask_too = masks[one % len(masks)], masks[other % len(masks)]
        match kind:
            case 0:
                made.append(b.call(operator.add, first, constant))
            case 1:
                made.append(b.call(operator.sub, first, second))
            case 2:
                made.append(b.call(operator.mul, first, constant))
            case 3:
                made.append(b.call(torch.where, mask, first, constant))
            case 4:
                masks.append(b.call(COMPARES[constant % len(COMPARES)], first, second))
            case 5:
                masks.append(b.call(operator.and_, mask, mask_too))
            case 6:
                masks.append(b.call(operator.or_, mask, mask_too))
            case 7:
                masks.append(b.call(operator.invert, mask))
            case 8:
                wide = b.method("expand", mask, length, length)
                masks.append(b.call((torch.tril, torch.triu)[other % 2], wide, constant))
            case 9:
                wide = b.method("expand", first, length, length)
                made.append(b.method("masked_fill", wide, mask, constant))
            case 10:
                made.append(b.method("transpose", first, 0, 1))
            case _:
                made.append(b.method("cumsum", b.call(operator.ne, first, first), 0))
    return b.graph((Ref("x"),))


recipes = st.lists(
    st.tuples(st.integers(0, 11), st.integers(0, 99), st.integers(0, 99), st.integers(-3, 3)),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(recipe=recipes)
def test_elements_are_those_at_other_sizes(builder: Any, recipe: Drawn) -> None:
    graph = annotate(arithmetic(builder, recipe, 5), 3)
    known = Positions(graph, effects(graph))
    assert graph.ops[0].name in known
    for length in (1, 2, 7):
        values = Interpreter(arithmetic(builder, recipe, length), {}).run({"x": torch.zeros(3, 2)})
        for op in graph.ops:
            element = known.element(Ref(op.name))
            if element is None:
                continue
            tensor = values[op.name]
            for place in itertools.product(*map(range, tensor.shape)):
                assert element_at(element, place) == tensor[place].item()
            if isinstance(element, Cases):
                continue
            lower = torch.ones(length, length, dtype=torch.bool).tril()
            causal = torch.equal(tensor.expand(length, length), lower)
            assert causal or not is_causal(distances(element, 2))
            held = distances(element, 2, length)
            assert not held or is_causal(held) is causal
            assert not held or all(held.values()) is bool(tensor.all())
