"""The base of everything that watches aten ops go by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpipe_compiler.dispatching import PlainDispatchMode


class DispatchWatch(PlainDispatchMode):
    """While entered, `saw` is called after every aten op that reaches dispatch below autograd."""

    def saw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: object
    ) -> None:
        """To be overridden: `func` (an OpOverload) was called so and returned this."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs the op and lets `saw` know."""
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        self.saw(func, args, kwargs, returned)
        return returned
