"""What several stages of T5ForConditionalGeneration have."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def create_bidirectional_mask(q_length: int, device: torch.device) -> Tensor:
    # masking_utils.py:85-554
    q_arange = torch.arange(q_length, device=device)  # (input_ids.1,)
    q_indices = q_arange[None, None, :, None]  # (1, 1, input_ids.1, 1)
    attention_mask = q_indices >= 0
    return attention_mask.expand(1, -1, q_length, q_length)  # (1, 1, input_ids.1, input_ids.1)


class T5LayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(32))

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_t5.py:65-72
        variance = (hidden_states.to(torch.float32) ** 2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + 1e-6)
        return self.weight * hidden_states


class T5DenseActDense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wi = nn.Linear(32, 64, bias=False)
        self.wo = nn.Linear(64, 32, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_t5.py:84-93
        hidden_states = self.wi(hidden_states)
        hidden_states = self.act(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.wo(hidden_states)
        return hidden_states


class T5AttentionWithPositionBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(32, 32, bias=False)
        self.k = nn.Linear(32, 32, bias=False)
        self.v = nn.Linear(32, 32, bias=False)
        self.o = nn.Linear(32, 32, bias=False)

    def forward(self, hidden_states: Tensor, mask: Tensor, position_bias: Tensor) -> Tensor:
        # modeling_t5.py:304-367, sdpa_attention.py:87-206
        shape = hidden_states.shape[:2]
        query_states = self.q(hidden_states).view(*shape, -1, 8).transpose(1, 2)
        key_states = self.k(hidden_states).view(*shape, -1, 8).transpose(1, 2)
        value_states = self.v(hidden_states).view(*shape, -1, 8).transpose(1, 2)
        position_bias_mask = torch.where(mask, position_bias, torch.finfo(torch.float32).min)
        position_bias_mask = position_bias_mask.contiguous()
        attn_output: Tensor = F.scaled_dot_product_attention(
            query_states,
            key_states,
            value_states,
            attn_mask=position_bias_mask,
            dropout_p=0.1 if self.training else 0.0,
            scale=1.0,
        )
        del position_bias_mask
        attn_output = attn_output.transpose(1, 2).contiguous()
        attn_output = attn_output.reshape(*shape, -1)
        attn_output = self.o(attn_output)
        return attn_output


def create_causal_mask(size: int, device: torch.device) -> Tensor:
    # masking_utils.py:76-546
    q_arange = torch.arange(size, device=device)  # (labels.1,)
    kv_arange = torch.arange(size, device=device)
    q_indices = q_arange[None, None, :, None]  # (1, 1, labels.1, 1)
    kv_indices = kv_arange[None, None, None]  # (1, 1, 1, labels.1)
    return kv_indices <= q_indices  # (1, 1, labels.1, labels.1)


class T5AttentionWithKeyValueStates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(32, 32, bias=False)
        self.k = nn.Linear(32, 32, bias=False)
        self.v = nn.Linear(32, 32, bias=False)
        self.o = nn.Linear(32, 32, bias=False)

    def forward(self, hidden_states: Tensor, key_value_states: Tensor) -> Tensor:
        # modeling_t5.py:304-367, sdpa_attention.py:193-206
        shape = hidden_states.shape[:2]
        shape_2 = key_value_states.shape[:2]
        query_states = self.q(hidden_states).view(*shape, -1, 8).transpose(1, 2)
        key_states = self.k(key_value_states).view(*shape_2, -1, 8).transpose(1, 2)
        value_states = self.v(key_value_states).view(*shape_2, -1, 8).transpose(1, 2)
        attn_output: Tensor = F.scaled_dot_product_attention(
            query_states,
            key_states,
            value_states,
            dropout_p=0.1 if self.training else 0.0,
            scale=1.0,
        )
        del value_states
        attn_output = attn_output.transpose(1, 2).contiguous()  # (B, labels.1, 4, 8)
        attn_output = attn_output.reshape(*shape, -1)  # (B, labels.1, 32)
        attn_output = self.o(attn_output)
        return attn_output


class T5LayerFF(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.DenseReluDense = T5DenseActDense()
        self.layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_t5.py:138-140
        forwarded_states = self.layer_norm(hidden_states)
        forwarded_states = self.DenseReluDense(forwarded_states)
        hidden_states = hidden_states + self.dropout(forwarded_states)
        return hidden_states


class T5LayerSelfAttentionWithPositionBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.SelfAttention = T5AttentionWithPositionBias()
        self.layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(0.1)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, position_bias: Tensor
    ) -> Tensor:
        # modeling_t5.py:392-400
        normed_hidden_states = self.layer_norm(hidden_states)
        attention_output: Tensor = self.SelfAttention(
            normed_hidden_states, attention_mask, position_bias
        )
        attention_output = hidden_states + self.dropout(attention_output)
        return attention_output


class T5LayerCrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.EncDecAttention = T5AttentionWithKeyValueStates()
        self.layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_states: Tensor, key_value_states: Tensor) -> Tensor:
        # modeling_t5.py:422-431
        normed_hidden_states = self.layer_norm(hidden_states)  # (B, labels.1, 32)
        attention_output = self.EncDecAttention(normed_hidden_states, key_value_states)
        layer_output: Tensor = hidden_states + self.dropout(attention_output)
        return layer_output


class T5BlockWithPositionBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleDict({"0": T5LayerSelfAttentionWithPositionBias(), "1": T5LayerFF()})

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, position_bias: Tensor
    ) -> Tensor:
        # modeling_t5.py:459-498
        hidden_states = self.layer["0"](hidden_states, attention_mask, position_bias)
        hidden_states = self.layer["1"](hidden_states)
        return hidden_states


class T5BlockWithEncoderHiddenStates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleDict(
            {
                "0": T5LayerSelfAttentionWithPositionBias(),
                "1": T5LayerCrossAttention(),
                "2": T5LayerFF(),
            },
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_bias: Tensor,
        encoder_hidden_states: Tensor,
    ) -> Tensor:
        # modeling_t5.py:459-498
        hidden_states = self.layer["0"](hidden_states, attention_mask, position_bias)
        hidden_states = self.layer["1"](hidden_states, encoder_hidden_states)
        hidden_states = self.layer["2"](hidden_states)
        return hidden_states
