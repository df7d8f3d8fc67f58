"""The example call as a flat list of named tensors, and back; and at other sizes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpipe_compiler.errors import ModelError, UsageError
from gpipe_compiler.frontend.naming import UniqueNames, identifier
from gpipe_compiler.frontend.structure import with_tensors
from gpipe_compiler.frontend.subject import Example, Subject
from gpipe_compiler.ir import Graph, Input, Ref, Value
from gpipe_compiler.ir.sizes import SMALLEST, is_free
from gpipe_compiler.runtime.core.nest import Path, items_of, tensors_of
from gpipe_compiler.runtime.sizes import Sizes, value_at


@dataclass(frozen=True)
class Signature:
    """How a flat list of tensors becomes the arguments of the model and the target.

    Attributes:
        examples: the example tensors, in the order of `inputs`.
    """

    inputs: tuple[Input, ...]
    examples: tuple[torch.Tensor, ...]
    tree: tuple[tuple[object, ...], Mapping[str, object], object]
    batch_size: int

    def rebuild(self, tensors: Sequence[object]) -> tuple[Any, Any, Any]:
        """Positional arguments, keyword arguments and target."""
        given = iter(tensors)
        args, kwargs, target = (with_tensors(part, given) for part in self.tree)
        return args, kwargs, target

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The example tensors by the names of the inputs."""
        names = (source.name for source in self.inputs)
        return zip(names, self.examples, strict=True)

    def samples(self, count: int) -> list[torch.Tensor]:
        """The example inputs cut or repeated to this number of samples; copies."""
        return [
            resize(tensor, source.batch_dim, count)
            for source, tensor in zip(self.inputs, self.examples, strict=True)
        ]

    def at(self, inputs: Sequence[Input], sizes: Mapping[str, int]) -> Signature:
        """The same with examples of other sizes, by name.

        Args:
            inputs: of the graph, with sizes in their shapes.
        """
        examples = list(self.examples)
        for index, source in enumerate(inputs):
            for dim, size in enumerate(source.shape or ()):
                if is_free(size):
                    examples[index] = resize(examples[index], dim, value_at(size, sizes))
        return dataclasses.replace(self, examples=tuple(examples))


def read_signature(subject: Subject, *, on_meta: bool) -> Signature:
    """The tensors of the example call, their names, and which of them have a batch dimension."""
    target = subject.target if subject.training and subject.loss_fn is not None else None
    tree = (tuple(subject.args), dict(subject.kwargs), target)
    found = [
        ((root, *path), tensor)
        for root, part in zip(("args", "kwargs", "target"), tree, strict=True)
        for path, tensor in tensors_of(part)
    ]
    if not found:
        raise ModelError(
            "the example inputs hold no tensor",
            hint="example_inputs() returns a tensor, a tuple, a dict, or the pair (args, kwargs)",
        )
    unique, parameters = UniqueNames(), _parameter_names(subject)
    names = [unique.unique(_input_name(path, parameters)) for path, _ in found]
    tensors = dict(zip(names, (tensor for _, tensor in found), strict=True))
    _check_said(subject.batch_dims, tensors)
    batch_size, dims = _batch_dims(subject.batch_dims, tensors)
    inputs = tuple(
        Input(name, path, dims[name], tuple(tensor.shape), tensor.dtype)
        for name, (path, tensor) in zip(names, found, strict=True)
    )
    examples = tuple(tensor.to("meta") if on_meta else tensor.detach() for _, tensor in found)
    return Signature(inputs, examples, tree, batch_size)


def _batch_dims(
    said: Mapping[str, int | None], tensors: Mapping[str, torch.Tensor]
) -> tuple[int, Mapping[str, int | None]]:
    """The samples in a call, and the batch dimension of every input.

    What is not said is dimension 0 where it has the size of the batch. That is the size that is
    said, or else the one of dimension 0 that most tensors share; of the first in case of a tie.
    """
    sizes = [tensor.shape[0] for tensor in tensors.values() if tensor.ndim > 0]
    known = [tensors[name].shape[dim] for name, dim in said.items() if dim is not None]
    size = known[0] if known else max(sizes, key=sizes.count) if sizes else 1
    return size, {
        name: said.get(name, 0 if tensor.ndim > 0 and tensor.shape[0] == size else None)
        for name, tensor in tensors.items()
    }


