"""The base of modes that see every aten op and are entered around many."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class PlainDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own base
    """A dispatch mode whose handler is called as it is.

    torch wraps handlers so that dynamo, where it compiles what runs, leaves them alone. Nothing is
    compiled in these modes, and the wrapper takes as long as what most handlers do.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]  # torch's own base

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own base

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
