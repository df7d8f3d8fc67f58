"""What a model returns in classes of its own, its package returns in these."""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from loading import load_package

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.compile import compile as compile_subject
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.runtime.core.outputs import as_returned
from gpipe_compiler.runtime.spec import OutputClass

MODEL = Path(__file__).parent / "output_classes_model.py"


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Subject, Path]:
    """A model of an importable module, and its package."""
    (tmp_path / "answering_model.py").write_text(MODEL.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "answering_model", raising=False)
    import answering_model

    torch.manual_seed(0)
    given = Subject("answering", answering_model.Answering(), (torch.randn(8, 4),), training=False)
    compile_subject(given, CompileOptions(2, 4, training=False), tmp_path / "out")
    return given, tmp_path / "out"


def test_objects_of_classes_that_can_be_imported(answering: tuple[Subject, Path]) -> None:
    given, package = answering
    x = torch.randn(7, 4)
    with load_package(package).Pipeline() as pipe, torch.no_grad():
        actual, expected = pipe(x), given.model.eval()(x)

    assert type(actual) is type(expected)
    assert type(actual.pair) is type(expected.pair)
    assert actual.unused is None
    torch.testing.assert_close(actual.rows, expected.rows)
    torch.testing.assert_close(actual.total, expected.total)
    torch.testing.assert_close(actual.pair, expected.pair)
    for name in ("ordered", "counted"):
        found, wanted = getattr(actual, name), getattr(expected, name)
        assert type(found) is type(wanted)
        assert list(found) == list(wanted)
    assert actual.counted.default_factory is expected.counted.default_factory
    assert not isinstance(actual.local, defaultdict)
    torch.testing.assert_close(actual.local["rows"], expected.local["rows"])
    torch.testing.assert_close(actual.caches[0], expected.caches[0])
    assert actual.ordered["a"] is None
    torch.testing.assert_close(actual.ordered["b"], expected.ordered["b"])
    torch.testing.assert_close(actual.counted["rows"], expected.counted["rows"])


def test_plain_objects_with_the_same_fields_elsewhere(
    answering: tuple[Subject, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, package = answering
    expected = given.model.eval()(torch.ones(2, 4))
    monkeypatch.setitem(sys.modules, "answering_model", None)

    with load_package(package).Pipeline() as pipe:
        actual = pipe(torch.ones(2, 4))

    torch.testing.assert_close(actual.rows, expected.rows.detach())
    torch.testing.assert_close(actual["total"], expected.total.detach())
    assert actual.pair._fields == ("first", "rest")
    torch.testing.assert_close(actual.pair.first, expected.pair.first.detach())
    assert "where they can be imported" in (package / "README.md").read_text()


def test_a_named_tuple_whose_name_is_none() -> None:
    """Names of classes that are made at run time may be anything."""
    for name in ("a b", "class", 'x"\n', "made.<locals>.Out"):
        known = OutputClass(path=(), module="nowhere", name=name, fields=("one", "two"))
        found = as_returned((1, 2), [known])
        assert (found.one, found.two) == (1, 2)


def test_an_object_of_a_plain_class_is_refused_where_it_is_used(
    answering: tuple[Subject, Path],
) -> None:
    """Nothing stands silently in its place: the way to it and its class are named."""
    _, package = answering
    module = load_package(package)
    with module.Pipeline() as pipe:
        cache = pipe(torch.ones(2, 4)).caches[1]
    refusal = sys.modules[f"{module.__name__}.runtime.errors"].UsageError

    copied = copy.deepcopy(cache)
    for use in (lambda: copied.keys, lambda: cache[0], lambda: bool(cache), lambda: [*cache]):
        with pytest.raises(refusal, match=r"caches\.1 is an object of the class Cache"):
            use()
