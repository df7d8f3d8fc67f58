"""The fake tensors of a trace, whose sizes may be symbols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.meta_utils import MetaConverter
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gpipe_compiler.dispatching import QuickFakes


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
    """A mode of fake tensors in which what is on meta is on the host."""

    def __init__(self, environment: ShapeEnv | None = None, *, export: bool = False) -> None:
        super().__init__(environment, export=export)
        self.fake_tensor_converter.meta_converter = _OnHost()
