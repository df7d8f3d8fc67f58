"""Whether a batch takes the branches on values that a graph was recorded with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpipe_compiler.frontend.trace_errors import BOTH_WAYS, by_values
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.branches import required_lines
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.runtime.core.required import BranchError


def refuse_other_way(graph: Graph, parts: Sequence[Sequence[torch.Tensor]]) -> None:
    """Refuses a graph whose branches go another way for some of these micro-batches.

    Raises:
        TraceError: naming the line that decides.
    """
    lines = required_lines(graph.ops)
    if not lines or any(tensor.is_meta for tensor in graph.tensors.values()):
        return
    for training in (True, False) if graph.loss is not None else (False,):
        for part in parts:
            tensors = {name: tensor.clone() for name, tensor in graph.tensors.items()}
            named = dict(zip((source.name for source in graph.inputs), part, strict=True))
            try:
                with torch.no_grad(), torch.random.fork_rng():
                    Interpreter(graph, tensors, training).run(named, keep=())
            except BranchError as error:
                raise by_values(lines[error.line], BOTH_WAYS) from error
            except Exception:  # noqa: BLE001  # plain PyTorch shows what the model rejects
                return
