"""Checkpoints that go from one number of stages to another and to plain PyTorch.

The truths: an undisturbed run, bit for bit; and torch's own functions for checkpoints of a plain
model (torch.distributed.checkpoint with get_optimizer_state_dict), which know nothing of pipelines.
"""

from __future__ import annotations

import random

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_runs import OPTIMIZERS, PlainTied, Run, equal, schedule_for
from safetensors.torch import load_file
from tiny_pipelines import data_for
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from gpipe_compiler.runtime.checkpoint import (
    Progress,
    RandomState,
    export,
    latest,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from gpipe_compiler.runtime.checkpoint.optimizer import merged
from gpipe_compiler.runtime.core.weights import save_weights
from gpipe_compiler.runtime.train.loading import load_weights

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


@pytest.fixture(scope="module", params=sorted(OPTIMIZERS))
def trained(request, tmp_path_factory):
    """A run over four stages: its checkpoint after 3 steps, its state after 6."""
    kind = request.param
    run = Run("tied", kind, 4)
    run.train(3)
    path = run.save(tmp_path_factory.mktemp(kind))
    run.train(6)
    yield kind, path, run.state()
    run.close()


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_any_number_of_devices_goes_on(trained, devices):
    kind, path, truth = trained
    run = Run("tied", kind, devices, seed=99)

    progress = run.load(path)
    run.train(6)

    assert (progress.step, progress.step_number, progress.seed) == (3, 3, 0)
    assert equal(run.state(), truth)
    run.close()


def test_statistics_and_dropout_go_on(tmp_path):
    """Buffers are there, and masks are those of the step and the seed."""
    run = Run("norm", "adam", 2, seed=3)
    run.train(2)
    path = run.save(tmp_path)
    run.train(4)
    for devices in (1, 2):
        other = Run("norm", "adam", devices)
        other.load(path)
        other.train(4)
        assert equal(other.state(), run.state())
        other.close()
    run.close()


def plain_steps(model, optimizer, schedule, start, until):
    for step in range(start, until):
        _, _, values = data_for("tied", 8, seed=step)
        optimizer.zero_grad()
        for first in range(0, 8, 2):
            part = {name: tensor[first : first + 2] for name, tensor in values.items()}
            (model(**part) / 4).backward()
        optimizer.step()
        schedule.step()


def close_to(model, truth):
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, truth[f"model.{name}"], rtol=1e-5, atol=1e-5)


def test_the_plain_model_goes_on(trained):
    kind, path, truth = trained
    saved = read_checkpoint(path)
    model = PlainTied()
    # In another order than the pipeline's: the state is found by name.
    optimizer = OPTIMIZERS[kind](list(model.parameters())[::-1])
    schedule = schedule_for(optimizer)

    model.load_state_dict(saved.model, strict=True)
    optimizer.load_state_dict(saved.optimizer_for(optimizer, model))
    schedule.load_state_dict(saved.scheduler)
    plain_steps(model, optimizer, schedule, saved.progress.step, 6)

    close_to(model, truth)


def test_torch_alone_reads_a_checkpoint(tmp_path):
    """With nothing of this project, into model and optimizer; and as one file."""
    run = Run("tied", "adam", 4)
    run.train(3)
    path = run.save(tmp_path)
    truth = run.state()
    run.close()
    model = PlainTied()
    optimizer = OPTIMIZERS["adam"](model.parameters())

    found = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(found, checkpoint_id=path)
    model.load_state_dict(found["model"], strict=True)
    set_optimizer_state_dict(model, optimizer, found["optimizer"])

    assert torch.equal(model.head.weight, truth["model.emb.weight"])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, truth[f"model.{name}"])
        assert optimizer.state[parameter].keys() == {
            "step",
            "exp_avg",
            "exp_avg_sq",
            "max_exp_avg_sq",
        }
        for slot, value in optimizer.state[parameter].items():
            assert torch.equal(value, truth[f"{name}.{slot}"])
    dcp_to_torch_save(path, tmp_path / "one.pt")
    whole = torch.load(tmp_path / "one.pt", weights_only=True)
    PlainTied().load_state_dict(whole["model"], strict=True)
    assert torch.equal(whole["optimizer"]["state"]["l1.bias"]["exp_avg"], truth["l1.bias.exp_avg"])


