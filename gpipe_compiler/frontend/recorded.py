"""One mode of a model, recorded on tensors without numbers, as a graph.

Parameters and buffers keep their names, every op knows the regions under `no_grad` and
`autocast` that it runs in, and torch.nn modules are called as the model calls them; see `recorder`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gpipe_compiler.errors import GPipeCompilerError, SourceLocation, TraceError
from gpipe_compiler.frontend.asked_autocast import cuda_missed
from gpipe_compiler.frontend.both_ways import draw_on_host, write_both_ways
from gpipe_compiler.frontend.branches_taken import (
    answered,
    answers_of,
    asks_for_numbers,
    refuse_changing,
    refuse_gradient_branches,
    without_branches,
)
from gpipe_compiler.frontend.calls_seen import RecordingFakes, calls_seen, vmap_followed
from gpipe_compiler.frontend.casts import CastWatch
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.free_sizes import (
    FoundSizes,
    FreePlaces,
    Place,
    asking_first,
    read_sizes,
    refuse_fixed,
    ties,
    wanted,
    write_fixed,
)
from gpipe_compiler.frontend.gradient_hooks import gradient_hooks_carried
from gpipe_compiler.frontend.lower import lower
from gpipe_compiler.frontend.modules import is_leaf
from gpipe_compiler.frontend.noted_sizes import (
    NotedSizes,
    SampleLists,
    batch_sizes,
    noting_sizes,
    sample_rules,
)
from gpipe_compiler.frontend.own_functions import own_functions_carried
from gpipe_compiler.frontend.precisions import SAME, Account, account, follow, only_in
from gpipe_compiler.frontend.raising_branches import checks_passed
from gpipe_compiler.frontend.recompute import activations_kept
from gpipe_compiler.frontend.recorder import Recorder, recording
from gpipe_compiler.frontend.state import named_state
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.surroundings import ambient, as_exported, kind_of
from gpipe_compiler.frontend.trace_errors import explained, refuse_fixed_batch
from gpipe_compiler.frontend.trace_settings import tracing_settings
from gpipe_compiler.frontend.types_of_python import plain_types
from gpipe_compiler.frontend.user_code import line_of_forward
from gpipe_compiler.frontend.without_numbers import (
    SMALLEST_BATCH,
    inputs_without_numbers,
    state_without_numbers,
)
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.interpret import STAND_IN, recurrent_forms, with_a_momentum
from gpipe_compiler.ir.rounded_sizes import rounded_in_integers
from gpipe_compiler.ir.symbolic import general
from gpipe_compiler.runtime.core.precision import lower_dtype
from gpipe_compiler.runtime.spec import Precision


def trace_mode(subject: Subject, training: bool, precision: Precision = Precision.FP32) -> Graph:
    """The model's graph in one mode; see `record_mode`."""
    recorded = record_mode(subject, training, precision)
    return recorded.graph(recorded.free_among(recorded.free))


def record_mode(
    subject: Subject,
    training: bool,
    precision: Precision = Precision.FP32,
    free: FreePlaces | None = None,
) -> RecordedMode:
    """The model in one mode, as it is recorded.

    Args:
        precision: one in which the model is another program than in fp32; the graph is for that
            precision alone.
        free: the dimensions that are to stay free, by default those that the subject's wish names.

    Raises:
        TraceError: with the construct that cannot be traced, its line, and what to do about it.
        ModelError: when the model raises on its example inputs.
    """
    entry = Entry(subject, training)
    free = wanted(subject.free, entry.signature) if free is None else free
    if precision is not Precision.FP32:
        if entry.states.on_meta:
            raise TraceError(
                f"in {precision.value} the model is another program than in fp32, and on meta it "
                "cannot be traced there",
                hint="build the model with its numbers, or compile with --precision fp32",
            )
        with ambient(lower_dtype(precision), kind_of(entry)):
            trace = _trace(entry, lower_dtype(precision), free)
            _write_both_ways(trace, lower_dtype(precision))
        return dataclasses.replace(trace, found=only_in(precision))
    trace, asked = _trace(entry, None, free), None
    if trace.watch.looks:
        found = account(entry, gradients=trace.gradients)
        if found.asked:
            asked = torch.float32
            trace = _trace(entry, asked, free)
        trace = dataclasses.replace(trace, found=found)
    _write_both_ways(trace, asked)
    return trace


