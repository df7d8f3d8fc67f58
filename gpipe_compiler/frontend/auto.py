"""Chooses the frontend: the first whose graph is right."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence

from torch import nn

from gpipe_compiler.errors import (
    GPipeCompilerError,
    IllegalGraphError,
    SourceLocation,
    TraceError,
)
from gpipe_compiler.frontend.check import differences
from gpipe_compiler.frontend.expand_repeats import expand_repeats
from gpipe_compiler.frontend.free_sizes import FreePlaces
from gpipe_compiler.frontend.host_draws import decided_by_draws
from gpipe_compiler.frontend.kernels import runs_on_meta, same_kernels
from gpipe_compiler.frontend.modes import merge
from gpipe_compiler.frontend.modules import CONTAINERS, rebuild
from gpipe_compiler.frontend.shorten import Shortened, shortened
from gpipe_compiler.frontend.state import named_state, state_table
from gpipe_compiler.frontend.subject import Subject, Wish
from gpipe_compiler.frontend.untraced import own_backward, refuse_gradient_hooks
from gpipe_compiler.frontend.user_code import definition
from gpipe_compiler.ir import Graph, ModuleSpec, StateKind
from gpipe_compiler.no_gc import uncollected
from gpipe_compiler.options import Frontend
from gpipe_compiler.runtime.spec import Precision

_ORDER = (Frontend.EXPORT, Frontend.DYNAMO)
"""By how many of 69 real models each traces right."""


def trace(subject: Subject, frontend: Frontend = Frontend.AUTO) -> Graph:
    """The graph of a model, as `choose` finds it."""
    return choose(subject, frontend)[0]


def choose(
    subject: Subject,
    frontend: Frontend = Frontend.AUTO,
    precision: Precision = Precision.FP32,
) -> tuple[Graph, Frontend]:
    """The first graph that is right, and the frontend that gave it.

    Right means equal to the model in train and in eval mode, as `frontend.check` compares them: at
    two batch sizes each, or one each where a comparison takes seconds. A long run of equal layers
    is traced as a short one where that gives a right graph too. The model object stays as it is.

    Args:
        precision: that the graph is to be for, whatever else it is for.

    Raises:
        TraceError: when no frontend gives a right graph; says what each of them met.
        ModelError: when the model raises on its example inputs.
    """
    if subject.training:
        refuse_gradient_hooks(subject.model)
    candidates = _ORDER if frontend is Frontend.AUTO else (frontend,)
    short = shortened(subject, placeless=True)
    if short is not None:
        # Where there are numbers, the whole model can be traced as well: one attempt is enough.
        on_meta = state_table(subject.model).on_meta
        attempts = candidates if on_meta else candidates[: runs_on_meta(subject)]
        for candidate in attempts:
            graph = _by_fewer_layers(short, subject, candidate, precision)
            if graph is not None:
                return _with_modules(graph, subject.model), candidate
    met: list[tuple[Frontend, GPipeCompilerError]] = []
    for candidate in candidates:
        try:
            graph = trace_with(subject, candidate, precision)
            return _with_modules(graph, subject.model), candidate
        except (TraceError, IllegalGraphError) as error:
            if frontend is not Frontend.AUTO and isinstance(error, TraceError):
                raise
            met.append((candidate, error))
    drawn = decided_by_draws(subject) if any(_BY_VALUES in e.problem for _, e in met) else None
    raise drawn or _all_failed(met, definition(type(subject.model).forward))


def trace_with(
    subject: Subject, frontend: Frontend, precision: Precision = Precision.FP32
) -> Graph:
    """The graph that one frontend gives, compared with the model.

    Raises:
        TraceError: when it cannot trace the model, or gives a graph that differs from it.
    """
    graph = unchecked(subject, frontend, precision)
    wrong = differences(graph, subject)
    if wrong and graph.sizes and not subject.free.must:
        return trace_with(subject.with_free(Wish()), frontend, precision)
    if wrong:
        own = own_backward(subject)
        if own is not None:
            raise own
        listing = "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if wrong[3:] else "")
        raise TraceError(
            f"the graph that {frontend.value} traced differs from the model: {listing}",
            hint="something that the tracer cannot see decides what the model computes: a branch "
            "on the number of samples, Python values taken from tensors, global state, or random "
            "numbers not drawn by torch",
        )
    return graph


def unchecked(subject: Subject, frontend: Frontend, precision: Precision) -> Graph:
    """The graph that one frontend gives.

    A model that is another program in the precision asked for is traced in that precision.

    Raises:
        TraceError: when the frontend cannot trace the model.
    """
    if frontend is not Frontend.EXPORT:
        if subject.free.must:
            raise TraceError(
                "it leaves no size free beside the batch",
                hint=f"leave out --free {min(subject.free.must)}",
            )
        subject = subject.with_free(Wish())
    graph = _in_both_modes(frontend, subject, Precision.FP32)
    return _in_both_modes(frontend, subject, precision) if precision in graph.unlike else graph


def _with_modules(graph: Graph, model: nn.Module) -> Graph:
    """The graph with what it says of the model's modules beside those that it calls."""
    first: dict[int, str] = {}
    named = dict(model.named_modules(remove_duplicate=False))
    return graph.replace(
        modules={**graph.modules, **dict(_uncalled(graph, model))},
        paths={path: first.setdefault(id(module), path) for path, module in named.items()},
        module_classes={
            path: type(module).__name__
            for path, module in named.items()
            if path and (isinstance(module, nn.Sequential) or not isinstance(module, CONTAINERS))
        },
    )


