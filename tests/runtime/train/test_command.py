"""The command of a package: what it prints, writes and returns."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil

import pytest
import torch
from tiny_pipelines import SAMPLES, WIDTH, Skip3, data_for, norm_spec, skip_spec, tied_spec
from torch.distributed.run import get_args_parser

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.core.weights import load_file, save_file, save_weights
from gpipe_compiler.runtime.train.arguments import parser_for
from gpipe_compiler.runtime.train.command import main

HOOKS = """
import torch

def train_data():
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 6, generator=generator)
        yield (x,), x.flip(1)
    yield (x[:3],), x[:3]   # a short last batch

def make_optimizer(params):
    return torch.optim.SGD(params, lr=0.5)
"""


@pytest.fixture
def package(tmp_path):
    """The folder of a package of the skip pipeline."""
    with Pipeline(skip_spec(), None, seed=1) as pipe:
        save_weights(pipe.state_dict(), tmp_path / "weights")
    values = data_for("skip", 4 * SAMPLES)[2]
    save_file(values, tmp_path / "weights" / "example.safetensors")
    (tmp_path / "plan.json").write_text('{"prediction": {"step_s": 0.5}}')
    return tmp_path


def test_torchrun_lets_the_options_through():
    """Before Python 3.12 it refuses words that begin several options of its own, such as --log."""
    theirs = get_args_parser()._option_string_actions
    commands = parser_for(skip_spec())._subparsers._group_actions[0].choices
    assert commands.keys() == {"train", "infer", "check", "bench", "export"}
    for name, command in commands.items():
        for option in command._option_string_actions:
            assert sum(other.startswith(option) for other in theirs) <= 1, (name, option)


def test_bench_tells_stage_times_and_writes_them(package, capsys):
    assert (
        main(
            skip_spec(),
            package,
            package / "weights",
            argv=["bench", "--stages", "--report", str(package / "times.json")],
        )
        == 0
    )

    assert "backward ms" in capsys.readouterr().out
    times = json.loads((package / "times.json").read_text())
    assert times["step_s"] > 0
    assert len(times["stages"]) == len(skip_spec().stages)
    assert all(stage["forward_s"] > 0 for stage in times["stages"])


def test_bench_writes_a_calibration_where_the_plan_tells_of_stages(package, capsys):
    stage = {"forward_s": 1e-3, "backward_s": 2e-3, "weight_s": 0.0, "remat": "none"}
    stages = [stage] * len(skip_spec().stages)
    (package / "plan.json").write_text(
        json.dumps({"prediction": {"step_s": 0.5}, "stages": stages})
    )
    file = package / "calibration.json"
    words = ["bench", "--steps", "1", "--calibrate", str(file)]
    assert main(skip_spec(), package, package / "weights", argv=words) == 0

    text = capsys.readouterr().out
    assert "(told 1, 2)" in text
    assert f"--calibration {file}" in text
    assert {*json.loads(file.read_text())} == {"forward", "backward", "measured"}

    file.unlink()
    (package / "plan.json").unlink()
    assert main(skip_spec(), package, package / "weights", argv=words) == 2
    assert "nothing to calibrate by" in capsys.readouterr().err
    assert not file.exists()


def losses(text):
    return [float(number) for number in re.findall(r"loss (\S+)", text)]


def test_train_on_the_example(package, capsys):
    """The loss falls, a line shows it, weights are saved under the model's names."""
    saved = package / "out.safetensors"
    words = ["train", "--steps", "30", "--lr", "0.1", "--optimizer", "adam", "--save", str(saved)]

    assert main(skip_spec(), package, package / "weights", argv=words) == 0
    text = capsys.readouterr().out
    assert "tiny: 4 stages, 4 micro-batches, gpipe, 4 threads on cpu" in text
    assert "step 30/30" in text
    assert "predicted 500 ms" in text
    assert "samples/s" in text
    assert losses(text)[-1] < 0.7 * losses(text)[0]
    assert load_file(saved).keys() == {
        f"model.l{number}.{kind}" for number in range(4) for kind in ("weight", "bias")
    }


def test_train_on_the_users_data(package, capsys):
    """Batches and optimizer come from the file; saved weights go on where they were."""
    hooks = package / "model.py"
    hooks.write_text(HOOKS)
    words = ["train", "--steps", "4", "--schedule", "1f1b", "--save", str(package / "out")]

    assert main(skip_spec(), package, package / "weights", str(hooks), words) == 0
    assert "step 4/4" in capsys.readouterr().out
    assert (
        main(
            skip_spec(),
            package,
            package / "weights",
            argv=["bench", "--load", str(package / "out")],
        )
        == 0
    )


def test_infer(package, capsys):
    """Outputs go to a file under the names of the output's structure."""
    x, y = package / "x.safetensors", package / "y.safetensors"
    save_file({"anything": data_for("skip", 6)[2]["x"]}, x)

    assert (
        main(
            skip_spec(),
            package,
            package / "weights",
            argv=["infer", "--input", str(x), "--output", str(y)],
        )
        == 0
    )
    assert "y: 6x6 float32" in capsys.readouterr().out
    assert {name: tuple(t.shape) for name, t in load_file(y).items()} == {
        "y": (6, WIDTH),
        "early.0": (WIDTH, 6),
        "early.1.0": (6, WIDTH),
    }


