"""The torch.export frontend: one mode of a model, traced on fake tensors, made readable again.

What is traced is the training IR of non-strict export: operators are not decomposed and writes in
place stay. Parameters and buffers keep their names, regions under `no_grad` and `autocast` stay
whole, calls of torch.nn modules are put together again (`relift`), and what remains is written as
a person would (`readable`).
"""

from __future__ import annotations

import contextlib
import io
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode

from gpipe_compiler.errors import GPipeCompilerError, TraceError
from gpipe_compiler.frontend.aten_to_python import aten_to_python, write_constants
from gpipe_compiler.frontend.casts import CastWatch
from gpipe_compiler.frontend.entry import Entry, make_entry
from gpipe_compiler.frontend.export_errors import explained, refuse_fixed_batch
from gpipe_compiler.frontend.free_sizes import (
    FoundSizes,
    FreePlaces,
    NotedSizes,
    asking_first,
    noting_sizes,
    read_sizes,
    refuse_fixed,
    ties,
    wanted,
    write_fixed,
)
from gpipe_compiler.frontend.gradient_hooks import gradient_hooks_carried
from gpipe_compiler.frontend.locate import model_frames
from gpipe_compiler.frontend.lower import lower, source_of
from gpipe_compiler.frontend.modules import is_leaf
from gpipe_compiler.frontend.own_functions import own_functions_carried
from gpipe_compiler.frontend.precisions import SAME, Account, account, follow, only_in
from gpipe_compiler.frontend.raising_branches import checks_passed
from gpipe_compiler.frontend.recompute import activations_kept
from gpipe_compiler.frontend.relift import CallRecorder, relift
from gpipe_compiler.frontend.sample_rules import sample_rules
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.surroundings import ambient, kind_of
from gpipe_compiler.frontend.traced_python import PythonFollowed
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.interpret import STAND_IN, with_a_momentum
from gpipe_compiler.ir.symbolic import general
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.core.precision import lower_dtype
from gpipe_compiler.runtime.spec import Precision

SMALLEST_BATCH = 2
"""A batch of one is taken for a constant by torch.export."""


def trace_export(subject: Subject, training: bool, precision: Precision = Precision.FP32) -> Graph:
    """The model's graph in one mode, by torch.export; see `export_mode`."""
    exported = export_mode(subject, training, precision)
    return exported.graph(exported.free_among(exported.trace.free))


def export_mode(
    subject: Subject,
    training: bool,
    precision: Precision = Precision.FP32,
    free: FreePlaces | None = None,
) -> ExportedMode:
    """The model in one mode, as torch.export traces it.

    Args:
        precision: one in which the model is another program than in fp32; the graph is for that
            precision alone.
        free: the dimensions that are to stay free, by default those that the subject's wish names.

    Raises:
        TraceError: with the construct that cannot be traced, its line, and what to do about it.
        ModelError: when the model raises on its example inputs.
    """
    entry = make_entry(subject, training)
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
            return ExportedMode(trace, entry, only_in(precision))
    trace = _trace(entry, None, free)
    if not trace.watch.looks:
        return ExportedMode(trace, entry, SAME)
    found = account(entry, gradients=trace.gradients)
    if found.asked:
        trace = _trace(entry, torch.float32, free)
    return ExportedMode(trace, entry, found)


@dataclass(frozen=True)
class _Trace:
    """An exported program, and what was noted while it was traced.

    Attributes:
        free: the dimensions that were to stay free, beside the batch.
        sizes: the user's lines that looked at sizes.
        gradients: whether it was traced as autograd would record it.
    """

    program: ExportedProgram
    recorder: CallRecorder
    watch: CastWatch
    free: FreePlaces
    sizes: NotedSizes
    gradients: bool


def _trace(entry: Entry, autocast_to: torch.dtype | None, free: FreePlaces) -> _Trace:
    """The entry exported, under autocast to a type.

    What has no backward, and need have none, is traced without gradients.
    """
    try:
        return _attempt(entry, autocast_to, free, gradients=True)
    except TraceError:
        if entry.has_loss:
            raise
        with contextlib.suppress(TraceError):
            return _attempt(entry, autocast_to, free, gradients=False)
        raise


