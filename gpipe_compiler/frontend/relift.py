"""Calls of torch.nn modules, put back together from the aten operators that they ran.

While a model is exported, hooks note every call of a torch.nn leaf module: its arguments, what it
returned, and which nodes of the traced graph it made. Afterwards the nodes of a call are replaced
by `self.conv1(x)` again, where that is the same program: the nodes read nothing but the arguments
and the module's own state, and nothing of them is read elsewhere but what the module returned.
The nodes of one call stand together in the trace, so putting the call in their place keeps the
order of everything, writes in place included.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._pytree import tree_leaves, tree_map

from gpipe_compiler.frontend.aten_functions import IDLE, has_effect
from gpipe_compiler.frontend.casts import READS
from gpipe_compiler.frontend.modules import is_plain
from gpipe_compiler.frontend.recompute import CHECKPOINT
from gpipe_compiler.frontend.state import named_state

_CALLS = "gpipe_compiler_calls"
"""Key of node.meta: numbers of the calls that made the node, outermost first."""

_VALUE = "gpipe_compiler_value"
"""Key of node.meta: number of the value, as arguments and results of calls refer to it."""

Accepts = Callable[[str, nn.Module], bool]
"""Whether a module can be constructed anew, given its path and itself."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor of the trace among the arguments or results of a call."""

    number: int


@dataclass(frozen=True, slots=True)
class _Unknown:
    """An argument that has no place in a rebuilt call: a symbolic size, an object."""


@dataclass
class ModuleCallRecord:
    """One call of a leaf module.

    Attributes:
        args, kwargs, result: nests of `_Value` and constants.
        start: the last node of the trace before the call.
    """

    path: str
    module: nn.Module
    args: Any
    kwargs: Any
    start: fx.Node
    result: Any = None


@dataclass
class CallRecorder:
    """Notes the calls of torch.nn leaf modules while a module is traced.

    Attributes:
        canonical: every name of a parameter or buffer to the first name of the same tensor.
    """

    canonical: dict[str, str] = field(default_factory=dict)
    calls: list[ModuleCallRecord] = field(default_factory=list)
    _open: list[int] = field(default_factory=list)
    _values: int = 0

    @contextlib.contextmanager
    def watching(self, model: nn.Module, prefix: str) -> Iterator[None]:
        """Hooks in place; calls are noted under `prefix` and the path in `model`."""
        handles = []
        first: dict[int, str] = {}
        for name, tensor in named_state(model):
            full = f"{prefix}.{name}"
            self.canonical[full] = first.setdefault(id(tensor), full)
        try:
            for path, module in model.named_modules():
                if path and is_plain(module):
                    full = f"{prefix}.{path}"
                    handles.append(
                        module.register_forward_pre_hook(
                            self._before(full, module), with_kwargs=True
                        )
                    )
                    handles.append(module.register_forward_hook(self._after))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, path: str, module: nn.Module) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_stand_in: nn.Module, args: Any, kwargs: Any) -> None:
            mode = get_proxy_mode()
            if mode is None:
                return
            self._open.append(len(self.calls))
            self.calls.append(
                ModuleCallRecord(
                    path,
                    module,
                    self._note(args, mode.tracer),
                    self._note(kwargs, mode.tracer),
                    next(iter(reversed(mode.tracer.graph.nodes))),
                )
            )

        return hook

    def _after(self, _stand_in: nn.Module, args: Any, output: Any) -> None:
        mode = get_proxy_mode()
        if mode is None or not self._open:
            return
        number = self._open.pop()
        call = self.calls[number]
        call.result = self._note(output, mode.tracer)
        for node in reversed(mode.tracer.graph.nodes):
            if node is call.start:
                break
            node.meta[_CALLS] = (number, *node.meta.get(_CALLS, ()))

    def _note(self, item: Any, tracer: Any) -> Any:
        """A nest of arguments with every tensor numbered, and its node marked with the number."""
        if isinstance(item, torch.Tensor):
            slot = get_proxy_slot(item, tracer, None)
            if slot is None:
                return _Unknown()
            meta = slot.proxy.node.meta
            if _VALUE not in meta:
                meta[_VALUE] = self._values
                self._values += 1
            return _Value(meta[_VALUE])
        if type(item) in (tuple, list):
            return type(item)(self._note(part, tracer) for part in item)
        if type(item) is dict:
            return {key: self._note(part, tracer) for key, part in item.items()}
        if item is None or type(item) in (bool, int, float, str, torch.dtype):
            return item
        return _Unknown()


def relift(graphs: Sequence[fx.Graph], recorder: CallRecorder, accepts: Accepts) -> None:
    """Replaces the nodes of recorded calls by `call_module` nodes, in place.

    Args:
        graphs: the traced graph and those of its regions; parameters and buffers are read by
            `get_attr` nodes under their canonical names.
    """
    sizes = Counter(number for graph in graphs for node in graph.nodes for number in _made_by(node))
    for graph in graphs:
        groups: dict[int, list[fx.Node]] = {}
        values: dict[int, fx.Node] = {}
        for node in graph.nodes:
            for number in _made_by(node):
                groups.setdefault(number, []).append(node)
            if _VALUE in node.meta:
                values[node.meta[_VALUE]] = node
        lifted: set[int] = set()
        for number in sorted(groups):
            nodes = groups[number]
            call = recorder.calls[number]
            outer = set(_made_by(nodes[0])) - {number}
            if len(nodes) != sizes[number] or outer & lifted or not accepts(call.path, call.module):
                continue
            state = {
                recorder.canonical[f"{call.path}.{name}"] for name, _ in named_state(call.module)
            }
            if _Group(graph, call, nodes, values, state).lift():
                lifted.add(number)
    for graph in graphs:
        for node in graph.nodes:
            node.meta.pop(_CALLS, None)
            node.meta.pop(_VALUE, None)


