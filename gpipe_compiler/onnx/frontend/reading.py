"""Reads the file of an ONNX model, and refuses what cannot be a pipeline."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import onnx
import onnx.inliner
import onnxruntime
from google.protobuf.message import DecodeError
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto
from onnx.external_data_helper import uses_external_data
from onnx.helper import make_tensor_value_info
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from gpipe_compiler.errors import ModelError, SourceLocation, UsageError
from gpipe_compiler.onnx.frontend.nodes import captured, subgraphs, title, with_inner
from gpipe_compiler.onnx.runtime.stage import SessionChoice, Whole
from gpipe_compiler.runtime.errors import StageError


@dataclass(frozen=True, eq=False)
class OnnxModel:
    """A model as its file has it.

    Attributes:
        path: absolute; files with weights stand beside it.
        proto: without the weights that stand in other files.
    """

    path: Path
    proto: ModelProto
    custom_ops: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def location(self) -> SourceLocation:
        return self.at()

    def at(self, node: str = "") -> SourceLocation:
        """The file, and what a node of it is called."""
        return SourceLocation(str(self.path), 0, code=node)


def read_model(path: Path, custom_ops: Sequence[Path] = ()) -> OnnxModel:
    """The model in a file.

    Weights in files of their own are not read, but have to be there, and to be long enough.

    Raises:
        UsageError: when there is no such file.
        ModelError: for a file that is no ONNX model or only part of one, weights that are missing,
            and whatever ONNX's own checker refuses.
    """
    if not path.is_file():
        problem = f"{path} is a directory" if path.is_dir() else f"there is no file {path}"
        raise UsageError(problem, hint="name the .onnx file")
    for library in custom_ops:
        if not library.is_file():
            raise UsageError(f"--custom-ops: there is no file {library}")
    # Of a link, what it is called and what stands beside it count: caches link to hashes.
    path = Path(os.path.abspath(path))  # noqa: PTH100  # as said
    try:
        proto = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise ModelError(
            f"{path} is no ONNX model, or only part of one: {error}", hint="copy or export it again"
        ) from error
    model = OnnxModel(path, proto, tuple(library.resolve() for library in custom_ops))
    if not proto.graph.output:
        what = "no outputs" if proto.graph.node else "no graph"
        raise ModelError(f"{path} holds {what}", hint="copy or export it again")
    _sort(proto.graph)
    _check_weights(model)
    _check(model)
    if proto.functions:
        model = dataclasses.replace(model, proto=_without_functions(proto))
    unshare_dequantised(model.proto.graph)
    return model


def _without_functions(proto: ModelProto) -> ModelProto:
    """A legal model with the nodes of its own functions in place of their calls, as ONNX Runtime
    has it: where it knows an operator of that name itself, it takes that."""
    versions = {opset.domain: opset.version for opset in proto.opset_import}
    for function in proto.functions:
        for opset in function.opset_import:
            if opset.domain not in versions:
                proto.opset_import.append(opset)
            # Where versions differ, their operators do not: the checker has seen to that.
            opset.version = versions.setdefault(opset.domain, opset.version)
    known = {
        (item.domain, item.name)
        for item in get_all_operator_schema()
        if item.since_version <= versions.get(item.domain, 0)
    }
    own = [each for each in proto.functions if (each.domain, each.name) not in known]
    del proto.functions[:]
    proto.functions.extend(own)
    while proto.functions:
        inner = [node for each in proto.functions for node in with_inner(each.node)]
        _give_defaults(proto.functions, (*inner, *with_inner(proto.graph.node)))
        called = {(node.domain, node.op_type, node.overload) for node in inner}
        functions = ((each, (each.domain, each.name, each.overload)) for each in proto.functions)
        # Those that no other calls: what they pass on to others is known once they are written out.
        outer = [(each.domain, each.name) for each, key in functions if key not in called]
        proto = onnx.inliner.inline_selected_functions(proto, outer)
    return proto


def _give_defaults(functions: Iterable[FunctionProto], nodes: Iterable[NodeProto]) -> None:
    """Writes attributes that calls of functions leave out, which the inliner does not know of."""
    of = {(each.domain, each.name, each.overload): each.attribute_proto for each in functions}
    for node in nodes:
        given = {attribute.name for attribute in node.attribute}
        defaults = of.get((node.domain, node.op_type, node.overload), ())
        node.attribute.extend(item for item in defaults if item.name not in given)


def _sort(graph: GraphProto) -> None:
    """Puts nodes behind what they read, as ONNX Runtime does; their order stays where it can."""
    maker = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    reads = [
        {maker[name] for name in (*node.input, *captured(node)) if name in maker}
        for node in graph.node
    ]
    if all(max(made, default=-1) < place for place, made in enumerate(reads)):
        return
    try:
        order = list(TopologicalSorter(dict(enumerate(reads))).static_order())
    except CycleError:
        return  # the checker says so
    nodes = [NodeProto.FromString(graph.node[place].SerializeToString()) for place in order]
    del graph.node[:]
    graph.node.extend(nodes)


def _check_weights(model: OnnxModel) -> None:
    """Raises ModelError for weights of one name, and for all whose external files are not right."""
    times = Counter(tensor.name for tensor in model.proto.graph.initializer)
    double = [name for name, count in times.items() if count > 1]
    if double:
        raise ModelError(
            f"{model.path} has several weights of the name {', '.join(double)}",
            hint="export it again",
        )
    faults = []
    for tensor in tensors_of(model.proto.graph):
        if not uses_external_data(tensor):
            continue
        place = {entry.key: entry.value for entry in tensor.external_data}
        # Links in the folder are followed, a location that leads out of it is not.
        file = Path(os.path.normpath(model.path.parent / place.get("location", "")))
        if not file.is_relative_to(model.path.parent):
            faults.append(f"{tensor.name} is outside the folder of the model, in {file}")
        elif not file.is_file():
            faults.append(f"{tensor.name} is in {file}, which is not there")
        elif file.stat().st_size < (
            end := int(place.get("offset", 0)) + int(place.get("length", 0))
        ):
            faults.append(f"{tensor.name} ends at byte {end} of {file}, which is shorter")
    if faults:
        listing = "".join(f"\n  - {fault}" for fault in faults[:_MOST])
        more = f"\n  and {len(faults) - _MOST} more" if len(faults) > _MOST else ""
        raise ModelError(
            f"{model.path} has weights that cannot be read:{listing}{more}",
            hint="copy the files with the weights beside the model too",
        )


_MOST = 10
"""Faults that a message names."""


def _check(model: OnnxModel) -> None:
    """What ONNX itself finds wrong; of a node, it is named."""
    try:
        onnx.checker.check_model(_complete(model.proto))
    except onnx.checker.ValidationError as error:
        faulty = _faulty_node(model)
        where = f" at {title(faulty)}" if faulty is not None else ""
        raise ModelError(
            f"{model.path} is no legal ONNX model{where}: {_first(str(error))}",
            hint="export it again, or look at it with onnx.checker.check_model",
        ) from error


def _complete(proto: ModelProto) -> ModelProto:
    """The model with inputs in place of its weights, and some shape for inputs and outputs.

    Weights are looked at elsewhere, and may be too large for the checker; values without a shape
    are against the rules, but ONNX Runtime does not mind.
    """
    found = without_weights(proto, -1, {})
    for value in (*found.graph.input, *found.graph.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    return found


def without_weights(
    proto: ModelProto, largest: int, sizes: Mapping[str, Sequence[int]]
) -> ModelProto:
    """The model without weights, which become inputs, and without the shapes of its outputs.

    Args:
        largest: elements up to which a weight stays; -1 for none.
        sizes: shapes that inputs are given.
    """
    found = ModelProto(
        ir_version=proto.ir_version,
        opset_import=proto.opset_import,
        functions=proto.functions,  # before they are inlined
        producer_name=proto.producer_name,
    )
    graph = found.graph
    graph.name = proto.graph.name
    graph.node.extend(proto.graph.node)
    graph.sparse_initializer.extend(proto.graph.sparse_initializer)
    weights = {tensor.name for tensor in proto.graph.initializer}
    graph.input.extend(source for source in proto.graph.input if source.name not in weights)
    for source in graph.input:
        if source.name in sizes:
            element = source.type.tensor_type.elem_type
            source.CopyFrom(make_tensor_value_info(source.name, element, sizes[source.name]))
    for tensor in proto.graph.initializer:
        if math.prod(tensor.dims) <= largest and not uses_external_data(tensor):
            graph.initializer.append(tensor)
        else:
            graph.input.append(make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    graph.output.extend(proto.graph.output)
    for result in graph.output:
        # Declared shapes are for the sizes of the exporter, and may contradict others.
        if result.type.HasField("tensor_type"):
            result.type.tensor_type.ClearField("shape")
    return found


def _faulty_node(model: OnnxModel) -> NodeProto | None:
    """The first node that is illegal by itself."""
    context = onnx.checker.DEFAULT_CONTEXT
    own = type(context)()
    own.ir_version = model.proto.ir_version
    own.opset_imports = {opset.domain: opset.version for opset in model.proto.opset_import}
    for node in model.proto.graph.node:
        try:
            onnx.checker.check_node(node, own)
        except onnx.checker.ValidationError:
            found: NodeProto = node
            return found
    return None


def _first(text: str) -> str:
    """The first lines of a message, in one."""
    return " ".join(text.split("\n\n")[0].split())


def tensors_of(graph: GraphProto) -> Iterator[TensorProto]:
    """All tensors that a graph holds: initialisers, attributes, and those of its subgraphs."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
        for inner in subgraphs(node):
            yield from tensors_of(inner)


