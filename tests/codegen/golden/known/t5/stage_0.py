"""Stage 0 of T5ForConditionalGeneration, the 1st of 4.

From encoder.embed_tokens to decoder.block.0.layer.0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import (
    T5BlockWithPositionBias,
    T5LayerFF,
    T5LayerNorm,
    create_bidirectional_mask,
    create_causal_mask,
)


def _relative_position_bucket(relative_position: Tensor) -> Tensor:
    # modeling_t5.py:241-261
    relative_buckets = (relative_position > 0).to(torch.int64) * 16  # (input_ids.1, input_ids.1)
    relative_position = torch.abs(relative_position)
    is_small = relative_position < 8
    to = (torch.log(relative_position.float() / 8) / 2.772588722239781 * 8).to(torch.int64)
    relative_position_if_large = to + 8
    relative_position_if_large = relative_position_if_large.min(
        torch.full_like(relative_position_if_large, 15)
    )
    relative_buckets += torch.where(is_small, relative_position, relative_position_if_large)
    return relative_buckets


def _relative_position_bucket_2(relative_position: Tensor) -> Tensor:
    # modeling_t5.py:244-261
    relative_position = -relative_position.min(torch.zeros_like(relative_position))
    is_small = relative_position < 16
    mul = torch.log(relative_position.float() / 16) / 2.0794415416798357 * 16
    relative_position_if_large = mul.to(torch.int64) + 16
    relative_position_if_large = relative_position_if_large.min(
        torch.full_like(relative_position_if_large, 31)
    )
    return torch.where(is_small, relative_position, relative_position_if_large)


class T5AttentionWithRelativeAttentionBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(32, 32, bias=False)
        self.k = nn.Linear(32, 32, bias=False)
        self.v = nn.Linear(32, 32, bias=False)
        self.o = nn.Linear(32, 32, bias=False)
        self.relative_attention_bias = nn.Embedding(32, 4)

    def forward(self, hidden_states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        # modeling_t5.py:268-367, sdpa_attention.py:87-206
        length = hidden_states.shape[1]
        shape = hidden_states.shape[:2]
        query_states = self.q(hidden_states).view(*shape, -1, 8).transpose(1, 2)
        key_states = self.k(hidden_states).view(*shape, -1, 8).transpose(1, 2)
        value_states = self.v(hidden_states).view(*shape, -1, 8).transpose(1, 2)
        context_position = torch.arange(length, dtype=torch.int64, device=hidden_states.device)[
            :, None
        ]
        memory_position = torch.arange(length, dtype=torch.int64, device=hidden_states.device)[None]
        relative_position = memory_position - context_position  # (input_ids.1, input_ids.1)
        relative_position_bucket = _relative_position_bucket(relative_position)
        values = self.relative_attention_bias(relative_position_bucket)
        SelfAttention_out = values.permute(2, 0, 1).unsqueeze(0)  # (1, 4, input_ids.1, input_ids.1)
        position_bias_mask = torch.where(mask, SelfAttention_out, torch.finfo(torch.float32).min)
        position_bias_mask = position_bias_mask.contiguous()
        attn_output = F.scaled_dot_product_attention(
            query_states,
            key_states,
            value_states,
            attn_mask=position_bias_mask,
            dropout_p=0.1 if self.training else 0.0,
            scale=1.0,
        )
        attn_output = attn_output.transpose(1, 2).contiguous()  # (B, input_ids.1, 4, 8)
        attn_output = attn_output.reshape(*shape, -1)  # (B, input_ids.1, 32)
        attn_output = self.o(attn_output)
        return SelfAttention_out, attn_output


class T5AttentionWithRelativeAttentionBias2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(32, 32, bias=False)
        self.k = nn.Linear(32, 32, bias=False)
        self.v = nn.Linear(32, 32, bias=False)
        self.o = nn.Linear(32, 32, bias=False)
        self.relative_attention_bias = nn.Embedding(32, 4)

    def forward(self, hidden_states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        # modeling_t5.py:268-367, sdpa_attention.py:87-206
        length = hidden_states.shape[1]
        shape = hidden_states.shape[:2]
        query_states = self.q(hidden_states).view(*shape, -1, 8).transpose(1, 2)
        key_states = self.k(hidden_states).view(*shape, -1, 8).transpose(1, 2)
        value_states = self.v(hidden_states).view(*shape, -1, 8).transpose(1, 2)
        context_position = torch.arange(length, dtype=torch.int64, device=hidden_states.device)[
            :, None
        ]
        memory_position = torch.arange(length, dtype=torch.int64, device=hidden_states.device)[None]
        relative_position = memory_position - context_position  # (labels.1, labels.1)
        del context_position, memory_position
        relative_position_bucket = _relative_position_bucket_2(relative_position)
        del relative_position
        values = self.relative_attention_bias(relative_position_bucket)  # (labels.1, labels.1, 4)
        SelfAttention_out = values.permute(2, 0, 1).unsqueeze(0)  # (1, 4, labels.1, labels.1)
        position_bias_mask = torch.where(mask, SelfAttention_out, torch.finfo(torch.float32).min)
        position_bias_mask = position_bias_mask.contiguous()
        attn_output = F.scaled_dot_product_attention(
            query_states,
            key_states,
            value_states,
            attn_mask=position_bias_mask,
            dropout_p=0.1 if self.training else 0.0,
            scale=1.0,
        )
        del position_bias_mask
        attn_output = attn_output.transpose(1, 2).contiguous()  # (B, labels.1, 4, 8)
        attn_output = attn_output.reshape(*shape, -1)  # (B, labels.1, 32)
        attn_output = self.o(attn_output)
        return SelfAttention_out, attn_output


class T5LayerSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.SelfAttention = T5AttentionWithRelativeAttentionBias()
        self.layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        # modeling_t5.py:392-400
        normed_hidden_states = self.layer_norm(hidden_states)  # (B, input_ids.1, 32)
        SelfAttention_out, attention_output = self.SelfAttention(
            normed_hidden_states, attention_mask
        )
        attention_output = hidden_states + self.dropout(attention_output)
        return SelfAttention_out, attention_output


class T5LayerSelfAttention2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.SelfAttention = T5AttentionWithRelativeAttentionBias2()
        self.layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        # modeling_t5.py:392-400
        normed_hidden_states = self.layer_norm(hidden_states)  # (B, labels.1, 32)
        SelfAttention_out, attention_output = self.SelfAttention(
            normed_hidden_states, attention_mask
        )
        attention_output = hidden_states + self.dropout(attention_output)
        return SelfAttention_out, attention_output


class T5Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleDict({"0": T5LayerSelfAttention(), "1": T5LayerFF()})

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        # modeling_t5.py:459-498
        SelfAttention_out, hidden_states = self.layer["0"](hidden_states, attention_mask)
        hidden_states = self.layer["1"](hidden_states)  # (B, input_ids.1, 32)
        return SelfAttention_out, hidden_states


class T5BlockPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleDict({"0": T5LayerSelfAttention2()})

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        # modeling_t5.py:459
        SelfAttention_out, hidden_states = self.layer["0"](hidden_states, attention_mask)
        return SelfAttention_out, hidden_states


class T5StackPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 32)
        self.block = nn.ModuleDict({"0": T5Block(), "1": T5BlockWithPositionBias()})
        self.dropout = nn.Dropout(0.1)


class T5StackPart2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 32)
        self.block = nn.ModuleDict({"0": T5BlockPart()})
        self.dropout = nn.Dropout(0.1)


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = T5StackPart()
        self.decoder = T5StackPart2()
        self.decoder.embed_tokens.weight = self.encoder.embed_tokens.weight  # shared

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            input_ids: (B, input_ids.1) int64, the model's kwargs["input_ids"].
            labels: (B, labels.1) int64, the model's kwargs["labels"].

        Returns:
            SelfAttention_out: (1, 4, input_ids.1, input_ids.1) float32, for stage 1.
            hidden_states: (B, input_ids.1, 32) float32, for stage 1.
            unsqueeze_1: (1, 4, labels.1, labels.1) float32, for stage 2 and stage 3.
            attention_output: (B, labels.1, 32) float32, for stage 1.
        """
        # masking_utils.py:848, modeling_t5.py:628
        batch = input_ids.shape[0]
        q_length = input_ids.shape[1]
        length = labels.shape[1]

        # encoder (modeling_t5.py:678-728)
        inputs_embeds = self.encoder.embed_tokens(input_ids)  # (B, input_ids.1, 32)
        attention_mask = create_bidirectional_mask(q_length, input_ids.device)
        hidden_states = self.encoder.dropout(inputs_embeds)  # (B, input_ids.1, 32)
        del inputs_embeds
        SelfAttention_out, hidden_states = self.encoder.block["0"](hidden_states, attention_mask)
        hidden_states = self.encoder.block["1"](hidden_states, attention_mask, SelfAttention_out)

        # modeling_t5.py:628-635
        shifted_input_ids = labels.new_zeros([batch, length])  # (B, labels.1)
        shifted_input_ids[..., 1:] = labels[..., :-1].clone()
        shifted_input_ids[..., 0] = 0
        shifted_input_ids.masked_fill_(shifted_input_ids == -100, 0)

        # decoder (modeling_t5.py:678-728)
        inputs_embeds = self.decoder.embed_tokens(shifted_input_ids)  # (B, labels.1, 32)
        attention_mask = create_causal_mask(length, input_ids.device)  # (1, 1, labels.1, labels.1)
        dropout_out = self.decoder.dropout(inputs_embeds)  # (B, labels.1, 32)
        del inputs_embeds
        unsqueeze_1, attention_output = self.decoder.block["0"](dropout_out, attention_mask)
        return SelfAttention_out, hidden_states, unsqueeze_1, attention_output
