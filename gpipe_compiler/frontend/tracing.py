"""Traces a model: the graph that is recorded, by way of fewer layers where that is right, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from gpipe_compiler.errors import GPipeCompilerError, IllegalGraphError, TraceError
from gpipe_compiler.frontend.check import compared, differences
from gpipe_compiler.frontend.encoders import fused_layers, packing_encoder
from gpipe_compiler.frontend.examples import given_values
from gpipe_compiler.frontend.expand_repeats import expand_repeats
from gpipe_compiler.frontend.free_sizes import FreePlaces, say_fixed, say_fixing
from gpipe_compiler.frontend.host_draws import keeps_layers
from gpipe_compiler.frontend.kernels import same_kernels
from gpipe_compiler.frontend.modes import merge
from gpipe_compiler.frontend.modules import CONTAINERS, rebuild
from gpipe_compiler.frontend.own_functions import own_backward
from gpipe_compiler.frontend.recorded import RecordedMode, record_mode
from gpipe_compiler.frontend.shorten import shortened
from gpipe_compiler.frontend.state import named_state, state_table
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.trace_errors import (
    DECIDES_BY_VALUES,
    refuse_default_type,
    refuse_gradient_hooks,
    refuse_writing_switches,
)
from gpipe_compiler.frontend.user_code import line_of_forward
from gpipe_compiler.ir import Graph, ModuleSpec, StateKind
from gpipe_compiler.no_gc import uncollected
from gpipe_compiler.runtime.spec import Precision


def trace(subject: Subject, precision: Precision = Precision.FP32) -> Graph:
    """The graph of a model, which is right.

    Right means equal to the model in train and in eval mode, as `frontend.check` compares them: at
    two batch sizes each, or one each where a comparison takes over a second. A long run of equal
    layers is traced as a short one where that gives a right graph too. The model object stays as it
    is.

    Args:
        precision: that the graph is to be for, whatever else it is for.

    Raises:
        TraceError: when the model cannot be traced, or its graph is not right; says why.
        ModelError: when the model raises on its example inputs.
    """
    refuse_default_type()
    if subject.training:
        refuse_gradient_hooks(subject.model)
    refuse_writing_switches(subject.model, training=subject.training)
    graph = _by_fewer_layers(subject, precision)
    try:
        graph = graph or trace_whole(subject, precision)
    except (TraceError, IllegalGraphError) as error:
        drawn = keeps_layers(subject) if DECIDES_BY_VALUES in error.problem else None
        if drawn is None:
            raise _untraceable(error, subject.model) from error
        graph = _with_both_ways(subject, precision, *drawn)
    return _with_modules(graph, subject.model).replace(
        given=given_values(subject),
        fused=fused_layers(graph, subject.model),
        packs=packing_encoder(graph, subject.model),
    )


def _with_both_ways(
    subject: Subject, precision: Precision, refusal: TraceError, keeps: bool | None
) -> Graph:
    if keeps is None:
        raise refusal
    try:
        graph = trace_whole(dataclasses.replace(subject, keeps=keeps), precision)
    except (TraceError, IllegalGraphError) as error:
        if error.problem.startswith(refusal.problem.partition(":")[0]):
            raise
        lines = {where and (where.file, where.line) for where in (error.location, refusal.location)}
        asks = DECIDES_BY_VALUES in error.problem and len(lines) == 1
        raise refusal if asks else _untraceable(error, subject.model) from error
    return graph.replace(keeps=keeps)


def trace_whole(subject: Subject, precision: Precision = Precision.FP32) -> Graph:
    """The graph of a model that is traced with all its layers, compared with the model.

    Raises:
        TraceError: when it cannot be traced, or the graph differs from it.
    """
    graph = unchecked(subject, precision)
    wrong, graph = compared(graph, subject)
    if wrong and graph.sizes and subject.free.everything:
        whole = trace_whole(subject.fixed(), precision)
        say_fixed(wrong[0])
        return whole
    if wrong:
        own = own_backward(subject)
        if own is not None:
            raise own
        listing = "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if wrong[3:] else "")
        raise TraceError(
            f"the graph that was traced differs from the model: {listing}",
            hint="something that the tracer cannot see decides what the model computes: a branch "
            "on the number of samples or on torch.compiler.is_exporting(), which is true here, "
            "Python values taken from tensors, global state, or random numbers not drawn by torch",
        )
    return graph


def unchecked(subject: Subject, precision: Precision) -> Graph:
    """The graph of a model as it is recorded.

    A model that is another program in the precision asked for is traced in that precision.
    """
    graph = _in_both_modes(subject, Precision.FP32)
    return _in_both_modes(subject, precision) if precision in graph.unlike else graph


def _with_modules(graph: Graph, model: nn.Module) -> Graph:
    """The graph with what it says of the model's modules beside those that it calls."""
    first: dict[int, str] = {}
    named = dict(model.named_modules(remove_duplicate=False))
    classes = {
        path: type(module)
        for path, module in named.items()
        if path and (isinstance(module, nn.Sequential) or not isinstance(module, CONTAINERS))
    }
    return graph.replace(
        modules={**graph.modules, **dict(_uncalled(graph, model))},
        paths={path: first.setdefault(id(module), path) for path, module in named.items()},
        module_classes={path: cls.__name__ for path, cls in classes.items()},
        of_torch=frozenset(path for path, cls in classes.items() if _is_of_torch(cls)),
    )