def whole_session(model: OnnxModel, *, optimised: bool = True) -> Whole:
    """The model, loaded; and optimised by ONNX Runtime.

    Raises:
        ModelError: when ONNX Runtime refuses it, naming the node where that is known.
    """
    try:
        return Whole(model.path, custom_ops=model.custom_ops, optimised=optimised)
    except StageError as error:
        nodes = [title(n) for n in model.proto.graph.node if _names(n, str(error))]
        at = f" (at {nodes[0]})" if nodes else ""
        raise ModelError(
            f"{error}{at}",
            hint="it has to run in one piece before it can run in stages; libraries of custom "
            "operators are named with --custom-ops",
        ) from error


_FOLDER = "session.model_external_initializers_file_folder_path"
"""Where ONNX Runtime looks for the weights of a model that it is given as bytes."""


def session_of(
    model: OnnxModel, proto: ModelProto, profile: Path | None = None
) -> onnxruntime.InferenceSession:
    """A session of one thread that runs node by node, as none are fused.

    Args:
        proto: run in place of the model, with the weights that it has in files.
        profile: how the file of a profile begins; None for no profile.
    """
    options = SessionChoice(custom_ops=model.custom_ops).options()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    options.add_session_config_entry(_FOLDER, str(model.path.parent))
    providers = ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=providers)


