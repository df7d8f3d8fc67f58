"""Replicas of pipelines over processes, compared with a plain loop over the whole batch.

The plain loop knows every tensor of the model once, by name, and runs micro-batch by micro-batch
under torch's own autograd, in double precision. BatchNorm is compared with one pipeline in one
process, which tests of its own hold against torch.
"""

from __future__ import annotations

import itertools
import socket
from pathlib import Path

import forked
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_pipelines import data_for, skip_spec, tied_spec

from gpipe_compiler.runtime.core.devices import default_devices, device_of_rank, gpu_of_rank
from gpipe_compiler.runtime.core.inputs import even_sizes
from gpipe_compiler.runtime.core.nest import tensors_of
from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.core.reducer import buckets
from gpipe_compiler.runtime.core.sharding import bounds, share_of
from gpipe_compiler.runtime.errors import TransportError, UsageError

HERE = Path(__file__).parents[1]


def ranks(processes, what, directory):
    return forked.run([HERE / "replica_ranks.py", what, directory], ranks=processes)


@pytest.mark.parametrize(
    ("processes", "what"),
    [
        *((2, "equal"), (4, "equal"), (2, "sharded"), (2, "full")),
        *(pytest.param(4, what, marks=pytest.mark.slow) for what in ("sharded", "full")),
    ],
)
def test_replicas_do_what_the_plain_loop_does(processes, what, tmp_path):
    """Losses, gradients, weights and buffers, after several steps, to 1e-10."""
    done = ranks(processes, what, tmp_path)

    assert done.returncode == 0, done.stderr
    files = sorted(tmp_path.glob("*.pt"))
    assert len(files) == {2: 10, 4: 22}[processes]
    for file in files:
        found, expected = torch.load(file)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            if tensor is None:
                assert found[key] is None, f"{file.stem}: {key}"
                continue
            torch.testing.assert_close(
                found[key], tensor, rtol=1e-10, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}"
            )
    moody = torch.load(tmp_path / "moody-2.pt")[0]
    assert moody["model.never.weight' 0"] is None
    assert moody["model.seldom.weight' 0"].any()
    for replicas in range(2, processes + 1, 2):
        refused(tmp_path, replicas, processes)


def refused(directory, replicas, processes):
    devices = processes // replicas
    bad = (replicas - 1) * devices
    for rank in range(processes):
        few = (directory / f"few-{replicas}-{rank}").read_text()
        assert few.startswith(f"a batch of {replicas - 1} is too small for {replicas} replicas")
        assert f"give every batch {replicas} samples or more" in few
        wrong = (directory / f"wrong-{replicas}-{rank}").read_text()
        assert "target is missing; a tensor is needed" in wrong
        assert (f"rank {bad} refused its inputs" in wrong) == (rank != bad)
        mixed = (directory / f"mixed-{replicas}-{rank}").read_text()
        assert "do not make the same call" in mixed
        for case in ("other", "evaluated"):
            other = (directory / f"{case}-{replicas}-{rank}").read_text()
            assert f"as rank {bad} has read it, is not that of rank 0" in other
            assert "the same seed on every rank" in other


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["optimizer", "full"])
def test_a_lost_rank_ends_replicas_that_wait_for_its_rows(tmp_path, sharding):
    """Wherever in the step that is."""
    done = ranks(4, f"die_{sharding}", tmp_path)

    assert done.returncode != 0
    for rank in range(3):
        message = (tmp_path / f"lost-{rank}").read_text()
        ends = ("gave up", "has lost the way", "the weights of the other replicas do not come")
        assert any(end in message for end in ends)


def test_a_lost_rank_ends_the_other_replicas(tmp_path):
    """Each of the others ends by itself, and names what it waited for."""
    done = ranks(4, "die", tmp_path)

    assert done.returncode != 0
    messages = {rank: (tmp_path / f"lost-{rank}").read_text() for rank in range(3)}
    # A rank notices at its next receive, or at its next send, whichever comes first.
    ends = {rank: (f"rank {rank} gave up", f"rank {rank} has lost the way") for rank in messages}
    assert any(end in messages[2] for end in ends[2])
    assert "rank 3" in messages[2]
    waited = {0: ("rank 2", "other replicas", "rank 1"), 1: ("rank 3", "other replicas", "rank 0")}
    for rank, names in waited.items():
        assert any(end in messages[rank] for end in ends[rank])
        assert any(name in messages[rank] for name in names)
    # Of one replica, one may have waited for the other; not both.
    assert any(f"from rank {1 - rank}" not in messages[rank] for rank in waited)


