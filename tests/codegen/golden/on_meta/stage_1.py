"""Stage 1 of meta_decoder, the 2nd of 2: blocks.1.attention to head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Stage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"1": nn.Module(), "2": nn.Module()})
        self.blocks["1"].attention = nn.Module()
        self.blocks["1"].attention.out = nn.Linear(32, 32)
        self.blocks["1"].narrow = nn.Linear(32, 32)
        self.blocks["1"].noise = nn.Parameter(torch.empty(1, 1, 32))
        self.blocks["1"].scale = nn.Parameter(torch.empty(32))
        self.blocks["2"].norm = nn.LayerNorm(32)
        self.blocks["2"].attention = nn.Module()
        self.blocks["2"].attention.qkv = nn.Linear(32, 96)
        self.blocks["2"].attention.out = nn.Linear(32, 32)
        self.blocks["2"].attention.register_buffer("cos", torch.zeros(8, 16))
        self.blocks["2"].attention.register_buffer("sin", torch.zeros(8, 16))
        self.blocks["2"].attention.register_buffer(
            "mask", torch.zeros(8, 8, dtype=torch.bool), persistent=False
        )
        self.blocks["2"].narrow = nn.Linear(32, 32)
        self.blocks["2"].noise = nn.Parameter(torch.empty(1, 1, 32))
        self.blocks["2"].scale = nn.Parameter(torch.empty(32))
        self.batch_norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(32, 400, bias=False)

    def forward(self, matmul_3: Tensor, add_5: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            matmul_3: (B, 2, 8, 16) float32, from stage 0, made at meta_decoder.py:43.
            add_5: (B, 8, 32) float32, from stage 0, made at meta_decoder.py:58.

        Returns:
            head: (B, 8, 400) float32, for the caller.
        """
        # meta_decoder.py:38
        batch = matmul_3.shape[0]

        # blocks.1.attention (meta_decoder.py:44)
        blocks_1_attention_out = self.blocks["1"].attention.out(
            matmul_3.transpose(1, 2).reshape(batch, 8, 32)
        )

        # blocks.1 (meta_decoder.py:58)
        blocks_1_attention_out = blocks_1_attention_out + self.blocks["1"].noise
        mul_9 = self.blocks["1"].scale * self.blocks["1"].narrow(F.gelu(blocks_1_attention_out))
        mul_9 = add_5 + mul_9

        # blocks.2 (meta_decoder.py:58)
        blocks_2_norm = self.blocks["2"].norm(mul_9)

        # blocks.2.attention (meta_decoder.py:33-44)
        qkv = self.blocks["2"].attention.qkv(blocks_2_norm).view(batch, 8, 3, 2, 16)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        scale = torch.sqrt(torch.full([], 16.0, device=matmul_3.device))
        first, second = query.chunk(2, -1)
        mul_10 = query * self.blocks["2"].attention.cos  # (B, 2, 8, 16)
        mul_11 = torch.cat([-second, first], -1) * self.blocks["2"].attention.sin
        mul_10 = mul_10 + mul_11
        del mul_11
        first, second = key.chunk(2, -1)
        mul_12 = key * self.blocks["2"].attention.cos
        mul_13 = torch.cat([-second, first], -1) * self.blocks["2"].attention.sin
        mul_12 = mul_12 + mul_13
        del mul_13
        mul_10 = mul_10 @ mul_12.transpose(-1, -2)  # (B, 2, 8, 8)
        del mul_12
        scores = mul_10 / scale
        del mul_10
        scores.masked_fill_(~self.blocks["2"].attention.mask, -1000000000.0)
        scores = F.softmax(scores, dim=-1)
        mixed = scores @ value  # (B, 2, 8, 16)
        del qkv, query, key, value, first, second
        mixed = mixed.transpose(1, 2).reshape(batch, 8, 32)  # (B, 8, 32)
        blocks_2_attention_out = self.blocks["2"].attention.out(mixed)

        # blocks.2 (meta_decoder.py:58)
        blocks_2_attention_out = blocks_2_attention_out + self.blocks["2"].noise
        mul_14 = self.blocks["2"].scale * self.blocks["2"].narrow(F.gelu(blocks_2_attention_out))
        mul_14 = mul_9 + mul_14

        # meta_decoder.py:80
        head = self.head(self.batch_norm(mul_14))  # (B, 8, 400)
        return head

    def loss(self, head: Tensor, target: Tensor) -> Tensor:
        """The loss of one micro-batch.

        Args:
            head: (B, 8, 400) float32, what forward returned.
            target: (B, 8) int64, the target.
        """
        # meta_decoder.py:97
        loss = F.cross_entropy(head.flatten(0, 1), target.flatten())
        return loss


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = ("batch_norm",)

# How the state begins where there are no weights yet (runtime/initial.py); * is any layer's number.
INITIAL = {
    "blocks.*.noise": (
        ("seed", "blocks.0.noise"),
        ("empty", (1, 1, 32), ("dtype=", torch.float32)),
        ("normal_", "%1", 0.0, 1.0),
        ("mul", "%1", 0.02),
        ("copy_", "self", "%3"),
    ),
    "blocks.*.scale": (
        ("empty", (32,), ("dtype=", torch.float32)),
        ("fill_", "%0", 1.0),
        ("mul", "%0", 0.1),
        ("copy_", "self", "%2"),
    ),
    "blocks.*.attention.out.weight": (
        ("seed", "blocks.0.attention.out.weight"),
        ("uniform_", -0.17677669529663684, 0.17677669529663684),
    ),
    "blocks.*.attention.out.bias": (
        ("seed", "blocks.0.attention.out.bias"),
        ("uniform_", -0.17677669529663687, 0.17677669529663687),
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
    "blocks.2.attention.mask": (
        ("empty", (8, 8), ("dtype=", torch.bool)),
        ("fill_", "%0", True),
        ("tril", "%0"),
        ("copy_", "self", "%2"),
    ),
    "blocks.2.attention.qkv.weight": (
        ("seed", "blocks.0.attention.qkv.weight"),
        ("orthogonal_", 1),
    ),
    "tokens.weight": (("normal_", 0.0, 1.0), ("at", (0,), "zero_")),
}
