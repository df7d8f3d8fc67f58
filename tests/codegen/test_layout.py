"""Names, expressions and their line breaks, against Python and against ruff."""

from __future__ import annotations

import ast
import dataclasses
import keyword
import operator
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler.codegen.constants import write_literal
from gpipe_compiler.codegen.expressions import ExpressionWriter
from gpipe_compiler.codegen.functions import BINARY, UNARY, spell
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import (
    Expression,
    call,
    comprehension,
    dict_of,
    lay_out,
    list_of,
    name,
    tuple_of,
)
from gpipe_compiler.codegen.names import RESERVED, Identifiers, identifier
from gpipe_compiler.codegen.statements import Statement, write_statements
from gpipe_compiler.errors import EmitError, SourceLocation
from gpipe_compiler.frontend.own_statements import UnwritableError
from gpipe_compiler.ir import ByMode, FunctionCall, MethodCall, Mode, Ref
from gpipe_compiler.targets.torch_stages import emit

words = st.text("abcxyz_.0", min_size=1, max_size=30)


@given(st.lists(st.text(max_size=60), max_size=20))
def test_names_are_identifiers_given_out_once(wanted: list[str]) -> None:
    names = Identifiers()

    given_out = [names.take(text) for text in wanted]

    assert len(set(given_out)) == len(given_out)
    for text in given_out:
        assert text.isidentifier()
        assert not keyword.iskeyword(text)
        assert text not in RESERVED


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layer1.0.conv1", "layer1_0_conv1"),
        ("0", "layer_0"),
        ("x", "x"),
        ("a b", "a_b"),
        ("", "value"),
        ("état", "état"),
    ],
)
def test_identifier(text: str, expected: str) -> None:
    assert identifier(text) == expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (torch.relu, "torch.relu"),
        (F.relu, "F.relu"),
        (F.conv2d, "F.conv2d"),
        (F.scaled_dot_product_attention, "F.scaled_dot_product_attention"),
        (F.max_pool2d, "F.max_pool2d"),
        (torch.einsum, "torch.einsum"),
        (torch.linalg.norm, "torch.linalg.norm"),
        (torch.special.expm1, "torch.special.expm1"),
        (torch.fft.fft, "torch.fft.fft"),
        (torch.Tensor.add, "torch.Tensor.add"),
        (torch.ops.aten.add.Tensor, "torch.ops.aten.add.Tensor"),
        (torch.sym_max, "torch.sym_max"),
        (operator.add, "operator.add"),
        (len, "len"),
        (torch.nn.Conv2d, "nn.Conv2d"),
        (lambda: None, None),
    ],
)
def test_functions_by_identity(function: Any, expected: str | None) -> None:
    """Evaluated where its imports are made, the text is the function itself."""
    imports = Imports()

    text = spell(function, imports)

    assert text == expected
    if text is not None:
        scope: dict[str, Any] = {}
        exec("\n".join(imports.lines()), scope)
        assert eval(text, scope) is function


constants = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 10**12)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from([torch.float16, torch.channels_last, torch.strided, Ellipsis]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=6,
)


@given(constants)
def test_literals_evaluate_to_themselves(value: object) -> None:
    imports = Imports()

    text = write_literal(value, imports).flat

    scope: dict[str, Any] = {}
    exec("\n".join(imports.lines()), scope)
    assert eval(text, scope) == value


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(UnwritableError, match="object"):
        write_literal(object(), Imports())


# whether equal numbers are one object is Python's own business
COMPARED = [function for function in BINARY if function not in (operator.is_, operator.is_not)]
NUMBERS = {"a": 3, "b": 5, "c": 2}
arguments = st.recursive(
    st.sampled_from([Ref("a"), Ref("b"), Ref("c"), 2, 7]),
    lambda inner: (
        st.tuples(st.sampled_from(COMPARED), inner, inner)
        | st.tuples(st.sampled_from([operator.neg, operator.invert, operator.not_]), inner)
    ),
    max_leaves=6,
)


@given(arguments)
@settings(max_examples=200)
def test_operators_nest_with_the_parentheses_they_need(tree: object) -> None:
    """Written with operators and evaluated, a tree of calls gives what the calls give."""
    writer = ExpressionWriter(Imports(), {}, {}, variables={key: name(key) for key in NUMBERS})
    count = 0

    def build(item: object) -> tuple[object, object]:
        nonlocal count
        if not isinstance(item, tuple):
            return item, NUMBERS[item.name] if isinstance(item, Ref) else item
        function, *operands = item
        written, values = zip(*map(build, operands), strict=True)
        if function in (operator.pow, operator.lshift, operator.rshift):
            # keeps numbers small
            values = (values[0], int(bool(values[1])))
            written = (written[0], int(values[1]))
        count += 1
        writer.variables[f"v{count}"] = writer.call(FunctionCall(function, tuple(written)))
        return Ref(f"v{count}"), function(*values)

    try:
        made, expected = build(tree)
    except (ZeroDivisionError, OverflowError, TypeError):
        return
    assert eval(writer.argument(made).flat, dict(NUMBERS)) == expected


