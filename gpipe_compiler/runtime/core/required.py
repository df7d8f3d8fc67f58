"""What stages require of the numbers that they compute: that branches go as they were compiled."""

from __future__ import annotations

import torch

from ..errors import PipelineError


class BranchError(PipelineError):
    """A batch for which the model takes another branch than the stages hold.

    Attributes:
        line: the user's line that decides.
    """

    def __init__(self, line: str) -> None:
        super().__init__(
            f"{line} goes another way for this batch, or for a micro-batch of it, than for the one "
            "that the model was compiled with, and the stages hold that way alone",
            hint="leave the batch out: no weight or buffer has changed, but gradients may have; "
            "take it with microbatches=1, where the whole of it goes that way; or write both ways "
            "with torch.where",
        )
        self.line = line


def require(condition: torch.Tensor, line: str) -> None:
    """Refuses a batch for which a condition does not hold.

    Raises:
        BranchError: naming the line.
    """
    if not bool(condition):
        raise BranchError(line)
