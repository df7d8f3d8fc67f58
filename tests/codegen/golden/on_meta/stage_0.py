"""Stage 0 of meta_decoder, the 1st of 2: tokens to blocks.1.attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(400, 32, padding_idx=0)
        self.blocks = nn.ModuleDict({"0": nn.Module(), "1": nn.Module()})
        self.blocks["0"].norm = nn.LayerNorm(32)
        self.blocks["0"].attention = nn.Module()
        self.blocks["0"].attention.qkv = nn.Linear(32, 96)
        self.blocks["0"].attention.out = nn.Linear(32, 32)
        self.blocks["0"].attention.register_buffer("cos", torch.zeros(8, 16))
        self.blocks["0"].attention.register_buffer("sin", torch.zeros(8, 16))
        self.blocks["0"].attention.register_buffer(
            "mask", torch.zeros(8, 8, dtype=torch.bool), persistent=False
        )
        self.blocks["0"].narrow = nn.Linear(32, 32)
        self.blocks["0"].noise = nn.Parameter(torch.empty(1, 1, 32))
        self.blocks["0"].scale = nn.Parameter(torch.empty(32))
        self.blocks["1"].norm = nn.LayerNorm(32)
        self.blocks["1"].attention = nn.Module()
        self.blocks["1"].attention.qkv = nn.Linear(32, 96)
        self.blocks["1"].attention.register_buffer("cos", torch.zeros(8, 16))
        self.blocks["1"].attention.register_buffer("sin", torch.zeros(8, 16))
        self.blocks["1"].attention.register_buffer(
            "mask", torch.zeros(8, 8, dtype=torch.bool), persistent=False
        )
        self.position = nn.Parameter(torch.empty(1, 8, 32))
        self.register_buffer("shift", torch.zeros(32), persistent=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            tokens: (B, 8) int64, the model's args[0].

        Returns:
            add_5: (B, 8, 32) float32, for stage 1.
            matmul_3: (B, 2, 8, 16) float32, for stage 1.
        """
        # meta_decoder.py:38-77
        batch = tokens.size(0)
        x = self.tokens(tokens) + self.position + self.shift  # (B, 8, 32)

        # blocks.0 (meta_decoder.py:58)
        blocks_0_norm = self.blocks["0"].norm(x)

        # blocks.0.attention (meta_decoder.py:33-44)
        qkv = self.blocks["0"].attention.qkv(blocks_0_norm).view(batch, 8, 3, 2, 16)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        scale = torch.sqrt(torch.full([], 16.0, device=tokens.device))
        first, second = query.chunk(2, -1)
        mul = query * self.blocks["0"].attention.cos  # (B, 2, 8, 16)
        mul_1 = torch.cat([-second, first], -1) * self.blocks["0"].attention.sin
        mul = mul + mul_1
        del mul_1
        first, second = key.chunk(2, -1)
        mul_2 = key * self.blocks["0"].attention.cos
        mul_3 = torch.cat([-second, first], -1) * self.blocks["0"].attention.sin
        mul_2 = mul_2 + mul_3
        del mul_3
        mul = mul @ mul_2.transpose(-1, -2)  # (B, 2, 8, 8)
        del mul_2
        scores = mul / scale
        del mul
        scores.masked_fill_(~self.blocks["0"].attention.mask, -1000000000.0)
        scores = F.softmax(scores, dim=-1)
        mixed = scores @ value  # (B, 2, 8, 16)
        del qkv, query, key, value, first, second
        mixed = mixed.transpose(1, 2).reshape(batch, 8, 32)  # (B, 8, 32)
        blocks_0_attention_out = self.blocks["0"].attention.out(mixed)

        # blocks.0 (meta_decoder.py:58)
        blocks_0_attention_out = blocks_0_attention_out + self.blocks["0"].noise
        add_5 = x + self.blocks["0"].scale * self.blocks["0"].narrow(F.gelu(blocks_0_attention_out))

        # blocks.1 (meta_decoder.py:58)
        blocks_1_norm = self.blocks["1"].norm(add_5)

        # blocks.1.attention (meta_decoder.py:33-43)
        qkv = self.blocks["1"].attention.qkv(blocks_1_norm).view(batch, 8, 3, 2, 16)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        scale = torch.sqrt(torch.full([], 16.0, device=tokens.device))
        first, second = query.chunk(2, -1)
        mul_5 = query * self.blocks["1"].attention.cos  # (B, 2, 8, 16)
        mul_6 = torch.cat([-second, first], -1) * self.blocks["1"].attention.sin
        mul_5 = mul_5 + mul_6
        del mul_6
        first, second = key.chunk(2, -1)
        mul_7 = key * self.blocks["1"].attention.cos
        mul_8 = torch.cat([-second, first], -1) * self.blocks["1"].attention.sin
        mul_7 = mul_7 + mul_8
        del mul_8
        mul_5 = mul_5 @ mul_7.transpose(-1, -2)  # (B, 2, 8, 8)
        del mul_7
        scores = mul_5 / scale
        del mul_5
        scores.masked_fill_(~self.blocks["1"].attention.mask, -1000000000.0)
        scores = F.softmax(scores, dim=-1)
        matmul_3 = scores @ value  # (B, 2, 8, 16)
        return add_5, matmul_3


# How the state begins where there are no weights yet (runtime/initial.py); * is any layer's number.
INITIAL = {
    "position": (("trunc_normal_", 0.0, 0.02, -2.0, 2.0),),
    "shift": (("arange", 32, ("dtype=", torch.int64)), ("div", "%0", 32), ("copy_", "self", "%1")),
    "tokens.weight": (("normal_", 0.0, 1.0), ("at", (0,), "zero_")),
    "blocks.0.noise": (
        ("empty", (1, 1, 32), ("dtype=", torch.float32)),
        ("normal_", "%0", 0.0, 1.0),
        ("mul", "%0", 0.02),
        ("copy_", "self", "%2"),
    ),
    "blocks.0.scale": (
        ("empty", (32,), ("dtype=", torch.float32)),
        ("fill_", "%0", 1.0),
        ("mul", "%0", 0.1),
        ("copy_", "self", "%2"),
    ),
    "blocks.*.norm.weight": (("fill_", 1.0),),
    **dict.fromkeys(("blocks.*.norm.bias", "blocks.*.attention.qkv.bias"), (("zero_",),)),
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
    "blocks.*.attention.mask": (
        ("empty", (8, 8), ("dtype=", torch.bool)),
        ("fill_", "%0", True),
        ("tril", "%0"),
        ("copy_", "self", "%2"),
    ),
    "blocks.*.attention.qkv.weight": (("orthogonal_", 1),),
    "blocks.1.attention.qkv.weight": (
        ("seed", "blocks.0.attention.qkv.weight"),
        ("orthogonal_", 1),
    ),
    "blocks.0.attention.out.weight": (("uniform_", -0.17677669529663684, 0.17677669529663684),),
    **dict.fromkeys(
        ("blocks.0.attention.out.bias", "blocks.0.narrow.bias"),
        (("uniform_", -0.17677669529663687, 0.17677669529663687),),
    ),
    "blocks.0.narrow.weight": (("normal_", 0.0, 0.008164965809277261),),
}
