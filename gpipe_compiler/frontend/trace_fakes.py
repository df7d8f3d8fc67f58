"""The fake tensors of a trace, whose sizes may be symbols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch._subclasses.meta_utils import MetaConverter
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gpipe_compiler.dispatching import QuickFakes, counts_of

Saw: TypeAlias = Callable[[Any, Sequence[Any], Any], None]
"""Is told of an op, of what it was called with and of what it made."""


class _OnHost(MetaConverter[Any]):
    """Makes tensors on meta into fakes on the host, where a model without numbers is to run: its
    code may ask for the device."""

    def __call__(self, t: torch.Tensor, *args: Any, **options: Any) -> Any:
        make = options.pop("callback")

        def on_host(made: Callable[[], object], device: torch.device | str) -> Any:
            return make(made, HOST if torch.device(device).type == "meta" else device)

        return super().__call__(t, *args, callback=on_host, **options)


HOST = torch.device("cpu")


class TraceFakes(QuickFakes):
    """A mode of fake tensors that tells of every op, and takes counts to be as many as is said.

    What is on meta is on the host here.
    """

    def __init__(self, environment: ShapeEnv | None = None, saw: Saw | None = None) -> None:
        """A mode of fakes.

        Args:
            environment: of the sizes that are symbols; None where all are numbers.
            saw: is told of every op, what it was called with and what it made.
        """
        super().__init__(shape_env=environment, export=environment is not None)
        self._saw = saw
        self.fake_tensor_converter.meta_converter = _OnHost()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made: Any = None
        if func is torch.ops.aten.bincount.default:
            with self:
                made = counts_of(func, args, kwargs or {})
        if made is None:
            made = self.dispatch(func, types, args, kwargs or {})
        if self._saw is not None:
            self._saw(func, args, made)
        return made
