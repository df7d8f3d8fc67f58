"""Stage 3 of SwinForImageClassification, the 4th of 4.

From swin.encoder.layers.2.blocks.1.layernorm_before to classifier.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from .layers import (
    SwinDropPath,
    SwinLayerWithDropPath,
    SwinMLP,
    SwinRelativePositionBias,
    get_attn_mask,
    sdpa_attention_forward_2,
    window_partition,
    window_reverse,
)


class SwinAttentionWithAttentionMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 64)
        self.k_proj = nn.Linear(64, 64)
        self.v_proj = nn.Linear(64, 64)
        self.o_proj = nn.Linear(64, 64)
        self.relative_position_bias = SwinRelativePositionBias(num_heads=4)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        # modeling_swin.py:428-466
        shape = hidden_states.shape[:2]
        query_states = self.q_proj(hidden_states).view(*shape, -1, 16).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(*shape, -1, 16).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(*shape, -1, 16).transpose(1, 2)
        relative_position_bias = self.relative_position_bias()  # (1, 4, 16, 16)
        unsqueeze = attention_mask.unsqueeze(1).unsqueeze(0)  # (1, 4, 1, 16, 16)
        attention_mask = unsqueeze.expand(hidden_states.shape[0] // 4, -1, -1, -1, -1).reshape(
            -1, 1, 16, 16
        )
        combined_mask = relative_position_bias + attention_mask  # (4*B, 4, 16, 16)
        attn_output: Tensor = sdpa_attention_forward_2(
            query_states, key_states, value_states, combined_mask
        )
        attn_output = attn_output.reshape(*shape, -1)  # (4*B, 16, 64)
        attn_output = self.o_proj(attn_output)
        return attn_output


class SwinLayerWithDropPath2(nn.Module):
    def __init__(self, keep_prob: float) -> None:
        super().__init__()
        self.attention = SwinAttentionWithAttentionMask()
        self.layernorm_before = nn.LayerNorm(64)
        self.layernorm_after = nn.LayerNorm(64)
        self.mlp = SwinMLP(64, 256)
        self.dropout = nn.Dropout(0.0)
        self.drop_path = SwinDropPath(keep_prob=keep_prob)

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_swin.py:542-621
        batch_size = hidden_states.shape[0]
        shape = hidden_states.shape
        shortcut = hidden_states
        hidden_states = self.layernorm_before(hidden_states).view(batch_size, 8, 8, 64)
        hidden_states = hidden_states.roll([-2, -2], dims=[1, 2])
        hidden_states_windows = window_partition(hidden_states, size=2, num_channels=64)
        del hidden_states
        hidden_states_windows = hidden_states_windows.view(-1, 16, 64)  # (4*B, 16, 64)
        attn_mask = get_attn_mask(shortcut.device, size=2, height=8, ge_number=4, ge_number_2=6)
        attention_output = self.attention(hidden_states_windows, attn_mask)  # (4*B, 16, 64)
        del attn_mask
        attention_windows = self.dropout(attention_output).view(-1, 4, 4, 64)  # (4*B, 4, 4, 64)
        attention_windows = window_reverse(attention_windows, size=2, num_channels=64, height=8)
        del attention_output
        hidden_states = attention_windows.roll([2, 2], dims=[1, 2])
        del attention_windows
        attention_windows = hidden_states.view(*shape)  # (B, 64, 64)
        if self.training:
            drop_path_out = self.drop_path(attention_windows)
        hidden_states = shortcut + (drop_path_out if self.training else attention_windows)
        del attention_windows
        if self.training:
            del drop_path_out
        residual = hidden_states
        hidden_states = self.layernorm_after(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.dropout(hidden_states) + residual
        return hidden_states


class SwinStagePart2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(
            {
                "1": SwinLayerWithDropPath2(keep_prob=0.9285714285714286),
                "2": SwinLayerWithDropPath(
                    64, 256, size=2, num_heads=4, height=8, keep_prob=0.9142857142857143, size_2=64
                ),
                "3": SwinLayerWithDropPath2(keep_prob=0.9),
            },
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_swin.py:694
        for layer_module in self.blocks.values():
            hidden_states = layer_module(hidden_states)  # (B, 64, 64)
        return hidden_states


class SwinEncoderPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"2": SwinStagePart2()})


class SwinModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = SwinEncoderPart()
        self.layernorm = nn.LayerNorm(64)
        self.pooler = nn.AdaptiveAvgPool1d(1)


class Stage3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.swin = SwinModelPart()
        self.classifier = nn.Linear(64, 5)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            hidden_states: (B, 64, 64) float32, from stage 2, made at modeling_swin.py:572.

        Returns:
            logits: (B, 5) float32, for the caller.
        """
        # swin.encoder (modeling_swin.py:806)
        encoder_outputs = self.swin.encoder.layers["2"](hidden_states)  # (B, 64, 64)

        # swin (modeling_swin.py:876-881)
        sequence_output = self.swin.layernorm(encoder_outputs)
        pooled_output = self.swin.pooler(sequence_output.transpose(1, 2))  # (B, 64, 1)
        pooled_output = pooled_output.flatten(1)  # (B, 64)

        # modeling_swin.py:1037
        logits: Tensor = self.classifier(pooled_output)  # (B, 5)
        return logits

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of one micro-batch.

        Args:
            logits: (B, 5) float32, what forward returned.
            labels: (B,) int64, the model's kwargs["labels"].
        """
        # loss_utils.py:42
        loss = F.cross_entropy(logits, labels)
        return loss