def _attempt(
    entry: Entry, autocast_to: torch.dtype | None, free: FreePlaces, *, gradients: bool
) -> _Trace:
    recorder = CallRecorder()
    watch = CastWatch(entry, traced=True)
    with recorder.watching(entry.model, "model"), noting_sizes() as sizes:
        sizes.ties = ties(entry.signature, free)
        entry.sizes = sizes if free else None
        numbers = NumbersOnMeta() if entry.states.on_meta else contextlib.nullcontext()
        momentum = with_a_momentum(entry.model) if entry.training else contextlib.nullcontext()
        with numbers, momentum, ambient(autocast_to, kind_of(entry)):
            program = export(entry, watch, free, gradients=gradients)
            return _Trace(program, recorder, watch, free, sizes, gradients)


@dataclass
class ExportedMode:
    """A model as it was traced in one mode, before it is a graph.

    Attributes:
        found: how the model compares in other precisions; the graph follows the types that it
            meets when it runs.
    """

    trace: _Trace
    entry: Entry
    found: Account

    def __post_init__(self) -> None:
        module = self.trace.program.graph_module
        for region in regions(module):
            restore_users(region.graph)
        canonical = self.trace.recorder.canonical
        self._placeholders = name_state(module, self.trace.program, canonical)

    @property
    def _graphs(self) -> list[fx.Graph]:
        return [region.graph for region in regions(self.trace.program.graph_module)]

    def free_among(self, places: FreePlaces) -> FreePlaces:
        """Those of some dimensions that the trace leaves free, where all others are fixed."""
        return self._sizes(places).places

    def _sizes(self, places: FreePlaces) -> FoundSizes:
        values = [node.meta.get("val") for graph in self._graphs for node in graph.nodes]
        where = self.trace.sizes.where
        return read_sizes(self.entry.signature, self._placeholders, values, places, where)

    def graph(self, places: FreePlaces) -> Graph:
        """The graph in which these dimensions are free; to be asked for once."""
        module, entry = self.trace.program.graph_module, self.entry
        sizes = self._sizes(places)
        refuse_fixed_batch(entry, self._placeholders, self.trace.sizes.line_of)
        refuse_fixed(entry.must, sizes, self.trace.sizes)
        graphs = self._graphs
        if self.trace.free:
            write_fixed(graphs)
        find_sources(graphs[::-1])
        relift(graphs, self.trace.recorder, lambda path, leaf: is_leaf(path, leaf, entry.training))
        _refuse_stand_in(graphs)
        write_constants(graphs, self.trace.program.constants)
        unlike = follow(graphs, self.found, self.trace.watch.events)
        aten_to_python(graphs)
        lowered = lower(module.graph, module, entry)
        lowered = lowered.replace(
            unlike=unlike,
            inputs=sizes.inputs,
            requires=sizes.requires,
            sample_rules=sample_rules(entry.signature, self._placeholders, self.trace.sizes),
        )
        return asking_first(lowered)


def export(entry: Entry, watch: CastWatch, free: FreePlaces, *, gradients: bool) -> ExportedProgram:
    """The entry in torch.export's training IR, the batch free to vary.

    Args:
        free: the dimensions that are free to vary too.

    Raises:
        TraceError: when torch.export fails.
    """
    signature = entry.signature
    examples = signature.samples(max(signature.batch_size, SMALLEST_BATCH))
    dynamic = tuple(
        {
            dim: Dim.AUTO
            for dim in range(example.ndim)
            if dim == source.batch_dim or (source.name, dim) in free
        }
        for source, example in zip(signature.inputs, examples, strict=True)
    )
    python = PythonFollowed()
    try:
        with (
            general() if free else contextlib.nullcontext(),
            checks_passed(),  # says which it has passed when the trace is no longer quiet
            tracing_settings(),
            _user_lines(),
            torch.set_grad_enabled(gradients),
            watch.watching(),
            python.around(),
            own_functions_carried() if entry.has_loss else contextlib.nullcontext(),
            gradient_hooks_carried() if entry.has_loss else contextlib.nullcontext(),
            # By itself a reentrant checkpoint is traced without gradients.
            activations_kept(trains=entry.has_loss),
        ):
            return torch.export.export(
                entry, tuple(examples), dynamic_shapes={"inputs": dynamic}, strict=False
            )
    except GPipeCompilerError:
        raise
    except Exception as error:  # whatever the user's code or torch raises on fake tensors
        raise explained(error, python.transform) from error


