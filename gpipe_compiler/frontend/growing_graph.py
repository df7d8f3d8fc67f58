"""A graph that grows by calls of torch, as they are made: what each is given and has made."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from gpipe_compiler.errors import SourceLocation, TraceError, at_code
from gpipe_compiler.frontend.calls import Written
from gpipe_compiler.frontend.held_names import HeldName, names_here
from gpipe_compiler.frontend.locate import calling_line
from gpipe_compiler.frontend.nests import has_tensors, is_literal
from gpipe_compiler.frontend.position import Position, local_path
from gpipe_compiler.frontend.size_nodes import SizeNodes
from gpipe_compiler.frontend.trace_errors import SPARSE
from gpipe_compiler.ir.arguments import map_argument, storage_key, tensors_in
from gpipe_compiler.ir.branches import require

EVENT = "gpipe_compiler_event"
"""Key of node.meta: number of the call that made the node."""

EFFECT = "gpipe_compiler_effect"
"""Key of node.meta: the node may do more than give its value: write to a tensor, or draw."""

SEEN = "gpipe_compiler_seen"
"""Key of node.meta: the nodes that the node reads, and what the functions around call them."""

WRITES = "gpipe_compiler_writes"
"""Key of node.meta: the tensors that the node writes to."""


class GrowingGraph:
    """Nodes for calls, in the order in which they are made.

    Attributes:
        tensors: the nodes that stand for tensors.
        event: number of the call that is being made.
        decisions: the nodes, of no other use, at which Python is told what follows from draws.
    """

    def __init__(self, *, gradients: bool, trains: bool) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.position = Position(self.graph, gradients=gradients)
        self.event: int | None = None
        self.decisions: list[fx.Node] = []
        self._sizes = SizeNodes(self.graph, self.position)
        self.tensors = TensorNodes(self.graph, self._sizes)
        self._asking = AskingWeights(self.tensors, trains=trains)

    def argument(self, item: Any) -> Any:
        """An argument of a call, in terms of nodes."""
        return map_argument(self._in_nodes, item)

    def _in_nodes(self, item: Any) -> Any:
        match item:
            case torch.Tensor():
                node = self.tensors.node(item)
                if not self._asking.fixes(item) or not self.position.gradients:
                    return node
                return self._create("call_method", "detach", (node,), {}, item)
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return self._sizes.written(item)
            case range():
                return list(item)
            case np.generic():
                return item.item()
            case np.ndarray():
                return item.tolist()
        return item

    def from_numbers(self, real: torch.Tensor, made: torch.Tensor) -> Any:
        """A new tensor of numbers that are known, and what stands for it in the trace."""
        with unset_fake_temporarily():
            numbers = real.tolist() if is_literal(real) else None
        if numbers is not None:
            options = {"dtype": made.dtype, "device": made.device}
            return self.record(Written(torch.tensor, (numbers,), options), made, ())
        self.tensors.constant(real)
        return self.record(Written("clone", (real,)), made, ())

    def record(
        self, call: Written, made: Any, changed: Sequence[torch.Tensor], *, effect: bool = False
    ) -> Any:
        """What a call has made, with a node for it.

        A call that returns its argument as it is gives another tensor, so that it has a node of
        its own.
        """
        made = apart(made, (call.args, call.kwargs), changed)
        node = self.add(call, made, effect=bool(changed) or effect)
        if changed:
            node.meta[WRITES] = tuple(changed)
        self._bind(node, made)
        return made

    def add(self, call: Written, made: Any, *, effect: bool = False) -> fx.Node:
        """A node for a call; what it has made is not its yet."""
        args, kwargs = self.argument(tuple(call.args)), self.argument(dict(call.kwargs))
        kind = "call_method" if isinstance(call.target, str) else "call_function"
        return self._create(kind, call.target, args, kwargs, made, effect)

    def called(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function makes, recorded though the model does not call it."""
        return self.record(Written(function, args, kwargs), function(*args, **kwargs), ())

    def requires(self, condition: torch.Tensor, line: str) -> None:
        """Notes what has to hold of every batch, as the user's line goes another way elsewhere."""
        arguments = self.argument(condition), line
        self._create("call_function", require, arguments, {}, None, effect=True)

    def decides(self, condition: torch.Tensor) -> None:
        """Notes that Python is told what follows from draws."""
        arguments = (self.argument(condition),)
        made = self._create("call_function", decided, arguments, {}, None, effect=True)
        self.decisions.append(made)

    def _create(
        self, kind: str, target: Any, args: Any, kwargs: Any, made: Any, effect: bool = False
    ) -> fx.Node:
        node = self.graph.create_node(kind, target, args, kwargs)
        node.meta.update(self.position.origin())
        node.meta["val"] = made
        node.meta[SEEN] = self._seen(node)
        if effect:
            node.meta[EFFECT] = True
        if self.event is not None:
            node.meta[EVENT] = self.event
        return node

    def _seen(self, node: fx.Node) -> tuple[tuple[fx.Node, HeldName], ...]:
        read = {source for source in node.all_input_nodes if source.op != "get_attr"}
        if not read:
            return ()
        pairs = (
            (self.tensors.known(held.tensor), held) for held in names_here(self.position.users)
        )
        return tuple((source, held) for source, held in pairs if source in read)

    def _bind(self, node: fx.Node, made: Any) -> None:
        """Lets nodes stand for the tensors that a call has made."""
        if isinstance(made, torch.Tensor):
            self.tensors.stands_for(node, made)
        elif isinstance(made, torch.SymInt | torch.SymFloat | torch.SymBool):
            self._sizes.note_number(node, made)
        elif isinstance(made, tuple | list):
            for index, part in enumerate(made):
                if isinstance(part, torch.Tensor | torch.SymInt) or has_tensors(part):
                    item = self._create("call_function", operator.getitem, (node, index), {}, part)
                    self._bind(item, part)
        elif isinstance(made, dict):
            raise TraceError("a function of torch returns a dict", location=calling_line())

    def sweep(self) -> None:
        """Drops what nothing reads and has no effect."""
        for node in reversed(list(self.graph.nodes)):
            used = node.users or node.op in ("placeholder", "output")
            if not used and not node.meta.get(EFFECT):
                self.graph.erase_node(node)


