"""Takes ops out of their graph to run them alone, each distinct one once.

Two ops are the same to a cost model when they call the same thing with the same constants on
tensors of the same shape, strides, dtype and need of gradients. ResNet-50's 175 ops are 70 such.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpipe_compiler.errors import ModelError
from gpipe_compiler.ir import (
    Argument,
    ByMode,
    FunctionCall,
    Graph,
    MethodCall,
    ModuleCall,
    Op,
    Ref,
    RegionCall,
    StateRef,
)
from gpipe_compiler.passes.blocks import Blocks
from gpipe_compiler.passes.dry_run import DryRun, tensors_in


@dataclass(frozen=True, slots=True)
class Lone:
    """An op with what it reads in a dry run, ready to run alone.

    Attributes:
        inputs: fake values that it reads, by name, as the dry run left them.
        states: fake parameters and buffers that it reads, by name.
    """

    run: DryRun
    op: Op
    inputs: Mapping[str, Any]
    states: Mapping[str, torch.Tensor]


def distinct(graph: Graph, run: DryRun) -> Iterator[tuple[Lone, tuple[str, ...]]]:
    """Each distinct op of the mode that `run` has, with the names of all that are the same.

    Args:
        run: of the graph, or of the shortest that tells of it (`passes.blocks`).

    Raises:
        ModelError: naming the op that cannot run.
    """
    environment = run.run(graph.batch_size)
    groups: dict[Hashable, list[Op]] = {}
    for op in run.graph.ops:
        if run.interpreter.runs(op):
            groups.setdefault(_signature(run, op, environment), []).append(op)
    told: dict[str, list[str]] = {}
    if len(run.graph.ops) < len(graph.ops):
        blocks = Blocks(graph)
        for op, name, _ in blocks.known():
            told.setdefault(name, []).append(op.name)
    for ops in groups.values():
        first = ops[0]
        inputs = {name: environment[name] for name in first.inputs if name in environment}
        states = {name: run.states[name] for name in first.states(run.graph.modules)}
        names = tuple(name for op in ops for name in told.get(op.name, (op.name,)))
        yield Lone(run, first, inputs, states), names


@dataclass(frozen=True, slots=True)
class Copies:
    """Fresh tensors to run an op on.

    Attributes:
        environment: what the op reads, by name.
        leaves: the tensors to differentiate by, parameters not among them.
    """

    environment: Mapping[str, Any]
    leaves: tuple[torch.Tensor, ...]


def copies(values: Mapping[str, Any], make: Callable[[torch.Tensor], torch.Tensor]) -> Copies:
    """Values with every tensor made anew by `make`, the same tensor once.

    Where the original needs a gradient, what the op gets is a copy of a leaf, so that the op may
    write in place.
    """
    made: dict[int, torch.Tensor] = {}
    leaves: list[torch.Tensor] = []

    def fresh(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in made:
                leaf = make(value)
                if value.requires_grad:
                    leaves.append(leaf.requires_grad_())
                    leaf = leaf.clone() if _is_dense(leaf) else leaf
                made[id(value)] = leaf
            return made[id(value)]
        if isinstance(value, torch.Size):
            return value
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(fresh(item) for item in value)
        if isinstance(value, list):
            return [fresh(item) for item in value]
        if isinstance(value, dict):
            return {key: fresh(item) for key, item in value.items()}
        return value

    return Copies({name: fresh(value) for name, value in values.items()}, tuple(leaves))


def differentiable(returned: object) -> tuple[torch.Tensor, ...]:
    """The tensors in what an op returned that a backward can start from, each once."""
    unique = {id(t): t for t in tensors_in(returned) if t.requires_grad}
    return tuple(unique.values())


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


def _signature(run: DryRun, op: Op, environment: Mapping[str, Any]) -> Hashable:
    """Equal for ops that are the same to a cost model; an op unlike any other where in doubt."""
    known: dict[int, int] = {}

    def tensor_key(tensor: torch.Tensor) -> Hashable:
        same = known.setdefault(id(tensor), len(known))
        return (
            "tensor",
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.requires_grad,
            same,
        )

    def key(argument: Argument) -> Hashable:
        match argument:
            case Ref(name=name):
                return key(environment[name])
            case StateRef(name=name):
                return tensor_key(run.states[name])
            case ByMode(train=train, evaluation=evaluation):
                return key(train if run.training else evaluation)
            case torch.Tensor():
                return tensor_key(argument)
            case tuple() | list():
                return (type(argument), tuple(key(item) for item in argument))
            case dict():
                return (dict, tuple((name, key(item)) for name, item in argument.items()))
            case slice():
                return (slice, key(argument.start), key(argument.stop), key(argument.step))
            case _:
                hash(argument)
                return (type(argument), argument)

    call = op.call
    try:
        arguments = key((call.args, dict(call.kwargs)))
        match call:
            case FunctionCall():
                return ("function", call.function, arguments)
            case MethodCall():
                return ("method", call.method, arguments)
            case ModuleCall():
                spec = run.graph.modules[call.module]
                own = {local: StateRef(name) for local, name in spec.state.items()}
                return ("module", spec.cls, key((spec.args, dict(spec.kwargs), own)), arguments)
            case RegionCall():
                return ("region", id(call.body), arguments)
    except TypeError:  # something that cannot be hashed: no other op is known to be the same
        return ("op", op.name)
    except KeyError as error:
        raise ModelError(
            f"{op.name} reads {error}, which has not been made in this mode", location=op.source
        ) from error