@contextlib.contextmanager
def tracing_settings() -> Iterator[None]:
    """How torch is set while it traces: quiet, and with `torch.einsum` as one call.

    Failures are explained here; when it fails, torch.export prints the graph so far on stderr, and
    torch 2.11 leaves its hook on assignments to buffers to every module of the process.
    Where opt_einsum is installed, torch has it choose the order of contractions by the sizes, the
    batch among them: the package finds its own, as the model does at every call. On torch 2.11 the
    states of an LSTM have a dimension more in a trace, and targets that are probabilities have
    their sizes fixed by a cross entropy. nn.Transformer looks into the values of its masks, to
    choose a kernel: here it applies them.
    """
    lstm = mock.patch.object(torch._VF, "lstm", _lstm)
    soft = mock.patch.object(torch._C._nn, "cross_entropy_loss", _cross_entropy)
    in_order = mock.patch.object(torch.backends, "opt_einsum", SimpleNamespace(enabled=False))
    hooks_restored = mock.patch.dict(nn.modules.module._global_buffer_registration_hooks)
    masks = mock.patch.object(nn.modules.transformer, "_detect_is_causal_mask", _is_causal)
    with (
        quiet(),
        contextlib.redirect_stderr(io.StringIO()),
        in_order,
        hooks_restored,
        lstm,
        soft,
        masks,
    ):
        yield


def _is_causal(_mask: object, is_causal: bool | None = None, _size: object = None) -> bool:
    """Whether the user says that a mask is causal."""
    return is_causal is True


_own_lstm = torch._VF.lstm


def _lstm(*args: Any) -> Any:
    """The output and the states of an LSTM, these of the shapes that it was given."""
    given = next(item for item in args if isinstance(item, tuple | list))
    output, *states = _own_lstm(*args)
    shaped = (
        state if state.ndim == old.ndim else state.reshape(old.shape)
        for state, old in zip(states, given, strict=True)
    )
    return output, *shaped


_own_cross_entropy: Any = torch._C._nn.cross_entropy_loss


def _cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    smoothing: float,
) -> Any:
    """A cross entropy; of probabilities it is written out where torch would fix their sizes."""
    if torch.__version__ >= "2.13" or not target.is_floating_point():
        return _own_cross_entropy(logits, target, weight, reduction, ignore_index, smoothing)
    dim = min(1, logits.ndim - 1)
    # Under autocast it computes in 32 bits, and so does this, by the type of the target.
    logs = torch.log_softmax(logits, dim, dtype=torch.promote_types(logits.dtype, target.dtype))
    if smoothing:
        target = target * (1 - smoothing) + smoothing / logits.shape[dim]
    if weight is not None:
        logs = logs * weight.reshape([-1 if d == dim else 1 for d in range(logits.ndim)])
    losses = -(logs * target).sum(dim)
    return (losses, losses.mean(), losses.sum())[reduction]


@contextlib.contextmanager
def _user_lines() -> Iterator[None]:
    """Lets every node know the user's lines that made it, helper functions included.

    By itself torch.export keeps those frames only that are named `forward`.
    """

    def keep(_tracer: object, stack: traceback.StackSummary) -> traceback.StackSummary:
        return traceback.StackSummary.from_list(model_frames(stack))

    with mock.patch.object(fx.proxy.TracerBase, "_filter_traceback_frames", keep):
        yield


def restore_users(graph: fx.Graph) -> None:
    """Lets every node know its users again.

    torch.export loses some of a value that is used both inside and outside of a `no_grad` region;
    changing such a user then fails.
    """
    for node in graph.nodes:
        node.users.clear()
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users[node] = None


def name_state(
    module: fx.GraphModule, program: ExportedProgram, canonical: Mapping[str, str]
) -> list[fx.Node]:
    """Reads parameters, buffers and constants by their canonical names, in regions too.

    An exported program takes them as inputs, and for a constant what a loss reads of the model
    itself, such as a weight that it penalises. Returns the placeholders of the inputs that remain.
    """
    inputs = []
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    held = {_memory(tensor): name for name, tensor in program.state_dict.items()}
    for node in [node for node in module.graph.nodes if node.op == "placeholder"]:
        spec = specs[node.name]
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(node)
            continue
        target = str(spec.target)
        if spec.kind is InputKind.CONSTANT_TENSOR:
            constant = program.constants[target]
            known = held.get(_memory(constant)) if isinstance(constant, torch.Tensor) else None
            if known is None:
                _keep(module, target, constant)
            elif program.state_dict[known].requires_grad:
                raise _read_from_outside(canonical.get(known, known), next(iter(node.users), node))
            target = known or target
        replace_by_state(module.graph, node, canonical.get(target, target))
    pull_state_into_regions(module)
    return inputs


