"""Stage 0 of SwinForImageClassification, the 1st of 4.

From swin.embeddings.patch_embeddings.projection to swin.encoder.layers.0.blocks.0.mlp.fc2.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import SwinMLP


class SwinPatchEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, 16, kernel_size=2, stride=2)

    def forward(self, pixel_values: Tensor) -> Tensor:
        # modeling_swin.py:281-284
        embeddings: Tensor = self.projection(pixel_values)  # (B, 16, 32, 32)
        embeddings = embeddings.flatten(2).transpose(1, 2)  # (B, 1024, 16)
        return embeddings


class SwinRelativePositionBias(nn.Module):
    relative_position_index: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.empty(49, 2))
        self.register_buffer(
            "relative_position_index", torch.empty(256, dtype=torch.int64), persistent=False
        )


class SwinAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 16)
        self.k_proj = nn.Linear(16, 16)
        self.v_proj = nn.Linear(16, 16)
        self.o_proj = nn.Linear(16, 16)
        self.relative_position_bias = SwinRelativePositionBias()

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_swin.py:428-543
        batch = hidden_states.shape[0] // 64
        q_proj_out = self.q_proj(hidden_states)  # (64*B, 16, 16)
        mul = 64 * batch
        view = q_proj_out.view(mul, 16, -1, 8)  # (64*B, 16, 2, 8)
        query_states = view.transpose(1, 2)  # (64*B, 2, 16, 8)
        key_states = self.k_proj(hidden_states).view(mul, 16, -1, 8).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(mul, 16, -1, 8).transpose(1, 2)

        # relative_position_bias (modeling_swin.py:368-370)
        relative_position_bias = self.relative_position_bias.relative_position_bias_table[
            self.relative_position_bias.relative_position_index
        ]
        relative_position_bias = relative_position_bias.view(16, 16, -1)  # (16, 16, 2)
        relative_position_bias_out = (
            relative_position_bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        )

        # sdpa_attention.py:193-206, modeling_swin.py:465-466
        attn_output: Tensor = F.scaled_dot_product_attention(
            query_states,
            key_states,
            value_states,
            attn_mask=relative_position_bias_out,
            scale=0.3535533905932738,
        )
        attn_output = attn_output.reshape(mul, -1, 16, 8)
        attn_output = attn_output.transpose(1, 2).contiguous()  # (64*B, 16, 2, 8)
        attn_output = attn_output.reshape(mul, 16, -1)  # (64*B, 16, 16)
        attn_output = self.o_proj(attn_output)
        return attn_output


class SwinEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embeddings = SwinPatchEmbeddings()
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.0)

    def forward(self, pixel_values: Tensor) -> Tensor:
        # modeling_swin.py:227-242
        embeddings: Tensor = self.patch_embeddings(pixel_values)  # (B, 1024, 16)
        embeddings = self.norm(embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings


class SwinLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layernorm_before = nn.LayerNorm(16)
        self.attention = SwinAttention()
        self.dropout = nn.Dropout(0.0)
        self.layernorm_after = nn.LayerNorm(16)
        self.mlp = SwinMLP(16, 64)

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_swin.py:491-614
        batch = hidden_states.shape[0]
        hidden_states_2 = self.layernorm_before(hidden_states)  # (B, 1024, 16)
        hidden_states_2 = hidden_states_2.view(batch, 32, 32, 16)  # (B, 32, 32, 16)
        hidden_states_2 = F.pad(hidden_states_2, [0, 0, 0, 0, 0, 0])
        input_feature = hidden_states_2.view(batch, 8, 4, 8, 4, 16)  # (B, 8, 4, 8, 4, 16)
        contiguous = input_feature.transpose(2, 3).contiguous()  # (B, 8, 8, 4, 4, 16)
        del hidden_states_2, input_feature
        windows = contiguous.view(-1, 4, 4, 16)  # (64*B, 4, 4, 16)
        hidden_states_windows = windows.view(-1, 16, 16)  # (64*B, 16, 16)
        attn_output = self.attention(hidden_states_windows)
        attention_output = self.dropout(attn_output)
        attention_windows = attention_output.view(-1, 4, 4, 16)  # (64*B, 4, 4, 16)
        windows = attention_windows.view(-1, 8, 8, 4, 4, 16)  # (B, 8, 8, 4, 4, 16)
        contiguous = windows.transpose(2, 3).contiguous()  # (B, 8, 4, 8, 4, 16)
        del attn_output, attention_output, attention_windows, windows
        windows = contiguous.view(-1, 32, 32, 16)  # (B, 32, 32, 16)
        attention_windows = windows.view(batch, 1024, 16)  # (B, 1024, 16)
        hidden_states = hidden_states + attention_windows
        del contiguous, windows, attention_windows
        hidden_states_2 = self.layernorm_after(hidden_states)
        hidden_states_2 = self.mlp(hidden_states_2)
        hidden_states = self.dropout(hidden_states_2) + hidden_states
        return hidden_states


class SwinStagePart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"0": SwinLayer()})

    def forward(self, embeddings: Tensor) -> Tensor:
        hidden_states: Tensor = self.blocks["0"](embeddings)  # (B, 1024, 16)
        return hidden_states


class SwinEncoderPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": SwinStagePart()})


class SwinModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = SwinEmbeddings()
        self.encoder = SwinEncoderPart()


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.swin = SwinModelPart()

    def forward(self, pixel_values: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            pixel_values: (B, 3, 64, 64) float32, the model's kwargs["pixel_values"].

        Returns:
            hidden_states: (B, 1024, 16) float32, for stage 1.
        """
        # swin
        embeddings = self.swin.embeddings(pixel_values)  # (B, 1024, 16)
        hidden_states: Tensor = self.swin.encoder.layers["0"](embeddings)
        return hidden_states
