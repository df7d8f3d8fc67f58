"""Checkpoints at addresses of fsspec, of which `memory://` is in this process.

The truths: an undisturbed run, bit for bit, and the checkpoint that the same run has in a folder.
"""

from __future__ import annotations

import uuid

import fsspec
import pytest
import torch
from checkpoint_runs import Run, equal

from gpipe_compiler.runtime.checkpoint import export, files, latest, read_checkpoint
from gpipe_compiler.runtime.core.address import Address, place_of
from gpipe_compiler.runtime.core.weights import load_file
from gpipe_compiler.runtime.errors import CheckpointError, UsageError

pytestmark = pytest.mark.usefixtures("one_thread")

FILES = ("__0_0.distcp", ".metadata", "trainer.pt", "checkpoint.json")


@pytest.fixture
def there():
    """An address where nothing is yet."""
    url = f"memory://{uuid.uuid4()}/run"
    yield url
    if fsspec.filesystem("memory").exists(url):
        fsspec.filesystem("memory").rm(url, recursive=True)


@pytest.fixture
def saved(there):
    """A run that has written a checkpoint at an address, and where."""
    run = Run("tied", "groups", 4)
    run.train(2)
    yield run, run.save(there)
    run.close()


def change(file, content):
    with fsspec.open(str(file), "wb") as stream:
        stream.write(content)


def content_of(file):
    with fsspec.open(str(file), "rb") as stream:
        return stream.read()


def refused(path):
    """What the refusal says; nothing of a live run is changed by it."""
    run = Run("tied", "groups", 2, seed=8)
    run.train(1)
    before = run.state()
    with pytest.raises(CheckpointError) as raised:
        run.load(path)
    assert equal(run.state(), before)
    run.close()
    return str(raised.value)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_any_number_of_devices_goes_on(saved, there, devices):
    truth, path = saved
    truth.train(5)
    run = Run("tied", "groups", devices, seed=99)

    assert latest(there) == path == Address(f"{there}/step_00000002")
    assert run.load(str(path)).step == 2
    run.train(5)

    assert equal(run.state(), truth.state())
    run.close()


def test_it_is_what_a_folder_holds(saved, tmp_path):
    run, path = saved
    folder = run.save(tmp_path / "folder")

    assert {file.name for file in path.iterdir()} == {file.name for file in folder.iterdir()}
    one, other = read_checkpoint(path), read_checkpoint(folder)
    assert equal(one.model, other.model)
    assert one.states.keys() == other.states.keys()
    for name, state in other.states.items():
        for slot, value in state.items():
            assert torch.equal(one.states[name][slot], value), (name, slot)
    assert (one.groups, one.progress, one.scheduler) == (
        other.groups,
        other.progress,
        other.scheduler,
    )
    export(path, tmp_path / "out.safetensors")
    assert equal(load_file(tmp_path / "out.safetensors"), other.model)


def test_the_newest_are_kept(saved, there):
    run, _ = saved
    for step in (3, 4, 5):
        run.train(step)
        run.save(there, keep=2)

    names = [path.name for path in place_of(there).iterdir()]
    assert names == ["step_00000004", "step_00000005"]


@pytest.mark.parametrize("name", FILES)
def test_damage_is_noticed(saved, name):
    _, path = saved
    whole = content_of(path / name)

    change(path / name, whole[: len(whole) // 2])
    assert name in refused(path)
    flipped = bytearray(whole)
    flipped[len(flipped) // 2] ^= 1
    change(path / name, bytes(flipped))
    assert str(path) in refused(path)
    (path / name).unlink()
    assert f"{name} is missing" in refused(path)


def test_a_damaged_newest_is_passed_over(saved, there):
    run, first = saved
    run.train(3)
    newest = run.save(there)
    change(newest / "__0_0.distcp", b"")

    with pytest.warns(UserWarning, match=r"passed over: .*__0_0\.distcp is truncated"):
        assert latest(there) == first


def test_one_that_is_not_finished_is_none(saved, there):
    """Whatever of it is there; the next one removes it, and does not take its name."""
    run, first = saved
    run.train(3)
    newest = run.save(there)
    (newest / "unfinished").write_text("", encoding="utf-8")
    assert latest(there) == newest, "complete, but for the removal of this file"
    (newest / "checkpoint.json").unlink()

    assert latest(there) == first
    assert "was not written to its end" in refused(newest)
    (newest / "trainer.pt").unlink()
    assert "was not written to its end" in refused(newest)
    assert run.save(there).name == "step_00000003_2"
    assert not newest.exists()


def test_a_run_that_may_not_write_leaves_nothing(saved, there):
    run, first = saved
    run.train(3)

    def forbid():
        raise CheckpointError("another run writes here")

    with pytest.raises(CheckpointError, match="another run writes here"):
        run.save(there, permitted=forbid)
    assert [path.name for path in place_of(there).iterdir()] == [first.name]


class BrokenStorage(fsspec.AbstractFileSystem):
    """Raises what no other library knows."""

    protocol = "broken"

    def _open(self, *_, **__):
        raise Exception("no credentials")

    ls = info = makedirs = _open


def test_what_storage_raises_is_told():
    fsspec.register_implementation("broken", BrokenStorage, clobber=True)
    run = Run("tied", "groups", 2)
    with pytest.raises(CheckpointError, match="no credentials"):
        run.save("broken://bucket/run")
    with pytest.raises(CheckpointError, match="no credentials"):
        run.load("broken://bucket/run/step_00000001")
    run.close()


def test_a_package_that_is_not_there_is_named():
    fsspec.register_implementation("elsewhere", "no_such_package.FileSystem", clobber=True)
    with pytest.raises(UsageError, match="needs a package that is not installed") as raised:
        place_of("elsewhere://bucket/run")
    assert raised.value.hint == "pip install no_such_package"
    with pytest.raises(UsageError, match="fsspec knows no addresses unknown://"):
        place_of("unknown://bucket/run")


def test_a_torch_without_these_names_is_told(saved, monkeypatch):
    _, path = saved
    monkeypatch.setattr(files, "_FSSPEC", "torch.distributed.checkpoint.nowhere")
    with pytest.raises(UsageError, match=r"has no torch\.distributed\.checkpoint\.nowhere"):
        read_checkpoint(path)
