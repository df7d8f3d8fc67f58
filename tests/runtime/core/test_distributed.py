"""Pipelines over processes with gloo."""

from __future__ import annotations

import re
from pathlib import Path

import forked
import pytest
import torch
from ranks import collect

RANKS = Path(__file__).parents[1] / "ranks.py"


def ranks(processes, what, directory, **variables):
    return forked.run([RANKS, what, directory], ranks=processes, **variables)


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_do_what_threads_do(processes, tmp_path):
    """Losses, outputs, and weights after two optimizer steps, in every schedule."""
    done = ranks(processes, "equal", tmp_path)

    assert done.returncode == 0, done.stderr
    files = sorted(tmp_path.glob("*.pt"))
    assert len(files) == {2: 3 * 3 + 2 * 2, 4: 2 * 3}[processes]
    for file in files:
        name, _, schedule = file.stem.partition("-")
        expected = collect(name, schedule, "local")
        found = torch.load(file)
        assert expected.keys() == found.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-6, msg=key)
    if processes == 2:
        # Refused inputs are refused everywhere, and the next step works.
        assert "the batch is empty" in (tmp_path / "refused-0").read_text()
        assert "rank 0 refused" in (tmp_path / "refused-1").read_text()
        assert all("made no loss" in (tmp_path / f"lossless-{rank}").read_text() for rank in (0, 1))


def test_gloo_brings_messages_where_no_socket_can_be_named(tmp_path):
    far = tmp_path / "-".join(["far"] * 30)
    far.mkdir()

    done = ranks(2, "by_gloo", tmp_path, TMPDIR=str(far))

    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "skip-1f1b.pt")
    for key, tensor in collect("skip", "1f1b", "local").items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-6, msg=key)


@pytest.mark.parametrize("fault", ["die", "stall"])
def test_a_lost_rank_is_noticed(fault, tmp_path):
    """The other one ends with a message that names rank, action and value."""
    done = ranks(2, fault, tmp_path)

    assert done.returncode != 0
    lost = tmp_path / "lost-0"
    assert lost.exists(), done.stderr
    # A rank that has ended may be noticed before, in sending to it.
    sent = r"|gave up at send .* to rank 1|has lost the way (to|from) rank 1"
    noticed = r"gave up at receive h'\[3\] 1>0 from rank 1" + (sent if fault == "die" else "")
    assert re.search(f"rank 0 ({noticed})", lost.read_text())
    if fault == "die":
        # Nor does it go on, with messages of a step that ended in the middle.
        assert "an earlier call of this pipeline ended" in (tmp_path / "again-0").read_text()