def _check_said(said: Mapping[str, int | None], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises UsageError where a batch dimension is said that cannot be."""
    hint = f"the inputs are {', '.join(_described(*pair) for pair in tensors.items())}"
    for name, dim in said.items():
        if name not in tensors:
            raise UsageError(f"--batch-dim {name}: there is no such input", hint=hint)
        if dim is not None and not 0 <= dim < tensors[name].ndim:
            raise UsageError(f"--batch-dim {name}={dim}: there is no such dimension", hint=hint)
    sizes = {name: tensors[name].shape[dim] for name, dim in said.items() if dim is not None}
    if len(set(sizes.values())) > 1:
        named = ", ".join(f"{size} in {name}" for name, size in sizes.items())
        raise UsageError(f"--batch-dim: the samples in a batch are {named}", hint=hint)


def _described(name: str, tensor: torch.Tensor) -> str:
    return f"{name} ({'x'.join(map(str, tensor.shape)) or 'a number'})"


def _parameter_names(subject: Subject) -> list[str]:
    """What forward calls each positional argument of the example call."""
    count = len(subject.args)
    try:
        parameters = inspect.signature(subject.model.forward).parameters.values()
    except (TypeError, ValueError):
        return [f"input_{index}" for index in range(count)]
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "input")
    names.extend(f"{rest}_{index}" for index in range(max(0, count - len(names))))
    return names[:count]


def _input_name(path: Path, parameters: Sequence[str]) -> str:
    root, *way = path
    if root == "args":
        way[0] = parameters[int(way[0])]
    if root == "target":
        way.insert(0, "target")
    return identifier("_".join(map(str, way)), digit_prefix="input")


def resize(tensor: torch.Tensor, dim: int | None, count: int) -> torch.Tensor:
    """A copy of a tensor, cut or repeated to a size in a dimension."""
    tensor = tensor.detach()
    if dim is None:
        return tensor.clone()
    repeats = max(1, -(-count // max(1, tensor.shape[dim])))
    return torch.cat([tensor] * repeats, dim).narrow(dim, 0, count).clone()


def resized(subject: Subject, graph: Graph) -> Subject:
    """The subject with its example repeated, or cut, to the sizes of its wish.

    Args:
        graph: as it was traced from the subject.

    Raises:
        UsageError: for a size that is not free, or that the model does not take.
    """
    known = {size.name: size.example for size in graph.sizes}
    wanted = subject.free.at
    for name in sorted(wanted.keys() - known.keys()):
        raise UsageError(
            f"--at {name}={wanted[name]}: the model leaves no size of this name free",
            hint=f"those that it does: {', '.join(known) or 'none'}",
        )
    sizes = {**known, **wanted}
    for name in wanted:
        if sizes[name] < SMALLEST:
            raise UsageError(
                f"--at {name}={sizes[name]}: sizes that are free are at least {SMALLEST}",
                hint="torch computes otherwise where a dimension has one element",
            )
    for demand in graph.requires:
        if not demand.holds(sizes):
            told = ", ".join(f"{name}={size}" for name, size in wanted.items())
            raise UsageError(
                f"--at {told}: the model demands {demand}: {demand.where}",
                hint="ask for sizes for which that holds",
            )
    args, kwargs, target = _call_at(subject, graph, sizes)
    example = subject.example
    if example is not None:
        real = dataclasses.replace(
            subject, args=example.args, kwargs=example.kwargs, target=example.target
        )
        example = Example(*_call_at(real, graph, sizes))
    return dataclasses.replace(subject, args=args, kwargs=kwargs, target=target, example=example)


def _call_at(subject: Subject, graph: Graph, sizes: Sizes) -> tuple[Any, Any, Any]:
    signature = read_signature(subject, on_meta=False).at(graph.inputs, sizes)
    return signature.rebuild(signature.examples)


# --- state between calls --------------------------------------------------------------------------

_FORM = "as in --state past_key_values=past_key_values, or --state hidden=1 for an output's place"


def with_state(graph: Graph, state: Mapping[str, str], values: Mapping[str, Value]) -> Graph:
    """The graph that says which of its inputs a session holds between calls.

    Args:
        state: the names of arguments, each with the key or the place of the output that it becomes.
        values: of the graph, by name.

    Raises:
        UsageError: for names that the model does not have, and state that does not become itself.
    """
    if graph.loss is not None:
        raise UsageError("--state is for --mode infer: nothing is trained between calls")
    outputs = dict(items_of(graph.outputs, Ref))
    carried: list[tuple[str, Path]] = []
    for past, present in state.items():
        inside = [(_inside(source, past), source) for source in graph.inputs]
        taken = {rest: source for rest, source in inside if rest is not None}
        if not taken:
            known = ", ".join(dict.fromkeys(source.name for source in graph.inputs))
            raise UsageError(
                f"--state: the model takes no {past}", hint=f"it takes {known}; {_FORM}"
            )
        place = tuple(present.split("."))
        made = {
            tuple(map(str, path[len(place) :])): path
            for path in outputs
            if tuple(map(str, path[: len(place)])) == place
        }
        if not made:
            known = ", ".join(dict.fromkeys(str(path[0]) for path in outputs if path))
            raise UsageError(
                f"--state: the model returns no {present}", hint=f"it returns {known}; {_FORM}"
            )
        if taken.keys() != made.keys():
            odd = ".".join(sorted(taken.keys() ^ made.keys())[0])
            raise UsageError(
                f"--state: {present} cannot be the next {past}: only one of them has "
                f"{odd or 'a tensor in its place'}"
            )
        for rest, source in taken.items():
            _check(source, values[outputs[made[rest]].name])
            carried.append((source.name, made[rest]))
    return graph.replace(carried=tuple(carried))


def _inside(source: Input, name: str) -> tuple[str, ...] | None:
    """Where a tensor stands in an argument of a name; None where it is in another."""
    rest = tuple(map(str, source.path[2:]))
    own = identifier("_".join((name, *rest)), digit_prefix="input")
    return rest if own == source.name and source.path[0] != "target" else None


def _check(source: Input, present: Value) -> None:
    same = present.dtype == source.dtype and present.batch_dim == source.batch_dim
    if same and len(present.dims) == len(source.shape or ()):
        return
    raise UsageError(
        f"--state: {present.name} cannot be the next {source.name}: it is {present}, and not of "
        f"{len(source.shape or ())} dimensions, {source.dtype}, with the batch in dimension "
        f"{source.batch_dim}"
    )
