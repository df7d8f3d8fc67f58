"""What a stage takes of memory: seen on fake tensors, not guessed.

Each action of a stage runs once with real autograd and no memory, while a dispatch mode sees every
storage come and go (`watch.py`). Fake tensors say that they are on the host: what is seen is what
the host's kernels make.

Not seen: what a kernel takes and gives back within itself (the workspace of a convolution).
"""

from __future__ import annotations

from gpipe_compiler.passes.rehearsal.rehearsals import MemoryTraces, rehearse

__all__ = ["MemoryTraces", "rehearse"]
