"""The memory trace of a stage: observed on fake tensors, not estimated.

Each action of a stage runs once with real autograd and no memory, while a dispatch mode sees every
storage come and go (`watch.py`). Fake tensors say that they are on the host: what is seen is what
the host's kernels make.

Not seen: what a kernel takes and gives back within itself (the workspace of a convolution).
"""

from __future__ import annotations

from gpipe_compiler.passes.allocation_trace import StageTraces
from gpipe_compiler.passes.memory_trace.traces import MemoryTraces

__all__ = ["MemoryTraces", "StageTraces"]
