"""Weights of which forward says whether they require gradients, as where a critic is held fixed."""

from __future__ import annotations

import torch
from torch import fx, nn

from gpipe_compiler.errors import SourceLocation, TraceError
from gpipe_compiler.frontend.locate import calling_line
from gpipe_compiler.frontend.position import local_path
from gpipe_compiler.frontend.tensor_nodes import TensorNodes


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