def _read_from_outside(name: str, reader: fx.Node) -> TraceError:
    """The refusal of a weight that is reached through a global or a closure.

    The models that a package is compared with are copies, and such a reader sees the original.
    """
    return TraceError(
        f"a weight of the model, {name.removeprefix('model.')}, is read from outside of it, "
        "through a global name or a closure, and not as its own or as an output",
        location=source_of(reader),
        hint="have forward return what the loss needs of its weights, such as "
        "`output, self.layer.weight.square().sum()`; the optimizer's weight_decay adds a penalty "
        "on all weights",
    )


def _memory(tensor: torch.Tensor) -> object:
    """Equal for tensors that are the same elements of the same memory, on meta too."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    place = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *place, tensor.dtype, tensor.shape, tensor.stride()


def _refuse_stand_in(graphs: Sequence[fx.Graph]) -> None:
    """Layers with a momentum of None trace as calls of the module, or not at all."""
    for graph in graphs:
        for node in graph.nodes:
            if STAND_IN in (*node.args, *node.kwargs.values()):
                raise TraceError(
                    "BatchNorm with momentum=None averages by a count that torch.export cannot "
                    "follow outside of a torch.nn module",
                    location=node.meta["source"],
                    hint="give the layer a momentum, or use the class of torch.nn itself",
                )


def find_sources(graphs: Sequence[fx.Graph]) -> None:
    """Gives nodes that torch.export made up (sizes, regions) the line of what they are for."""
    for graph in graphs:
        for node in reversed(graph.nodes):
            node.meta["source"] = source_of(node)
            if node.meta["source"] is None or not Path(node.meta["source"].file).is_absolute():
                near = [*node.users, *_inside(graph, node)]
                node.meta["source"] = next(
                    (user.meta["source"] for user in near if user.meta.get("source")), None
                )


def _inside(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """The nodes of a region."""
    owner = graph.owning_module
    bodies = [] if owner is None else _bodies(owner, node)
    return [inner for _, body in bodies for inner in body.graph.nodes]


def _bodies(module: fx.GraphModule, node: fx.Node) -> list[tuple[int, fx.GraphModule]]:
    """The graphs that a region runs, by their places among its arguments."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    found = [
        (place, getattr(module, str(item.target), None))
        for place, item in enumerate(node.args)
        if isinstance(item, fx.Node) and item.op == "get_attr"
    ]
    return [(place, body) for place, body in found if isinstance(body, fx.GraphModule)]


def _keep(module: fx.GraphModule, target: str, tensor: object) -> None:
    """Makes a constant an attribute of the graph's module, under its own name."""
    owner: torch.nn.Module = module
    *path, name = target.split(".")
    for part in path:
        if not hasattr(owner, part):
            owner.add_module(part, torch.nn.Module())
        owner = getattr(owner, part)
    object.__setattr__(owner, name, tensor)


def replace_by_state(graph: fx.Graph, node: fx.Node, target: str) -> None:
    """Reads a parameter, buffer or constant by its name instead of taking it as an input."""
    with graph.inserting_before(node):
        state = graph.create_node("get_attr", target)
    state.meta = dict(node.meta)
    node.replace_all_uses_with(state)
    graph.erase_node(node)


def pull_state_into_regions(module: fx.GraphModule) -> None:
    """Lets a region read a parameter by its name, instead of being handed it."""
    for node in module.graph.nodes:
        bodies = _bodies(module, node)
        if len(bodies) != 1:
            continue
        place, body = bodies[0]
        operands = node.args[place + 1 :]
        placeholders = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
        if len(operands) != len(placeholders):  # an operator of another kind, refused in `lower`
            continue
        kept = []
        for operand, placeholder in zip(operands, placeholders, strict=True):
            if isinstance(operand, fx.Node) and operand.op == "get_attr":
                replace_by_state(body.graph, placeholder, str(operand.target))
            else:
                kept.append(operand)
        node.args = (*node.args[: place + 1], *kept)
        pull_state_into_regions(body)


def regions(module: fx.GraphModule) -> list[fx.GraphModule]:
    """A graph module and the bodies of its regions, each once."""
    found = [module]
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            found.extend(regions(child))
    return found


class NumbersOnMeta(TorchFunctionMode):
    """Makes `torch.full((), 2.0)` of `torch.tensor(2.0)`, which on meta would forget its number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is torch.tensor and args and device is not None:
            options = {key: kwargs[key] for key in ("dtype", "device") if key in kwargs}
            if torch.device(device).type == "meta":
                if isinstance(args[0], (bool, int, float)):
                    return torch.full((), args[0], **options)
                if isinstance(args[0], (list, tuple)) and not args[0]:
                    return torch.empty((0,), **options)
        return func(*args, **kwargs)
