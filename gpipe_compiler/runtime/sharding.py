"""The share of a mini-batch that a replica works on."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from .inputs import Inputs, as_call, even_sizes, look_up, microbatch_count
from .nest import Path
from .spec import PipelineSpec


def share_of(
    spec: PipelineSpec,
    call: tuple[Inputs, object],
    replica: int,
    replicas: int,
    microbatches: int,
) -> tuple[Inputs, object]:
    """The consecutive samples of a mini-batch that one of several replicas takes.

    Replicas' micro-batches, one replica's after another's, are those of a single pipeline with
    as many micro-batches as all of them: sizes differ by one sample at most. A batch with fewer
    samples than replicas leaves some of them none, which `Pipeline.step` refuses on all of them; a
    batch whose tensors do not fit together comes back as it is, which it refuses too.

    Args:
        call: inputs and target.
        microbatches: those of each replica.
    """
    args, kwargs = as_call(call[0])
    whole = {"args": args, "kwargs": kwargs, "target": call[1]}
    found = {source.path: look_up(whole, source.path) for source in spec.inputs if source.batched}
    tensors = {path: x for path, x in found.items() if isinstance(x, torch.Tensor) and x.dim()}
    sizes = {tensor.shape[0] for tensor in tensors.values()}
    if len(sizes) != 1:
        return call
    start, stop = bounds(spec, sizes.pop(), replica, replicas, microbatches)
    own = _cut(whole, list(tensors), slice(start, stop))
    return (own["args"], own["kwargs"]), own["target"]


def bounds(
    spec: PipelineSpec, samples: int, replica: int, replicas: int, microbatches: int
) -> tuple[int, int]:
    """The first sample of a replica's share, and the one after its last."""
    count = microbatch_count(spec, samples, replicas * microbatches)
    ends = [0, *accumulate(even_sizes(samples, count))]
    places = [0, *accumulate(even_sizes(count, replicas))]
    return ends[places[replica]], ends[places[replica + 1]]


def _cut(item: Any, paths: Sequence[Path], part: slice) -> Any:
    """A copy of a nest, as deep as need be, in which the tensors at some paths are a part of them.

    The way leads through tuples, lists, dicts, and attributes.
    """
    if () in paths:
        return item[part]
    inner: dict[Any, list[Path]] = {}
    for key, *rest in paths:
        inner.setdefault(key, []).append(tuple(rest))
    if isinstance(item, tuple):
        items = [_cut(x, inner[i], part) if i in inner else x for i, x in enumerate(item)]
        return type(item)(*items) if hasattr(item, "_fields") else type(item)(items)
    result = copy.copy(item)
    for key, rests in inner.items():
        if isinstance(item, dict | list):
            result[key] = _cut(item[key], rests, part)
        else:
            setattr(result, str(key), _cut(getattr(item, str(key)), rests, part))
    return result