@pytest.mark.parametrize("kind", ["groups", "momentum"])
def test_a_pipeline_reads_what_torch_alone_has_written(kind, tmp_path):
    model = PlainTied()
    optimizer = OPTIMIZERS[kind](model.parameters())
    schedule = schedule_for(optimizer)
    plain_steps(model, optimizer, schedule, 0, 3)
    states = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(states, checkpoint_id=tmp_path / "plain")
    run = Run("tied", kind, 2)

    progress = load_checkpoint(run.pipe, run.optimizer, tmp_path / "plain")
    assert progress == Progress()
    run.schedule.load_state_dict(schedule.state_dict())
    run.step = 3
    run.train(6)
    plain_steps(model, optimizer, schedule, 3, 6)

    close_to(model, run.state())
    run.close()


def test_groups_are_found_by_their_parameters(tmp_path):
    """Formed by the user on every process; here in another order, and one of them empty."""
    run = Run("tied", "groups", 2)
    run.train(3)
    path = run.save(tmp_path)
    groups = read_checkpoint(path).groups
    assert [group["params"] for group in groups] == [["l1.bias"], ["emb.weight", "l1.weight"]]
    assert [group["weight_decay"] for group in groups] == [0.0, 0.1]
    other = Run("tied", "groups", 2)
    wide, flat = (other.optimizer.param_groups[k]["params"] for k in (1, 0))
    other.optimizer = torch.optim.AdamW(
        [{"params": wide}, {"params": []}, {"params": flat}], lr=7.0
    )

    load_checkpoint(other.pipe, other.optimizer, path)

    found = [(g["weight_decay"], g["lr"]) for g in other.optimizer.param_groups]
    assert found[0] == (0.1, 0.05)
    assert found[2] == (0.0, 0.025)
    run.close()
    other.close()


def test_frozen_parameters_have_no_state_and_are_stored(tmp_path):
    run = Run("tied", "adam", 2)
    for name, parameter in run.pipe.named_parameters():
        parameter.requires_grad_(name != "l1.weight")
    trained = [p for p in run.pipe.parameters() if p.requires_grad]
    run.optimizer = torch.optim.Adam(trained, lr=0.1)
    run.schedule = schedule_for(run.optimizer)
    run.train(2)
    saved = read_checkpoint(run.save(tmp_path))

    assert saved.states.keys() == {"emb.weight", "l1.bias"}
    assert torch.equal(saved.model["l1.weight"], run.pipe.state_dict()["l1.weight"])
    run.close()


def test_tied_tensors_are_stored_once_and_exported_twice(tmp_path):
    run = Run("tied", "sgd", 4)
    path = run.save(tmp_path)
    saved = read_checkpoint(path)
    assert saved.model["head.weight"] is saved.model["emb.weight"]
    stored = dcp.FileSystemReader(path).read_metadata().storage_data
    tensors = {(i.relative_path, i.offset) for k, i in stored.items() if k.fqn.startswith("model.")}
    assert len(tensors) == 3

    export(path, tmp_path / "weights" / "tied.safetensors")

    exported = load_file(tmp_path / "weights" / "tied.safetensors")
    model = PlainTied()
    model.load_state_dict(exported, strict=True)
    assert equal(exported, dict(run.pipe.state_dict()))
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["tied.safetensors"]
    other = Run("tied", "sgd", 2, seed=9)
    load_weights(other.pipe, tmp_path / "weights" / "tied.safetensors")
    assert equal(dict(other.pipe.state_dict()), dict(run.pipe.state_dict()))
    run.close()
    other.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_every_type_is_exported(dtype, tmp_path):
    tensors = {"a.b": torch.tensor([[0, 1, 2]]).to(dtype), "empty": torch.zeros(0, 3, dtype=dtype)}
    tensors["scalar"] = torch.tensor(1).to(dtype)
    dcp.save({"model": tensors}, checkpoint_id=tmp_path / "plain")

    export(tmp_path / "plain", tmp_path / "file.safetensors")

    found = load_file(tmp_path / "file.safetensors")
    assert equal(found, tensors)
    assert all(found[name].dtype == dtype for name in tensors)


def test_weights_of_a_package_are_divided_anew(tmp_path):
    """What a pipeline over four devices writes with --save is read over any number."""
    run = Run("tied", "sgd", 4)
    save_weights(run.pipe.state_dict(), tmp_path, shard_bytes=300)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for devices in (1, 2):
        other = Run("tied", "sgd", devices, seed=7)
        load_weights(other.pipe, tmp_path)
        assert equal(dict(other.pipe.state_dict()), dict(run.pipe.state_dict()))
        other.close()
    run.close()