def _names(node: NodeProto, message: str) -> bool:
    """Whether a message of ONNX Runtime is about a node: by its name, or domain and operator."""
    if node.name and f"({node.name})" in message:
        return True
    return bool(node.domain) and f"{node.domain}:{node.op_type}" in message


# --- dequantisations ------------------------------------------------------------------------------


DEQUANTIZE = "DequantizeLinear"


def unshare_dequantised(graph: GraphProto) -> None:
    """Copies the nodes that dequantise for several readers, one for each.

    ONNX Runtime does the same when it loads a model: a `DequantizeLinear` and its reader become
    one kernel. So the readers can lie in several stages, and what crosses is quantised.
    """
    weights = {tensor.name for tensor in graph.initializer}
    taken = {name for node in graph.node for name in (node.name, *node.output)}
    taken |= weights | {value.name for value in graph.input}
    readers: dict[str, list[NodeProto]] = {}
    kept = {value.name for value in graph.output}
    for node in graph.node:
        kept.update(captured(node))
        for name in node.input:
            readers.setdefault(name, []).append(node)
    nodes: list[NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type != DEQUANTIZE or node.input[0] in weights:
            continue
        (made,) = node.output
        each = list({id(reader): reader for reader in readers.get(made, [])}.values())
        for reader in each[made not in kept :]:
            copy = NodeProto()
            copy.CopyFrom(node)
            copy.name = _fresh(node.name, taken) if node.name else ""
            copy.output[0] = _fresh(made, taken)
            reader.input[:] = [copy.output[0] if n == made else n for n in reader.input]
            nodes.append(copy)
    if len(nodes) > len(graph.node):
        copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)


def _fresh(name: str, taken: set[str]) -> str:
    wish = next(w for n in itertools.count(1) if (w := f"{name}_{n}") not in taken)
    taken.add(wish)
    return wish
