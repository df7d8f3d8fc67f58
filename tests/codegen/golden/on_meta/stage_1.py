"""Stage 1 of meta_decoder, the 2nd of 2: blocks.1 to head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Block


class BlockPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(32))
        self.narrow = nn.Linear(32, 32)
        self.noise = nn.Parameter(torch.empty(1, 1, 32))

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        # meta_decoder.py:58
        add: Tensor = x + self.scale * self.narrow(F.gelu(out + self.noise))  # (B, 8, 32)
        return add


class Stage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"1": BlockPart(), "2": Block()})
        self.batch_norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(32, 400, bias=False)

    def forward(self, out: Tensor, x: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            out: (B, 8, 32) float32, from stage 0, made at meta_decoder.py:44.
            x: (B, 8, 32) float32, from stage 0, made at meta_decoder.py:58.

        Returns:
            head_out: (B, 8, 400) float32, for the caller.
        """
        # meta_decoder.py:79-80
        x = self.blocks["1"](x, out)  # (B, 8, 32)
        x = self.blocks["2"](x)
        head_out: Tensor = self.head(self.batch_norm(x))  # (B, 8, 400)
        return head_out

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of one micro-batch.

        Args:
            output: (B, 8, 400) float32, what forward returned.
            target: (B, 8) int64, the target.
        """
        # meta_decoder.py:97
        loss = F.cross_entropy(output.flatten(0, 1), target.flatten())
        return loss


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = ("batch_norm",)

# How state begins where there are no weights (runtime/core/building.py); * is any layer's number.
INITIAL = {
    "blocks.*.scale": (
        ("empty", (32,), ("dtype=", torch.float32)),
        ("fill_", "%0", 1.0),
        ("mul", "%0", 0.1),
        ("copy_", "self", "%2"),
    ),
    "blocks.*.noise": (
        ("seed", "blocks.0.noise"),
        ("empty", (1, 1, 32), ("dtype=", torch.float32)),
        ("normal_", "%1", 0.0, 1.0),
        ("mul", "%1", 0.02),
        ("copy_", "self", "%3"),
    ),
    "blocks.*.narrow.weight": (
        ("seed", "blocks.0.narrow.weight"),
        ("normal_", 0.0, 0.008164965809277261),
    ),
    "blocks.*.narrow.bias": (
        ("seed", "blocks.0.narrow.bias"),
        ("uniform_", -0.17677669529663687, 0.17677669529663687),
    ),
    **dict.fromkeys(
        ("blocks.2.norm.weight", "batch_norm.weight", "batch_norm.running_var"), (("fill_", 1.0),)
    ),
    **dict.fromkeys(
        (
            "blocks.2.norm.bias",
            "blocks.2.attention.qkv.bias",
            "batch_norm.bias",
            "batch_norm.running_mean",
            "batch_norm.num_batches_tracked",
        ),
        (("zero_",),),
    ),
    "blocks.2.attention.mask": (
        ("empty", (8, 8), ("dtype=", torch.bool)),
        ("fill_", "%0", True),
        ("tril", "%0"),
        ("copy_", "self", "%2"),
    ),
    "blocks.2.attention.cos": (
        ("arange", 0, 16, 2, ("dtype=", torch.int64)),
        ("_to_copy", "%0", ("dtype=", torch.float32)),
        ("div", "%1", 16),
        ("pow", 10000, "%2"),
        ("reciprocal", "%3"),
        ("mul", "%4", 1.0),
        ("arange", 8, ("dtype=", torch.int64)),
        ("_to_copy", "%6", ("dtype=", torch.float32)),
        ("as_strided", "%7", (8, 1), (1, 1), 0),
        ("mul", "%8", "%5"),
        ("repeat", "%9", (1, 2)),
        ("cos", "%10"),
        ("copy_", "self", "%11"),
    ),
    "blocks.2.attention.sin": (
        ("arange", 0, 16, 2, ("dtype=", torch.int64)),
        ("_to_copy", "%0", ("dtype=", torch.float32)),
        ("div", "%1", 16),
        ("pow", 10000, "%2"),
        ("reciprocal", "%3"),
        ("mul", "%4", 1.0),
        ("arange", 8, ("dtype=", torch.int64)),
        ("_to_copy", "%6", ("dtype=", torch.float32)),
        ("as_strided", "%7", (8, 1), (1, 1), 0),
        ("mul", "%8", "%5"),
        ("repeat", "%9", (1, 2)),
        ("sin", "%10"),
        ("copy_", "self", "%11"),
    ),
    "blocks.2.attention.qkv.weight": (
        ("seed", "blocks.0.attention.qkv.weight"),
        ("orthogonal_", 1),
    ),
    "blocks.2.attention.out.weight": (
        ("seed", "blocks.0.attention.out.weight"),
        ("uniform_", -0.17677669529663684, 0.17677669529663684),
    ),
    "blocks.2.attention.out.bias": (
        ("seed", "blocks.0.attention.out.bias"),
        ("uniform_", -0.17677669529663687, 0.17677669529663687),
    ),
    "tokens.weight": (("normal_", 0.0, 1.0), ("at", (0,), "zero_")),
}
