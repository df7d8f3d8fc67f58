"""Every case is exact, or is refused with the right reason.

The cases stand in `models/`; how packages are judged, in `judge.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from adversary.case import Case, Refused
from adversary.judging import JudgeProcess, compiled
from adversary.known_open import KNOWN_OPEN
from adversary.registry import cases, lines_at_fault

CASES = cases()
EXACT = {name for name, case in CASES.items() if not isinstance(case.expect, Refused)}
MOST_TOLD = 8
QUICK = {name for name, case in CASES.items() if case.quick}


def _marked(name: str) -> object:
    marks = [] if CASES[name].quick else [pytest.mark.slow]
    if name in KNOWN_OPEN:
        marks.append(pytest.mark.xfail(strict=True, reason=KNOWN_OPEN[name]))
    return pytest.param(name, marks=marks)


@pytest.mark.usefixtures("validating")
@pytest.mark.parametrize("name", [_marked(name) for name in CASES if name in EXACT])
def test_exact(name: str, judge: JudgeProcess, tmp_path: Path) -> None:
    outcome = compiled(CASES[name], name.partition(".")[0], tmp_path)

    assert outcome.code == 0, outcome.text
    assert "Traceback" not in outcome.text
    faults = judge.faults(case=name, package=str(outcome.package))
    assert not faults, "\n".join(faults[:MOST_TOLD])


@pytest.mark.usefixtures("validating")
@pytest.mark.parametrize("name", [_marked(name) for name in CASES if name not in EXACT])
def test_refused(name: str, judge: JudgeProcess, tmp_path: Path) -> None:
    case = CASES[name]
    module, expect = name.partition(".")[0], case.expect
    assert isinstance(expect, Refused)
    outcome = compiled(case, module, tmp_path)
    problem, _, hint = outcome.text.partition("hint:")

    assert outcome.code == 1, outcome.text
    assert [words for words in expect.cause if words not in problem] == [], outcome.text
    assert [words for words in expect.way_out if words not in hint] == [], outcome.text
    assert "Traceback" not in outcome.text
    if expect.at_line:
        # Paths may be shown relative to the current directory.
        assert any(line in problem for line in lines_at_fault(name)), outcome.text
    if expect.accept:
        again = compiled(case, module, tmp_path / "again", f"{expect.accept} --force")
        assert again.code == 0, again.text
        faults = judge.faults(
            case=name,
            package=str(again.package),
            reference=expect.reference,
            options=expect.accept,
        )
        assert not faults, "\n".join(faults[:MOST_TOLD])


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 200
    assert len(EXACT) >= 150
    assert 35 <= len(QUICK) <= 45
    # Every class of models has a case that is always run.
    assert {name.partition(".")[0] for name in CASES} == {n.partition(".")[0] for n in QUICK}


def test_what_is_open_is_there() -> None:
    assert [name for name in KNOWN_OPEN if name not in CASES] == []


def test_cases_know_plain_pytorch_only() -> None:
    """The judge runs where the compiler cannot be imported; so do the cases."""
    folder = Path(__file__).parent
    files = [folder / name for name in ("judge.py", "case.py", "registry.py", "drawn.py")]
    for file in (*files, *(folder / "models").glob("*.py")):
        assert "import gpipe_compiler" not in file.read_text(), file
        assert "from gpipe_compiler" not in file.read_text(), file


def test_options_are_a_users(judge: JudgeProcess) -> None:
    """Names of cases do not repeat those of the judge's own answers."""
    assert judge.faults(case="no.such", package="/nowhere") != []
    assert isinstance(CASES["attention.encoder"], Case)