def _write_both_ways(trace: RecordedMode, autocast_to: torch.dtype | None) -> None:
    """Writes into a trace what happens where layers are left out at random."""
    entry, recorder = trace.entry, trace.recorder
    if recorder.decisions:
        write_both_ways(entry, recorder, lambda: _trace(entry, autocast_to, trace.free).recorder)
    elif entry.keeps is not None:
        draw_on_host(recorder.graph)


def _trace(entry: Entry, autocast_to: torch.dtype | None, free: FreePlaces) -> RecordedMode:
    """The entry recorded, under autocast to a type.

    What has no backward, and need have none, is recorded without gradients.
    """
    try:
        trace = _told(entry, autocast_to, free, gradients=True)
    except TraceError:
        if entry.has_loss:
            raise
        with contextlib.suppress(TraceError):
            return _told(entry, autocast_to, free, gradients=False)
        raise
    asked = trace.recorder.gradients_asked
    if asked is None or entry.training:
        return trace
    if not entry.has_loss:
        return _told(entry, autocast_to, free, gradients=False)
    refuse_gradient_branches(entry, asked)
    return trace


def _told(
    entry: Entry, autocast_to: torch.dtype | None, free: FreePlaces, *, gradients: bool
) -> RecordedMode:
    """The entry recorded; where it asks for values, with those of its example."""
    first, failed = None, None
    try:
        first = _attempt(entry, autocast_to, free, answered(), gradients=gradients)
        if not first.recorder.guessed and not asks_for_numbers(first.recorder):
            return first
    except TraceError as error:
        failed = error
    with ambient(autocast_to, kind_of(entry)):
        answers = answers_of(entry, max(entry.signature.batch_size, SMALLEST_BATCH))
    try:
        if answers:
            told = answered(answers, flags=first is None)
            return _attempt(entry, autocast_to, free, told, gradients=gradients)
    except TraceError as error:
        failed = error
    if first is not None:
        return first
    assert failed is not None
    raise failed


def _attempt(
    entry: Entry,
    autocast_to: torch.dtype | None,
    free: FreePlaces,
    told: contextlib.AbstractContextManager[None],
    *,
    gradients: bool,
) -> RecordedMode:
    watch = CastWatch(entry, traced=True)
    modules = {path: module for path, module in entry.named_modules() if path}
    # To be asked before hooks watch them.
    leaves = {
        path
        for path, module in modules.items()
        if path.startswith("model.") and is_leaf(path, module, entry.training)
    }
    recorder = Recorder(gradients=gradients, trains=entry.training and entry.has_loss)
    momentum = with_a_momentum(entry.model) if entry.training else contextlib.nullcontext()
    with cuda_missed(), noting_sizes() as sizes, momentum, ambient(autocast_to, kind_of(entry)):
        sizes.ties = ties(entry.signature, free)
        entry.sizes = sizes if free else None
        with told:
            inputs = _record(entry, recorder, leaves, watch, free, sizes)
            refuse_changing(recorder)
        return RecordedMode(entry, recorder, inputs, watch, free, sizes, gradients)


@dataclass(frozen=True)
class RecordedMode:
    """A model as it was traced in one mode, before it is a graph.

    Attributes:
        free: the dimensions that were to stay free, beside the batch.
        gradients: whether it was recorded as autograd would record it.
        found: how the model compares in other precisions; the graph follows the types that it
            meets when it runs.
    """

    entry: Entry
    recorder: Recorder
    inputs: list[fx.Node]
    watch: CastWatch
    free: FreePlaces
    sizes: NotedSizes
    gradients: bool
    found: Account = SAME

    def free_among(self, places: FreePlaces) -> FreePlaces:
        """Those of some dimensions that the trace leaves free, where all others are fixed."""
        return self._found_sizes(places).places

    def fixed(self, places: FreePlaces) -> dict[Place, tuple[SourceLocation, str]]:
        """The lines that fix some dimensions, where the user may not know it, and what they do.

        That a weight fits the features alone, which stand last by torch's custom, is no news.
        """
        found: dict[Place, tuple[SourceLocation, str]] = {}
        for source, node in zip(self.entry.signature.inputs, self.inputs, strict=True):
            given = node.meta["val"]
            for dim, size in enumerate(given.shape):
                features = given.is_floating_point() and dim == given.ndim - 1
                number, fitting = self.sizes.made_number(size), self.sizes.fitting(size)
                if (source.name, dim) not in places:
                    continue
                if number is not None:
                    found[source.name, dim] = number, "makes a number of it"
                elif fitting is not None and source.path[0] != "target" and not features:
                    found[source.name, dim] = fitting, "fits no other"
        return found

    def _found_sizes(self, places: FreePlaces) -> FoundSizes:
        values = [node.meta.get("val") for node in self.recorder.graph.nodes]
        where = self.sizes.where
        return read_sizes(self.entry.signature, self.inputs, values, places, where)

    def graph(self, places: FreePlaces) -> Graph:
        """The graph in which these dimensions are free; to be asked for once."""
        recorder, entry = self.recorder, self.entry
        sizes = self._found_sizes(places)
        refuse_fixed_batch(entry, self.inputs, self.sizes.line_of)
        refuse_fixed(entry.must, sizes, self.sizes)
        if self.free:
            write_fixed(recorder.graph)
        _refuse_stand_in(recorder.graph)
        unlike = follow(recorder.graph, self.found, self.watch.events)
        # Gradients of what is in no package, such as a teacher's parameters, are nobody's.
        constants = {name: held.detach() for name, held in recorder.tensors.constants.items()}
        lowered = lower(recorder.graph, constants, entry)
        lowered = lowered.replace(
            unlike=unlike,
            inputs=sizes.inputs,
            requires=sizes.requires,
            sample_rules=sample_rules(entry.signature, self.inputs, self.sizes),
        )
        return asking_first(lowered)


