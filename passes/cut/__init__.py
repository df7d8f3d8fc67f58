"""The cut: which op runs in which stage. `choose` says what is chosen, and by which searches."""

from gpipe_compiler.passes.cut.choose import Cut, TooFewPartsError, cut

__all__ = ["Cut", "TooFewPartsError", "cut"]