def _is_of_torch(cls: type[nn.Module]) -> bool:
    """Whether torch offers a class in torch.nn, where a user's file may put its own, too."""
    return getattr(nn, cls.__name__, None) is cls and cls.__module__.startswith("torch.")


def _uncalled(graph: Graph, model: nn.Module) -> Iterator[tuple[str, ModuleSpec]]:
    """The modules of torch whose state the graph has as they do, and which it does not call."""
    for path, module in model.named_modules():
        if path in graph.modules or not _is_of_torch(type(module)):
            continue
        own = [(graph.state.get(f"{path}.{local}"), held) for local, held in named_state(module)]
        alike = (
            state is not None
            and (state.kind is StateKind.PARAMETER) is isinstance(held, nn.Parameter)
            for state, held in own
        )
        spec = rebuild(path, module) if own and all(alike) else None
        if spec is not None:
            yield path, spec


@uncollected()
def _in_both_modes(subject: Subject, precision: Precision) -> Graph:
    modes = (True, False) if subject.training else (False,)
    try:
        graphs = _recorded(subject, modes, precision)
    except TraceError as error:
        if not subject.free.everything:
            raise
        graphs = _recorded(subject.fixed(), modes, precision)
        say_fixed(error.problem, error.location)
    return merge(*graphs) if subject.training else graphs[0]


def _recorded(subject: Subject, modes: Sequence[bool], precision: Precision) -> list[Graph]:
    """The recorded graphs of these modes, in which the same dimensions are free."""
    traces: list[RecordedMode] = []
    left: FreePlaces | None = None
    for training in modes:
        traces.append(record_mode(subject, training, precision, left))
        left = traces[-1].free_among(traces[-1].free)
    wished = traces[0].free
    free: FreePlaces | None = None
    while left != free:
        free = left
        for trace in traces:
            left = trace.free_among(left or {})
    assert free is not None
    for trace in traces:
        say_fixing(trace.fixed({p: n for p, n in wished.items() if p not in free}))
    return [trace.graph(free) for trace in traces]


def _by_fewer_layers(subject: Subject, precision: Precision) -> Graph | None:
    """The graph of a model by way of that of a shortened one; None where there is no such way.

    It is compared with the whole model kernel by kernel, and compared in numbers as a traced graph
    is: hooks of tensors, casts and a model's own look at whether it is exported leave no kernel on
    meta. Where the model has no numbers, the graph of few layers is compared at other sizes and in
    its backward: of the whole one that would show shapes alone, which follow from its kernels.
    """
    short = shortened(subject, placeless=True)
    if short is None:
        return None
    try:
        few = unchecked(short.subject, precision)
        graph = expand_repeats(few, short, subject)
        if graph is None:
            return None
        if not same_kernels(graph, subject, short.subject) and not same_kernels(
            graph, subject, short.subject, exported=True
        ):
            return None
        if state_table(subject.model).on_meta:
            return None if differences(few, short.subject) else graph
    except GPipeCompilerError:
        # With layers missing the model may not run at all: the whole one decides.
        return None
    wrong, graph = compared(graph, subject)
    return None if wrong else graph


def _untraceable(error: GPipeCompilerError, model: nn.Module) -> TraceError:
    """Why a model cannot be traced, and what to do about it."""
    cause = ""
    hint = error.hint or "write what the line does with torch's operators on tensors alone"
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        cause = ", as torch.jit has compiled it, or a part of it"
        hint = (
            "build the model from the modules that were scripted or traced: what torch.jit has "
            "compiled cannot be taken apart"
        )
    return TraceError(
        f"the model cannot be traced{cause}: {error.problem}",
        location=error.location or line_of_forward(model),
        hint=hint,
    )
