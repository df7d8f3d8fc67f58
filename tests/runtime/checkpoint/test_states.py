"""Objects of the user's that are saved and loaded with a checkpoint, and those that do not fit."""

from __future__ import annotations

import pytest
import torch
from tiny_pipelines import skip_spec

from gpipe_compiler.runtime.checkpoint import (
    Progress,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.errors import CheckpointError


class Kept:
    """Holds any state."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Picky(Kept):
    def load_state_dict(self, state):
        raise RuntimeError("not this one")


@pytest.fixture
def pipe():
    with Pipeline(skip_spec(), None) as made:
        yield made


def saved(pipe, folder, **states):
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    return save_checkpoint(pipe, optimizer, folder, Progress(), states=states)


def loaded(pipe, path, **states):
    load_checkpoint(pipe, None, path, states=states)


NEST = {
    "a.b": torch.arange(3.0),
    7: {"x": torch.tensor(2), "names": ["one", None], "none": {}},
    "list": [torch.ones(2), 3],
    "count": 12,
}


def test_any_nest_of_dicts_comes_back(pipe, tmp_path):
    """Of tensors those that are there already; of other values all, also new ones."""
    path = saved(pipe, tmp_path, mine=Kept(state=NEST), other=Kept(x=torch.zeros(2)))
    live = Kept(state={"a.b": torch.zeros(5), 7: {"x": torch.tensor(0)}})
    loaded(pipe, path, mine=live)
    plain = read_checkpoint(path).extra
    assert plain.keys() == {"mine", "other"}
    for found in (live.state["state"], plain["mine"]["state"]):
        assert found.keys() == NEST.keys()
        assert torch.equal(found["a.b"], NEST["a.b"])
        assert found[7].keys() == NEST[7].keys()
        assert found[7]["x"] == 2
        assert found[7]["names"] == ["one", None]
        assert torch.equal(found["list"][0], torch.ones(2))
        assert (found["list"][1], found["count"]) == (3, 12)


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ({"unknown": Kept()}, "holds no state of unknown"),
        ({"mine": Picky()}, "mine is Kept, this one is Picky"),
        ({"mine": Kept(x=torch.zeros(2), y=torch.zeros(1))}, r"does not hold state\.mine\.y"),
        ({"mine": Kept()}, r"holds state\.mine\.x, which is not there"),
    ],
)
def test_what_does_not_fit_is_refused(pipe, tmp_path, states, words):
    """Before anything is taken over."""
    path = saved(pipe, tmp_path, mine=Kept(x=torch.zeros(2)))
    before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    with torch.no_grad():
        next(pipe.parameters()).add_(1)
    with pytest.raises(CheckpointError, match=words):
        loaded(pipe, path, **states)
    changed = [name for name, x in pipe.state_dict().items() if not torch.equal(x, before[name])]
    assert len(changed) == 1


def test_what_an_object_refuses_or_code_would_have_to_read_is_told(pipe, tmp_path):
    path = saved(pipe, tmp_path, mine=Picky(x=1))
    with pytest.raises(CheckpointError, match=r"Picky does not take its state: .*not this one"):
        loaded(pipe, path, mine=Picky())
    with pytest.raises(CheckpointError, match="another one, holds more than numbers"):
        saved(pipe, tmp_path / "other", mine=Kept(x=Kept()))
