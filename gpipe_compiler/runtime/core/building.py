"""The module of a stage, with weights that are read, or as in a new model.

There it is replayed how the model's own code would have filled a tensor. Its steps are tuples
`(op, *arguments)`: in-place methods of the tensor itself, in order, as `("normal_", 0.0, 0.02)`.
`("at", (0,), "zero_")` does a step on a part: integers and (start,
stop) pairs, one a dimension. `("seed", "wte.weight")` draws what that tensor draws. Where a step
names other tensors, `"%2"` is the result of step 2 (`"%2.1"` the second of several) and `"self"`
the tensor itself; such ops are those of torch.ops.aten, `("dtype=", torch.float32)` is a keyword.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import WeightsError
from ..spec import StageSpec, Steps
from ..wording import some
from .assembly import named
from .stored_weights import Weights


def build_stage(
    spec: StageSpec, weights: Weights | None, device: torch.device, seed: int
) -> nn.Module:
    """A stage's module on its device, with its weights.

    Without weights, a tensor begins on the device as `spec.initial` says, and so does a buffer that
    the weights do not hold. What that leaves out is initialised by the rule of its module, and a
    parameter of no such module is drawn from normal(0, 0.02); a vector is ones when its name ends
    in `weight`, zeros otherwise. What is drawn depends on `seed` and on names in the model: the
    same for any number of stages.

    Raises:
        WeightsError: when weights are given and do not hold a parameter of the stage, or hold one
            of another shape.
    """
    with torch.device("meta"):
        module = spec.module()
    parameters = list(module.named_parameters(remove_duplicate=False))
    buffers = list(module.named_buffers(remove_duplicate=False))
    like = _tensors(spec, module)
    trained = {spec.named(own) for own, _ in parameters}
    stored = {} if weights is None else weights.load(like, device)
    if weights is not None and (missing := trained - stored.keys() - weights.anew):
        problem = f"the weights in {weights.directory} do not hold {some(sorted(missing))}"
        raise WeightsError(problem)
    left = like.keys() - stored.keys()
    unknown = {name for name in left if spec.beginning(name) is None}
    with torch.random.fork_rng(devices=_generators(device)):
        if unknown:
            # Something is computed by the constructor: let it.
            reset = weights is None or not trained.isdisjoint(unknown)
            module = _constructed(spec, device, seed, reset=reset)
        in_memory = _tensors(spec, module)
        for name in sorted(left - unknown):
            memory = in_memory[name].detach() if unknown else _memory_for(like[name], device)
            replay(memory, name, spec.beginning(name) or (), seed)
            stored[name] = memory
    made = dict(module.named_parameters(remove_duplicate=False))
    new: dict[str, torch.Tensor] = {}  # what two modules of a stage share is one tensor again
    for own, parameter in parameters:
        name = spec.named(own)
        if name not in new:
            new[name] = made[own]
            if name in stored:
                new[name] = nn.Parameter(stored[name], requires_grad=parameter.requires_grad)
        put(module, own, new[name])
    for own, _ in buffers:
        if spec.named(own) in stored:
            put(module, own, stored[spec.named(own)])
    return module


def _tensors(spec: StageSpec, module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a stage's module, by their names in the model."""
    found: dict[str, torch.Tensor] = {}
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    for own, tensor in (*parameters, *buffers):
        found.setdefault(spec.named(own), tensor)
    return found