def decided(_condition: object) -> None:
    """Marks in a recorded graph where Python decides by a draw."""


def apart(made: Any, arguments: Any, changed: Sequence[torch.Tensor]) -> Any:
    """What a call has made, with views in place of arguments that it returns as they were."""
    given = {id(tensor) for tensor in tensors_in(arguments)} - {id(tensor) for tensor in changed}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.alias.default(tensor) if id(tensor) in given else tensor

    return tree_map_only(torch.Tensor, own, made)


class AskingWeights:
    """Which weights require no gradients now, though they did when forward began.

    Args:
        trains: whether the forward that is recorded has gradients.
    """

    def __init__(self, tensors: TensorNodes, *, trains: bool) -> None:
        self._tensors = tensors
        self._trains = trains
        self._fixed: dict[int, tuple[fx.Node, SourceLocation | None]] = {}

    def say(self, tensor: torch.Tensor, asks: bool) -> None:
        """Forward says of a tensor whether it requires gradients.

        Raises:
            TraceError: where it is a weight that did not when forward began.
        """
        node = self._tensors.known(tensor)
        if not self._trains or node is None or node.op != "get_attr":
            return
        if not asks and tensor.requires_grad:
            self._fixed[id(tensor)] = node, calling_line()
        elif asks and not tensor.requires_grad and self._fixed.pop(id(tensor), None) is None:
            raise _not_alike(node, "lets", "which is frozen, require gradients", calling_line())

    def fixes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a weight that gets no gradients from what reads it now."""
        return id(tensor) in self._fixed

    def fixes_in(self, module: nn.Module) -> bool:
        """Whether a module has such weights."""
        return bool(self._fixed) and any(map(self.fixes, module.parameters()))

    def refuse_left(self) -> None:
        """Holds a recorded forward to it that its weights require gradients as before."""
        for node, where in self._fixed.values():
            raise _not_alike(node, "leaves", "which is trained, without gradients", where)


def _not_alike(node: fx.Node, does: str, what: str, where: SourceLocation | None) -> TraceError:
    return TraceError(
        f"forward {does} {local_path(str(node.target))}, {what}: the first call is not the second",
        location=where,
        hint="say in build_model() what is trained, by `parameter.requires_grad_()`; what is held "
        "fixed for a while is to require gradients again where forward ends",
    )


class TensorNodes:
    """The nodes of a graph by the tensors that they stand for.

    Attributes:
        constants: tensors that the model has from elsewhere, by the target of the nodes that read
            them.
        takes_all: whether tensors without numbers from elsewhere are constants too.
    """

    def __init__(self, graph: fx.Graph, sizes: SizeNodes) -> None:
        self.constants: dict[str, torch.Tensor] = {}
        self.takes_all = False
        self._graph = graph
        self._sizes = sizes
        self._nodes: dict[int, tuple[torch.Tensor, fx.Node]] = {}
        self._held: dict[int, str] = {}
        self._weights: dict[object, str] = {}

    def follow(self, modules: Mapping[str, nn.Module]) -> None:
        """Notes the tensors that modules hold as plain attributes."""
        self._held = {
            id(item): f"{path}.{name}"
            for path, module in modules.items()
            for name, item in vars(module).items()
            if isinstance(item, torch.Tensor)
        }

    def stands_for(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """Lets a node stand for a tensor from now on."""
        self._nodes[id(tensor)] = tensor, node
        self._sizes.note(node, tensor)

    def known(self, tensor: torch.Tensor) -> fx.Node | None:
        """The node that stands for a tensor."""
        found = self._nodes.get(id(tensor))
        return None if found is None else found[1]

    def is_of_inputs(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is made of inputs, or in a way that is not known."""
        node = self.known(tensor)
        return node is None or any(n.op == "placeholder" for n in (node, *sources_of(node)))

    def input(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """A placeholder for a tensor."""
        node = self._graph.placeholder(name)
        node.meta["val"] = tensor
        self.stands_for(node, tensor)
        return node

    def state(self, target: str, tensor: torch.Tensor) -> fx.Node:
        """A node that reads a tensor that was there before."""
        node = self._graph.create_node("get_attr", target)
        node.meta["val"] = tensor
        self.stands_for(node, tensor)
        return node

    def lend(self, name: str, own: torch.Tensor, lent: torch.Tensor) -> None:
        """Lets a parameter or buffer be read, in whose place the model has one without numbers."""
        self._weights[_memory(own)] = name
        self.state(name, lent)

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """The node that stands for a tensor; one that reads a constant for what comes from
        elsewhere."""
        if tensor.layout is not torch.strided:
            raise SPARSE.at(calling_line())
        known = self.known(tensor)
        if known is not None:
            return known
        if isinstance(tensor, FakeTensor) and not self.takes_all:
            where = calling_line()
            raise TraceError(
                "the model uses a tensor that it makes in a way that is not recorded"
                f"{at_code(where)}, as in torch.autograd.grad in forward",
                location=where,
                hint="write what it computes with torch's operators on the inputs, or compute it "
                "in __init__ and keep it in a buffer",
            )
        return self.constant(tensor)

    def constant(self, tensor: torch.Tensor) -> fx.Node:
        """A node that reads a tensor that comes from elsewhere."""
        weight = self._weights.get(_memory(tensor))
        if weight is not None and tensor.requires_grad:
            raise _read_from_outside(local_path(weight))
        held = weight or self._held.get(id(tensor))
        if held is not None:
            return self.state(held, tensor)
        target = f"tensor_constant{len(self.constants)}"
        self.constants[target] = tensor
        return self.state(target, tensor)


def _read_from_outside(weight: str) -> TraceError:
    """The refusal of a weight that is reached through a global or a closure.

    The models that a package is compared with are copies, and such a reader sees the original.
    """
    return TraceError(
        f"a weight of the model, {weight}, is read from outside of it, through a global name or a "
        "closure, and not as its own or as an output",
        location=calling_line(),
        hint="have forward return what the loss needs of its weights, such as "
        "`output, self.layer.weight.square().sum()`; the optimizer's weight_decay adds a penalty "
        "on all weights",
    )


def _memory(tensor: torch.Tensor) -> object:
    """Equal for tensors that are the same elements of the same memory, on meta too."""
    if tensor.layout is not torch.strided or isinstance(tensor, FakeTensor):
        return id(tensor)
    place = storage_key(tensor), tensor.storage_offset()
    return *place, tensor.dtype, tensor.shape, tensor.stride()


def sources_of(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that a node's value is computed from."""
    seen, pending = {node}, [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                pending.append(source)
                yield source
