"""Stage 1 of SwinForImageClassification, the 2nd of 4.

From swin.encoder.layers.0.blocks.1.attention to swin.encoder.layers.1.blocks.0.mlp.fc2.
"""

from torch import Tensor, nn

from .layers import (
    SwinDropPath,
    SwinMLP,
    SwinPatchMerging,
    SwinStagePart,
    window_reverse,
)


class SwinAttentionPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.o_proj = nn.Linear(16, 16)


class SwinLayerPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = SwinAttentionPart()
        self.layernorm_after = nn.LayerNorm(16)
        self.mlp = SwinMLP(16, 64)
        self.dropout = nn.Dropout(0.0)
        self.drop_path = SwinDropPath(keep_prob=0.9857142857142858)

    def forward(self, shortcut: Tensor, attn_output: Tensor) -> Tensor:
        # attention (sdpa_attention.py:206, modeling_swin.py:465-466)
        attn_output = attn_output.transpose(1, 2).contiguous()  # (64*B, 16, 2, 8)
        attn_output = attn_output.reshape(shortcut.shape[0] * 64, 16, -1)  # (64*B, 16, 16)
        attn_output = self.attention.o_proj(attn_output)

        # modeling_swin.py:556-621
        attention_output = self.dropout(attn_output)
        attention_windows = attention_output.view(-1, 4, 4, 16)  # (64*B, 4, 4, 16)
        attention_windows = window_reverse(attention_windows, size=8, num_channels=16, height=32)
        hidden_states: Tensor = attention_windows.roll([2, 2], dims=[1, 2])
        attention_windows = hidden_states.view(*shortcut.shape)  # (B, 1024, 16)
        if self.training:
            drop_path_out = self.drop_path(attention_windows)
        hidden_states = shortcut + (drop_path_out if self.training else attention_windows)
        residual = hidden_states
        hidden_states = self.layernorm_after(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.dropout(hidden_states) + residual
        return hidden_states


class SwinStagePart2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"1": SwinLayerPart()})
        self.downsample = SwinPatchMerging(64, 32, height=32, num_channels=16)

    def forward(self, hidden_states: Tensor, attn_output: Tensor) -> Tensor:
        # modeling_swin.py:694-700
        hidden_states = self.blocks["1"](hidden_states, attn_output)  # (B, 1024, 16)
        hidden_states = self.downsample(hidden_states)  # (B, 256, 32)
        return hidden_states


class SwinEncoderPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {
                "0": SwinStagePart2(),
                "1": SwinStagePart(
                    32,
                    128,
                    size=4,
                    num_heads=2,
                    height=16,
                    keep_prob=0.9714285714285714,
                    size_2=256,
                ),
            },
        )


class SwinModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = SwinEncoderPart()


class Stage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.swin = SwinModelPart()

    def forward(self, attn_output: Tensor, hidden_states: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            attn_output: (64*B, 2, 16, 8) float32, from stage 0, made at sdpa_attention.py:193.
            hidden_states: (B, 1024, 16) float32, from stage 0, made at modeling_swin.py:572.

        Returns:
            hidden_states: (B, 256, 32) float32, for stage 2.
        """
        # swin.encoder (modeling_swin.py:806)
        input_feature = self.swin.encoder.layers["0"](hidden_states, attn_output)  # (B, 256, 32)
        hidden_states = self.swin.encoder.layers["1"](input_feature)
        return hidden_states
