"""Carries what hooks do to gradients through a trace: each becomes a function with a backward.

A hook runs while it is traced, on a gradient that has no numbers. What it computes is written down
as the backward of a torch.autograd.Function whose forward gives its argument; what it reads of the
forward pass is an argument too. So a cut may lie on either side of it.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeGuard
from unittest import mock

import torch
from torch import fx, nn
from torch.utils.hooks import RemovableHandle

from gpipe_compiler.errors import TraceError
from gpipe_compiler.frontend.calls import Written
from gpipe_compiler.frontend.growing_graph import WRITES
from gpipe_compiler.frontend.locate import calling_line
from gpipe_compiler.frontend.recorder import Recorder, recording
from gpipe_compiler.frontend.user_code import definition
from gpipe_compiler.ir.arguments import storage_key
from gpipe_compiler.ir.own_functions import OwnFunction, function_of_text
from gpipe_compiler.runtime.core.random import may_draw

_Hook = Callable[..., Any]

_OF = "gpipe_compiler_hook_of"
"""Key of node.meta: the node whose gradient goes through a hook."""

_CLASS = '''class Hooked(torch.autograd.Function):
    """A copy of its argument, whose gradient goes through a hook of the model."""

    @staticmethod
    def forward(ctx, x, *read):
        ctx.save_for_backward(*read)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return hook(gradient, *ctx.saved_tensors), *(None for _ in ctx.saved_tensors)
'''

_WAY_OUT = (
    "write it as a torch.autograd.Function whose forward gives its argument and whose backward "
    "does what the hook does"
)


@contextlib.contextmanager
def gradient_hooks_carried() -> Iterator[None]:
    """Lets what is traced inside hold what hooks of tensors and modules do to gradients.

    Raises:
        TraceError: for a hook that cannot be written down.
    """
    with (
        mock.patch.object(torch.Tensor, "register_hook", _hook_tensor),
        mock.patch.object(nn.modules.module, "BackwardHook", _ModuleHooks),
    ):
        yield


_HOOK_TENSOR = torch.Tensor.register_hook


def _hook_tensor(tensor: torch.Tensor, hook: _Hook) -> RemovableHandle:
    """Stands for `tensor.register_hook(hook)`."""
    recorder = recording()
    if recorder is None:
        handle: RemovableHandle = _HOOK_TENSOR(tensor, hook)  # type: ignore[no-untyped-call]  # of torch
        return handle
    put = _put(recorder, tensor, hook) if tensor.requires_grad else None
    return _Handle(put, tensor, recorder)


class _Handle(RemovableHandle):
    """Takes a hook of a tensor out of a trace again: it never runs, whatever was computed since."""

    def __init__(self, put: fx.Node | None, tensor: torch.Tensor, recorder: Recorder) -> None:
        super().__init__(OrderedDict())
        self._put, self._tensor, self._recorder = put, tensor, recorder

    def remove(self) -> None:
        put, self._put = self._put, None
        if put is None:
            return
        before: Any = put.args[0]
        put.replace_all_uses_with(before)
        if self._recorder.tensors.known(self._tensor) is put:
            self._recorder.tensors.stands_for(before, self._tensor)
        put.graph.erase_node(put)


def _put(
    recorder: Recorder,
    tensor: torch.Tensor,
    hook: _Hook,
    of_module: _Hook | None = None,
    foreign: Collection[int] = (),
) -> fx.Node | None:
    """Sends the gradient of a tensor through a hook, wherever the tensor is used; the node that
    does.

    Args:
        of_module: the hook of a module that this one is a part of.
        foreign: the ids of the gradients of other tensors.
    """
    carried, read = _written(recorder, tensor, hook, of_module, foreign)
    if carried is None:
        return None
    current = recorder.tensors.node(tensor)
    # Hooks run in the order in which they were registered: the last one is the nearest to the op.
    node: fx.Node = current.meta.get(_OF, current)
    users = [user for user in node.users if _takes_gradient(user)]
    if users and read:
        raise TraceError(
            "a hook on the gradient of a tensor that was used before it was registered reads other "
            "tensors: they cannot be there in time",
            location=calling_line(),
            hint="register the hook right after the line that makes the tensor",
        )
    put = recorder.add(Written(carried, (node, *map(recorder.tensors.node, read))), tensor)
    put.meta[_OF] = node
    if users:
        node.append(put)
    for user in users:
        user.replace_input_with(node, put)
    if current is node:
        recorder.tensors.stands_for(put, tensor)
    return put


def _takes_gradient(node: fx.Node) -> bool:
    """Whether gradients may come through a node; what it holds of its value does not say."""
    made = node.meta.get("val")
    return not isinstance(made, torch.Tensor | int | torch.SymInt) or (
        isinstance(made, torch.Tensor) and (made.is_floating_point() or made.is_complex())
    )


def _written(
    recorder: Recorder,
    tensor: torch.Tensor,
    hook: _Hook,
    of_module: _Hook | None,
    foreign: Collection[int],
) -> tuple[OwnFunction | None, list[torch.Tensor]]:
    """The function that stands for a hook, and the tensors of the forward pass that it reads; None
    for a hook that changes nothing."""
    gradient = _gradient(tensor)
    inner = Recorder(gradients=False)
    inner.tensors.takes_all = True
    placeholder = inner.tensors.input("gradient", gradient)
    with recorder.paused(), inner:
        made_of: Any = hook(gradient)
    inner.finish(made_of)
    graph, constants = inner.graph, inner.tensors.constants
    reading = [(node, constants[str(node.target)]) for node in graph.nodes if node.op == "get_attr"]
    if any(node.users and id(held) in foreign for node, held in reading):
        raise TraceError(
            "a backward hook of a module makes the gradient of one tensor of those of others: they "
            "may be in another stage",
            location=definition(of_module),
            hint=_WAY_OUT,
        )
    (returned,) = graph.output_node().args
    changes = returned is not None and returned is not placeholder
    _refuse_writes(graph, changes=changes)
    if not changes:
        return None, []
    made = returned.meta["val"] if isinstance(returned, fx.Node) else None
    if not isinstance(made, torch.Tensor) or made.shape != gradient.shape:
        raise TraceError(
            "a hook on a gradient returns something else than a tensor of its size",
            location=calling_line(),
            hint=_WAY_OUT,
        )
    read: dict[int, tuple[torch.Tensor, fx.Node]] = {}
    for node, held in reading:
        if recorder.tensors.known(held) is None:
            continue
        if id(held) not in read:
            with graph.inserting_after(placeholder):
                read[id(held)] = held, graph.placeholder(f"read_{len(read)}")
            read[id(held)][1].meta["val"] = held
        node.replace_all_uses_with(read[id(held)][1])
        graph.erase_node(node)
    # Placeholders are put right after the gradient, so that the last one comes first.
    carried = function_of_text("Hooked", _file_text(graph))
    return carried, [held for held, _ in reversed(read.values())]


def _refuse_writes(graph: fx.Graph, *, changes: bool) -> None:
    """Refuses what a hook writes to tensors of the model, or to a gradient without a new one.

    Args:
        changes: whether it returns a gradient that it has made.
    """
    held = [node for node in graph.nodes if node.op in ("get_attr", "placeholder")]
    of_memory = {storage_key(node.meta["val"]): node for node in reversed(held)}
    for node in graph.nodes:
        memory = map(storage_key, node.meta.get(WRITES, ()))
        written = next((of_memory[key] for key in memory if key in of_memory), None)
        if written is None:
            continue
        of_model = written.op == "get_attr"
        if of_model or (written.op == "placeholder" and not changes):
            what = "a tensor of the model" if of_model else "the gradient that it is given"
            raise TraceError(
                f"a hook on a gradient writes into {what}",
                location=calling_line(),
                hint="return a new tensor from the hook; keep what it counts out of the model",
            )


class _ModuleHooks:
    """Stands for torch's `BackwardHook`, which calls those of one call of a module."""

    def __init__(
        self, module: nn.Module, hooks: Sequence[_Hook], pre_hooks: Sequence[_Hook]
    ) -> None:
        self._module, self._hooks, self._pre_hooks = module, tuple(hooks), tuple(pre_hooks)
        self._given: list[torch.Tensor] = []
        self._inputs: tuple[object, ...] = ()

    def setup_input_hook(self, args: Any) -> Any:
        """The arguments, by themselves: a module that a hook follows has views of them."""
        self._inputs = args
        self._given, made = _views(args)
        return made

    def setup_output_hook(self, result: Any) -> Any:
        results = result if isinstance(result, tuple) else (result,)
        after, views = _views(results)
        recorder = recording()
        if recorder is None or not after:
            return result
        for hook in self._pre_hooks:
            self._each(recorder, after, results, hook)
        if self._given:
            got = tuple(_gradient(item) if _is_followed(item) else None for item in results)
            for hook in self._hooks:
                self._each(recorder, self._given, self._inputs, hook, got)
        return views if isinstance(result, tuple) else views[0]

    def _each(
        self,
        recorder: Recorder,
        tensors: Sequence[torch.Tensor],
        places: Sequence[object],
        hook: _Hook,
        *others: tuple[torch.Tensor | None, ...],
    ) -> None:
        """Sends the gradient of each tensor through a hook that is given those of all.

        Args:
            places: what the gradients stand for, tensors without one included.
            others: gradients that the hook is given besides.
        """
        wanted = [place for place, item in enumerate(places) if _is_followed(item)]
        gradients = [_gradient(item) if _is_followed(item) else None for item in places]
        for own, tensor in zip(wanted, tensors, strict=True):

            def alone(gradient: torch.Tensor) -> Any:
                given = tuple(gradient if i == own else g for i, g in enumerate(gradients))  # noqa: B023  # called in this round
                changed = hook(self._module, given, *others)
                return None if changed is None else changed[own]  # noqa: B023  # as above

            foreign = {id(g) for i, g in enumerate(gradients) if i != own}
            foreign.update(id(other) for got in others for other in got)
            _put(recorder, tensor, alone, hook, foreign)


