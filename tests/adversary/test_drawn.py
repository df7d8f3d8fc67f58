"""What hypothesis draws is exact: models, layouts, losses, precisions and ways to compute."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path

import pytest
from adversary.drawn import LOSSES, SCHEDULES, STEPS, Recipe, drawn_case
from adversary.judging import JudgeProcess, compiled
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

QUICK, MANY = 4, 60
"""How many are drawn, always the same ones."""


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    steps = draw(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4))
    layout = draw(st.integers(0, 1))
    if layout == 1 and not {"attention", "conv", "fills"} & {*steps}:
        steps.append("attention")  # else either dimension may be the batch, and the first is taken
    training = draw(st.sampled_from((True, True, True, False)))
    microbatches = draw(st.sampled_from((1, 2, 4, 8)))
    stages = draw(st.integers(1, 3))
    options = f"--stages {stages} --microbatches {microbatches}"
    if draw(st.booleans()):
        options += " --precision bf16"
    if not training:
        options += " --mode infer"
    ways: list[dict[str, object]] = [
        {"precision": "fp32"},
        {"precision": "bf16", "microbatches": 1},
    ]
    if training:
        possible = [name for name in SCHEDULES if stages % 2 == 0 or name in ("gpipe", "1f1b")]
        schedule = SCHEDULES[draw(st.sampled_from(possible))]
        remat = draw(st.sampled_from(("none", "full")))
        ways.append({"precision": "fp32", "remat": remat, "microbatches": 3, **schedule})
    return Recipe(
        steps=tuple(steps),
        layout=layout,
        loss=draw(st.sampled_from(sorted(LOSSES))) if training else "",
        output=draw(st.sampled_from(("tensor", "dict", "sum"))),
        options=options,
        manners=tuple(ways),
        sizes=(8, draw(st.integers(1, 7))),
    )


def is_exact(recipe: Recipe, judge: JudgeProcess) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        outcome = compiled(drawn_case(recipe), "drawn", folder)
        assert outcome.code == 0, outcome.text
        faults = judge.faults(drawn=dataclasses.asdict(recipe), package=str(outcome.package))
        assert not faults, "\n".join(faults[:8])
    finally:
        shutil.rmtree(folder)


QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.usefixtures("validating")
@settings(max_examples=QUICK, suppress_health_check=QUIET, phases=[Phase.generate])
@given(recipes())
def test_a_few_drawn(judge: JudgeProcess, recipe: Recipe) -> None:
    is_exact(recipe, judge)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("validating")
@settings(max_examples=MANY, suppress_health_check=QUIET)
@given(recipes())
def test_many_drawn(judge: JudgeProcess, recipe: Recipe) -> None:
    is_exact(recipe, judge)
