"""Which node of a recorded graph stands for a tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx, nn
from torch._subclasses import FakeTensor

from gpipe_compiler.errors import TraceError, at_code
from gpipe_compiler.frontend.locate import calling_line
from gpipe_compiler.frontend.position import local_path
from gpipe_compiler.frontend.size_nodes import SizeNodes


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

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Whether the model has made a tensor, and was not given it."""
        node = self.known(tensor)
        return node is not None and node.op != "placeholder"

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
    place = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *place, tensor.dtype, tensor.shape, tensor.stride()
