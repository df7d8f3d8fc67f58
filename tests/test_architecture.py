"""The page and the picture of the rooms, against the imports."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from loading import load_script

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    return load_script(DOCS / "draw_rooms.py")


def test_the_picture_is_that_of_the_imports(drawing: ModuleType) -> None:
    """Where it is not: `python docs/draw_rooms.py docs/architecture.svg`."""
    assert drawing.draw(drawing.rooms()) == (DOCS / "architecture.svg").read_text(encoding="utf-8")


def test_the_page_has_every_room_and_no_other(drawing: ModuleType) -> None:
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "architecture.md").read_text("utf-8"), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == set(drawing.rooms())


def test_the_files_to_look_at_first_are_there() -> None:
    text = (DOCS / "architecture.md").read_text("utf-8")
    files = re.findall(r"`((?:\w+/)+\w+\.py)`", text)
    root = DOCS.parent / "gpipe_compiler"
    assert files
    missing = [file for file in files if not any((r / file).exists() for r in (root, root.parent))]
    assert missing == []
