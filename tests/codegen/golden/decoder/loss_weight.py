"""What the loss is a mean over.

The loss of decoder is a mean over the targets other than -100. Micro-batches weigh in the loss of
the mini-batch by it; it is computed from the inputs, before the step.
"""

from torch import Tensor, nn


class LossWeight(nn.Module):
    def forward(self, target: Tensor) -> Tensor:
        """What counts in one micro-batch of B samples.

        Args:
            target: (B, ids.1) int64, the target.
        """
        weight = (target != -100).sum()
        return weight
