"""Holds a package of exported stages against the torch model that they come from.

The model runs here, in eval mode; the package in a process of its own in which neither this
compiler nor torch can be imported.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

from gpipe_compiler.errors import ValidationError, summary
from gpipe_compiler.frontend.entry import Entry, make_entry
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.arguments import value_names
from gpipe_compiler.onnx.codegen.traits import closeness
from gpipe_compiler.onnx.runtime.arrays import write_arrays
from gpipe_compiler.onnx.validate import Arrays, held, refuse_apart
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.train.comparison import flat_tensors
from gpipe_compiler.validate.package import Validation


def validate_exported(subject: Subject, plan: Plan, directory: Path) -> Validation:
    """Runs the package in `directory` against the model, on its example inputs.

    The batches are the planned mini-batch, one micro-batch, and one that does not split evenly.

    Raises:
        ValidationError: when the package cannot be run. Differences are reported, not raised.
        ModelError: when samples of a batch meet in the model.
    """
    assert plan.graph is not None
    graph = plan.graph
    entry = make_entry(subject, training=False)
    batches = [plan.batch_size, plan.microbatch_size, plan.batch_size + 1]
    calls, notes = {}, []
    with tempfile.TemporaryDirectory(prefix="gpipe-validate-") as scratch:
        folder = Path(scratch)
        for samples in dict.fromkeys(batches):
            inputs = entry.signature.samples(samples)
            try:
                whole = _run(entry, graph, inputs)
            except Exception as error:  # whatever the user's code raises
                if plan.microbatches > 1 or samples == plan.batch_size:
                    raise
                notes.append(f"a batch of {samples} is not compared: {summary(error)}")
                continue
            _refuse_apart(entry, plan, inputs, whole)
            names = [source.name for source in graph.inputs]
            given = {name: array_of(item) for name, item in zip(names, inputs, strict=True)}
            write_arrays(folder / f"{samples}.npz", whole)
            calls[samples] = given
        return held(directory, plan, calls, folder, notes)


def _run(entry: Entry, graph: Graph, inputs: list[torch.Tensor]) -> Arrays:
    """The outputs of the model, by the names of its values; its buffers stay as they are."""
    before = [buffer.clone() for buffer in entry.model.buffers()]
    with torch.no_grad():
        leaves = entry(*[tensor.clone() for tensor in inputs])
    for buffer, content in zip(entry.model.buffers(), before, strict=True):
        buffer.copy_(content)
    found = list(flat_tensors(entry.outputs(leaves)).values())
    names = list(value_names(graph.outputs))
    if len(names) != len(found):
        raise ValidationError("the model returns a parameter or a constant, which no stage makes")
    return {name: array_of(tensor) for name, tensor in zip(names, found, strict=True)}


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The numbers of a tensor; bfloat16, which numpy does not have, as uint16."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return np.array(tensor.numpy())


def _refuse_apart(entry: Entry, plan: Plan, inputs: list[torch.Tensor], whole: Arrays) -> None:
    """Makes sure that samples do not meet in the model.

    Raises:
        ModelError: naming the outputs in which they do.
    """
    graph = plan.graph
    assert graph is not None
    if graph.whole_batch:
        return
    pairs = list(zip(graph.inputs, inputs, strict=True))
    size = plan.microbatch_size
    count = next(source.samples(tensor) for source, tensor in pairs if source.batched)
    parts = [
        _run(entry, graph, [source.part(tensor, start, size) for source, tensor in pairs])
        for start in range(0, count, size)
    ]
    refuse_apart(graph, whole, parts, closeness(graph, quantised=False))