def item(*index: Any) -> FunctionCall:
    return FunctionCall(operator.getitem, (Ref("x"), index if len(index) > 1 else index[0]))


def dropout(*args: Any) -> FunctionCall:
    return FunctionCall(F.dropout, (Ref("x"), *args))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (item(slice(None), 0), "x[:, 0]"),
        (item(..., None), "x[..., None]"),
        (item(slice(None, Ref("n"))), "x[:n]"),
        (item(slice(None, Ref("s"))), "x[: y.shape[0]]"),
        (item(slice(Ref("s"), None)), "x[y.shape[0] :]"),
        (item(slice(None, None, Ref("s"))), "x[:: y.shape[0]]"),
        (item(slice(1, -1, 2)), "x[1:-1:2]"),
        (FunctionCall(getattr, (Ref("x"), "shape")), "x.shape"),
        (FunctionCall(operator.pow, (Ref("x"), 2)), "x**2"),
        (FunctionCall(operator.pow, (Ref("s"), -0.5)), "y.shape[0] ** -0.5"),
        (FunctionCall(operator.iadd, (Ref("n"), 1)), "n + 1"),
        (dropout(0.1, ByMode(True, False)), "F.dropout(x, 0.1, training=self.training)"),
        (dropout(ByMode(0.1, 0.0)), "F.dropout(x, 0.1 if self.training else 0.0)"),
        (MethodCall("view", (Ref("x"), Ref("n"), -1)), "x.view(n, -1)"),
        (MethodCall("sum", (Ref("z"),), {"dim": 1}), "(x + y).sum(dim=1)"),
        (
            FunctionCall(torch.zeros, (2,), {"device": torch.device("cpu")}),
            "torch.zeros(2, device=x.device)",
        ),
        (FunctionCall(torch.arange, (5,)), "torch.arange(5, device=x.device)"),
        (FunctionCall(torch.clamp, (Ref("x"), float("-inf"))), "torch.clamp(x, -math.inf)"),
    ],
)
def test_calls_as_a_person_writes_them(made: FunctionCall | MethodCall, expected: str) -> None:
    writer = ExpressionWriter(
        Imports(),
        {},
        {},
        anchor="x",
        variables={
            **{key: name(key) for key in "xyn"},
            "s": Expression("y.shape[0]"),
            "z": writer_sum(),
        },
    )

    assert writer.call(made).flat == expected


IMAGE, WEIGHT = torch.arange(96.0).view(2, 3, 4, 4), torch.ones(3, 1, 3)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (MethodCall("mean", (Ref("x"), -1, True)), "x.mean(-1, keepdim=True)"),
        (MethodCall("sum", (Ref("x"), [1], False)), "x.sum(1)"),
        (MethodCall("var", (Ref("x"), [2, 3], False)), "x.var([2, 3], unbiased=False)"),
        (MethodCall("transpose", (Ref("x"), 1, 2)), "x.transpose(1, 2)"),
        (MethodCall("roll", (Ref("x"), [1], [2])), "x.roll(1, dims=2)"),
        (MethodCall("chunk", (Ref("x"), 2, -1)), "x.chunk(2, dim=-1)"),
        (FunctionCall(torch.cat, ([Ref("x"), Ref("x")], 1)), "torch.cat([x, x], dim=1)"),
        (FunctionCall(torch.where, (Ref("m"), Ref("x"), 0.0)), "torch.where(m, x, 0.0)"),
        (FunctionCall(torch.histc, (Ref("x"), 4, 1, 3)), "torch.histc(x, 4, min=1, max=3)"),
        (
            FunctionCall(F.pad, (Ref("x"), [0, 1], "constant", -1.0)),
            "F.pad(x, [0, 1], value=-1.0)",
        ),
        (
            FunctionCall(F.conv1d, (Ref("r"), Ref("w"), None, [1], [1], [1], 3)),
            "F.conv1d(r, w, padding=1, groups=3)",
        ),
        (
            FunctionCall(F.max_pool2d, (Ref("x"), [2, 2]), {"stride": [1, 2]}),
            "F.max_pool2d(x, 2, stride=[1, 2])",
        ),
        (
            FunctionCall(F.layer_norm, (Ref("x"), [4], Ref("v"), Ref("v"), 1e-3)),
            "F.layer_norm(x, [4], v, v, eps=0.001)",
        ),
    ],
)
def test_numbers_by_keyword_mean_what_they_meant(
    made: FunctionCall | MethodCall, expected: str
) -> None:
    own = {"x": IMAGE, "m": IMAGE > 9, "r": IMAGE[..., 0], "w": WEIGHT, "v": torch.ones(4)}
    writer = ExpressionWriter(Imports(), {}, {}, variables={key: name(key) for key in own})
    text = writer.call(made).flat

    def of(item: Any) -> Any:
        parts = [of(part) for part in item] if isinstance(item, list) else item
        return own[item.name] if isinstance(item, Ref) else parts

    args = [of(item) for item in made.args]
    kwargs = dict(made.kwargs)
    if isinstance(made, MethodCall):
        values = getattr(args[0], made.method)(*args[1:], **kwargs)
    else:
        values = made.function(*args, **kwargs)
    assert text == expected
    torch.testing.assert_close(eval(text, {"torch": torch, "F": F, **own}), values, rtol=0, atol=0)


