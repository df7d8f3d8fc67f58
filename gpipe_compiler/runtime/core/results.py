"""What a call comes to, from what each device made: its loss, and what the model returns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..spec import Leaf, PipelineSpec, Structure
from .call import Call
from .engine import DeviceResult
from .loss_weights import total_of
from .outputs import as_returned, join, rebuild
from .request import StepRequest, Values
from .topology import Topology
from .wiring import makers, output_leaves


class Results:
    """Puts together what devices made; every rank makes the same calls.

    Attributes:
        made: the values of the stages that the model returns.
    """

    def __init__(self, spec: PipelineSpec, topology: Topology) -> None:
        self._spec = spec
        self._topology = topology
        returned = {leaf.value for leaf in output_leaves(spec.outputs)}
        self.made = frozenset(returned - {source.name for source in spec.inputs})
        self._makers = makers(spec)

    def loss(self, results: Sequence[DeviceResult], request: StepRequest) -> torch.Tensor | None:
        """The loss of the mini-batch, over all replicas, on every rank; None where none is made."""
        assert self._spec.loss is not None
        pipeline = self._topology.pipeline
        losses = {m: terms for result in results for m, terms in result.losses.items()}
        # What a term is where nothing in the mini-batch counts.
        empty = [0.0 if t.above > -math.inf else math.nan for t in self._spec.loss.summands]
        mine = self._over_replicas(total_of(losses, request.loss_weights, empty), request, empty)
        if pipeline.size == 1:
            return mine
        told = (None, None) if mine is None else (mine.tolist(), mine.dtype)
        source = self._topology.rank_of(self._makers[self._spec.loss.value])
        terms, dtype = pipeline.broadcast_object(told, source, "the loss")
        if terms is None:
            return None
        return torch.tensor(terms, dtype=dtype, device=pipeline.device)

    def _over_replicas(
        self, total: torch.Tensor | None, request: StepRequest, empty: Sequence[float]
    ) -> torch.Tensor | None:
        if total is None or self._topology.replicas == 1:
            return total
        # A replica in whose share nothing counts has no such term, and adds nothing.
        counts = total.new_tensor(
            [any(column) for column in zip(*request.loss_weights, strict=True)]
        )
        rows = torch.stack([torch.where(counts > 0, total, 0.0), counts])
        value, replicas = self._topology.peers.sum(rows.double(), "the loss")
        mean = value / self._topology.replicas
        return torch.where(replicas > 0, mean, mean.new_tensor(empty)).to(total.dtype)

    def gathered(
        self,
        results: Sequence[DeviceResult],
        request: StepRequest,
        groups: Sequence[Sequence[int]],
        leaves: Sequence[Leaf],
    ) -> Sequence[Values]:
        """The outputs of each group of micro-batches, on rank 0.

        One after another, in the same order on all ranks.
        """
        pipeline, outputs = self._topology.pipeline, [Values() for _ in groups]
        for leaf in leaves:
            if leaf.value not in request.kept or leaf.value not in self.made:
                continue
            source = self._topology.rank_of(self._makers[leaf.value])
            for group, made in zip(groups, outputs, strict=True):
                mine: torch.Tensor | None = None
                for result in results:
                    if leaf.value in result.results[group[0]]:
                        pieces = [result.results[m][leaf.value] for m in group]
                        mine = join(leaf, pieces, [request.samples[m] for m in group])
                if source != 0 and pipeline.rank in (0, source):
                    mine = pipeline.pass_on(mine, source, f"output {leaf.value}")
                if mine is not None and pipeline.rank == 0:
                    made[leaf.value] = mine
        return outputs

    def returned(
        self,
        structure: Structure,
        values: Values,
        call: Call,
        group: Sequence[int],
        loss: torch.Tensor | None,
    ) -> object:
        """What the model returns for the micro-batches that were passed together.

        Args:
            loss: the terms of the one that the model itself returns.
        """
        samples, sizes = [call.samples[m] for m in group], call.sizes[group[0]]
        made = rebuild(structure, values, samples, sizes, call.training)
        if loss is not None and isinstance(made, dict):
            made = {"loss": loss.sum(), **made}
        return as_returned(made, self._spec.classes)