def _refuse_stand_in(graph: fx.Graph) -> None:
    """Layers with a momentum of None are calls of the module, or cannot be recorded."""
    for node in graph.nodes:
        if STAND_IN in (*node.args, *node.kwargs.values()):
            raise TraceError(
                "BatchNorm with momentum=None averages by a count that cannot be followed outside "
                "of a torch.nn module",
                location=node.meta["source"],
                hint="give the layer a momentum, or use the class of torch.nn itself",
            )


def _refuse_new_state(entry: Entry) -> None:
    for name, _ in named_state(entry.model):
        if name not in entry.states.canonical:
            raise TraceError(
                f"forward makes {name}, a parameter or buffer that the model did not have before: "
                "no stage can begin with it",
                location=line_of_forward(entry.model),
                hint="call the model once in build_model(), or make it in the constructor",
            )


@contextlib.contextmanager
def _of_any_size() -> Iterator[None]:
    """Around a run on sizes that are free, such as the steps of a recurrent layer.

    Of a layer that is not called whole all steps are recorded.
    """
    with general(), recurrent_forms(lambda: recording() is None):
        yield


def _record(
    entry: Entry,
    recorder: Recorder,
    leaves: Collection[str],
    watch: CastWatch,
    free: FreePlaces,
    sizes: NotedSizes,
) -> list[fx.Node]:
    """Records the entry, the batch free to vary; returns the nodes of the inputs.

    Args:
        leaves: the paths of the modules that are called whole.

    Raises:
        TraceError: for what no graph can hold.
    """
    environment = ShapeEnv()
    mode = RecordingFakes(environment, export=True)
    try:
        with (
            _of_any_size() if free else rounded_in_integers(),
            checks_passed(),  # says which it has passed when the trace is no longer quiet
            tracing_settings(),
            without_branches(),
            as_exported(),
            torch.set_grad_enabled(recorder.position.gradients),
            own_functions_carried() if entry.has_loss else contextlib.nullcontext(),
            gradient_hooks_carried() if entry.has_loss else contextlib.nullcontext(),
            # By itself a reentrant checkpoint is recorded without gradients.
            activations_kept(trains=entry.has_loss),
            vmap_followed(),
            torch.random.fork_rng(),
        ):
            inputs = inputs_without_numbers(entry, mode, environment, free)
            sources = zip(entry.signature.inputs, inputs, strict=True)
            nodes = [recorder.tensors.input(source.name, tensor) for source, tensor in sources]
            recorder.lists = SampleLists(sizes, batch_sizes(entry.signature, nodes))
            python = enable_python_dispatcher()  # its kernels take sizes that are free
            with state_without_numbers(entry, mode) as state, python, mode, calls_seen():
                for name, (own, lent) in state.items():
                    recorder.tensors.lend(name, own, lent)
                every = entry.named_modules(remove_duplicate=False)
                recorder.follow({path: module for path, module in every if path}, leaves)
                noted = mock.patch.object(entry, "notes", recorder.decides)
                with recorder, watch.watching(), plain_types(entry.modules(), sizes), noted:
                    returned = entry(*inputs)
                _refuse_new_state(entry)
            recorder.finish(returned)
            return nodes
    except GPipeCompilerError:
        raise
    except Exception as error:  # whatever the user's code or torch raises on fake tensors
        raise explained(error) from error