def test_old_checkpoints_go_when_the_new_one_is_there(tmp_path):
    run = Run("tied", "sgd", 1)
    paths = []
    for step in (1, 2, 3, 4):
        run.step = step
        paths.append(run.save(tmp_path, keep=2))
    assert sorted(tmp_path.iterdir()) == paths[2:]
    assert latest(tmp_path) == paths[3]

    # A run that goes on from an earlier checkpoint: the newest is what it writes.
    run.load(paths[2])
    again = [run.save(tmp_path, keep=3), run.save(tmp_path, keep=3)]
    assert [path.name for path in again] == ["step_00000003_2", "step_00000003_3"]
    assert latest(tmp_path) == again[1]
    assert set(tmp_path.iterdir()) == {paths[3], *again}
    run.close()


def test_left_over_temporaries_go_and_strangers_stay(tmp_path):
    for name in (".step_00000001.partial", ".step_00000002_2.removed", "notes", ".step_1.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("kept")
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nothing") is None
    run = Run("tied", "sgd", 1)

    run.save(tmp_path)

    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".step_1.partial", "notes", "step_00000000"]
    run.close()


def test_scaler_schedule_and_data_position_come_back(tmp_path):
    run = Run("tied", "sgd", 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=5)
    schedules = torch.optim.lr_scheduler
    warm = schedules.LinearLR(run.optimizer, 0.1, total_iters=4)
    both = [warm, schedules.CosineAnnealingLR(run.optimizer, 10)]
    schedule = schedules.SequentialLR(run.optimizer, both, [4])
    run.optimizer.step()
    schedule.step()
    torch.manual_seed(4)
    random.seed(5)
    numpy.random.seed(6)
    data = {"shuffled": [3, 1, 2], "seen": torch.tensor(9)}
    began = RandomState.now()
    drawn = torch.rand(3), random.random(), numpy.random.rand()
    progress = Progress(7, 2, 5, began, RandomState.now(), data)
    path = save_checkpoint(
        run.pipe, run.optimizer, tmp_path, progress, scheduler=schedule, scaler=scaler
    )
    other = Run("tied", "sgd", 1)
    warm = schedules.LinearLR(other.optimizer, 0.1, total_iters=4)
    both = [warm, schedules.CosineAnnealingLR(other.optimizer, 10)]
    new_schedule = schedules.SequentialLR(other.optimizer, both, [4])
    new_scaler = torch.amp.GradScaler("cpu")

    found = load_checkpoint(
        other.pipe, other.optimizer, path, scheduler=new_schedule, scaler=new_scaler
    )

    assert (found.step, found.epoch, found.batch, found.data) == (7, 2, 5, data)
    assert new_scaler.state_dict() == scaler.state_dict()
    assert new_schedule.state_dict() == schedule.state_dict()
    assert other.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]
    found.random.restore()
    assert torch.equal(torch.rand(3), drawn[0])
    assert (random.random(), numpy.random.rand()) == drawn[1:]
    assert torch.equal(found.current.torch_cpu, progress.current.torch_cpu)
    run.close()
    other.close()


def test_weights_alone(tmp_path):
    """Without an optimizer, into one that was trained by another."""
    run = Run("tied", "groups", 4)
    run.train(2)
    path = run.save(tmp_path)
    other = Run("tied", "sgd", 2)

    load_checkpoint(other.pipe, None, path)

    assert equal(dict(other.pipe.state_dict()), dict(run.pipe.state_dict()))
    run.close()
    other.close()


def test_memory_formats_are_those_of_the_parameters(tmp_path):
    """Fused optimizers want states to lie in memory as their parameters do."""
    parameter = torch.nn.Parameter(torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tree = {
        "model": {"p": parameter.detach()},
        "optimizer": {
            "state": {"p": dict(optimizer.state[parameter])},
            "param_groups": [{**optimizer.param_groups[0], "params": ["p"]}],
        },
    }
    dcp.save(tree, checkpoint_id=tmp_path / "plain")
    other = torch.optim.Adam([parameter], fused=True)
    saved = read_checkpoint(tmp_path / "plain")

    other.load_state_dict(saved.optimizer_for(other, [("p", parameter)]))

    moment = other.state[parameter]["exp_avg"]
    assert moment.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(moment, optimizer.state[parameter]["exp_avg"])
    assert other.param_groups[0]["fused"] is True
    other.step()


def test_two_groups_alike_stay_two(tmp_path):
    """And the parts of one group on two processes are one."""
    group = {"lr": 0.1, "foreach": None}
    first = [{**group, "params": ["a"]}, {**group, "params": ["b"]}]
    second = [{**group, "params": ["c"]}, {**group, "foreach": True, "params": ["d", "b"]}]
    third = [{"lr": 0.2, "foreach": None, "params": ["e"]}, {**group, "params": ["f"]}]

    joined = merged([first, second, third])

    assert [found["params"] for found in joined] == [["a", "c"], ["b", "d", "f"], ["e"]]
