"""From a torch.fx graph to a Graph.

The fx graph is that of an `Entry`: placeholders in the order of the signature's inputs, and one
output, the list that `Entry.forward` returns. Nodes carry what a `Recorder` notes of them. No tuple
is a value of a Graph: what a call returns is bound by unpacking.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from gpipe_compiler.errors import TraceError
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.growing_graph import SEEN
from gpipe_compiler.frontend.modules import rebuild
from gpipe_compiler.frontend.naming import rename
from gpipe_compiler.frontend.position import CHECKPOINT, LAYER, REGIONS, local_path
from gpipe_compiler.frontend.state import named_state
from gpipe_compiler.ir import (
    Argument,
    Call,
    FunctionCall,
    Graph,
    Loss,
    MethodCall,
    ModuleCall,
    ModuleSpec,
    Op,
    Reduction,
    Ref,
    Result,
    State,
    StateKind,
    StateRef,
)
from gpipe_compiler.ir.arguments import map_argument, value_names
from gpipe_compiler.ir.interpret import construct
from gpipe_compiler.ir.legality import check
from gpipe_compiler.ir.ops import SeenName
from gpipe_compiler.runtime.core.packed import PACKED


def lower(graph: fx.Graph, constants: Mapping[str, torch.Tensor], entry: Entry) -> Graph:
    """The Graph that a torch.fx graph of an entry stands for.

    Args:
        constants: by the targets of `get_attr`; the others are attributes of the entry, as are the
            targets of `call_module`.

    Raises:
        TraceError: for a node that no Graph can hold.
    """
    lowering = _Lowering(constants, entry)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, source in zip(placeholders, entry.signature.inputs, strict=True):
        lowering.arguments[node] = Ref(source.name)
    ops, returned = lowering.nodes(graph)
    copies = {leaf: _copied(leaf) for leaf in returned[0] if isinstance(leaf, StateRef)}
    ops = [*ops, *copies.values()]
    leaves = [Ref(copies[leaf].name) if leaf in copies else leaf for leaf in returned[0]]
    loss = None
    if entry.has_loss:
        first = leaves.pop(0)
        if not isinstance(first, Ref):
            raise TraceError(
                "the loss does not depend on the inputs",
                hint="loss_fn(output, target) must compute it from the output",
            )
        # How losses combine matters in training only.
        reduction = entry.reduction if entry.training else Reduction.MEAN
        loss = Loss(first.name, reduction, returned=entry.returns_loss)
    outputs = entry.outputs(leaves)
    raw = Graph(
        name=entry.name,
        inputs=entry.signature.inputs,
        ops=_bound(ops, (outputs, loss and Ref(loss.value))),
        outputs=outputs,
        classes=entry.known.classes,
        state={**entry.states.states, **lowering.constants},
        modules=lowering.modules,
        batch_size=entry.signature.batch_size,
        loss=loss,
        tensors={**entry.states.tensors, **lowering.constant_tensors},
        example=dict(entry.signature.named()),
    )
    return check(rename(raw), after="the frontend")


def _copied(state: StateRef) -> Op:
    """What stands for a parameter or buffer that the model returns: a stage makes its outputs."""
    own = f"{state.name.replace('.', '_')}_returned"
    return Op(own, MethodCall("clone", (state,)), own)


def _bound(ops: Sequence[Op], ends: Argument) -> tuple[Op, ...]:
    """The ops, with names for those results alone that are read."""
    needed = set(value_names(ends))
    bound: list[Op] = []
    for op in reversed(ops):
        bound.append(dataclasses.replace(op, result=_needed(op.result, needed)))
        needed.update(op.inputs)
    return tuple(reversed(bound))


def _needed(result: Result, needed: set[str]) -> Result:
    """A result with a name only for what is read."""
    if isinstance(result, tuple):
        parts = tuple(_needed(item, needed) for item in result)
        return parts if any(part is not None for part in parts) else None
    return result if result in needed else None


def _unpacked(name: str, returned: Any) -> tuple[Result, Argument]:
    """A result with a name for each tensor that is returned, and the argument that the whole of it
    stands for; the name itself for anything but tensors in tuples and lists."""
    if not _holds_tensors_alone(returned):
        return name, Ref(name)
    pairs = [
        (None, None) if item is None else _unpacked(f"{name}.{index}", item)
        for index, item in enumerate(returned)
    ]
    results, arguments = zip(*pairs, strict=True)
    return results, list(arguments) if isinstance(returned, list) else arguments


def _holds_tensors_alone(returned: Any) -> bool:
    """Whether it is a tuple or list of tensors, possibly nested, that may be missing."""
    if not isinstance(returned, tuple | list) or isinstance(returned, torch.Size) or not returned:
        return False
    return all(
        item is None or isinstance(item, torch.Tensor) or _holds_tensors_alone(item)
        for item in returned
    )


@dataclass
class _Lowering:
    """Turns nodes into ops; names are still those of the nodes."""

    given: Mapping[str, torch.Tensor]
    entry: Entry
    arguments: dict[fx.Node, Argument] = field(default_factory=dict)
    modules: dict[str, ModuleSpec] = field(default_factory=dict)
    constants: dict[str, State] = field(default_factory=dict)
    constant_tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        table = self.entry.states
        self._names = {id(tensor): name for name, tensor in table.tensors.items()}
        for name, tensor in named_state(self.entry.model):
            self._names[id(tensor)] = table.canonical[name]
        self._taken = {source.name for source in self.entry.signature.inputs}

    def nodes(self, graph: fx.Graph) -> tuple[list[Op], Any]:
        """The ops of a graph, and the arguments of its output node."""
        calls: list[fx.Node] = []
        for node in graph.nodes:
            if node.op == "get_attr":
                path = str(node.target)
                held = self.given.get(path)
                held = operator.attrgetter(path)(self.entry) if held is None else held
                self.arguments[node] = StateRef(self._state(path, held))
            elif node.op not in ("placeholder", "output"):
                calls.append(node)
        ops = [self._op(node) for node in calls if not self._is_item(node)]
        return ops, self.argument(graph.output_node().args)

    def _is_item(self, node: fx.Node) -> bool:
        """Whether a node takes something out of an unpacked result; it stands for that then."""
        match node:
            case fx.Node(target=operator.getitem, args=(fx.Node() as source, int() as index)):
                whole = self.arguments.get(source)
                if isinstance(whole, tuple | list):
                    self.arguments[node] = whole[index]
                    return True
        return False

    def _op(self, node: fx.Node) -> Op:
        call = self._call(node)
        # In-place ops may return their argument, so that a name may not stand for an input twice.
        name = f"%{node.name}"
        result, self.arguments[node] = _unpacked(name, node.meta.get("val"))
        op = Op(
            name,
            call,
            result,
            node.meta["source"],
            module_of(node),
            checkpoint=str(node.meta.get(CHECKPOINT, "")),
            turns=tuple((local_path(p), turn) for p, _, turn in node.meta["modules"] if turn),
            layer=str(node.meta.get(LAYER, "")),
            regions=node.meta[REGIONS],
        )
        seen = tuple(
            SeenName(op.inputs.index(argument.name), held.scope, held.name, held.path, held.bound)
            for source, held in node.meta.get(SEEN, ())
            if isinstance(argument := self.arguments.get(source), Ref)
            and argument.name in op.inputs
        )
        return dataclasses.replace(op, seen=seen)

    def _call(self, node: fx.Node) -> Call:
        args = tuple(self.argument(item) for item in node.args)
        kwargs = {key: self.argument(item) for key, item in node.kwargs.items()}
        match node.op:
            case "call_function":
                args, kwargs = _attention_by_keyword(node.target, args, kwargs)
                assert callable(node.target)  # fx guarantees it
                return FunctionCall(node.target, args, kwargs)
            case "call_method":
                return MethodCall(str(node.target), args, kwargs)
            case _:
                return ModuleCall(self._module(str(node.target), node), args, kwargs)

    def argument(self, item: Any) -> Argument:
        return map_argument(self._leaf, item)

    def _leaf(self, item: Any) -> Argument:
        if isinstance(item, fx.Node):
            return self.arguments[item]
        return list(item) if isinstance(item, range) else item

    def _state(self, path: str, tensor: torch.Tensor) -> str:
        """The canonical name of a parameter or buffer; a new constant for any other tensor."""
        known = self._names.get(id(tensor)) or self.entry.states.canonical.get(local_path(path))
        if known is not None:
            return known
        wish = local_path(path)
        base = "constant" if "tensor_constant" in wish else wish
        name, number = base, 0
        while name in self.constants or name in self.entry.states.canonical:
            number += 1
            name = f"{base}_{number}"
        kind = StateKind.PARAMETER if isinstance(tensor, nn.Parameter) else StateKind.CONSTANT
        self.constants[name] = State(
            name,
            kind,
            tuple(tensor.shape),
            tensor.dtype,
            requires_grad=tensor.requires_grad,
            persistent=kind is StateKind.PARAMETER,
            initial=self.entry.states.initial.get(wish, ()) if tensor.is_meta else (),
        )
        self.constant_tensors[name] = tensor
        self._names[id(tensor)] = name
        return name

    def _module(self, target: str, node: fx.Node) -> str:
        path = local_path(target)
        if path not in self.modules:
            module = self.entry.get_submodule(target)
            spec = rebuild(path, module)
            if spec is None:
                raise TraceError(
                    f"the module {path} ({type(module).__name__}) cannot be constructed anew",
                    location=node.meta["source"],
                )
            held = dict(named_state(module))
            state = {  # in the order of the constructor; a model may have set its weights later
                local: self._state(f"{target}.{local}", held[local])
                for local, _ in named_state(construct(spec))
            }
            self.modules[path] = dataclasses.replace(spec, state=state)
        spec = self.modules[path]
        if "lengths" in node.kwargs and spec.cls in PACKED:
            self.modules[path] = dataclasses.replace(spec, cls=PACKED[spec.cls])
        return path


def _attention_by_keyword(
    function: object, args: tuple[Argument, ...], kwargs: dict[str, Argument]
) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
    """Attention's options by keyword, as people write them and as both modes can share them."""
    if function is not torch.nn.functional.scaled_dot_product_attention:
        return args, kwargs
    named = dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False))
    defaults = {"attn_mask": None, "is_causal": False}
    options = {**named, **kwargs}
    return args[:3], {k: v for k, v in options.items() if k not in defaults or v != defaults[k]}


def module_of(node: fx.Node) -> str:
    """The path of the module whose forward makes the call."""
    return local_path(node.meta["modules"][-1][0]) if node.meta["modules"] else ""