@pytest.mark.parametrize("times", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_processes_that_reduce_end_as_they_should(times, tmp_path):
    """However a process ends after collectives, and how often: its own exit code, no abort."""
    done = forked.run([HERE / "replica_exits.py", times, tmp_path])

    assert done.returncode == 0, done.stdout + done.stderr
    assert "terminate" not in done.stderr


def test_replicas_need_torchrun():
    """In one process there is one replica."""
    with pytest.raises(UsageError, match="2 replicas need a process for every device"):
        Pipeline(skip_spec(), None, data_parallel=2, transport="local")


@given(st.integers(0, 70), st.integers(1, 5), st.integers(1, 6), st.booleans())
def test_shares_are_those_of_one_pipeline(samples, replicas, microbatches, mixes):
    """One after another they are the batch; split again, the micro-batches of the whole."""
    spec = skip_spec()
    if mixes:
        object.__setattr__(spec.stages[0], "mixes", True)
    ends = [bounds(spec, samples, r, replicas, microbatches) for r in range(replicas)]
    assert ends[0][0] == 0
    assert ends[-1][1] == samples
    assert all(one[1] == other[0] for one, other in itertools.pairwise(ends))
    sizes = [stop - start for start, stop in ends]
    if min(sizes) == 0:
        return
    count = max(1, min(replicas * microbatches, samples // (2 if mixes else 1)))
    own = [max(1, min(microbatches, size // (2 if mixes else 1))) for size in sizes]
    split = [n for size, parts in zip(sizes, own, strict=True) for n in even_sizes(size, parts)]
    assert tuple(split) == even_sizes(samples, count)


def test_a_share_is_cut_out_of_nests():
    """Whatever the call looks like; the caller's own tensors are left alone."""
    inputs, target, values = data_for("tied", 8)
    shares = [share_of(tied_spec(), (inputs, target), r, 2, 2) for r in range(2)]
    for name, path in (("tokens", ("kwargs", "batch", "tokens")), ("labels", ("target", "labels"))):
        pieces = []
        for (args, kwargs), part in shares:
            nest = {"args": args, "kwargs": kwargs, "target": part}
            pieces.append(dict(tensors_of(nest))[path])
        assert [len(piece) for piece in pieces] == [4, 4]
        assert torch.equal(torch.cat(pieces), values[name])
    assert len(inputs["batch"]["tokens"]) == 8


def test_what_does_not_fit_together_is_not_cut():
    """So that a step refuses it, on all ranks."""
    call = (torch.ones(8, 6),), torch.ones(7, 6)
    assert share_of(skip_spec(), call, 0, 2, 2) is call


def test_buckets_keep_order_and_type():
    """About as many bytes as asked for, one dtype in each."""
    sizes = [(3, torch.float32), (4, torch.float64), (5, torch.float32), (6, torch.float32)]
    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in sizes]
    found = buckets(parameters, 4 * 8)
    assert [[len(p) for p in bucket] for bucket in found] == [[3, 5], [4], [6]]


def test_a_process_that_finds_no_other_says_so(monkeypatch):
    """As on a host that the first one cannot be reached from."""
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        alone = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**alone, "MASTER_PORT": taken.getsockname()[1]}.items():
            monkeypatch.setenv(name, str(value))

        with pytest.raises(TransportError, match="do not find each other"):
            Pipeline(tied_spec(), None, timeout_s=1)


@pytest.mark.parametrize(
    ("named", "gpus", "expected"),
    [
        (None, 4, "cuda:1"),
        ("cuda", 4, "cuda:1"),
        ("cuda:3", 4, "cuda:3"),
        ("cpu", 4, "cpu"),
        (None, 0, "cpu"),
        ("cuda", 0, "cuda"),
    ],
)
def test_cuda_is_the_gpu_of_the_local_rank(monkeypatch, named, gpus, expected):
    """NCCL takes none without its number."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    device = device_of_rank(None if named is None else torch.device(named))

    assert device == torch.device(expected)


@pytest.mark.parametrize(
    ("order", "gpus", "beside", "expected"),
    [
        ((), 4, 4, (0, 1, 2, 3)),
        ((2, 0, 3, 1), 4, 4, (2, 0, 3, 1)),
        ((3, 1), 4, 2, (3, 1)),  # the other two are not used
        ((1, 0), 4, 4, (1, 0, 3, 2)),  # two replicas, one after the other
        ((1, 0, 3, 2), 2, 2, (1, 0, 1, 0)),  # two hosts
        ((2, 0, 3, 1), 2, 2, (0, 1, 0, 1)),  # a rank cannot compute on another host's GPU
        ((2, 0), 2, 2, (0, 1)),  # planned for a larger machine
        ((1, 1), 2, 2, (0, 1)),
    ],
)
def test_ranks_compute_on_the_planned_gpus(monkeypatch, order, gpus, beside, expected):
    """Where the plan can be followed; otherwise in order, and never two on one."""
    found = []
    for rank in range(len(expected)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank % beside))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(beside))
        found.append(gpu_of_rank(order, gpus))
    assert tuple(found) == expected


@pytest.mark.parametrize(
    ("order", "gpus", "expected"),
    [
        ((), 0, ["cpu", "cpu"]),
        ((1, 0), 0, ["cpu", "cpu"]),
        ((), 2, ["cuda:0", "cuda:1"]),
        ((3, 1), 4, ["cuda:3", "cuda:1"]),
        ((3, 1), 2, ["cuda:0", "cuda:1"]),
        ((3, 1), 1, ["cuda:0", "cuda:0"]),
    ],
)
def test_threads_compute_on_the_planned_gpus(monkeypatch, order, gpus, expected):
    """Where they are all there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    assert default_devices(2, order) == tuple(map(torch.device, expected))
