"""Stage 2 of SwinForImageClassification, the 3rd of 4.

From swin.encoder.layers.1.blocks.1.layernorm_before to swin.encoder.layers.2.blocks.0.mlp.fc2.
"""

from torch import Tensor, nn

from .layers import (
    SwinDropPath,
    SwinMLP,
    SwinPatchMerging,
    SwinRelativePositionBias,
    SwinStagePart,
    get_attn_mask,
    sdpa_attention_forward_2,
    window_partition,
    window_reverse,
)


class SwinAttentionWithAttentionMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 32)
        self.k_proj = nn.Linear(32, 32)
        self.v_proj = nn.Linear(32, 32)
        self.o_proj = nn.Linear(32, 32)
        self.relative_position_bias = SwinRelativePositionBias(num_heads=2)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        # modeling_swin.py:428-466
        shape = hidden_states.shape[:2]
        query_states = self.q_proj(hidden_states).view(*shape, -1, 16).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(*shape, -1, 16).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(*shape, -1, 16).transpose(1, 2)
        relative_position_bias = self.relative_position_bias()  # (1, 2, 16, 16)
        unsqueeze = attention_mask.unsqueeze(1).unsqueeze(0)  # (1, 16, 1, 16, 16)
        unsqueeze = unsqueeze.expand(hidden_states.shape[0] // 16, -1, -1, -1, -1)
        attention_mask = unsqueeze.reshape(-1, 1, 16, 16)  # (16*B, 1, 16, 16)
        combined_mask = relative_position_bias + attention_mask  # (16*B, 2, 16, 16)
        attn_output: Tensor = sdpa_attention_forward_2(
            query_states, key_states, value_states, combined_mask
        )
        attn_output = attn_output.reshape(*shape, -1)  # (16*B, 16, 32)
        attn_output = self.o_proj(attn_output)
        return attn_output


class SwinLayerWithDropPath2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = SwinAttentionWithAttentionMask()
        self.layernorm_before = nn.LayerNorm(32)
        self.layernorm_after = nn.LayerNorm(32)
        self.mlp = SwinMLP(32, 128)
        self.dropout = nn.Dropout(0.0)
        self.drop_path = SwinDropPath(keep_prob=0.9571428571428572)

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_swin.py:542-621
        batch_size = hidden_states.shape[0]
        shape = hidden_states.shape
        shortcut = hidden_states
        hidden_states = self.layernorm_before(hidden_states)  # (B, 256, 32)
        hidden_states = hidden_states.view(batch_size, 16, 16, 32)  # (B, 16, 16, 32)
        hidden_states = hidden_states.roll([-2, -2], dims=[1, 2])
        hidden_states_windows = window_partition(hidden_states, size=4, num_channels=32)
        hidden_states_windows = hidden_states_windows.view(-1, 16, 32)  # (16*B, 16, 32)
        attn_mask = get_attn_mask(shortcut.device, size=4, height=16, ge_number=12, ge_number_2=14)
        attention_output = self.attention(hidden_states_windows, attn_mask)  # (16*B, 16, 32)
        attention_output = self.dropout(attention_output)
        attention_windows = attention_output.view(-1, 4, 4, 32)  # (16*B, 4, 4, 32)
        attention_windows = window_reverse(attention_windows, size=4, num_channels=32, height=16)
        hidden_states = attention_windows.roll([2, 2], dims=[1, 2])
        attention_windows = hidden_states.view(*shape)  # (B, 256, 32)
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
        self.blocks = nn.ModuleDict({"1": SwinLayerWithDropPath2()})
        self.downsample = SwinPatchMerging(128, 64, height=16, num_channels=32)

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_swin.py:694-700
        hidden_states = self.blocks["1"](hidden_states)  # (B, 256, 32)
        hidden_states = self.downsample(hidden_states)  # (B, 64, 64)
        return hidden_states


class SwinEncoderPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {
                "1": SwinStagePart2(),
                "2": SwinStagePart(
                    64, 256, size=2, num_heads=4, height=8, keep_prob=0.9428571428571428, size_2=64
                ),
            },
        )


class SwinModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = SwinEncoderPart()


class Stage2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.swin = SwinModelPart()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            hidden_states: (B, 256, 32) float32, from stage 1, made at modeling_swin.py:572.

        Returns:
            hidden_states: (B, 64, 64) float32, for stage 3.
        """
        # swin.encoder (modeling_swin.py:806)
        for layer_module in self.swin.encoder.layers.values():
            hidden_states = layer_module(hidden_states)  # (B, 64, 64)
        return hidden_states
