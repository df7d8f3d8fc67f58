"""`docs/exactness.md`: what it quotes is said where it says so, and every row has its tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from adversary.case import Refused
from adversary.registry import cases

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "exactness.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([\w.]+)\])?`")


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its own heads."""
    part = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in lines[2:]]


PROMISED, REFUSED = rows_of("What is promised"), rows_of("What is refused")


def flat(text: str) -> str:
    """Without line breaks and what only makes it bold."""
    return " ".join(text.replace("**", "").split())


def test_the_tables_are_there() -> None:
    assert len(PROMISED) > 40
    assert len(REFUSED) > 10
    assert {len(row) for row in PROMISED} == {5}
    assert {len(row) for row in REFUSED} == {4}


@pytest.mark.parametrize("row", PROMISED, ids=lambda row: row[1][:40])
def test_what_is_quoted_is_said(row: list[str]) -> None:
    (page,) = re.findall(r"\]\(([^)]+)\)", row[0])
    (words,) = re.findall(r'^"(.+?)"(?: \([\w ]+\))?$', row[1])

    assert flat(words) in flat((PAGE.parent / page).read_text())


@pytest.mark.parametrize("row", [*PROMISED, *REFUSED], ids=lambda row: row[1][:40])
def test_every_row_has_a_test(row: list[str]) -> None:
    named = TEST.findall(row[-1])

    assert named
    for file, function, case in named:
        text = (ROOT / file).read_text()
        assert re.search(rf"^def {function}\(", text, re.MULTILINE), f"{file}::{function}"
        if case:
            is_refused = isinstance(cases()[case].expect, Refused)
            assert is_refused == (function == "test_refused"), case
    assert flat(TEST.sub("", row[-1]).replace(",", "")) == ""
