"""Checkpoints that are damaged, foreign, or cannot be written.

The truth is what was in memory before: after a refusal the live model, optimizer and schedule are
the same, bit for bit; and a checkpoint that is read at all gives what was saved.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import shutil
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_runs import Run, equal, schedule_for
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex

from gpipe_compiler.runtime.checkpoint import (
    Progress,
    export,
    latest,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from gpipe_compiler.runtime.checkpoint.files import _Unpickler
from gpipe_compiler.runtime.checkpoint.folder import Index, _crc
from gpipe_compiler.runtime.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

FILES = ("__0_0.distcp", ".metadata", "trainer.pt", "checkpoint.json")


class Case:
    """A checkpoint, what it holds, and a live run of other numbers."""

    def __init__(self, directory):
        writer = Run("tied", "adam", 2)
        writer.train(2)
        self.path = writer.save(directory / "saved")
        self.truth = writer.state()
        writer.close()
        self.copy = directory / "copy"
        self.run = Run("tied", "adam", 4, seed=8)
        self.run.train(1)
        self.before = self.run.state()

    def damage(self, name, change):
        """A copy of the checkpoint with one file changed."""
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.path, self.copy)
        content = (self.copy / name).read_bytes()
        (self.copy / name).write_bytes(change(content))
        return self.copy

    def refused(self, path, *, run=None):
        """What the refusal says, nothing being changed by it."""
        run = run or self.run
        before = run.state()
        with pytest.raises(CheckpointError) as raised:
            run.load(path)
        assert equal(run.state(), before)
        return str(raised.value)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    torch.set_num_threads(1)
    found = Case(tmp_path_factory.mktemp("damage"))
    yield found
    found.run.close()


@settings(max_examples=60)
@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(case, name, part):
    # The last byte of the index is the end of its line.
    path = case.damage(name, lambda content: content[: int(part * (len(content) - 1))])

    assert name in case.refused(path)
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


@settings(max_examples=150)
@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_a_changed_bit_is_refused_or_means_nothing(case, name, part, bit):
    def flip(content):
        changed = bytearray(content)
        changed[int(part * len(changed))] ^= 1 << bit
        return bytes(changed)

    path = case.damage(name, flip)
    reader = Run("tied", "adam", 1, seed=3)
    before = reader.state()
    try:
        reader.load(path)
    except CheckpointError:
        assert equal(reader.state(), before)
    else:
        assert equal(reader.state(), case.truth)
    reader.close()


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_refused(case, name):
    path = case.damage(name, lambda content: content)
    (path / name).unlink()

    assert f"{name} is missing" in case.refused(path)


def test_a_longer_file_and_files_of_another_checkpoint_are_refused(case, tmp_path):
    assert "written were" in case.refused(case.damage(FILES[0], lambda content: content + b"x"))
    run = Run("tied", "adam", 2, seed=1)
    run.train(2)
    other = run.save(tmp_path)
    run.close()
    content = (other / FILES[0]).read_bytes()
    assert len(content) == (case.path / FILES[0]).stat().st_size
    assert "is damaged" in case.refused(case.damage(FILES[0], lambda _: content))


def test_another_format_is_refused(case):
    def newer(text):
        content = json.loads(text)
        content["format"] = 2
        content.pop("crc")
        return json.dumps({**content, "crc": _crc(content)}).encode()

    assert "format 2, this package reads format 1" in case.refused(case.damage(FILES[3], newer))


def test_what_is_no_checkpoint_is_refused(case, tmp_path):
    assert "no folder" in case.refused(tmp_path / "nothing")
    assert "name the folder of one checkpoint" in case.refused(case.path.parent)
    assert "no checkpoint" in case.refused(tmp_path)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("where", [".metadata", "trainer.pt", "value"])
def test_code_in_a_checkpoint_is_not_run(case, where, tmp_path):
    evil = Evil(str(tmp_path / "ran"))
    path = tmp_path / "evil"
    if where == "value":
        dcp.save(
            {"model": {"emb.weight": torch.ones(2)}, "optimizer": {"param_groups": [{"lr": evil}]}},
            checkpoint_id=path,
        )
        with pytest.raises(CheckpointError, match="is damaged"):
            read_checkpoint(path)
    else:
        shutil.copytree(case.path, path)
        content = pickle.dumps(evil)
        if where == "trainer.pt":
            torch.save({"data": evil}, path / "file")
            content = (path / "file").read_bytes()
        (path / where).write_bytes(content)
        rewrite(path)
        assert where in case.refused(path)
    assert not (tmp_path / "ran").exists()


class Attribute:
    """Pickled as an attribute of something, as some versions of Python store members of enums."""

    def __init__(self, of, name):
        self.of, self.name = of, name

    def __reduce__(self):
        return getattr, (self.of, self.name)


def test_of_attributes_members_of_enums_alone_are_read():
    stored = MetadataIndex("w"), Attribute(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")
    *_, member = _Unpickler(io.BytesIO(pickle.dumps(stored))).load()
    assert member is _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST

    with pytest.raises(pickle.UnpicklingError, match="no part of a checkpoint"):
        _Unpickler(io.BytesIO(pickle.dumps(Attribute(MetadataIndex, "__init__")))).load()


def rewrite(path):
    """Let the index agree with files that were changed on purpose."""
    content = json.loads((path / "checkpoint.json").read_text())
    for name in (".metadata", "trainer.pt"):
        size = (path / name).stat().st_size
        content["files"][name] = size
        content["checksums"][name] = [(0, size, zlib.crc32((path / name).read_bytes()))]
    (path / "checkpoint.json").unlink()
    Index(**{key: content[key] for key in Index.__dataclass_fields__}).write(path)


def test_a_checkpoint_of_another_model_is_refused(case, tmp_path):
    run = Run("norm", "adam", 2)
    path = run.save(tmp_path)
    message = case.refused(path)
    assert "is not of tiny" in message
    assert "first.l0.weight is unknown" in message
    assert "more" in message
    assert "emb.weight is unknown" in case.refused(case.path, run=run)
    run.close()


def plain_states(case):
    model = read_checkpoint(case.path).model
    return {name: tensor.clone() for name, tensor in model.items()}


def test_other_shapes_and_types_are_refused(case, tmp_path):
    for change, said in (
        (torch.ones(3), "l1.bias is of shape (3,), not of shape (6,)"),
        (torch.ones(6, dtype=torch.int64), "l1.bias is of torch.int64, not of torch.float32"),
        ("words", "l1.bias is no tensor"),
    ):
        states = {**plain_states(case), "l1.bias": change}
        dcp.save({"model": states}, checkpoint_id=tmp_path / "plain")
        with pytest.raises(CheckpointError) as raised:
            load_checkpoint(case.run.pipe, None, tmp_path / "plain")
        assert said in str(raised.value)
        shutil.rmtree(tmp_path / "plain")
    dcp.save(plain_states(case), checkpoint_id=tmp_path / "plain")
    with pytest.raises(CheckpointError, match="is missing"):
        load_checkpoint(case.run.pipe, None, tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"no weights under model\.<name>"):
        export(tmp_path / "plain", tmp_path / "file")
    assert equal(case.run.state(), case.before)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: torch.optim.SGD(p, lr=1.0), "optimizer is Adam, this one is SGD"),
        (lambda p: torch.optim.AdamW(p, lr=1.0), "optimizer is Adam, this one is AdamW"),
        (lambda p: torch.optim.Adam(p[1:], lr=1.0), "does not train emb.weight"),
    ],
)
def test_another_optimizer_is_refused(case, make, said):
    optimizer = make(list(case.run.pipe.parameters()))
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(case.run.pipe, optimizer, case.path)
    assert [dict(group) for group in optimizer.param_groups] == before
    assert not optimizer.state
    assert equal(case.run.state(), case.before)


def test_another_optimizer_is_refused_by_the_plain_model(case):
    saved = read_checkpoint(case.path)
    parameters = dict(case.run.pipe.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    with pytest.raises(CheckpointError, match="optimizer is Adam, this one is SGD"):
        saved.optimizer_for(optimizer, parameters.items())


def test_an_optimizer_of_more_parameters_is_refused(case, tmp_path):
    run = Run("tied", "adam", 2)
    few = torch.optim.Adam(list(run.pipe.parameters())[:1], amsgrad=True)
    path = save_checkpoint(run.pipe, few, tmp_path, Progress(), scheduler=schedule_for(few))
    assert "does not train l1.weight, l1.bias, this one does" in case.refused(path)
    run.close()


def test_a_stranger_among_the_parameters_is_refused(case, tmp_path):
    run = Run("tied", "adam", 2)
    run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    with pytest.raises(CheckpointError, match="none of the pipeline's"):
        run.save(tmp_path)
    assert "none of the pipeline's" in case.refused(case.path, run=run)
    run.close()


@pytest.mark.parametrize("kind", ["sgd", "groups"])
def test_kinds_are_told_apart_without_an_index(case, kind, tmp_path):
    """In what torch alone has written, by hyper-parameters."""
    saved = read_checkpoint(case.path)
    optimizer = {"state": saved.states, "param_groups": saved.groups}
    dcp.save({"model": saved.model, "optimizer": optimizer}, checkpoint_id=tmp_path / "plain")
    run = Run("tied", kind, 2)
    with pytest.raises(CheckpointError, match="of another kind than"):
        load_checkpoint(run.pipe, run.optimizer, tmp_path / "plain")
    run.close()


def test_a_schedule_is_missing_or_of_another_kind(case, tmp_path):
    other = torch.optim.lr_scheduler.ExponentialLR(case.run.optimizer, 0.9)
    with pytest.raises(CheckpointError, match="scheduler is MultiStepLR, this one is Exponential"):
        load_checkpoint(case.run.pipe, case.run.optimizer, case.path, scheduler=other)
    run = Run("tied", "adam", 2)
    path = save_checkpoint(run.pipe, run.optimizer, tmp_path, Progress())
    run.close()
    assert "no state of a scheduler" in case.refused(path)


def test_a_schedule_of_code_is_refused_when_it_is_saved(case, tmp_path):
    class Odd:
        def state_dict(self):
            return {"odd": Evil("nothing")}

        def load_state_dict(self, state):
            raise AssertionError

    run = case.run
    with pytest.raises(CheckpointError, match="more than numbers and names"):
        save_checkpoint(run.pipe, run.optimizer, tmp_path, Progress(), scheduler=Odd())
    assert list(tmp_path.iterdir()) == []


def test_the_newest_complete_one_is_found(case, tmp_path):
    for step in (1, 2):
        case.run.step = step
        case.run.save(tmp_path)
    case.run.step = 1
    (tmp_path / "step_00000002" / FILES[0]).write_bytes(b"cut")
    with pytest.warns(UserWarning, match="passed over: .*step_00000002.* is truncated"):
        assert latest(tmp_path) == tmp_path / "step_00000001"
    (tmp_path / "step_00000001" / FILES[3]).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is complete"):
        latest(tmp_path)


def test_a_write_that_fails_within_a_tensor_is_told_of(case, tmp_path):
    """torch's own message for that is about positions in a file."""
    run = Run("tied", "adam", 2)
    run.train(1)
    next(iter(run.optimizer.state.values()))["large"] = torch.ones(1_000_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*__0_0.distcp: File too large"):
            run.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
    run.close()


def test_export_leaves_no_part_of_a_file(case, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            export(case.path, tmp_path / "weights.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
