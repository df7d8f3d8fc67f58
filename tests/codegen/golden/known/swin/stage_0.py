"""Stage 0 of SwinForImageClassification, the 1st of 4.

From swin.embeddings.patch_embeddings.projection
to swin.encoder.layers.0.blocks.1.attention.relative_position_bias.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from .layers import (
    SwinAttention,
    SwinMLP,
    SwinRelativePositionBias,
    get_attn_mask,
    window_partition,
    window_reverse,
)


class SwinPatchEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, 16, kernel_size=2, stride=2)

    def forward(self, pixel_values: Tensor) -> Tensor:
        # modeling_swin.py:281-284
        embeddings: Tensor = self.projection(pixel_values)  # (B, 16, 32, 32)
        embeddings = embeddings.flatten(2).transpose(1, 2)  # (B, 1024, 16)
        return embeddings


class SwinEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embeddings = SwinPatchEmbeddings()
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.0)

    def forward(self, pixel_values: Tensor) -> Tensor:
        # modeling_swin.py:226-242
        embeddings: Tensor = self.patch_embeddings(pixel_values)  # (B, 1024, 16)
        embeddings = self.norm(embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings


class SwinLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = SwinAttention(16, num_attention_heads=2, scale=8**-0.5, size=8)
        self.layernorm_before = nn.LayerNorm(16)
        self.layernorm_after = nn.LayerNorm(16)
        self.mlp = SwinMLP(16, 64)
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_swin.py:542-572
        batch_size = hidden_states.shape[0]
        shape = hidden_states.shape
        shortcut = hidden_states
        hidden_states = self.layernorm_before(hidden_states)  # (B, 1024, 16)
        hidden_states = hidden_states.view(batch_size, 32, 32, 16)  # (B, 32, 32, 16)
        hidden_states_windows = window_partition(hidden_states, size=8, num_channels=16)
        hidden_states_windows = hidden_states_windows.view(-1, 16, 16)  # (64*B, 16, 16)
        attention_output = self.attention(hidden_states_windows)
        attention_output = self.dropout(attention_output)
        attention_windows = attention_output.view(-1, 4, 4, 16)  # (64*B, 4, 4, 16)
        attention_windows = window_reverse(attention_windows, size=8, num_channels=16, height=32)
        attention_windows = attention_windows.view(*shape)  # (B, 1024, 16)
        hidden_states = shortcut + attention_windows
        residual = hidden_states
        hidden_states = self.layernorm_after(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.dropout(hidden_states) + residual
        return hidden_states


class SwinAttentionPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 16)
        self.k_proj = nn.Linear(16, 16)
        self.v_proj = nn.Linear(16, 16)
        self.relative_position_bias = SwinRelativePositionBias(num_heads=2)


class SwinLayerPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = SwinAttentionPart()
        self.layernorm_before = nn.LayerNorm(16)

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_swin.py:542-621
        batch_size = hidden_states.shape[0]
        hidden_states = self.layernorm_before(hidden_states).view(batch_size, 32, 32, 16)
        hidden_states = hidden_states.roll([-2, -2], dims=[1, 2])
        hidden_states_windows = window_partition(hidden_states, size=8, num_channels=16)
        del hidden_states
        hidden_states_windows = hidden_states_windows.view(-1, 16, 16)  # (64*B, 16, 16)
        attn_mask = get_attn_mask(
            hidden_states_windows.device, size=8, height=32, ge_number=28, ge_number_2=30
        )

        # attention (modeling_swin.py:425-446, sdpa_attention.py:193)
        size = hidden_states_windows.shape[0]
        query_states = (
            self.attention.q_proj(hidden_states_windows).view(size, 16, -1, 8).transpose(1, 2)
        )
        key_states = (
            self.attention.k_proj(hidden_states_windows).view(size, 16, -1, 8).transpose(1, 2)
        )
        value_states = (
            self.attention.v_proj(hidden_states_windows).view(size, 16, -1, 8).transpose(1, 2)
        )
        relative_position_bias = self.attention.relative_position_bias()  # (1, 2, 16, 16)
        expand = attn_mask.unsqueeze(1).unsqueeze(0).expand(batch_size, -1, -1, -1, -1)
        attention_mask = expand.reshape(-1, 1, 16, 16)  # (64*B, 1, 16, 16)
        del attn_mask, expand
        combined_mask = relative_position_bias + attention_mask  # (64*B, 2, 16, 16)
        del attention_mask
        return F.scaled_dot_product_attention(
            query_states, key_states, value_states, attn_mask=combined_mask, scale=8**-0.5
        )


class SwinStagePart2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"0": SwinLayer(), "1": SwinLayerPart()})

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        # modeling_swin.py:694
        hidden_states = self.blocks["0"](hidden_states)  # (B, 1024, 16)
        attn_output = self.blocks["1"](hidden_states)  # (64*B, 2, 16, 8)
        return hidden_states, attn_output


class SwinEncoderPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": SwinStagePart2()})


class SwinModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = SwinEmbeddings()
        self.encoder = SwinEncoderPart()


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.swin = SwinModelPart()

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            pixel_values: (B, 3, 64, 64) float32, the model's kwargs["pixel_values"].

        Returns:
            hidden_states: (B, 1024, 16) float32, for stage 1.
            attn_output: (64*B, 2, 16, 8) float32, for stage 1.
        """
        # swin (modeling_swin.py:806-864)
        embedding_output = self.swin.embeddings(pixel_values)  # (B, 1024, 16)
        hidden_states, attn_output = self.swin.encoder.layers["0"](embedding_output)
        return hidden_states, attn_output