def _uncalled(graph: Graph, model: nn.Module) -> Iterator[tuple[str, ModuleSpec]]:
    """The modules of torch whose state the graph has as they do, and which it does not call."""
    for path, module in model.named_modules():
        public = getattr(nn, type(module).__name__, None) is type(module)
        if path in graph.modules or not public:
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
def _in_both_modes(frontend: Frontend, subject: Subject, precision: Precision) -> Graph:
    """The graph of both modes."""
    modes = (True, False) if subject.training else (False,)
    if frontend is Frontend.EXPORT:
        try:
            graphs = _exported(subject, modes, precision)
        except TraceError:
            if not subject.free.asks or subject.free.must:
                raise
            graphs = _exported(subject.with_free(Wish()), modes, precision)
    else:
        # Imported when used: dynamo takes seconds to import.
        captured = importlib.import_module("gpipe_compiler.frontend.captured")
        graphs = [captured.trace_dynamo(subject, training, precision) for training in modes]
    return merge(*graphs) if subject.training else graphs[0]


def _exported(subject: Subject, modes: Sequence[bool], precision: Precision) -> list[Graph]:
    """The graphs of these modes by torch.export, in which the same dimensions are free."""
    exported = importlib.import_module("gpipe_compiler.frontend.exported")
    traces = [exported.export_mode(subject, training, precision) for training in modes]
    free: FreePlaces = {}
    left: FreePlaces = traces[0].trace.free
    while left != free:
        free = left
        for trace in traces:
            left = trace.free_among(left)
    return [trace.graph(free) for trace in traces]


def _by_fewer_layers(
    short: Shortened, subject: Subject, frontend: Frontend, precision: Precision
) -> Graph | None:
    """The graph of a model by way of that of the shortened one; None where there is no such way.

    It is compared with the whole model kernel by kernel, and compared in numbers as a traced graph
    is: hooks of tensors, casts and a model's own look at whether it is exported leave no kernel on
    meta. Where the model has no numbers, those of few layers are compared.
    """
    on_meta = state_table(subject.model).on_meta
    try:
        few = unchecked(short.subject, frontend, precision)
        graph = expand_repeats(few, short, subject)
        if graph is None:
            return None
        if not same_kernels(graph, subject, short.subject) and not same_kernels(
            graph, subject, short.subject, exported=True
        ):
            return None
        if on_meta and differences(few, short.subject):
            return None
    except GPipeCompilerError:
        # With layers missing the model may not run at all: the whole one tells.
        return None
    return None if differences(graph, subject) else graph


_KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        r"torch\.func\b|torch\.vmap|functorch",
        "it applies a transform of torch.func",
        "compute on the whole batch at once: torch's ops take batches, and "
        "torch.autograd.grad(..., create_graph=True) gives gradients in forward",
    ),
    (
        r"pack(ed|_padded)_sequence|PackedSequence",
        "it packs sequences",
        "pass padded sequences to the layer, and mask what lies behind their ends: how many rows a "
        "packed sequence has depends on the values of the lengths",
    ),
    (
        r"torch\.jit\.script|ScriptModule",
        "torch.jit has compiled it, or a part of it",
        "build the model from the modules that were scripted or traced: what torch.jit has "
        "compiled cannot be taken apart",
    ),
    (
        r"nested_tensor|torch\.jagged",
        "it makes nested tensors",
        "pad to one length, and pass a mask of what is padding: a plan is for known shapes",
    ),
)
"""What no frontend follows: how what they say of the user's line reads; in words; the way out."""


_BY_VALUES = "decides by the values of a tensor"
"""In what frontends say of a branch on the data."""

_ANOTHER = "try another frontend"


def _all_failed(
    met: list[tuple[Frontend, GPipeCompilerError]], forward: SourceLocation | None
) -> TraceError:
    """One error out of those of all frontends.

    It points at the line that most of them name, or else at the model's `forward`.
    """
    errors = [error for _, error in met]
    said = {
        frontend: f"{f'{error.location}: ' if error.location else ''}{error.problem}"
        for frontend, error in met
    }
    alike = len(set(said.values())) == 1
    lines = [f"  {frontend.value}: {text}" for frontend, text in said.items()]
    listing = f" {errors[0].problem}" if alike else "\n" + "\n".join(lines)
    hints = [error.hint for error in errors if error.hint and not error.hint.startswith(_ANOTHER)]
    hint = hints[0] if hints else "write what the line does with torch's operators on tensors alone"
    cause = ""
    for pattern, words, way_out in _KNOWN:
        telling = [error for error in errors if re.search(pattern, error.problem)]
        if telling:
            errors, cause, hint = telling, f", as {words}", way_out
            break
    places = [error.location for error in errors if error.location is not None]
    return TraceError(
        f"the model cannot be traced{cause}:{listing}",
        location=max(places, key=places.count) if places else forward,
        hint=hint,
    )
