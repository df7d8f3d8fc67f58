"""The place of a layer among equal ones, where nothing may follow from it."""

from __future__ import annotations

from typing import Any, NoReturn

from gpipe_compiler.errors import TraceError

_USES = """
    eq ne lt le gt ge hash bool repr str format index int float complex trunc floor ceil round
    neg pos abs invert add sub mul truediv floordiv mod divmod pow lshift rshift and or xor
    radd rsub rmul rtruediv rfloordiv rmod rdivmod rpow rlshift rrshift rand ror rxor
"""


def _used(*_: object) -> NoReturn:
    raise TraceError("what the model computes depends on the place of a layer")


class Place:
    """A whole number that nobody knows: it may be handed on, and raises when it is used.

    Raises:
        TraceError: when it is compared, computed with, looked up or printed.
    """

    @property
    def __class__(self) -> Any:
        """What `isinstance` is told: a place is an int in the model."""
        return int

    @__class__.setter
    def __class__(self, _: Any) -> None:
        _used()

    def __copy__(self) -> Place:
        """Copies of the model know no more."""
        return self

    def __deepcopy__(self, _: object) -> Place:
        """Copies of the model know no more."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        """An int has attributes too."""
        if name.startswith("__"):
            raise AttributeError(name)
        _used()


for _use in _USES.split():
    setattr(Place, f"__{_use}__", _used)
