"""The text of packages, compared with the folder `golden`.

    pytest tests/codegen/test_golden.py --rewrite-golden

writes the folder anew; read the difference before committing it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from versions import pinned

GOLDEN = Path(__file__).with_name("golden")
FILES = ("*.py", "README.md")


@pytest.mark.parametrize(
    ("folder_name", "label", "segments"),
    [("conv_net", "conv_net", 0), ("decoder", "decoder", 0), ("recomputed", "conv_net", 2)],
)
def test_the_text_of_a_package(
    folder_name: str,
    label: str,
    segments: int,
    emitted: Callable[..., Any],
    request: pytest.FixtureRequest,
) -> None:
    """Every emitted source file is, word for word, the one in the golden folder.

    Other versions of torch have kernels of their own, which ask other things of sizes.
    """
    directory = emitted(label, 3, segments).directory
    texts = {path.name: path.read_text() for glob in FILES for path in directory.glob(glob)}
    folder = GOLDEN / folder_name
    if request.config.getoption("--rewrite-golden", default=False):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for name, text in texts.items():
            (folder / name).write_text(text)

    expected = {path.name: path.read_text() for path in folder.iterdir()}

    assert expected.keys() == texts.keys()
    if pinned("torch"):
        assert expected == texts


def test_ctrl_c_while_a_package_is_imported_is_no_traceback(tmp_path: Path) -> None:
    golden = Path(__file__).parent / "golden" / "decoder" / "run.py"
    (tmp_path / "run.py").write_text(golden.read_text())
    (tmp_path / "__init__.py").write_text("raise KeyboardInterrupt\n")

    done = subprocess.run(
        [sys.executable, tmp_path / "run.py", "train"], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (130, "")


def test_mypy_finds_nothing_in_the_program(tmp_path: Path) -> None:
    """As strict as it can be; by itself, as its package holds no `runtime/` here."""
    program = tmp_path / "run.py"
    for golden in Path(__file__).parent.glob("golden/*/run.py"):
        program.write_text(golden.read_text())
        mypy = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={tmp_path}", program]
        done = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
