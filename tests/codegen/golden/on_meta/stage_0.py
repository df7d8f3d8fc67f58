"""Stage 0 of meta_decoder, the 1st of 2: tokens to blocks.1.attention.out."""

import torch
from torch import Tensor, nn

from .layers import Attention, Block


class BlockPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        # meta_decoder.py:58
        out: Tensor = self.attention(self.norm(x))  # (B, 8, 32)
        return out


class Stage0(nn.Module):
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(400, 32, padding_idx=0)
        self.position = nn.Parameter(torch.empty(1, 8, 32))
        self.register_buffer("shift", torch.zeros(32), persistent=False)
        self.blocks = nn.ModuleDict({"0": Block(), "1": BlockPart()})

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            tokens: (B, 8) int64, the model's args[0].

        Returns:
            x: (B, 8, 32) float32, for stage 1.
            out: (B, 8, 32) float32, for stage 1.
        """
        # meta_decoder.py:77-79
        x = self.tokens(tokens) + self.position + self.shift  # (B, 8, 32)
        x = self.blocks["0"](x)
        out = self.blocks["1"](x)
        return x, out


# How state begins where there are no weights (runtime/core/building.py); * is any layer's number.
INITIAL = {
    "position": (("trunc_normal_", 0.0, 0.02, -2.0, 2.0),),
    "shift": (("arange", 32, ("dtype=", torch.int64)), ("div", "%0", 32), ("copy_", "self", "%1")),
    "tokens.weight": (("normal_", 0.0, 1.0), ("at", (0,), "zero_")),
    "blocks.0.scale": (
        ("empty", (32,), ("dtype=", torch.float32)),
        ("fill_", "%0", 1.0),
        ("mul", "%0", 0.1),
        ("copy_", "self", "%2"),
    ),
    "blocks.0.noise": (
        ("empty", (1, 1, 32), ("dtype=", torch.float32)),
        ("normal_", "%0", 0.0, 1.0),
        ("mul", "%0", 0.02),
        ("copy_", "self", "%2"),
    ),
    "blocks.*.norm.weight": (("fill_", 1.0),),
    **dict.fromkeys(("blocks.*.norm.bias", "blocks.*.attention.qkv.bias"), (("zero_",),)),
    "blocks.*.attention.mask": (
        ("empty", (8, 8), ("dtype=", torch.bool)),
        ("fill_", "%0", True),
        ("tril", "%0"),
        ("copy_", "self", "%2"),
    ),
    "blocks.*.attention.cos": (
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
    "blocks.*.attention.sin": (
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
    "blocks.*.attention.qkv.weight": (("orthogonal_", 1),),
    "blocks.1.attention.qkv.weight": (
        ("seed", "blocks.0.attention.qkv.weight"),
        ("orthogonal_", 1),
    ),
    "blocks.*.attention.out.weight": (("uniform_", -0.17677669529663684, 0.17677669529663684),),
    "blocks.1.attention.out.weight": (
        ("seed", "blocks.0.attention.out.weight"),
        ("uniform_", -0.17677669529663684, 0.17677669529663684),
    ),
    **dict.fromkeys(
        ("blocks.*.attention.out.bias", "blocks.0.narrow.bias"),
        (("uniform_", -0.17677669529663687, 0.17677669529663687),),
    ),
    "blocks.1.attention.out.bias": (
        ("seed", "blocks.0.attention.out.bias"),
        ("uniform_", -0.17677669529663687, 0.17677669529663687),
    ),
    "blocks.0.narrow.weight": (("normal_", 0.0, 0.008164965809277261),),
}
