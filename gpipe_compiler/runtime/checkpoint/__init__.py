"""Checkpoints of a run of training: written by all ranks, read by any number of them.

    path = save_checkpoint(pipe, optimizer, directory, Progress(step=100))
    progress = load_checkpoint(pipe, optimizer, latest(directory))

They are written by torch.distributed.checkpoint under the names of the original model: the keys are
`model.<name>`, `optimizer.state.<name>.<slot>` and `optimizer.param_groups.<k>.<hyper-parameter>`,
as in `{"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .folder import latest
from .progress import Progress, RandomState

if TYPE_CHECKING:
    from .background import BackgroundSaver
    from .loading import PlainCheckpoint, export, load_checkpoint, read_checkpoint
    from .saving import save_checkpoint

__all__ = [
    "BackgroundSaver",
    "PlainCheckpoint",
    "Progress",
    "RandomState",
    "export",
    "latest",
    "load_checkpoint",
    "read_checkpoint",
    "save_checkpoint",
]

_HOMES = {
    "BackgroundSaver": ".background",
    "PlainCheckpoint": ".loading",
    "export": ".loading",
    "load_checkpoint": ".loading",
    "read_checkpoint": ".loading",
    "save_checkpoint": ".saving",
}
"""Modules that need torch.distributed.checkpoint, which takes as long to import as torch itself."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
