"""What several stages of SwinForImageClassification have."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def window_partition(input_feature: Tensor, size: int, num_channels: int) -> Tensor:
    # modeling_swin.py:491-494
    batch_size = input_feature.shape[0]
    input_feature = input_feature.view(batch_size, size, 4, size, 4, num_channels)
    return input_feature.transpose(2, 3).contiguous().view(-1, 4, 4, num_channels)


class SwinRelativePositionBias(nn.Module):
    relative_position_index: Tensor

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.empty(49, num_heads))
        self.register_buffer(
            "relative_position_index", torch.empty(256, dtype=torch.int64), persistent=False
        )

    def forward(self) -> Tensor:
        # modeling_swin.py:368-370
        relative_position_bias = self.relative_position_bias_table[self.relative_position_index]
        relative_position_bias = relative_position_bias.view(16, 16, -1)
        return relative_position_bias.permute(2, 0, 1).contiguous().unsqueeze(0)


def sdpa_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scale: float
) -> Tensor:
    # sdpa_attention.py:193-206
    attn_output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scale
    )
    return attn_output.transpose(1, 2).contiguous()


def window_reverse(windows: Tensor, size: int, num_channels: int, height: int) -> Tensor:
    # modeling_swin.py:503-504
    windows = windows.view(-1, size, size, 4, 4, num_channels)
    return windows.transpose(2, 3).contiguous().view(-1, height, height, num_channels)


class SwinMLP(nn.Module):
    def __init__(self, dim: int, out_features: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, out_features)
        self.fc2 = nn.Linear(out_features, dim)

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_swin.py:479-481, activations.py:89
        hidden_states = self.fc1(hidden_states)
        hidden_states = F.gelu(hidden_states)
        hidden_states = self.fc2(hidden_states)
        return hidden_states


def window_partition_2(input_feature: Tensor, size: int) -> Tensor:
    # modeling_swin.py:491-494
    input_feature = input_feature.view(1, size, 4, size, 4, 1)
    return input_feature.transpose(2, 3).contiguous().view(-1, 4, 4, 1)


class SwinDropPath(nn.Module):
    def __init__(self, keep_prob: float) -> None:
        super().__init__()
        self.keep_prob = keep_prob

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_swin.py:58-60
        random_tensor = torch.rand(
            [hidden_states.shape[0], 1, 1], dtype=torch.float32, device=hidden_states.device
        )
        random_tensor = torch.floor(random_tensor + self.keep_prob)
        return hidden_states / self.keep_prob * random_tensor


class SwinPatchMerging(nn.Module):
    def __init__(self, in_features: int, out_features: int, height: int, num_channels: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.height = height
        self.num_channels = num_channels
        self.reduction = nn.Linear(in_features, out_features, bias=False)
        self.norm = nn.LayerNorm(in_features)

    def forward(self, input_feature: Tensor) -> Tensor:
        # modeling_swin.py:314-324
        batch_size = input_feature.shape[0]
        input_feature = input_feature.view(batch_size, self.height, self.height, self.num_channels)
        input_feature = torch.cat(
            [
                input_feature[:, ::2, ::2],
                input_feature[:, 1::2, ::2],
                input_feature[:, ::2, 1::2],
                input_feature[:, 1::2, 1::2],
            ],
            dim=-1,
        )
        input_feature = input_feature.view(batch_size, -1, self.in_features)
        input_feature = self.norm(input_feature)
        input_feature = self.reduction(input_feature)
        return input_feature


def sdpa_attention_forward_2(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor
) -> Tensor:
    # sdpa_attention.py:193-206
    attn_output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=0.25
    )
    return attn_output.transpose(1, 2).contiguous()


class SwinAttention(nn.Module):
    def __init__(self, hidden_size: int, num_attention_heads: int, scale: float, size: int) -> None:
        super().__init__()
        self.scale = scale
        self.size = size
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, hidden_size)
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size)
        self.relative_position_bias = SwinRelativePositionBias(num_heads=num_attention_heads)

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_swin.py:428-466
        rows = hidden_states.shape[0]
        query_states = self.q_proj(hidden_states).view(rows, 16, -1, self.size).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(rows, 16, -1, self.size).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(rows, 16, -1, self.size).transpose(1, 2)
        relative_position_bias = self.relative_position_bias()
        attn_output: Tensor = sdpa_attention_forward(
            query_states, key_states, value_states, relative_position_bias, scale=self.scale
        )
        attn_output = attn_output.reshape(rows, 16, -1)
        attn_output = self.o_proj(attn_output)
        return attn_output


def get_attn_mask(
    device: torch.device, size: int, height: int, ge_number: int, ge_number_2: int
) -> Tensor:
    # modeling_swin.py:598-606
    h_idx = torch.arange(height, device=device)
    w_idx = torch.arange(height, device=device)
    h_region = (h_idx >= ge_number).long() + (h_idx >= ge_number_2).long()
    w_region = (w_idx >= ge_number).long() + (w_idx >= ge_number_2).long()
    add = h_region[None, :, None, None] * 3 + w_region[None, None, :, None]
    img_mask = add.to(torch.float32)
    mask_windows = window_partition_2(img_mask, size=size)
    mask_windows = mask_windows.view(-1, 16)
    attn_mask = mask_windows.unsqueeze(1) - mask_windows.unsqueeze(2)
    return attn_mask.masked_fill(attn_mask != 0, -100.0).masked_fill(attn_mask == 0, 0.0)


class SwinLayerWithDropPath(nn.Module):
    def __init__(
        self,
        channels: int,
        out_features: int,
        size: int,
        num_heads: int,
        height: int,
        keep_prob: float,
        size_2: int,
    ) -> None:
        super().__init__()
        self.channels = channels
        self.size = size
        self.height = height
        self.size_2 = size_2
        self.attention = SwinAttention(channels, num_attention_heads=num_heads, scale=0.25, size=16)
        self.layernorm_before = nn.LayerNorm(channels)
        self.layernorm_after = nn.LayerNorm(channels)
        self.mlp = SwinMLP(channels, out_features)
        self.dropout = nn.Dropout(0.0)
        self.drop_path = SwinDropPath(keep_prob=keep_prob)

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_swin.py:542-566
        batch_size = hidden_states.shape[0]
        shortcut = hidden_states
        hidden_states = self.layernorm_before(hidden_states)
        hidden_states = hidden_states.view(batch_size, self.height, self.height, self.channels)
        hidden_states_windows = window_partition(
            hidden_states, size=self.size, num_channels=self.channels
        )
        del hidden_states
        hidden_states_windows = hidden_states_windows.view(-1, 16, self.channels)
        attention_output = self.dropout(self.attention(hidden_states_windows))
        attention_windows = attention_output.view(-1, 4, 4, self.channels)
        attention_windows = window_reverse(
            attention_windows, size=self.size, num_channels=self.channels, height=self.height
        )
        del attention_output
        attention_windows = attention_windows.view(batch_size, self.size_2, self.channels)
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


class SwinStagePart(nn.Module):
    def __init__(
        self,
        channels: int,
        out_features: int,
        size: int,
        num_heads: int,
        height: int,
        keep_prob: float,
        size_2: int,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(
            {
                "0": SwinLayerWithDropPath(
                    channels,
                    out_features,
                    size=size,
                    num_heads=num_heads,
                    height=height,
                    keep_prob=keep_prob,
                    size_2=size_2,
                ),
            },
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_swin.py:694
        hidden_states = self.blocks["0"](hidden_states)
        return hidden_states
