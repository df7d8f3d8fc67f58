"""What several stages of LlamaForCausalLM have."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LlamaRotaryEmbedding(nn.Module):
    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(4), persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        # modeling_llama.py:111-116
        with torch.no_grad():
            freqs = position_ids[..., None].float() * self.inv_freq.to(torch.float32)
            emb = torch.cat([freqs, freqs], dim=-1)  # (1, input_ids.1, 8)
            cos = torch.cos(emb)
            sin = torch.sin(emb)
            cos = cos.to(torch.float32)
            sin = sin.to(torch.float32)
        return cos, sin


class LlamaRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(32))

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_llama.py:63-66
        hidden_states = hidden_states.to(torch.float32)  # (B, input_ids.1, 32)
        hidden_states = hidden_states * torch.rsqrt(
            (hidden_states**2).mean(-1, keepdim=True) + 1e-6
        )
        return self.weight * hidden_states.to(torch.float32)


def rotate_half(x: Tensor) -> Tensor:
    # modeling_llama.py:121-123
    x1 = x[..., :4]
    x2 = x[..., 4:]
    return torch.cat([-x2, x1], dim=-1)


def sdpa_attention_forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    # sdpa_attention.py:193-206
    attn_output = F.scaled_dot_product_attention(
        query, key, value, scale=8**-0.5, is_causal=True, enable_gqa=True
    )
    return attn_output.transpose(1, 2).contiguous()  # (B, input_ids.1, 4, 8)


class LlamaMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(32, 64, bias=False)
        self.up_proj = nn.Linear(32, 64, bias=False)
        self.down_proj = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # modeling_llama.py:164
        down_proj: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down_proj


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    # modeling_llama.py:145-148
    cos = cos.unsqueeze(1)  # (1, 1, input_ids.1, 8)
    sin = sin.unsqueeze(1)
    q_embed = q * cos + rotate_half(q) * sin  # (B, 4, input_ids.1, 8)
    k_embed = k * cos + rotate_half(k) * sin  # (B, 2, input_ids.1, 8)
    return q_embed, k_embed


class LlamaAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 32, bias=False)
        self.k_proj = nn.Linear(32, 16, bias=False)
        self.v_proj = nn.Linear(32, 16, bias=False)
        self.o_proj = nn.Linear(32, 32, bias=False)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # modeling_llama.py:243-269
        shape = hidden_states.shape[:2]
        query_states = self.q_proj(hidden_states).view(*shape, -1, 8).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(*shape, -1, 8).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(*shape, -1, 8).transpose(1, 2)
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        attn_output: Tensor = sdpa_attention_forward(query_states, key_states, value_states)
        attn_output = attn_output.reshape(*shape, -1)  # (B, input_ids.1, 32)
        attn_output = self.o_proj(attn_output)
        return attn_output


class LlamaDecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = LlamaAttention()
        self.mlp = LlamaMLP()
        self.input_layernorm = LlamaRMSNorm()
        self.post_attention_layernorm = LlamaRMSNorm()

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # modeling_llama.py:295-312
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), cos, sin
        )
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states