def _made_by(node: fx.Node) -> tuple[int, ...]:
    """The calls that made a node.

    The inputs of a region, the region and its results only carry the marks of what they stand for.
    """
    calls: tuple[int, ...] = node.meta.get(_CALLS, ())
    return calls if node.op == "call_function" and not _is_region(node) else ()


def _is_region(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_region(source)
    return isinstance(node.target, torch._ops.HigherOrderOperator)


class _RefusedError(Exception):
    """The call cannot stand for its nodes."""


@dataclass
class _Group:
    """The nodes of one call in a graph.

    Attributes:
        values: the nodes of numbered values; results are replaced here when the call is lifted.
        state: canonical names of the module's parameters and buffers.
    """

    graph: fx.Graph
    call: ModuleCallRecord
    nodes: list[fx.Node]
    values: dict[int, fx.Node]
    state: set[str]

    def lift(self) -> bool:
        """Puts the call in the place of its nodes; False when that is not the same program."""
        body = [node for node in self.nodes if not _is_symbolic(node)]
        if not body:
            return False
        try:
            args, kwargs = tree_map(self._resolve, (self.call.args, self.call.kwargs))
            results = self._results(body)
            self._check(body, args, kwargs, results)
        except _RefusedError:
            return False
        with self.graph.inserting_before(body[0]):
            node = self.graph.create_node("call_module", self.call.path, args, kwargs)
            node.meta = _meta_of_call(body[-1], self.call.path)
            node.meta["val"] = tree_map(self._value_of, self.call.result)
            node.meta[IDLE] = not any(map(has_effect, body))
            self._bind(node, self.call.result, set(results))
        for old in reversed(self.nodes):
            if not old.users:
                self.graph.erase_node(old)
        return True

    def _resolve(self, leaf: Any) -> Any:
        """A leaf of the recorded arguments, the node of a value."""
        if not isinstance(leaf, _Value | _Unknown):
            return leaf
        if isinstance(leaf, _Unknown) or leaf.number not in self.values:
            raise _RefusedError
        return self.values[leaf.number]

    def _results(self, body: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """The nodes that the call returns, and that anything reads."""
        found = {}
        for leaf in tree_leaves(self.call.result):
            if isinstance(leaf, _Unknown):
                raise _RefusedError
            if isinstance(leaf, _Value) and leaf.number in self.values:
                node = self.values[leaf.number]
                if node not in body:
                    raise _RefusedError
                found[node] = leaf.number
        if not found:
            raise _RefusedError
        return found

    def _check(
        self,
        body: Sequence[fx.Node],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: dict[fx.Node, int],
    ) -> None:
        """Nothing else goes into the group, and nothing else comes out of it."""
        own = set(self.nodes)
        inside = set(body)
        allowed = {leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, fx.Node)}
        for node in body:
            for source in node.all_input_nodes:
                known = source in own or source in allowed or _is_symbolic(source)
                if not known and not self._is_own_state(source):
                    raise _RefusedError
            if node not in results and any(user not in own for user in node.users):
                raise _RefusedError
        for node in own - inside:
            # A size that is read outside stays, so it must not rest on anything inside.
            stays = any(user not in own for user in node.users)
            if stays and any(source in own for source in node.all_input_nodes):
                raise _RefusedError

    def _is_own_state(self, node: fx.Node) -> bool:
        return node.op == "get_attr" and node.target in self.state

    def _value_of(self, leaf: Any) -> Any:
        if not isinstance(leaf, _Value):
            return leaf
        node = self.values.get(leaf.number)
        return None if node is None else node.meta.get("val")

    def _bind(self, node: fx.Node, result: Any, results: set[fx.Node]) -> None:
        """Lets every reader of an old result read the new one."""
        if isinstance(result, _Value):
            old = self.values.get(result.number)
            if old in results:
                old.replace_all_uses_with(node)
                node.meta[READS] = old.meta.get(READS, ())
                node.meta[_VALUE] = result.number
                self.values[result.number] = node
            return
        if not isinstance(result, tuple | list):
            return
        for index, part in enumerate(result):
            if not any(
                isinstance(leaf, _Value) and self.values.get(leaf.number) in results
                for leaf in tree_leaves(part)
            ):
                continue
            item = self.graph.call_function(operator.getitem, (node, index))
            item.meta = {**node.meta, "val": node.meta["val"][index]}
            self._bind(item, part, results)


def _is_symbolic(node: fx.Node) -> bool:
    """Whether a node computes a size, from shapes alone."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def _meta_of_call(last: fx.Node, path: str) -> dict[str, Any]:
    """What is known of the call: its source line, and the module that makes it."""
    stack = {}
    for key, entry in (last.meta.get("nn_module_stack") or {}).items():
        if entry[0] == path:
            break
        stack[key] = entry
    kept = {key: last.meta[key] for key in ("source", CHECKPOINT) if key in last.meta}
    return {**kept, "nn_module_stack": stack}
