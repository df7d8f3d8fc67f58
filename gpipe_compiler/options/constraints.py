"""What a user asks of the cut, as it is named on the command line; `constrain.py` obeys."""

from __future__ import annotations

from dataclasses import dataclass

from gpipe_compiler.text.escaping import shell_line


@dataclass(frozen=True, slots=True)
class Constraints:
    """What is asked of modules, which may also be single ops or values, by name.

    Attributes:
        pins: a module and its stage, from 0, or from the end as -1: all its ops lie there.
        together: all ops of each of these modules lie in one stage.
        split_at: a new stage begins with each of these modules: its first ops lie in a later
            stage than the ops that make what they read.
    """

    pins: tuple[tuple[str, int], ...] = ()
    together: tuple[str, ...] = ()
    split_at: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """Each as on the command line."""
        return (
            *(pin_words(name, stage) for name, stage in self.pins),
            *(shell_line(["--keep-together", name]) for name in self.together),
            *(shell_line(["--split-at", name]) for name in self.split_at),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The modules, ops and values that are named."""
        return tuple(dict.fromkeys((*(n for n, _ in self.pins), *self.together, *self.split_at)))


NO_CONSTRAINTS = Constraints()


def pin_words(name: str, stage: int) -> str:
    """A pin as on the command line."""
    return shell_line(["--pin", f"{name}={stage}"])
