"""Parameters that several stages own: equal on every device, and when they are first made.

Held against what the optimizer, or the first owner, has written.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_pipelines import tied_spec
from torch import nn

from gpipe_compiler.runtime.core.local_stages import LocalStages, SharedParameter, summed
from gpipe_compiler.runtime.core.reducer import Reducer, share_initial

OWNERS = {"emb.weight": (0, 1, 3)}


class Elsewhere(nn.Parameter):
    """A parameter that says it lies on another device."""

    device = torch.device("cuda", 1)


class Peers:
    """The other processes of a pipeline: `value` comes from the first owner."""

    size = 1
    rank = 0

    def __init__(self, value):
        self.value = value
        self.asked = []

    def broadcast(self, tensor, source, what, targets):
        self.asked.append((source, tuple(targets)))
        assert tensor.dtype == self.value.dtype
        return self.value


@pytest.mark.parametrize("write", [lambda p: p.data.add_(1.0), lambda p: p.detach().add_(1.0)])
def test_a_copy_on_another_device_follows_however_the_optimizer_writes(write):
    copy = torch.zeros(3)
    shared = SharedParameter("w", [nn.Parameter(torch.zeros(3)), Elsewhere(copy)])
    shared.spread()
    for step in range(2):
        write(shared.canonical)
        shared.spread()
        assert torch.equal(copy, torch.full((3,), step + 1.0))


@pytest.mark.parametrize("stage", range(4))
def test_initial_values_go_to_the_owners_alone_in_their_own_type(stage):
    """Where each process has a stage; the third has none of the embedding."""
    spec = tied_spec()
    value = torch.randn(10, 6, dtype=torch.float64)
    peers = Peers(value)
    held = LocalStages(spec, {stage: spec.stages[stage].module().double()})

    topology = SimpleNamespace(pipeline=peers, peers=peers, rank_of=lambda stage: stage)
    share_initial(topology, held, OWNERS, None)

    owns = stage in OWNERS["emb.weight"]
    assert peers.asked == ([(0, (1, 3))] if owns else [])
    if owns:
        assert torch.equal(held.state_dict()["emb.weight"], value)


class Replica:
    """One of two replicas on two devices that share a parameter: what goes from rank 0 to 1."""

    replicas = 2
    carrier = torch.device("cpu")

    def __init__(self, other):
        self.other = other
        self.sent = []
        self.rank = 0
        self.world = self.pipeline = self.collectives = self

    def all_reduce(self, row):
        if self.other is not None:
            row += torch.cat([self.other, torch.ones(1)]) / 2

    def wait(self, work, what):
        assert work is None

    def broadcast(self, tensor, source, what, targets):
        if self.rank == source:
            self.sent.append(tensor.clone())
            return tensor
        return self.sent.pop(0)


@pytest.mark.parametrize("own", [None, 2.0])
@pytest.mark.parametrize("other", [None, 4.0])
def test_all_owners_have_the_mean_also_where_a_replica_has_no_gradient(own, other):
    """As where nothing counts in the loss of its share."""
    full = [None if x is None else torch.full((3,), x) for x in (own, other)]
    replica = Replica(full[1])
    owners = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    for rank, owner in enumerate(owners):
        replica.rank = rank
        owner.grad = None if own is None else full[0].clone()
        reducer = Reducer(replica, {}, [SharedParameter("w", [owner])], {"w": (0, 1)})
        reducer.begin()
        reducer.finish()

    expected = None if own is other is None else torch.full((3,), ((own or 0) + (other or 0)) / 2)
    for owner in owners:
        assert (owner.grad is None) == (expected is None)
        if expected is not None:
            assert torch.equal(owner.grad, expected)
    assert not replica.sent


def test_sparse_and_dense_gradients_are_summed_in_either_order():
    dense = torch.rand(3, 2)
    sparse = torch.sparse_coo_tensor([[0, 2, 2]], torch.rand(3, 2), (3, 2))
    expected = dense + sparse.to_dense()
    for one, other in ((dense, sparse), (sparse, dense)):
        torch.testing.assert_close(summed(one, other), expected)
