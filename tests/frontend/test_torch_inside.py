"""Every name that torch does not promise is looked for before it is used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from gpipe_compiler.cli import main as cli
from gpipe_compiler.errors import GPipeCompilerError
from gpipe_compiler.frontend import torch_inside
from gpipe_compiler.frontend.torch_inside import USED, check_torch

ROOT = Path(__file__).parents[2]
ELSEWHERE = re.compile(r"torch\._(dynamo|export)\b|torch\.__|torch\._cudnn_init_dropout_state")
"""Looked for where they are used, of Python itself, or met on a GPU alone."""

IMPORT = re.compile(r"^ *from (torch[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)
DOTTED = re.compile(r"\btorch(?:\.\w+)*\._[a-zA-Z]\w*(?:\.\w+)*")


def private_names() -> set[str]:
    """As they stand in the code, with what holds them."""
    found = set()
    for folder in ("gpipe_compiler", "passes"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name in ("torch_inside.py", "quiet.py"):
                continue
            text = re.sub(r'"""(?s:.*?)"""|"[^"\n]*"|#.*', "", path.read_text(encoding="utf-8"))
            for home, names in IMPORT.findall(text):
                words = re.sub(r"\bas \w+|[(),]", " ", names).split()
                found |= {f"{home}.{word}" for word in words if "._" in f"{home}.{word}"}
            found |= set(DOTTED.findall(re.sub(IMPORT, "", text)))
    return {name for name in found if not ELSEWHERE.match(name)}


def test_all_that_is_used_is_looked_for() -> None:
    known = {f"{home}.{name}" for home, names in USED.items() for name in names}
    names = private_names()

    assert len(names) > 15
    for name in sorted(names):
        assert any(name == one or name.startswith(f"{one}.") for one in known), name


def test_this_torch_has_all_of_it() -> None:
    check_torch()


@pytest.mark.parametrize("home", ["torch._C", "torch._gone", "torch.Tensor"])
def test_what_it_lacks_is_named(home: str) -> None:
    with pytest.raises(GPipeCompilerError, match=rf"torch \d.*has no {home}\._lost, which") as told:
        check_torch({home: ("_lost",), "torch": ("_check",)})
    assert str(torch.__version__).partition("+")[0] in str(told.value)


def test_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_inside.check_torch, "__defaults__", ({"torch._C": ("_lost",)},))
    (tmp_path / "model.py").write_text("")

    assert cli.compile_command([str(tmp_path / "model.py"), "--stages", "2"]) == 1
    err = capsys.readouterr().err
    assert "has no torch._C._lost" in err
    assert "hint: install a version that it is tested with" in err
