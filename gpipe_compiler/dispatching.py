"""The bases of modes that see every aten op and are entered around many."""

from __future__ import annotations

from typing import Any

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


class DispatchWatch(PlainDispatchMode):
    """While entered, `saw` is called after every aten op that reaches dispatch below autograd."""

    def saw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: object
    ) -> None:
        """To be overridden: `func` (an OpOverload) was called so and returned this."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the op and lets `saw` know."""
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        self.saw(func, args, kwargs, returned)
        return returned
