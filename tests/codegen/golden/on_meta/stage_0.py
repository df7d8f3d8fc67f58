"""Stage 0 of meta_decoder, the 1st of 2: tokens to blocks.1.attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(400, 32, padding_idx=0)
        self.position = nn.Parameter(torch.empty(1, 8, 32))
        self.register_buffer("shift", torch.zeros(32), persistent=False)

        # blocks.0
        self.blocks_0_norm = nn.LayerNorm(32)

        # blocks.0.attention
        self.blocks_0_attention_qkv = nn.Linear(32, 96)
        self.register_buffer("blocks_0_attention_cos", torch.zeros(8, 16))
        self.register_buffer("blocks_0_attention_sin", torch.zeros(8, 16))
        self.register_buffer(
            "blocks_0_attention_mask", torch.zeros(8, 8, dtype=torch.bool), persistent=False
        )
        self.blocks_0_attention_out = nn.Linear(32, 32)

        # blocks.0
        self.blocks_0_noise = nn.Parameter(torch.empty(1, 1, 32))
        self.blocks_0_narrow = nn.Linear(32, 32)
        self.blocks_0_scale = nn.Parameter(torch.empty(32))

        # blocks.1
        self.blocks_1_norm = nn.LayerNorm(32)

        # blocks.1.attention
        self.blocks_1_attention_qkv = nn.Linear(32, 96)
        self.register_buffer("blocks_1_attention_cos", torch.zeros(8, 16))
        self.register_buffer("blocks_1_attention_sin", torch.zeros(8, 16))
        self.register_buffer(
            "blocks_1_attention_mask", torch.zeros(8, 8, dtype=torch.bool), persistent=False
        )

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
        blocks_0_norm = self.blocks_0_norm(x)

        # blocks.0.attention (meta_decoder.py:33-44)
        qkv = self.blocks_0_attention_qkv(blocks_0_norm).view(batch, 8, 3, 2, 16)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        scale = torch.sqrt(torch.full([], 16.0, device=tokens.device))
        first, second = query.chunk(2, -1)
        mul = query * self.blocks_0_attention_cos  # (B, 2, 8, 16)
        mul_1 = torch.cat([-second, first], -1) * self.blocks_0_attention_sin
        mul = mul + mul_1
        del mul_1
        first, second = key.chunk(2, -1)
        mul_2 = key * self.blocks_0_attention_cos
        mul_3 = torch.cat([-second, first], -1) * self.blocks_0_attention_sin
        mul_2 = mul_2 + mul_3
        del mul_3
        mul = mul @ mul_2.transpose(-1, -2)  # (B, 2, 8, 8)
        del mul_2
        scores = mul / scale
        del mul
        scores.masked_fill_(~self.blocks_0_attention_mask, -1000000000.0)
        scores = F.softmax(scores, dim=-1)
        mixed = scores @ value  # (B, 2, 8, 16)
        del qkv, query, key, value, first, second
        mixed = mixed.transpose(1, 2).reshape(batch, 8, 32)  # (B, 8, 32)
        blocks_0_attention_out = self.blocks_0_attention_out(mixed)

        # blocks.0 (meta_decoder.py:58)
        blocks_0_attention_out = blocks_0_attention_out + self.blocks_0_noise
        add_5 = x + self.blocks_0_scale * self.blocks_0_narrow(F.gelu(blocks_0_attention_out))

        # blocks.1 (meta_decoder.py:58)
        blocks_1_norm = self.blocks_1_norm(add_5)

        # blocks.1.attention (meta_decoder.py:33-43)
        qkv = self.blocks_1_attention_qkv(blocks_1_norm).view(batch, 8, 3, 2, 16)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        scale = torch.sqrt(torch.full([], 16.0, device=tokens.device))
        first, second = query.chunk(2, -1)
        mul_5 = query * self.blocks_1_attention_cos  # (B, 2, 8, 16)
        mul_6 = torch.cat([-second, first], -1) * self.blocks_1_attention_sin
        mul_5 = mul_5 + mul_6
        del mul_6
        first, second = key.chunk(2, -1)
        mul_7 = key * self.blocks_1_attention_cos
        mul_8 = torch.cat([-second, first], -1) * self.blocks_1_attention_sin
        mul_7 = mul_7 + mul_8
        del mul_8
        mul_5 = mul_5 @ mul_7.transpose(-1, -2)  # (B, 2, 8, 8)
        del mul_7
        scores = mul_5 / scale
        del mul_5
        scores.masked_fill_(~self.blocks_1_attention_mask, -1000000000.0)
        scores = F.softmax(scores, dim=-1)
        matmul_3 = scores @ value  # (B, 2, 8, 16)
        return add_5, matmul_3


# The module's own names of its state, and the model's.
STATE = {
    "tokens.weight": "tokens.weight",
    "blocks_0_norm.weight": "blocks.0.norm.weight",
    "blocks_0_norm.bias": "blocks.0.norm.bias",
    "blocks_0_attention_qkv.weight": "blocks.0.attention.qkv.weight",
    "blocks_0_attention_qkv.bias": "blocks.0.attention.qkv.bias",
    "blocks_0_attention_out.weight": "blocks.0.attention.out.weight",
    "blocks_0_attention_out.bias": "blocks.0.attention.out.bias",
    "blocks_0_narrow.weight": "blocks.0.narrow.weight",
    "blocks_0_narrow.bias": "blocks.0.narrow.bias",
    "blocks_1_norm.weight": "blocks.1.norm.weight",
    "blocks_1_norm.bias": "blocks.1.norm.bias",
    "blocks_1_attention_qkv.weight": "blocks.1.attention.qkv.weight",
    "blocks_1_attention_qkv.bias": "blocks.1.attention.qkv.bias",
    "position": "position",
    "shift": "shift",
    "blocks_0_attention_cos": "blocks.0.attention.cos",
    "blocks_0_attention_sin": "blocks.0.attention.sin",
    "blocks_0_attention_mask": "blocks.0.attention.mask",
    "blocks_0_noise": "blocks.0.noise",
    "blocks_0_scale": "blocks.0.scale",
    "blocks_1_attention_cos": "blocks.1.attention.cos",
    "blocks_1_attention_sin": "blocks.1.attention.sin",
    "blocks_1_attention_mask": "blocks.1.attention.mask",
}

# How the state begins where there are no weights yet (runtime/initial.py), by the model's names.
INITIAL = {
    "tokens.weight": (("normal_", 0.0, 1.0), ("at", (0,), "zero_")),
    "blocks.0.norm.weight": (("fill_", 1.0),),
    "blocks.0.norm.bias": (("zero_",),),
    "blocks.0.attention.qkv.weight": (("orthogonal_", 1),),
    "blocks.0.attention.qkv.bias": (("zero_",),),
    "blocks.0.attention.out.weight": (("uniform_", -0.17677669529663684, 0.17677669529663684),),
    "blocks.0.attention.out.bias": (("uniform_", -0.17677669529663687, 0.17677669529663687),),
    "blocks.0.narrow.weight": (("normal_", 0.0, 0.008164965809277261),),
    "blocks.0.narrow.bias": (("uniform_", -0.17677669529663687, 0.17677669529663687),),
    "blocks.1.norm.weight": (("fill_", 1.0),),
    "blocks.1.norm.bias": (("zero_",),),
    "blocks.1.attention.qkv.weight": (
        ("seed", "blocks.0.attention.qkv.weight"),
        ("orthogonal_", 1),
    ),
    "blocks.1.attention.qkv.bias": (("zero_",),),
    "position": (("trunc_normal_", 0.0, 0.02, -2.0, 2.0),),
    "shift": (("arange", 32, ("dtype=", torch.int64)), ("div", "%0", 32), ("copy_", "self", "%1")),
    **dict.fromkeys(
        ("blocks.0.attention.cos", "blocks.1.attention.cos"),
        (
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
    ),
    **dict.fromkeys(
        ("blocks.0.attention.sin", "blocks.1.attention.sin"),
        (
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
    ),
    **dict.fromkeys(
        ("blocks.0.attention.mask", "blocks.1.attention.mask"),
        (
            ("empty", (8, 8), ("dtype=", torch.bool)),
            ("fill_", "%0", True),
            ("tril", "%0"),
            ("copy_", "self", "%2"),
        ),
    ),
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
}
