"""Stage 2 of SwinForImageClassification, the 3rd of 4.

From swin.encoder.layers.1.blocks.0.attention to swin.encoder.layers.2.blocks.0.mlp.fc2.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import SwinMLP, SwinPatchMerging


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
        self.q_proj = nn.Linear(32, 32)
        self.k_proj = nn.Linear(32, 32)
        self.v_proj = nn.Linear(32, 32)
        self.o_proj = nn.Linear(32, 32)
        self.relative_position_bias = SwinRelativePositionBias()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        # swin.encoder.layers.1.blocks.0.attention (modeling_swin.py:428)
        rows = hidden_states.shape[0]

        # modeling_swin.py:428-543
        batch = hidden_states.shape[0] // 16
        query_states = self.q_proj(hidden_states).view(rows, 16, -1, 16).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(rows, 16, -1, 16).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(rows, 16, -1, 16).transpose(1, 2)

        # relative_position_bias (modeling_swin.py:368-370)
        relative_position_bias = self.relative_position_bias.relative_position_bias_table[
            self.relative_position_bias.relative_position_index
        ]
        relative_position_bias = relative_position_bias.view(16, 16, -1)  # (16, 16, 2)
        relative_position_bias_out = (
            relative_position_bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        )

        # modeling_swin.py:442-466, sdpa_attention.py:193-206
        attention_mask = (
            attention_mask[None, :, None].expand(batch, -1, -1, -1, -1).reshape(-1, 1, 16, 16)
        )
        combined_mask = relative_position_bias_out + attention_mask  # (16*B, 2, 16, 16)
        attn_output: Tensor = F.scaled_dot_product_attention(
            query_states, key_states, value_states, attn_mask=combined_mask
        )
        attn_output = attn_output.reshape(rows, -1, 16, 16)
        attn_output = attn_output.transpose(1, 2).contiguous()  # (16*B, 16, 2, 16)
        attn_output = attn_output.reshape(rows, 16, -1)  # (16*B, 16, 32)
        attn_output = self.o_proj(attn_output)
        return attn_output


class SwinRelativePositionBias2(nn.Module):
    relative_position_index: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.empty(49, 4))
        self.register_buffer(
            "relative_position_index", torch.empty(256, dtype=torch.int64), persistent=False
        )


class SwinAttention2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 64)
        self.k_proj = nn.Linear(64, 64)
        self.v_proj = nn.Linear(64, 64)
        self.o_proj = nn.Linear(64, 64)
        self.relative_position_bias = SwinRelativePositionBias2()

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_swin.py:428-543
        batch = hidden_states.shape[0] // 4
        q_proj_out = self.q_proj(hidden_states)  # (4*B, 16, 64)
        mul = 4 * batch
        view = q_proj_out.view(mul, 16, -1, 16)  # (4*B, 16, 4, 16)
        query_states = view.transpose(1, 2)  # (4*B, 4, 16, 16)
        key_states = self.k_proj(hidden_states).view(mul, 16, -1, 16).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(mul, 16, -1, 16).transpose(1, 2)

        # relative_position_bias (modeling_swin.py:368-370)
        relative_position_bias = self.relative_position_bias.relative_position_bias_table[
            self.relative_position_bias.relative_position_index
        ]
        relative_position_bias = relative_position_bias.view(16, 16, -1)  # (16, 16, 4)
        relative_position_bias_out = (
            relative_position_bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        )

        # sdpa_attention.py:193-206, modeling_swin.py:465-466
        attn_output: Tensor = F.scaled_dot_product_attention(
            query_states, key_states, value_states, attn_mask=relative_position_bias_out
        )
        attn_output = attn_output.reshape(mul, -1, 16, 16)
        attn_output = attn_output.transpose(1, 2).contiguous()  # (4*B, 16, 4, 16)
        attn_output = attn_output.reshape(mul, 16, -1)  # (4*B, 16, 64)
        attn_output = self.o_proj(attn_output)
        return attn_output


class SwinLayerPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layernorm_after = nn.LayerNorm(32)
        self.mlp = SwinMLP(32, 128)
        self.dropout = nn.Dropout(0.0)

    def forward(self, windows: Tensor, input_feature: Tensor) -> tuple[object, ...]:
        # modeling_swin.py:428-566
        batch = windows.shape[0]
        mul = 16 * batch
        windows = windows.contiguous().view(-1, 16, 16, 32)  # (B, 16, 16, 32)
        attention_windows = windows.view(batch, 256, 32)  # (B, 256, 32)

        # drop_path (modeling_swin.py:58-60)
        if self.training:
            random_tensor = torch.rand([batch, 1, 1], dtype=torch.float32, device=windows.device)
            random_tensor = torch.floor(random_tensor + 0.9714285714285714)
            drop_path_out = attention_windows / 0.9714285714285714 * random_tensor  # (B, 256, 32)

        # modeling_swin.py:567-572
        hidden_states = input_feature + (drop_path_out if self.training else attention_windows)
        hidden_states_2 = self.layernorm_after(hidden_states)
        hidden_states_2 = self.mlp(hidden_states_2)
        hidden_states = self.dropout(hidden_states_2) + hidden_states
        return mul, hidden_states


class SwinLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layernorm_before = nn.LayerNorm(32)
        self.attention = SwinAttention()
        self.dropout = nn.Dropout(0.0)
        self.layernorm_after = nn.LayerNorm(32)
        self.mlp = SwinMLP(32, 128)

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_swin.py:491-621
        batch = hidden_states.shape[0]
        hidden_states_2 = self.layernorm_before(hidden_states)  # (B, 256, 32)
        hidden_states_2 = hidden_states_2.view(batch, 16, 16, 32)  # (B, 16, 16, 32)
        hidden_states_2 = F.pad(hidden_states_2, [0, 0, 0, 0, 0, 0])
        hidden_states_2 = hidden_states_2.roll([-2, -2], [1, 2])
        input_feature = hidden_states_2.view(batch, 4, 4, 4, 4, 32)  # (B, 4, 4, 4, 4, 32)
        windows = input_feature.transpose(2, 3).contiguous().view(-1, 4, 4, 32)  # (16*B, 4, 4, 32)
        hidden_states_windows = windows.view(-1, 16, 32)  # (16*B, 16, 32)
        h_idx = torch.arange(16, device=hidden_states.device)  # (16,)
        w_idx = torch.arange(16, device=hidden_states.device)
        h_region = (h_idx >= 12).long() + (h_idx >= 14).long()
        w_region = (w_idx >= 12).long() + (w_idx >= 14).long()
        add = h_region[None, :, None, None] * 3 + w_region[None, None, :, None]  # (1, 16, 16, 1)
        img_mask = add.to(torch.float32)
        input_feature = img_mask.view(1, 4, 4, 4, 4, 1)  # (1, 4, 4, 4, 4, 1)
        windows = input_feature.transpose(2, 3).contiguous().view(-1, 4, 4, 1)  # (16, 4, 4, 1)
        mask_windows = windows.view(-1, 16)  # (16, 16)
        attn_mask = mask_windows.unsqueeze(1) - mask_windows.unsqueeze(2)  # (16, 16, 16)
        attn_mask = attn_mask.masked_fill(attn_mask != 0, -100.0).masked_fill(attn_mask == 0, 0.0)
        attn_output = self.attention(hidden_states_windows, attn_mask)  # (16*B, 16, 32)
        attention_output = self.dropout(attn_output)
        attention_windows = attention_output.view(-1, 4, 4, 32)  # (16*B, 4, 4, 32)
        windows = attention_windows.view(-1, 4, 4, 4, 4, 32)  # (B, 4, 4, 4, 4, 32)
        windows = windows.transpose(2, 3).contiguous().view(-1, 16, 16, 32)  # (B, 16, 16, 32)
        hidden_states_2 = windows.roll([2, 2], [1, 2])
        attention_windows = hidden_states_2.view(batch, 256, 32)  # (B, 256, 32)

        # drop_path (modeling_swin.py:58-60)
        if self.training:
            random_tensor = torch.rand(
                [batch, 1, 1], dtype=torch.float32, device=hidden_states.device
            )
            random_tensor = torch.floor(random_tensor + 0.9571428571428572)
            drop_path_out = attention_windows / 0.9571428571428572 * random_tensor  # (B, 256, 32)

        # modeling_swin.py:567-572
        hidden_states = hidden_states + (drop_path_out if self.training else attention_windows)
        hidden_states_2 = self.layernorm_after(hidden_states)
        hidden_states_2 = self.mlp(hidden_states_2)
        hidden_states = self.dropout(hidden_states_2) + hidden_states
        return hidden_states


class SwinLayer2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layernorm_before = nn.LayerNorm(64)
        self.attention = SwinAttention2()
        self.dropout = nn.Dropout(0.0)
        self.layernorm_after = nn.LayerNorm(64)
        self.mlp = SwinMLP(64, 256)

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_swin.py:491-614
        batch = hidden_states.shape[0]
        hidden_states_2 = self.layernorm_before(hidden_states)  # (B, 64, 64)
        hidden_states_2 = hidden_states_2.view(batch, 8, 8, 64)  # (B, 8, 8, 64)
        hidden_states_2 = F.pad(hidden_states_2, [0, 0, 0, 0, 0, 0])
        input_feature = hidden_states_2.view(batch, 2, 4, 2, 4, 64)  # (B, 2, 4, 2, 4, 64)
        contiguous = input_feature.transpose(2, 3).contiguous()  # (B, 2, 2, 4, 4, 64)
        del hidden_states_2, input_feature
        windows = contiguous.view(-1, 4, 4, 64)  # (4*B, 4, 4, 64)
        hidden_states_windows = windows.view(-1, 16, 64)  # (4*B, 16, 64)
        attn_output = self.attention(hidden_states_windows)
        attention_output = self.dropout(attn_output)
        attention_windows = attention_output.view(-1, 4, 4, 64)  # (4*B, 4, 4, 64)
        windows = attention_windows.view(-1, 2, 2, 4, 4, 64)  # (B, 2, 2, 4, 4, 64)
        contiguous = windows.transpose(2, 3).contiguous()  # (B, 2, 4, 2, 4, 64)
        del attn_output, attention_output, attention_windows, windows
        windows = contiguous.view(-1, 8, 8, 64)  # (B, 8, 8, 64)
        attention_windows = windows.view(batch, 64, 64)  # (B, 64, 64)

        # drop_path (modeling_swin.py:58-60)
        if self.training:
            random_tensor = torch.rand(
                [batch, 1, 1], dtype=torch.float32, device=hidden_states.device
            )
            random_tensor = torch.floor(random_tensor + 0.9428571428571428)
            drop_path_out = attention_windows / 0.9428571428571428 * random_tensor  # (B, 64, 64)

        # modeling_swin.py:567
        hidden_states = hidden_states + (drop_path_out if self.training else attention_windows)
        del contiguous, windows, attention_windows
        if self.training:
            del drop_path_out
        hidden_states_2 = self.layernorm_after(hidden_states)
        hidden_states_2 = self.mlp(hidden_states_2)
        hidden_states = self.dropout(hidden_states_2) + hidden_states
        return hidden_states


class SwinStagePart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"0": SwinLayerPart(), "1": SwinLayer()})
        self.downsample = SwinPatchMerging(128, 64, view_number=16, view_number_2=32)

    def forward(self, windows: Tensor, input_feature: Tensor) -> Tensor:
        _, hidden_states = self.blocks["0"](windows, input_feature)  # (B, 256, 32)
        input_feature = self.downsample(self.blocks["1"](hidden_states))  # (B, 64, 64)
        return input_feature


class SwinStagePart2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"0": SwinLayer2()})

    def forward(self, input_feature: Tensor) -> Tensor:
        hidden_states: Tensor = self.blocks["0"](input_feature)  # (B, 64, 64)
        return hidden_states


class SwinEncoderPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"1": SwinStagePart(), "2": SwinStagePart2()})


class SwinModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = SwinEncoderPart()


class Stage2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.swin = SwinModelPart()

    def forward(self, windows: Tensor, input_feature: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            windows: (B, 4, 4, 4, 4, 32) float32, from stage 1, made at modeling_swin.py:504.
            input_feature: (B, 256, 32) float32, from stage 1, made at modeling_swin.py:324.

        Returns:
            hidden_states: (B, 64, 64) float32, for stage 3.
        """
        # swin.encoder
        hidden_states: Tensor = self.swin.encoder.layers["2"](
            self.swin.encoder.layers["1"](windows, input_feature)
        )
        return hidden_states