def test_bench(package, capsys):
    """The median is compared with the prediction of the plan."""
    assert main(skip_spec(), package, package / "weights", argv=["bench", "--steps", "2"]) == 0
    text = capsys.readouterr().out
    assert "step: median" in text
    assert "predicted 500 ms" in text

    plan = json.loads((package / "plan.json").read_text())
    plan["prediction"]["threads_s"] = 0.25
    (package / "plan.json").write_text(json.dumps(plan))
    assert main(skip_spec(), package, package / "weights", argv=["bench", "--steps", "1"]) == 0
    assert "when it was compiled 250 ms" in capsys.readouterr().out

    # That of four devices tells nothing about one.
    assert (
        main(
            skip_spec(),
            package,
            package / "weights",
            argv=["bench", "--steps", "1", "--devices", "cpu"],
        )
        == 0
    )
    assert "predicted" not in capsys.readouterr().out


def test_check(package, capsys):
    """The pipeline is compared with its own stages in a row."""
    assert main(skip_spec(), package, package / "weights", argv=["check"]) == 0
    assert "gradient" in capsys.readouterr().out


class InSixteenBits(Skip3):
    def loss(self, y, target):
        return y.square().mean()


def test_check_of_a_loss_of_16_bits(package, capsys):
    """It is held to the rounding of its type: micro-batches are summed up in it."""
    spec = skip_spec()
    last = dataclasses.replace(spec.stages[-1], module=InSixteenBits)
    spec = dataclasses.replace(spec, stages=(*spec.stages[:-1], last))

    # The gradients of what several stages read are summed up in another order.
    main(spec, package, package / "weights", argv=["check", "--precision", "bf16"])

    assert re.search(r"loss .* 6e-02 +ok", capsys.readouterr().out)


def test_nested_inputs_and_no_weights(tmp_path, capsys):
    """An example is put back where the inputs stood in the call; stages initialise themselves."""
    (tmp_path / "weights").mkdir()
    save_file(data_for("tied", 8)[2], tmp_path / "weights" / "example.safetensors")

    assert (
        main(tied_spec(), tmp_path, None, argv=["train", "--steps", "2", "--batch-size", "12"]) == 0
    )
    assert "step 2/2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["bench", "--devices", "cpu,cpu,cpu"], 2, "4 stages cannot be spread over 3"),
        (["infer", "--input", "nowhere"], 1, "cannot read nowhere"),
        (["infer", "--load", "nowhere"], 1, "cannot read nowhere"),
        (["check", "--reference", "nowhere"], 2, "cannot read the reference nowhere"),
    ],
)
def test_user_errors_are_one_message(package, capsys, words, code, message):
    """No traceback, and the exit code tells what kind of fault it was."""
    assert main(skip_spec(), package, package / "weights", argv=words) == code
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert message in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("source", "code", "message"),
    [
        ("import nothing_of_that_name", 1, "ModuleNotFoundError"),
        ("def train_data(): return []", 1, "gives no batches"),
        ("def train_data(): return [1]", 2, "batch 1 of pass 1 of train_data() of"),
        ("def make_optimizer(params): return 1 / 0", 1, "make_optimizer() of"),
    ],
)
def test_faults_of_the_users_file(package, capsys, source, code, message):
    """They are told as the file's, in one line."""
    hooks = package / "model.py"
    hooks.write_text(source)

    assert (
        main(skip_spec(), package, package / "weights", str(hooks), ["train", "--steps", "2"])
        == code
    )
    assert message in capsys.readouterr().err


def test_a_stage_that_raises(package, capsys, monkeypatch):
    """The message names the stage; --traceback lets the exception through."""

    def fail(self, a, c):
        raise ValueError("bad luck")

    spec = skip_spec()
    monkeypatch.setattr(spec.stages[3].module, "forward", fail)

    assert main(spec, package, package / "weights", argv=["train", "--steps", "1"]) == 1
    assert "stage 3, forward of micro-batch 0 (3F0): ValueError: bad luck" in (
        capsys.readouterr().err
    )
    with pytest.raises(Exception, match="bad luck"):
        main(spec, package, package / "weights", argv=["train", "--steps", "1", "--traceback"])


def test_missing_weights_are_named(package, capsys):
    """A package whose weights are those of another model says what is missing."""
    save_weights({"other": torch.zeros(1)}, package / "weights")

    assert main(skip_spec(), package, package / "weights", argv=["infer"]) == 1
    assert "do not hold model.l0." in capsys.readouterr().err


def test_weights_that_are_gone_are_named(package, capsys):
    """A package that was written with weights never begins with others."""
    shutil.rmtree(package / "weights")

    assert main(skip_spec(), package, package / "weights", argv=["train", "--steps", "1"]) == 1
    assert "index.json is missing" in capsys.readouterr().err


def test_a_package_without_an_example(tmp_path, capsys):
    """It says what to do instead."""
    assert main(norm_spec(), tmp_path, None, argv=["infer"]) == 2
    assert "this package has no example batch" in capsys.readouterr().err


def test_a_folder_of_hugging_face_is_exported_of_such_a_package_alone(package, tmp_path, capsys):
    """What its files would be called, another package does not know."""
    words = ["export", "--checkpoint", "kept", "--format", "huggingface", "-o", str(tmp_path / "o")]

    assert main(skip_spec(), package, package / "weights", argv=words) == 2
    assert "was not compiled from a folder of Hugging Face's" in capsys.readouterr().err
