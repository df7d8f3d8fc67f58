"""What a plan told, beside what was measured."""

from __future__ import annotations

import json

import pytest
import torch

from gpipe_compiler.runtime.errors import UsageError
from gpipe_compiler.runtime.train.stage_times import StageSeconds
from gpipe_compiler.runtime.train.told import (
    Told,
    likely_reason,
    memory_lines,
    stage_table,
    write_calibration,
)

STAGE = {"forward_s": 0.001, "backward_s": 0.003, "weight_s": 0.001, "segments_s": 0.0005}


def told(remat: str = "none", **prediction: object) -> Told:
    plan = {
        "stages": [{**STAGE, "remat": remat}] * 2,
        "prediction": {"step_s": 0.5, "here_s": 0.6, **prediction},
        "calibration": [2.0, 3.0],
    }
    return Told._read(plan, alone=True)


def test_what_was_measured_when_it_was_compiled_comes_before_predictions():
    assert (told().what, told().step_s) == ("predicted", 0.6)
    assert (told(threads_s=0.7).what, told(threads_s=0.7).step_s) == ("when it was compiled", 0.7)


def test_a_backward_has_the_forwards_that_run_again():
    (kept, _), (again, _) = told().stages, told("full").stages

    assert kept == StageSeconds(0.001, pytest.approx(0.0025), 0.001)
    assert again == StageSeconds(0.001, pytest.approx(0.0035), 0.001)


def test_the_table_has_what_was_told_in_brackets():
    measured = [StageSeconds(0.002, 0.004), StageSeconds(0.002, 0.003, 0.001)]

    assert stage_table(measured, told().stages).splitlines() == [
        "stage  forward ms  backward ms  weight ms",
        "    0           2            4              (told 1, 3.5)",
        "    1           2            3          1   (told 1, 2.5, 1)",
    ]


@pytest.mark.parametrize(
    ("step_s", "factor", "said"),
    [
        (0.6, 1.0, ""),
        (0.74, 9.0, ""),
        (1.8, 3.0, "stages compute for 3.00 times what was told"),
        (0.3, 0.5, "stages compute for 0.50 times what was told"),
        (1.8, 1.1, "transfers, and waiting"),
    ],
)
def test_the_likely_reason(step_s, factor, said):
    stages = [
        StageSeconds(factor * stage.forward_s, factor * stage.backward_s, factor * stage.weight_s)
        for stage in told().stages
    ]
    reason = likely_reason(told(), step_s, stages)

    assert said in reason
    assert bool(reason) == bool(said)


def test_without_stages_it_says_how_to_find_out():
    assert "--stages" in likely_reason(told(), 5.0, [])


def test_a_calibration_goes_on_from_that_of_the_plan(tmp_path):
    """Forwards took twice as long as was told by twice, backwards half of what was by thrice."""
    stages = [
        StageSeconds(2 * stage.forward_s, 0.5 * stage.backward_s, 0.5 * stage.weight_s)
        for stage in told().stages
    ]
    file = tmp_path / "calibration.json"

    write_calibration(file, told(), stages, "model")

    assert json.loads(file.read_text()) == {
        "forward": pytest.approx(4.0),
        "backward": pytest.approx(1.5),
        "measured": "model",
    }


def test_backwards_that_are_not_told_count_as_forwards_do(tmp_path):
    plan = {
        "stages": [
            {**STAGE, "backward_s": 0.0, "weight_s": 0.0, "segments_s": 0.0, "remat": "none"}
        ],
        "prediction": {"step_s": 0.5},
    }
    file = tmp_path / "calibration.json"

    write_calibration(file, Told._read(plan, alone=True), [StageSeconds(0.003)], "model")

    found = json.loads(file.read_text())
    assert found["forward"] == found["backward"] == pytest.approx(3.0)


def test_nothing_is_calibrated_by_what_nobody_told(tmp_path):
    file = tmp_path / "calibration.json"

    for plan in (None, told()):
        with pytest.raises(UsageError, match="nothing to calibrate by"):
            write_calibration(file, plan, [StageSeconds(0.001)], "model")

    assert not file.exists()


def test_the_memory_of_a_process_is_what_the_system_says():
    known = told(memory=[{"peak": 3_000_000}, {"peak": 4_000_000}])
    (line,) = memory_lines(known, {0: torch.device("cpu"), 1: torch.device("cpu")})

    assert line.endswith("told 7 MB of tensors")
    most = int(line.split(":")[1].split(" MB")[0].replace(",", ""))
    assert 100 < most < 100_000  # torch alone takes more, and no machine here has so much
    assert memory_lines(told(), {0: torch.device("cpu")}) == []
