"""Numbers that forward turns into tensors on meta, where a tensor has no numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class NumbersOnMeta(TorchFunctionMode):
    """Makes `torch.full((), 2.0)` of `torch.tensor(2.0)`, which on meta would forget its number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is torch.tensor and args and device is not None:
            options = {key: kwargs[key] for key in ("dtype", "device") if key in kwargs}
            if torch.device(device).type == "meta":
                if isinstance(args[0], (bool, int, float)):
                    return torch.full((), args[0], **options)
                if isinstance(args[0], (list, tuple)) and not args[0]:
                    return torch.empty((0,), **options)
        return func(*args, **kwargs)
