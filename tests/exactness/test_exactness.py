"""Training in a pipeline against the plain loop, in all that pipelines are known to get wrong.

Every model is compiled into 1, 2 and 4 stages. Each package trains five steps under all schedules,
with and without rematerialisation, on threads and under torchrun, with one stage a device and with
several; losses and final state are compared with the plain loop of `training_cases`.
`python tests/exactness/table.py` prints the largest differences as a table.
"""

from __future__ import annotations

import itertools

import pytest
from table import LAYOUTS, MORE_LAYOUTS, ONE_EACH, largest_difference
from train_packages import REMATS
from training_cases import CASES

MANNERS = [
    *((layout, schedule) for layout in LAYOUTS for schedule in layout.schedules),
    *(
        pytest.param(layout, schedule, marks=pytest.mark.slow)
        for layout in MORE_LAYOUTS
        for schedule in layout.schedules
    ),
]


@pytest.mark.parametrize("transport", ["local", "torchrun"])
@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize(("layout", "schedule"), MANNERS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_training_equals_the_plain_loop(runs, plain, case, layout, schedule, remat, transport):
    """Losses, weights, buffers and skipped steps."""
    expected = plain[case.name]
    found = runs(layout, transport)[case.name, schedule, remat]

    assert found.state.keys() == expected.state.keys()
    assert largest_difference(expected, found) <= case.tolerance
    assert found.skipped == expected.skipped


def test_the_cases_are_what_they_say(packages, plain):
    """The cuts put the shared things on several stages, and the scaler really skips."""
    crossings = {case.name: packages(4)[number].crossings for number, case in enumerate(CASES)}
    assert any(len(crossing.targets) > 1 for crossing in crossings["skip to two stages"])
    assert any(max(c.targets) - c.source > 2 for c in crossings["far skip"])
    owners = [stage.index for stage in packages(4)[0].stages if "words.weight" in stage.state]
    assert len(owners) == 3
    assert 0 < plain["fp16 scaler"].skipped < len(CASES[7].sizes)


@pytest.mark.parametrize("transport", ["local", "torchrun"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_numbers_do_not_depend_on_stages_or_transport(runs, layout, transport):
    """The same training run as with one stage in this process, dropout included."""
    for case, schedule, remat in itertools.product(CASES, layout.schedules, REMATS):
        expected = runs(ONE_EACH[0], "local")[case.name, "gpipe", remat]
        found = runs(layout, transport)[case.name, schedule, remat]
        assert largest_difference(expected, found) <= case.tolerance, (case, schedule, remat)