def writer_sum() -> Expression:
    inner = ExpressionWriter(Imports(), {}, {}, variables={key: name(key) for key in "xy"})
    return inner.call(FunctionCall(operator.add, (Ref("x"), Ref("y"))))


def expressions() -> st.SearchStrategy[Expression]:
    leaf = st.text("abcdefgh", min_size=1, max_size=25).map(lambda text: name(f"v{text}"))

    def grow(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
        some = st.lists(inner, min_size=1, max_size=8)
        keyed = st.lists(st.tuples(leaf, inner), min_size=1, max_size=3)
        return (
            some.map(lambda items: call("torch.cat", items))
            | some.map(lambda items: call("f", [item.prefixed("key=") for item in items[:1]]))
            | some.map(tuple_of)
            | some.map(list_of)
            | keyed.map(dict_of)
            | inner.map(lambda item: comprehension("[", item, "for i in range(3)", "]"))
        )

    return st.recursive(leaf, grow, max_leaves=25)


@given(st.lists(st.tuples(expressions(), st.integers(0, 2)), min_size=20, max_size=40))
@settings(max_examples=8, deadline=None)
def test_lines_break_where_ruff_breaks_them(
    tmp_path_factory: pytest.TempPathFactory, made: list[tuple[Expression, int]]
) -> None:
    """Calls, tuples, lists, dicts and comprehensions of any nesting and length."""
    lines: list[str] = []
    for expression, indent in made:
        lines.extend(["if x:", "    if y:"][:indent])
        lines.extend(lay_out(expression, prefix="value = ", indent=indent))
    text = "\n".join(lines) + "\n"
    ast.parse(text)
    file = tmp_path_factory.mktemp("layout") / "code.py"
    file.write_text(text)

    ruff = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "100"]
    done = subprocess.run([*ruff, "--diff", file], capture_output=True, text=True, check=False)

    assert done.stdout == ""


def test_unary_spellings_are_operators() -> None:
    writer = ExpressionWriter(Imports(), {}, {}, variables={"x": name("x")})

    texts = [writer.call(FunctionCall(function, (Ref("x"),))).flat for function in UNARY]

    assert texts == ["-x", "+x", "~x", "not x"]


def test_an_unknown_function_names_the_users_line(
    planned: Callable[..., Any], tmp_path: Path
) -> None:
    """The error says which op, where it stands, and what can be done."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    plan = planned(model, torch.rand(2, 2), count=1)
    ops = list(plan.graph.ops)
    ops[1] = dataclasses.replace(
        ops[1],
        call=FunctionCall(_of_no_module, (Ref(ops[0].name),)),
        source=SourceLocation("/home/user/model.py", 12),
    )
    broken = dataclasses.replace(plan, graph=plan.graph.replace(ops=tuple(ops)))

    with pytest.raises(EmitError, match=r"model\.py:12: the op .* no part of torch"):
        emit(broken, tmp_path / "out")

    assert list(tmp_path.iterdir()) == []


def _of_no_module(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


@given(st.lists(st.sampled_from(Mode), min_size=1, max_size=8))
def test_statements_run_in_order_in_their_modes(modes: list[Mode]) -> None:
    statements = [
        Statement("", name(f"ran.append({number})"), mode) for number, mode in enumerate(modes)
    ]

    text = "\n".join(write_statements(statements, 0))

    for training, other in ((True, Mode.EVAL), (False, Mode.TRAIN)):
        ran: list[int] = []
        exec(text, {"self": SimpleNamespace(training=training), "ran": ran})
        assert ran == [number for number, mode in enumerate(modes) if mode is not other]


def test_a_keyword_that_is_longer_than_a_line_breaks_too() -> None:
    """It is no expression by itself, and a method that is called in it makes it no chain."""
    value = dict_of(
        (name(repr(key)), name(f"Joined.{key.upper()}()")) for key in ("a" * 50, "b" * 50)
    )
    lines = lay_out(call("Spec", [value.prefixed("outputs=")]), prefix="SPEC = ")
    assert [line.strip() for line in lines[:2]] == ["SPEC = Spec(", "outputs={"]
    ast.parse("\n".join(lines))


@pytest.mark.parametrize("made", [name("x.unbind()"), call("f", [name("a"), name("b")])])
def test_more_targets_than_a_line_holds_have_a_line_each(made: Expression) -> None:
    targets = [f"unbind_number_{number}" for number in range(9)]
    lines = lay_out(made, prefix=f"{', '.join(targets)} = ", indent=1)

    assert lines == ["    (", *(f"        {own}," for own in targets), f"    ) = {made.flat}"]
