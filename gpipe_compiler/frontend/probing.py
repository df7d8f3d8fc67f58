"""Parts of an example batch, a loss tried on them, and the numbers in what a model returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from gpipe_compiler.errors import ModelError, SourceLocation
from gpipe_compiler.frontend.examples import samples_in_a_list
from gpipe_compiler.frontend.structure import Template, TensorSlot, map_tensors, pick, slots
from gpipe_compiler.frontend.user_code import definition, raised
from gpipe_compiler.ir import Reduction
from gpipe_compiler.ir.arguments import leaves
from gpipe_compiler.runtime.core.nest import Path
from gpipe_compiler.runtime.spec import Samples

Dims: TypeAlias = Sequence[int | None]
"""The batch dimension of every tensor in a nest."""

DISTINCT = 999_983
"""Numbers that are drawn one by one, and repeated, which takes less time; a prime, which divides no
size of a sample."""


def samples_of(tree: object, dims: Dims, count: int, first: int, last: int) -> object:
    """Some of the samples of a nest of tensors; what has no batch dimension stays whole.

    Args:
        count: samples in the nest, each of one row or of several.
    """
    order = iter(dims)

    def part(tensor: torch.Tensor) -> torch.Tensor:
        dim = next(order)
        if dim is None:
            return tensor
        rows = tensor.shape[dim] // count
        return tensor.narrow(dim, first * rows, (last - first) * rows)

    return map_tensors(part, tree)


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and type without contents, and of no fake mode."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A real tensor for one on meta: random numbers, or zeros where it holds integers.

    They lie between 0 and 1, as losses of probabilities, logarithms and scales ask for.
    """
    if not tensor.is_meta:
        return tensor
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    drawn = torch.rand(min(tensor.numel(), DISTINCT), dtype=tensor.dtype)
    return repeated(drawn, tensor.shape)


_LARGEST_STAND_IN = 1 << 26
"""Elements of the largest tensor made up to try the loss function of a model on meta."""


def stand_ins(
    trees: tuple[object, object], count: int, dims: tuple[Dims, Dims], structure: Template
) -> tuple[tuple[object, object], int]:
    """A few of some samples of output and target with made-up numbers, on which a loss can be
    tried, and how many.

    Where they would take too much memory, they stay on meta.
    """

    def largest(output: object) -> int:
        return max((leaf.numel() for leaf in pick(output, structure)), default=0)

    few = count if largest(trees[0]) <= _LARGEST_STAND_IN else 2
    output, target = (samples_of(*pair, count, 0, few) for pair in zip(trees, dims, strict=True))
    if largest(output) > _LARGEST_STAND_IN:
        return (output, map_tensors(on_meta, target)), few
    with torch.random.fork_rng():
        return (map_tensors(stand_in, output), map_tensors(stand_in, target)), few


