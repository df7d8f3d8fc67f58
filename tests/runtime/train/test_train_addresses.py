"""Training with its checkpoints at an address, held against a run that is not disturbed."""

from __future__ import annotations

import uuid

import fsspec
import pytest
import torch
from tiny_pipelines import norm_spec
from training_commands import SHUFFLED, assert_same

from gpipe_compiler.runtime.core.address import Address, place_of
from gpipe_compiler.runtime.core.storing import HeldError
from gpipe_compiler.runtime.core.weights import load_file
from gpipe_compiler.runtime.errors import CheckpointError
from gpipe_compiler.runtime.train.checkpoint_manager import Claim
from gpipe_compiler.runtime.train.command import main
from gpipe_compiler.runtime.train.optimizer import Update


@pytest.fixture
def there():
    """An address where nothing is yet."""
    url = f"memory://{uuid.uuid4()}/run"
    yield url
    if fsspec.filesystem("memory").exists(url):
        fsspec.filesystem("memory").rm(url, recursive=True)


def names(there):
    return [path.name for path in place_of(there).iterdir()]


def test_resumed_is_undisturbed(run, there):
    """The same bits, the same log; and nothing but checkpoints is left."""
    whole, parts = run(norm_spec(), SHUFFLED), run(norm_spec(), SHUFFLED)
    words = ("--checkpoint-dir", there, "--checkpoint-every", 2, "--keep-checkpoints", 2)

    assert whole("--steps", 8) == 0
    assert parts("--steps", 5, *words) == 0
    assert names(there) == ["step_00000004", "step_00000005"]
    assert parts("--steps", 8, *words, "--resume") == 0

    assert_same(parts, whole)
    assert names(there) == ["step_00000006", "step_00000008"]
    assert parts("--steps", 8, *words, "--resume", f"{there}/step_00000006") == 0
    for name, tensor in whole.weights.items():
        assert torch.equal(parts.weights[name], tensor), name


def test_load_and_export(run, there, tmp_path):
    kept = run(norm_spec(), SHUFFLED)
    assert kept("--steps", 2, "--checkpoint-dir", there) == 0
    truth = kept.weights

    words = ["export", "--checkpoint", there, "-o", str(tmp_path / "out.safetensors")]
    assert main(norm_spec(), kept.folder, None, None, words) == 0
    for name, tensor in load_file(tmp_path / "out.safetensors").items():
        assert torch.equal(truth[name], tensor), name

    went_on, loaded = run(norm_spec(), SHUFFLED), run(norm_spec(), SHUFFLED)
    weights = went_on.folder / "weights.safetensors"
    kept.saved.rename(weights)
    assert went_on("--steps", 1, "--load", weights) == 0
    assert loaded("--steps", 1, "--load", there) == 0
    assert_same(loaded, went_on)


def test_an_address_with_checkpoints_is_not_written_over(run, there, capsys):
    kept = run(norm_spec(), SHUFFLED)
    words = ("--steps", 2, "--checkpoint-dir", there)
    assert kept(*words) == 0

    assert kept(*words) == 2
    assert f"{there} holds checkpoints already, the newest is" in capsys.readouterr().err
    assert kept(*words, "--resume") == 0


def test_the_newest_run_alone_writes(run, there, capsys, monkeypatch):
    """Of two that run at a time the second is refused, unless it resumes: then the first ends."""
    kept, other = run(norm_spec(), SHUFFLED), run(norm_spec(), SHUFFLED)
    words = ("--checkpoint-dir", there, "--checkpoint-every", 1)
    update = Update.__call__
    codes = []

    def disturbed(self, *given):
        with monkeypatch.context() as patch:
            patch.setattr(Update, "__call__", update)
            if not codes:
                codes.append(other("--steps", 1, *words))
                codes.append(other("--steps", 1, *words, "--resume"))
        return update(self, *given)

    monkeypatch.setattr(Update, "__call__", disturbed)
    assert kept("--steps", 2, *words) == 1
    assert codes == [2, 0]
    told = capsys.readouterr().err
    assert f"another run writes its checkpoints to {there}: process " in told
    assert "if it was killed, --resume takes its place" in told
    assert f"another run has gone on from {there}: a run that has ended" in told
    assert names(there) == ["step_00000001"]


def test_a_restart_takes_the_claim_of_its_own_job_alone():
    directory = Address(f"memory://{uuid.uuid4()}")
    first = Claim.take(directory, "one", again=False, resumed=False)
    second = Claim.take(directory, "one", again=True, resumed=False)
    with pytest.raises(CheckpointError, match="another run has gone on"):
        first.check()
    second.check()
    third = Claim.take(directory, "two", again=False, resumed=True)
    with pytest.raises(HeldError, match="process"):
        Claim.take(directory, "one", again=True, resumed=True)
    second.release()
    third.check()
    third.release()
    assert directory.iterdir() == []
