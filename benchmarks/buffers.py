"""What reuse of memory and writing in place save, without any hardware.

    python benchmarks/buffers.py

For each model and mode, one stage of all ops at the batch size that is told, traced on fake
tensors: the activations and all that ops make on the way, where every block has a place of its own
(no reuse), and the most that lives at a time. Gradients of parameters are not among them. Each row
is told for the model with no op in place, and with all that `passes.inplace` puts in place.
"""

from __future__ import annotations

import argparse
import dataclasses
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpipe_compiler.compile import trace_subject
from gpipe_compiler.frontend.source import load
from gpipe_compiler.ir import FunctionCall, Graph, MethodCall, Op
from gpipe_compiler.passes.allocation_trace import BlockKind, StageTraces
from gpipe_compiler.passes.inplace import write_in_place
from gpipe_compiler.passes.memory_trace import MemoryTraces
from gpipe_compiler.passes.saved_tensors import saved_tensors
from gpipe_compiler.passes.shapes import annotate

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

MODELS = {"resnet50": 32, "inception": 32, "unet": 8, "amoebanet": 8, "transformer": 8}
"""Examples and the batch size at which each is looked at."""

OTHERS = frozenset({BlockKind.PARAMETER_GRADIENT, BlockKind.BUFFER, BlockKind.CAST})
"""What outlives a step, or is no activation."""

MB = 1e6


@dataclass(frozen=True)
class Activations:
    """Bytes of the blocks of one micro-batch.

    Attributes:
        no_reuse: where every block has a place of its own.
        alive: the most that live at a time.
    """

    no_reuse: int
    alive: int

    @classmethod
    def of(cls, traces: StageTraces, *, training: bool) -> Activations:
        """Those of a forward, and of its backward in training.

        What the stage is given lives from the beginning, and what it hands on to the end.
        """
        events = (*traces.forward, *(traces.first_backward if training else ()))
        sizes = {
            event.block: traces.blocks[event.block].bytes
            for event in events
            if traces.blocks[event.block].kind not in OTHERS
        }
        made = {event.block for event in events if event.alive}
        alive = most = sum(size for block, size in sizes.items() if block not in made)
        for event in events:
            alive += sizes.get(event.block, 0) * (1 if event.alive else -1)
            most = max(most, alive)
        return cls(sum(sizes.values()), most)


@dataclass(frozen=True)
class Row:
    """A model in one mode.

    Attributes:
        plain, written: with nothing in place, and with all that may be.
        changed: how many ops are in place.
    """

    label: str
    batch: int
    training: bool
    plain: Activations
    written: Activations
    changed: int


def row(label: str, batch: int, *, training: bool) -> Row:
    """The figures of one example."""
    subject = load(str(EXAMPLES / f"{label}.py"), input_specs=[], training=training)
    graph = trace_subject(subject)
    plain = annotate(out_of_place(graph), batch)
    written = write_in_place(plain)
    pairs = zip(plain.ops, written.ops, strict=True)
    modules = sum(plain.modules[path] != spec for path, spec in written.modules.items())
    changed = max(modules, sum(old is not new for old, new in pairs))
    return Row(label, batch, training, _activations(plain), _activations(written), changed)


def out_of_place(graph: Graph) -> Graph:
    """The graph with the activations and additions out of place that its author wrote in place."""
    modules = {
        path: dataclasses.replace(spec, kwargs={k: v for k, v in spec.kwargs.items() if k != _FLAG})
        for path, spec in graph.modules.items()
    }
    return graph.replace(ops=tuple(map(_plain, graph.ops)), modules=modules)


_FLAG = "inplace"


def _plain(op: Op) -> Op:
    call = op.call
    if isinstance(call, MethodCall):
        method = "add" if call.method == "add_" else call.method
        return dataclasses.replace(op, call=dataclasses.replace(call, method=method))
    if not isinstance(call, FunctionCall):
        return op
    function = operator.add if call.function is operator.iadd else call.function
    kwargs = {key: value for key, value in call.kwargs.items() if key != _FLAG}
    return dataclasses.replace(op, call=dataclasses.replace(call, function=function, kwargs=kwargs))


def _activations(graph: Graph) -> Activations:
    names = [op.name for op in graph.ops]
    inputs = [source.name for source in graph.inputs]
    traces = MemoryTraces(graph).of(names, inputs, graph.output_values)
    return Activations.of(traces, training=graph.loss is not None)


def table(rows: Sequence[Row]) -> str:
    """As Markdown."""
    lines = [
        "| model | batch | mode | in place | no reuse | most alive | saved by reuse "
        "| saved in place |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for item in rows:
        mode = "train" if item.training else "infer"
        for found, ops in ((item.plain, 0), (item.written, item.changed)):
            less = 1 - found.alive / item.plain.alive
            lines.append(
                f"| {item.label} | {item.batch} | {mode} | {f'{ops} ops' if ops else 'none'} "
                f"| {found.no_reuse / MB:,.1f} MB | {found.alive / MB:,.1f} MB "
                f"| {found.no_reuse / found.alive:.2f}x "
                f"| {f'{less:.1%}' if ops else ''} |"
            )
    return "\n".join(lines)


def article(batch: int = 32) -> str:
    """ResNet-50 beside the figures of Graphcore's article on memory: 26M weights, 16M activations
    an image, more than 7.5 GB to train at a mini-batch of 32."""
    subject = load(str(EXAMPLES / "resnet50.py"), input_specs=[], training=True)
    graph = annotate(out_of_place(trace_subject(subject)), batch)
    saved = saved_tensors(graph).saved_bytes(op.name for op in graph.ops)
    forward = _activations(annotate(graph.replace(loss=None, values={}), batch))
    step = _activations(graph)
    weights = 4 * graph.parameter_count
    return "\n".join(
        (
            f"weights {graph.parameter_count / 1e6:.1f}M, {weights / MB:.0f} MB",
            f"activations an image {forward.no_reuse / 4 / batch / 1e6:.1f}M",
            f"kept for the backward {saved / 4 / batch / 1e6:.1f}M an image",
            f"weights and activations of one image {(weights + forward.no_reuse / batch) / MB:.0f} "
            "MB",
            f"a training step at {batch}: {(step.no_reuse + 2 * weights) / 1e9:.2f} GB without "
            f"reuse, {(step.alive + 2 * weights) / 1e9:.2f} GB with it, gradients counted",
        )
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), help="examples (default: all)")
    chosen = parser.parse_args(argv).models
    warnings.simplefilter("ignore")
    rows = [row(label, MODELS.get(label, 8), training=t) for label in chosen for t in (False, True)]
    print(table(rows))
    if "resnet50" in chosen:
        print(f"\n{article()}")


if __name__ == "__main__":
    main()