def _is_followed(item: object) -> TypeGuard[torch.Tensor]:
    return isinstance(item, torch.Tensor) and item.requires_grad


def _gradient(item: torch.Tensor) -> torch.Tensor:
    """One without numbers."""
    with torch._C.DisableTorchFunction():
        return torch.empty_like(item, requires_grad=False)


def _views(items: Any) -> tuple[list[torch.Tensor], Any]:
    """Views of the tensors that require gradients, and the items with these in their place."""
    made: list[torch.Tensor] = []

    def view(item: object) -> object:
        if not _is_followed(item):
            return item
        made.append(item.view_as(item))
        return made[-1]

    found = [view(item) for item in items]
    return made, tuple(found) if type(items) is tuple else type(items)(*found)


_IMPORTS: Mapping[str, str] = {
    "torch": "import torch",
    "math": "import math",
    "_operator": "import operator as _operator",
    "operator": "import operator",
    "inf": "from math import inf",
    "nan": "from math import nan",
}
"""What the text of a traced graph may name, and how it is imported."""


def _file_text(graph: fx.Graph) -> str:
    """A file that makes the function of a hook, with what it imports.

    Raises:
        TraceError: where the hook draws random numbers, holds tensors of its own, or calls what a
            package cannot name.
    """
    for node in graph.nodes:
        if node.op == "get_attr":
            raise _unwritable(node, "it reads a tensor that it makes while it is traced")
        if node.op == "call_function" and may_draw(node.target):
            raise _unwritable(node, "it draws random numbers")
    _follow_devices(graph)
    written = graph.python_code("self").src
    (function,) = (part for part in ast.parse(written).body if isinstance(part, ast.FunctionDef))
    function.name, function.returns = "hook", None
    del function.args.args[0]
    local = {argument.arg for argument in function.args.args}
    names = [part for part in ast.walk(function) if isinstance(part, ast.Name)]
    local.update(part.id for part in names if isinstance(part.ctx, ast.Store))
    for used in sorted(
        {part.id for part in names} - local - _IMPORTS.keys() - vars(builtins).keys()
    ):
        raise TraceError(f"a hook on a gradient uses {used}, which a package cannot import")
    function.body = [statement for statement in function.body if not _releases(statement)]
    text = f"{ast.unparse(function)}\n\n\n{_CLASS}"
    named = {part.id for part in ast.walk(ast.parse(text)) if isinstance(part, ast.Name)}
    imports = [statement for name, statement in _IMPORTS.items() if name in named]
    return "\n".join((*imports, "", "", text))


def _releases(statement: ast.stmt) -> bool:
    """Whether a statement is `x = None`, by which generated code releases what it has read."""
    value = statement.value if isinstance(statement, ast.Assign) else None
    return isinstance(value, ast.Constant) and value.value is None


def _unwritable(node: fx.Node, why: str) -> TraceError:
    return TraceError(
        f"the model computes {node.target} in a hook on a gradient, and "
        f"{why}: that cannot be written into a package",
        location=node.meta.get("source") or calling_line(),
        hint="compute it before, and hand it in",
    )


def _follow_devices(graph: fx.Graph) -> None:
    """Devices that were fixed by tracing become that of the first argument."""
    tensors = [n for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    given = [node for node in tensors if node.op == "placeholder"]
    for node in list(graph.nodes):
        leaves = (*node.args, *node.kwargs.values())
        if not given or not any(isinstance(leaf, torch.device) for leaf in leaves):
            continue
        with graph.inserting_before(node):
            device = graph.call_function(getattr, (given[0], "device"))

        def change(leaf: Any, device: fx.Node = device) -> Any:
            return device if isinstance(leaf, torch.device) else leaf

        node.args = tuple(map(change, node.args))
        node.kwargs = {key: change(leaf) for key, leaf in node.kwargs.items()}