def repeated(numbers: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A tensor of this shape with the same numbers over and over."""
    count = shape.numel()
    return numbers.repeat(-(-count // max(1, len(numbers))))[:count].reshape(shape)


def reduction_of(loss: Callable[[int, int], torch.Tensor], count: int) -> Reduction:
    """How the loss of a batch follows from the losses of its halves; the mean when in doubt.

    Args:
        loss: that of the samples from the first number to before the second.
    """
    whole, half = loss(0, count), count // 2
    if whole.is_meta:
        return Reduction.MEAN
    total = loss(0, half).double() + loss(half, count).double()
    if torch.allclose(whole.double(), total / 2, rtol=1e-3):
        return Reduction.MEAN
    return Reduction.SUM if torch.allclose(whole.double(), total, rtol=1e-3) else Reduction.MEAN


def sum_of_squares(tensors: Sequence[Any]) -> Any:
    """The loss of `LossChoice.SUM_OF_SQUARES`."""
    total = tensors[0].square().sum()
    for tensor in tensors[1:]:
        total = total + tensor.square().sum()
    return total


def slot_of_loss(template: Template) -> int | None:
    """The slot of the loss that the model itself returns."""
    if isinstance(template, dict) and isinstance(template.get("loss"), TensorSlot):
        return slots(template["loss"])[0]
    return None


def check_scalar(loss: object, what: str) -> None:
    """Raises a ModelError for a loss that is not one number."""
    if isinstance(loss, torch.Tensor) and loss.ndim == 0:
        return
    tensor = isinstance(loss, torch.Tensor)
    shape = f"a tensor of shape {tuple(loss.shape)}" if tensor else f"a {type(loss).__name__}"  # type: ignore[attr-defined]
    raise ModelError(
        f"{what} {shape} where a loss is expected",
        hint="a loss is one number: reduce it with .mean() or .sum()"
        if tensor
        else "return the loss alone, a tensor of one number; metrics can be outputs of the model",
    )


def unwritten(outputs: Sequence[torch.Tensor], loss_fn: Any, *given: object) -> object:
    """The loss, which may write in place to copies of the outputs alone.

    Raises:
        ModelError: where it writes to them. What the model returns without a loss is another thing.
    """
    counted = [tensor for tensor in outputs if not tensor.is_inference()]
    before = [tensor._version for tensor in counted]
    loss = loss_fn(*given)
    if before != [tensor._version for tensor in counted]:
        raise ModelError(
            "loss_fn writes in place into what the model returns: in inference, which has no loss, "
            "the outputs would be others than in training",
            location=definition(loss_fn),
            hint="write into a copy: output = output.clone()",
        )
    return loss


_FREE = (
    "the batch must be free to vary: dimension 0 of the inputs, unless another was found, or is "
    "said with --batch-dim NAME=DIM"
)


def user_call(
    what: str,
    function: Callable[..., Any],
    count: int,
    args: Any,
    kwargs: Mapping[str, Any],
    hint: str = "",
) -> Any:
    """What the user's code returns; what it raises, as a ModelError.

    Args:
        count: samples that it is given.
        hint: the way out, where one is known.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:  # whatever the user's code raises
        on = f"on a batch of {count} samples made from the example inputs"
        hint = hint or f"{_FREE}{samples_in_a_list((args, kwargs))}"
        raise raised(what, error, on, hint) from error


def has_numbers(template: Template) -> bool:
    """Whether anything stands in it that may depend on the batch and is no tensor."""
    told = (TensorSlot, torch.dtype, type(None))
    return not all(isinstance(leaf, told) for leaf in leaves(template))


def settle_numbers(output: Any, template: Template, samples: int) -> None:
    """Has a trace with free sizes fix those from which a number in the output follows.

    Args:
        template: with `Samples` for every number that is a multiple of the samples.
        samples: as many as the trace has.
    """
    match template:
        case tuple() | list():
            for index, item in enumerate(template):
                settle_numbers(output[index], item, samples)
        case dict():
            by_key = isinstance(output, Mapping)
            for key, item in template.items():
                settle_numbers(output[key] if by_key else getattr(output, key), item, samples)
        case Samples(factor=factor):
            bool(output == factor * samples)
        case _ if isinstance(output, torch.SymInt | torch.SymFloat | torch.SymBool):
            bool(output == template)


def with_numbers(
    template: Template,
    count: int,
    others: Mapping[int, Template],
    location: SourceLocation | None,
    path: Path = (),
) -> Template:
    """The template with `Samples` for every number that is a multiple of the samples.

    Args:
        count: the samples that it was seen with.
        others: the templates seen with other numbers of samples.
        location: of what returns it.

    Raises:
        ModelError: for a number that differs between batches in any other way.
    """

    def part(key: str | int) -> Template:
        parts = {samples: other[key] for samples, other in others.items()}
        return with_numbers(template[key], count, parts, location, (*path, key))

    alike = [other for other in others.values() if type(other) is type(template)]
    match template:
        case tuple() | list() if len(alike) == len(others):
            if any(len(other) != len(template) for other in alike):
                return template  # another structure, which whoever runs the model finds
            return type(template)(map(part, range(len(template))))
        case dict() if all(other.keys() == template.keys() for other in alike):
            return {key: part(key) for key in template} if len(alike) == len(others) else template
        case tuple() | list() | dict() | TensorSlot():
            return template
    if all(repr(other) == repr(template) for other in others.values()):
        return template
    factor, rest = divmod(template, count) if type(template) is int else (0, 1)
    if not rest and all(other == factor * samples for samples, other in others.items()):
        return Samples(factor)
    seen = [f"{item!r} for {samples}" for samples, item in {count: template, **others}.items()]
    where = "".join(f"[{key!r}]" for key in path)
    raise ModelError(
        f"output{where} is no tensor and differs between batches: {', '.join(seen)} samples; only "
        "multiples of the number of samples can be told for other batches",
        location=location,
        hint="return it as a tensor, or leave it out of what the model returns; --microbatches 1 "
        "does not help, for it would be that of the example",
    )
