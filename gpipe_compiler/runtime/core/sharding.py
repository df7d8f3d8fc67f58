"""The share of a mini-batch that a replica works on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import accumulate, zip_longest
from typing import Any

import torch

from ..spec import PipelineSpec
from .inputs import (
    Inputs,
    even_sizes,
    is_listed,
    look_up,
    microbatch_count,
    nest_of,
    passed_to,
)
from .nest import Path
from .weights import checksum


def share_of(
    spec: PipelineSpec, call: tuple[Inputs, object], replica: int, replicas: int, microbatches: int
) -> tuple[Inputs, object]:
    """The consecutive samples of a mini-batch, or micro-batches of a list, that a replica takes.

    Replicas' micro-batches, one replica's after another's, are those of a single pipeline with
    as many micro-batches as all of them: sizes differ by one sample at most. A batch with fewer
    samples than replicas leaves some of them none, which `Pipeline.step` refuses on all of them; a
    batch whose tensors do not fit together comes back as it is, which it refuses too.

    Args:
        microbatches: those of each replica.
    """
    inputs, target = call
    if is_listed(spec, inputs):
        assert isinstance(inputs, list)
        ends = [0, *accumulate(even_sizes(len(inputs), replicas))]
        start, stop = ends[replica : replica + 2]
        if isinstance(target, list) and len(target) == len(inputs):
            return inputs[start:stop], target[start:stop]
        return (inputs[start:stop], None) if target is None else call
    whole = nest_of(inputs, target)
    found = {
        source: look_up(whole, source.path)
        for source in spec.inputs
        if source.batch_dim is not None
    }
    tensors = {
        source: tensor
        for source, tensor in found.items()
        if isinstance(tensor, torch.Tensor) and tensor.dim() > (source.batch_dim or 0)
    }
    sizes = {source.samples(tensor) for source, tensor in tensors.items()}
    if len(sizes) != 1:
        return call
    start, stop = bounds(spec, sizes.pop(), replica, replicas, microbatches)
    parts = {s.path: s.part(tensor, start, stop - start) for s, tensor in tensors.items()}
    own = _replaced(whole, parts)
    return (own["args"], own["kwargs"]), own["target"]


def checksum_of(spec: PipelineSpec, call: tuple[Inputs, object]) -> int:
    """A checksum of all tensors of a mini-batch that the pipeline takes."""
    inputs, target = call
    calls = [call]
    if is_listed(spec, inputs):
        assert isinstance(inputs, list)
        calls = list(zip_longest(inputs, target if isinstance(target, list) else ()))
    return checksum(item for own in calls for item in passed_to(spec, *own).items())


def bounds(
    spec: PipelineSpec, samples: int, replica: int, replicas: int, microbatches: int
) -> tuple[int, int]:
    """The first sample of a replica's share, and the one after its last."""
    count = microbatch_count(spec, samples, replicas * microbatches)
    ends = [0, *accumulate(even_sizes(samples, count, spec.group.samples))]
    places = [0, *accumulate(even_sizes(count, replicas))]
    return ends[places[replica]], ends[places[replica + 1]]


def _replaced(item: Any, parts: Mapping[Path, torch.Tensor]) -> Any:
    """A copy of a nest, as deep as need be, with other tensors at some paths.

    The way leads through tuples, lists, dicts, and attributes.
    """
    if () in parts:
        return parts[()]
    inner: dict[Any, dict[Path, torch.Tensor]] = {}
    for (key, *rest), part in parts.items():
        inner.setdefault(key, {})[tuple(rest)] = part
    if isinstance(item, tuple):
        items = [_replaced(x, inner[i]) if i in inner else x for i, x in enumerate(item)]
        return type(item)(*items) if hasattr(item, "_fields") else type(item)(items)
    result = copy.copy(item)
    for key, rests in inner.items():
        if isinstance(item, Mapping | list):
            result[key] = _replaced(item[key], rests)
        else:
            setattr(result, str(key), _replaced(getattr(item, str(key)), rests))
    return result
