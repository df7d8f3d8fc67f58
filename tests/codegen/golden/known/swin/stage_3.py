"""Stage 3 of SwinForImageClassification, the 4th of 4.

From swin.encoder.layers.2.blocks.0.attention to classifier.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import SwinMLP


class SwinRelativePositionBias(nn.Module):
    relative_position_index: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.empty(49, 4))
        self.register_buffer(
            "relative_position_index", torch.empty(256, dtype=torch.int64), persistent=False
        )


class SwinAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 64)
        self.k_proj = nn.Linear(64, 64)
        self.v_proj = nn.Linear(64, 64)
        self.o_proj = nn.Linear(64, 64)
        self.relative_position_bias = SwinRelativePositionBias()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        # swin.encoder.layers.2.blocks.0.attention (modeling_swin.py:428)
        rows = hidden_states.shape[0]

        # modeling_swin.py:428-543
        batch = hidden_states.shape[0] // 4
        query_states = self.q_proj(hidden_states).view(rows, 16, -1, 16).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(rows, 16, -1, 16).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(rows, 16, -1, 16).transpose(1, 2)

        # relative_position_bias (modeling_swin.py:368-370)
        relative_position_bias = self.relative_position_bias.relative_position_bias_table[
            self.relative_position_bias.relative_position_index
        ]
        relative_position_bias = relative_position_bias.view(16, 16, -1)  # (16, 16, 4)
        relative_position_bias_out = (
            relative_position_bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        )

        # modeling_swin.py:442-466, sdpa_attention.py:193-206
        attention_mask = (
            attention_mask[None, :, None].expand(batch, -1, -1, -1, -1).reshape(-1, 1, 16, 16)
        )
        combined_mask = relative_position_bias_out + attention_mask  # (4*B, 4, 16, 16)
        attn_output: Tensor = F.scaled_dot_product_attention(
            query_states, key_states, value_states, attn_mask=combined_mask
        )
        attn_output = attn_output.reshape(rows, -1, 16, 16)
        attn_output = attn_output.transpose(1, 2).contiguous()  # (4*B, 16, 4, 16)
        attn_output = attn_output.reshape(rows, 16, -1)  # (4*B, 16, 64)
        attn_output = self.o_proj(attn_output)
        return attn_output


class SwinAttention2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 64)
        self.k_proj = nn.Linear(64, 64)
        self.v_proj = nn.Linear(64, 64)
        self.o_proj = nn.Linear(64, 64)
        self.relative_position_bias = SwinRelativePositionBias()

    def forward(self, hidden_states: Tensor) -> Tensor:
        # swin.encoder.layers.2.blocks.0.attention (modeling_swin.py:428)
        rows = hidden_states.shape[0]

        # modeling_swin.py:428-430
        query_states = self.q_proj(hidden_states).view(rows, 16, -1, 16).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(rows, 16, -1, 16).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(rows, 16, -1, 16).transpose(1, 2)

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
        attn_output = attn_output.reshape(rows, -1, 16, 16)
        attn_output = attn_output.transpose(1, 2).contiguous()  # (4*B, 16, 4, 16)
        attn_output = attn_output.reshape(rows, 16, -1)  # (4*B, 16, 64)
        attn_output = self.o_proj(attn_output)
        return attn_output


class SwinLayer(nn.Module):
    def __init__(self, add_number: float) -> None:
        super().__init__()
        self.add_number = add_number
        self.layernorm_before = nn.LayerNorm(64)
        self.attention = SwinAttention()
        self.dropout = nn.Dropout(0.0)
        self.layernorm_after = nn.LayerNorm(64)
        self.mlp = SwinMLP(64, 256)

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_swin.py:491-621
        batch = hidden_states.shape[0]
        hidden_states_2 = self.layernorm_before(hidden_states)  # (B, 64, 64)
        hidden_states_2 = hidden_states_2.view(batch, 8, 8, 64)  # (B, 8, 8, 64)
        hidden_states_2 = F.pad(hidden_states_2, [0, 0, 0, 0, 0, 0])
        hidden_states_2 = hidden_states_2.roll([-2, -2], [1, 2])
        input_feature = hidden_states_2.view(batch, 2, 4, 2, 4, 64)  # (B, 2, 4, 2, 4, 64)
        contiguous = input_feature.transpose(2, 3).contiguous()  # (B, 2, 2, 4, 4, 64)
        del hidden_states_2, input_feature
        windows = contiguous.view(-1, 4, 4, 64)  # (4*B, 4, 4, 64)
        hidden_states_windows = windows.view(-1, 16, 64)  # (4*B, 16, 64)
        h_idx = torch.arange(8, device=hidden_states.device)  # (8,)
        w_idx = torch.arange(8, device=hidden_states.device)
        long = (h_idx >= 4).long()
        ge = h_idx >= 6
        del h_idx
        h_region = long + ge.long()
        del long
        long = (w_idx >= 4).long()
        ge = w_idx >= 6
        del w_idx
        w_region = long + ge.long()
        del long
        mul = h_region[None, :, None, None] * 3  # (1, 8, 1, 1)
        del h_region
        img_mask = (mul + w_region[None, None, :, None]).to(torch.float32)  # (1, 8, 8, 1)
        input_feature = img_mask.view(1, 2, 4, 2, 4, 1)  # (1, 2, 4, 2, 4, 1)
        windows = input_feature.transpose(2, 3).contiguous().view(-1, 4, 4, 1)  # (4, 4, 4, 1)
        mask_windows = windows.view(-1, 16)  # (4, 16)
        attn_mask = mask_windows.unsqueeze(1) - mask_windows.unsqueeze(2)  # (4, 16, 16)
        masked_fill = attn_mask.masked_fill(attn_mask != 0, -100.0)
        eq = attn_mask == 0
        del attn_mask
        attn_mask = masked_fill.masked_fill(eq, 0.0)
        del masked_fill
        attn_output = self.attention(hidden_states_windows, attn_mask)  # (4*B, 16, 64)
        del attn_mask
        attention_output = self.dropout(attn_output)
        attention_windows = attention_output.view(-1, 4, 4, 64)  # (4*B, 4, 4, 64)
        windows = attention_windows.view(-1, 2, 2, 4, 4, 64)  # (B, 2, 2, 4, 4, 64)
        contiguous = windows.transpose(2, 3).contiguous()  # (B, 2, 4, 2, 4, 64)
        del attn_output, attention_output, attention_windows, windows
        windows = contiguous.view(-1, 8, 8, 64)  # (B, 8, 8, 64)
        hidden_states_2 = windows.roll([2, 2], [1, 2])
        del contiguous, windows
        attention_windows = hidden_states_2.view(batch, 64, 64)  # (B, 64, 64)

        # drop_path (modeling_swin.py:58-60)
        if self.training:
            random_tensor = torch.rand(
                [batch, 1, 1], dtype=torch.float32, device=hidden_states.device
            )
            random_tensor = torch.floor(random_tensor + self.add_number)
            drop_path_out = attention_windows / self.add_number * random_tensor  # (B, 64, 64)

        # modeling_swin.py:567
        hidden_states = hidden_states + (drop_path_out if self.training else attention_windows)
        del hidden_states_2, attention_windows
        if self.training:
            del drop_path_out
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
        windows = input_feature.transpose(2, 3).contiguous().view(-1, 4, 4, 64)  # (4*B, 4, 4, 64)
        hidden_states_windows = windows.view(-1, 16, 64)  # (4*B, 16, 64)
        attn_output = self.attention(hidden_states_windows)
        attention_output = self.dropout(attn_output)
        attention_windows = attention_output.view(-1, 4, 4, 64)  # (4*B, 4, 4, 64)
        windows = attention_windows.view(-1, 2, 2, 4, 4, 64)  # (B, 2, 2, 4, 4, 64)
        windows = windows.transpose(2, 3).contiguous().view(-1, 8, 8, 64)  # (B, 8, 8, 64)
        attention_windows = windows.view(batch, 64, 64)  # (B, 64, 64)

        # drop_path (modeling_swin.py:58-60)
        if self.training:
            random_tensor = torch.rand(
                [batch, 1, 1], dtype=torch.float32, device=hidden_states.device
            )
            random_tensor = torch.floor(random_tensor + 0.9142857142857143)
            drop_path_out = attention_windows / 0.9142857142857143 * random_tensor  # (B, 64, 64)

        # modeling_swin.py:567-572
        hidden_states = hidden_states + (drop_path_out if self.training else attention_windows)
        hidden_states_2 = self.layernorm_after(hidden_states)
        hidden_states_2 = self.mlp(hidden_states_2)
        hidden_states = self.dropout(hidden_states_2) + hidden_states
        return hidden_states


class SwinStagePart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(
            {
                "1": SwinLayer(add_number=0.9285714285714286),
                "2": SwinLayer2(),
                "3": SwinLayer(add_number=0.9),
            },
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.blocks["3"](self.blocks["2"](self.blocks["1"](hidden_states)))
        return hidden_states


class SwinEncoderPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"2": SwinStagePart()})


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
        # swin.encoder
        hidden_states = self.swin.encoder.layers["2"](hidden_states)  # (B, 64, 64)

        # swin (modeling_swin.py:876-881)
        sequence_output = self.swin.layernorm(hidden_states)
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
