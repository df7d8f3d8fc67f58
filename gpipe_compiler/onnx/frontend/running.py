"""The whole model in ONNX Runtime: whether it runs at all."""

from __future__ import annotations

from onnx import NodeProto

from gpipe_compiler.errors import ModelError
from gpipe_compiler.onnx.frontend.nodes import title
from gpipe_compiler.onnx.frontend.reading import OnnxModel
from gpipe_compiler.onnx.runtime.errors import StageError
from gpipe_compiler.onnx.runtime.whole import Whole


def whole_session(model: OnnxModel) -> Whole:
    """The model, loaded.

    Raises:
        ModelError: when ONNX Runtime refuses it, naming the node where that is known.
    """
    try:
        return Whole(model.path, custom_ops=model.custom_ops)
    except StageError as error:
        nodes = [title(n) for n in model.proto.graph.node if _names(n, str(error))]
        at = f" (at {nodes[0]})" if nodes else ""
        raise ModelError(
            f"{error}{at}",
            hint="it has to run in one piece before it can run in stages; libraries of custom "
            "operators are named with --custom-ops",
        ) from error


def _names(node: NodeProto, message: str) -> bool:
    """Whether a message of ONNX Runtime is about a node: by its name, or domain and operator."""
    if node.name and f"({node.name})" in message:
        return True
    return bool(node.domain) and f"{node.domain}:{node.op_type}" in message
