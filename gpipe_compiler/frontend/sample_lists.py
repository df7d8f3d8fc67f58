"""Lists of the samples of a batch, as `list(features)` is, which are put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.frontend.locate import calling_line
from gpipe_compiler.frontend.noted_sizes import NotedSizes
from gpipe_compiler.ir.symbolic import expression_of, is_symbolic

_JOINED: Mapping[object, Callable[[torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), lambda x: x.flatten(0, 1)),
    torch.stack: lambda x: x,
}
"""What puts samples together along dimension 0, and what that is of the batch."""

_LISTING = (torch.Tensor.__iter__, torch.Tensor.__len__, torch.Tensor.unbind, torch.unbind)


@dataclass(frozen=True, slots=True)
class SampleList:
    """The samples of a tensor, one by one, and the user's line that asked for them."""

    whole: torch.Tensor
    samples: Sequence[torch.Tensor]
    line: SourceLocation | None


class SampleLists:
    """Samples that Python holds one by one, as many as the example has.

    All of them joined in order are the batch, at every number of samples. Whatever else is done
    with one of them, or with their number, is right for the example's number alone.

    Args:
        sizes: what is noted of them.
        batch: the number of samples, as tensors have it.
    """

    def __init__(self, sizes: NotedSizes, batch: Iterable[Any] = ()) -> None:
        self._sizes = sizes
        self._batch = {expression_of(size) for size in batch if is_symbolic(size)}
        self._lists: dict[int, SampleList] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._lists)

    def listed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The samples that `list(x)` or `x.unbind()` takes; None where it is no batch."""
        if func not in _LISTING:
            return None
        whole, *dim = (*args, *kwargs.values())
        first = dim in ([], [0]) and isinstance(whole, torch.Tensor) and whole.dim() > 0
        size: Any = whole.shape[0] if first else 0
        if not is_symbolic(size) or expression_of(size) not in self._batch:
            return None
        if func is torch.Tensor.__len__:
            raise TypeError("Python's list() may ask how many there are, and does without")
        samples = tuple(whole.select(0, 0) for _ in range(size.node.hint))
        found = SampleList(whole, samples, calling_line())
        self._lists.update((id(sample), found) for sample in samples)
        return samples

    def joined(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What joins all samples of a list in order, of the tensor that they are of; or None."""
        if func not in _JOINED or not self._lists:
            return None
        parts, *dim = (*args, *kwargs.values())
        found = self._lists.get(id(parts[0])) if isinstance(parts, list | tuple) and parts else None
        if found is None or dim not in ([], [0]) or kwargs.keys() - {"tensors", "dim"}:
            return None
        same = list(map(id, parts)) == list(map(id, found.samples))
        return _JOINED[func](found.whole).clone() if same and found.whole.dim() > 1 else None

    def taken(self, items: Sequence[Any]) -> SampleList | None:
        """The list of one of these, which is none any more: its length is fixed at its line."""
        found = next((self._lists[id(item)] for item in items if id(item) in self._lists), None)
        if found is not None:
            for sample in found.samples:
                del self._lists[id(sample)]
            if found.line is not None:
                self._sizes.fixed.setdefault(expression_of(found.whole.shape[0]), found.line)
        return found
