"""`core/nest.py`: values as text, equal for equal ones and for no others."""

from __future__ import annotations

import collections
import copy
import enum
import functools
import pathlib
import types
from dataclasses import dataclass, field
from decimal import Decimal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe_compiler.runtime.core.nest import as_text, values_of


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Settings:
    scale: float
    hidden: int = field(default=1, repr=False)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class Own(list[int]):
    pass


def doubled(x: float) -> float:
    return 2 * x


def scaled(factor: float):
    return lambda x: factor * x


DIFFERENT = [
    None,
    True,
    1,
    1.0,
    "1",
    b"1",
    float("nan"),
    1j,
    torch.float32,
    torch.bfloat16,
    torch.device("cpu"),
    torch.Size([1, 2]),
    (1, 2),
    [1, 2],
    {1, 2},
    frozenset({1, 2}),
    {1: 2},
    collections.OrderedDict({1: 2}),
    range(3),
    slice(1, 2),
    Colour.RED,
    Colour.BLUE,
    Settings(2.0),
    Settings(3.0),
    Settings(2.0, hidden=2),
    types.SimpleNamespace(scale=2.0),
    Slotted(1),
    Slotted(2),
    Own([1, 2]),
    Own([1, 3]),
    Decimal("1"),
    pathlib.PurePosixPath("a"),
    doubled,
    scaled(2.0),
    scaled(3.0),
    functools.partial(doubled, 1.0),
    functools.partial(doubled, 2.0),
    "long" * 100 + "a",
    "long" * 100 + "b",
    torch.nn.functional.relu,
    torch.tanh,
    torch.nn.ReLU,
]


def test_different_values_have_different_texts():
    texts = [as_text(value) for value in DIFFERENT]
    assert len(set(texts)) == len(texts)
    assert max(map(len, texts)) < 200


@pytest.mark.parametrize("value", DIFFERENT, ids=lambda value: type(value).__name__)
def test_a_copy_has_the_same_text(value: object):
    assert as_text(copy.deepcopy(value)) == as_text(value)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
NESTS = st.recursive(
    PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


@given(NESTS, NESTS)
def test_settings_are_told_apart_by_what_they_hold(one: object, other: object):
    assert (as_text(Slotted(one)) == as_text(Slotted(other))) == (repr(one) == repr(other))


def test_an_object_that_holds_itself_has_a_text():
    ring = types.SimpleNamespace(name="ring")
    ring.self = ring
    assert as_text(ring) == "SimpleNamespace(name='ring', self=...)"


def test_what_cannot_be_told_apart_is_refused():
    with pytest.raises(TypeError, match="generator"):
        as_text(value for value in ())


def test_tensors_are_no_values():
    call = {"args": (torch.ones(1), 2), "kwargs": {"deep": [{"flag": False}]}}
    texts = [(path, as_text(item)) for path, item in values_of(call)]
    assert texts == [(("args", 1), "2"), (("kwargs", "deep", 0, "flag"), "False")]