def _memory_for(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(tensor, device=device, requires_grad=False)


def put(module: nn.Module, own: str, tensor: torch.Tensor) -> None:
    """Let a tensor take the place of the module's parameter or buffer of this name."""
    path, _, attribute = own.rpartition(".")
    holder = submodule(module, path)
    if isinstance(tensor, nn.Parameter):
        setattr(holder, attribute, tensor)  # a recurrent module takes note of it, too
    else:
        holder._buffers[attribute] = tensor


def submodule(module: nn.Module, path: str) -> nn.Module:
    """The module at a path, also where a method of the one around it has the same name."""
    for name in path.split(".") if path else ():
        module = module._modules[name]  # type: ignore[assignment]  # there is one
    return module


def _constructed(spec: StageSpec, device: torch.device, seed: int, *, reset: bool) -> nn.Module:
    """The stage as its constructors make it on its device.

    Args:
        reset: whether its parameters begin by the rules of their modules.
    """
    with torch.device(device):
        module = spec.module()
    if not reset:
        return module
    # Children first: a parent such as MultiheadAttention has the last word on their biases.
    for path, holder in reversed(list(module.named_modules())):
        own_names = [
            name
            for name, tensor in (*holder._parameters.items(), *holder._buffers.items())
            if tensor is not None
        ]
        if own_names:
            first = f"{path}.{own_names[0]}" if path else own_names[0]
            torch.manual_seed(seed_of(spec.named(first), seed))
            _reset(holder, path, spec, seed)
    return module


def _reset(holder: nn.Module, path: str, spec: StageSpec, seed: int) -> None:
    for rule in ("reset_parameters", "_reset_parameters"):
        reset = getattr(holder, rule, None)
        if callable(reset):
            reset()
            return
    for own, parameter in holder._parameters.items():
        if parameter is None or not parameter.is_floating_point():
            continue
        name = spec.named(f"{path}.{own}" if path else own)
        torch.manual_seed(seed_of(name, seed))
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)


def _generators(device: torch.device) -> list[int]:
    if device.type != "cuda":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]


# --- numbers as the model's own code draws them ---------------------------------------------------

_OF_INIT = frozenset({"trunc_normal_", "orthogonal_", "sparse_", "dirac_", "eye_"})
"""Steps that torch.nn.init has, and a tensor has not."""


def replay(tensor: torch.Tensor, name: str, steps: Steps, seed: int) -> None:
    """Fill a tensor by its steps.

    What is drawn depends on `seed`, the tensor's name in the model and the kind of device, not on
    which stage or process draws it. The state of the global generators is used up: callers fork.
    """
    torch.manual_seed(seed_of(name, seed))
    results: list[Any] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # an orthogonal matrix is rounded by how many compute it
    try:
        with torch.no_grad():
            for step in steps:
                results.append(_do(tensor, step, results, seed))
    finally:
        torch.set_num_threads(threads)


def seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _do(tensor: torch.Tensor, step: Sequence[Any], results: Sequence[Any], seed: int) -> Any:
    op, *arguments = step
    if op == "seed":
        torch.manual_seed(seed_of(arguments[0], seed))
        return None
    if op == "at":
        index, inner, *rest = arguments
        return _op(inner)(_part(tensor, index), *rest)
    if op == "tensor":
        values, dtype = arguments
        return torch.tensor(values, dtype=dtype, device=tensor.device)
    given, options, tensors = [], {}, 0
    for argument in arguments:
        if _is_option(argument):
            options[argument[0][:-1]] = argument[1]
        else:
            value = named(argument, results, tensor)
            tensors += value is not argument
            given.append(value)
    if tensors:
        return _op(op)(*given, **options)
    if op.endswith("_"):
        return _op(op)(tensor, *given, **options)
    return _op(op)(*given, **options, device=tensor.device)


def _part(tensor: torch.Tensor, index: Sequence[Any]) -> torch.Tensor:
    return tensor[tuple(slice(*item) if isinstance(item, tuple) else item for item in index)]


def _op(name: str) -> Callable[..., Any]:
    home: Any = nn.init if name in _OF_INIT else torch.ops.aten
    return getattr(home, name)  # type: ignore[no-any-return]  # functions of torch


def _is_option(argument: object) -> bool:
    return (
        isinstance(argument, tuple)
        and len(argument) == 2
        and isinstance(argument[0], str)
        and argument[0].endswith("=")
    )
