"""What several stages of MixtralForCausalLM have."""

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers torch.ops.transformers)
from torch import Tensor, nn


class MixtralRotaryEmbedding(nn.Module):
    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(4), persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        # modeling_mixtral.py:192-197
        with torch.no_grad():
            freqs = position_ids[..., None].float() * self.inv_freq.to(torch.float32)
            emb = torch.cat([freqs, freqs], dim=-1)  # (1, input_ids.1, 8)
            cos = torch.cos(emb)
            sin = torch.sin(emb)
            cos = cos.to(torch.float32)
            sin = sin.to(torch.float32)
        return cos, sin


class MixtralRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(32))

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_mixtral.py:144-147
        hidden_states = hidden_states.to(torch.float32)  # (B, input_ids.1, 32)
        variance = (hidden_states**2).mean(-1, keepdim=True)  # (B, input_ids.1, 1)
        hidden_states = hidden_states * torch.rsqrt(variance + 1e-5)  # (B, input_ids.1, 32)
        return self.weight * hidden_states.to(torch.float32)


def rotate_half(x: Tensor) -> Tensor:
    # modeling_mixtral.py:202-204
    x1 = x[..., :4]
    x2 = x[..., 4:]
    return torch.cat([-x2, x1], dim=-1)


def sdpa_attention_forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    # sdpa_attention.py:193-206
    attn_output = F.scaled_dot_product_attention(
        query, key, value, scale=8**-0.5, is_causal=True, enable_gqa=True
    )
    return attn_output.transpose(1, 2).contiguous()  # (B, input_ids.1, 4, 8)


class MixtralTopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 32))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        # modeling_mixtral.py:105-108
        router_logits = F.linear(hidden_states, self.weight)  # (input_ids.1 * B, 4)
        router_probs = F.softmax(router_logits.float(), dim=-1)
        router_top_value, router_indices = router_probs.topk(2)
        router_top_value /= router_top_value.sum(-1, keepdim=True)
        return router_indices, router_top_value


class MixtralExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(4, 128, 32))
        self.down_proj = nn.Parameter(torch.empty(4, 32, 64))

    def forward(self, top_k_weights: Tensor, top_k_index: Tensor, hidden_states: Tensor) -> Tensor:
        # moe.py:383-579, activations.py:103
        sample_weights = top_k_weights.reshape(-1)  # (2 * input_ids.1 * B,)
        expert_ids = top_k_index.reshape(-1)
        expert_ids_g, perm = expert_ids.sort()
        selected_hidden_states_g = hidden_states[perm // 2]  # (2 * input_ids.1 * B, 32)
        sample_weights_g = sample_weights[perm]  # (2 * input_ids.1 * B,)
        histc_input = expert_ids_g.float()
        del expert_ids_g
        tokens_per_expert = torch.histc(histc_input, 4, max=3)  # (4,)
        del histc_input
        offsets = tokens_per_expert.cumsum(0, dtype=torch.int32)
        del tokens_per_expert
        out = self.gate_up_proj.transpose(-2, -1)  # (4, 32, 128)
        selected_hidden_states_g = selected_hidden_states_g.to(torch.float32)
        proj_out = torch.ops.transformers.grouped_mm_fallback.default(
            selected_hidden_states_g, out, offs=offsets
        )
        gate, up = proj_out.chunk(2, dim=-1)
        act_fn_out = F.silu(gate)  # (2 * input_ids.1 * B, 64)
        proj_out = act_fn_out * up
        out = self.down_proj.transpose(-2, -1)  # (4, 64, 32)
        proj_out = proj_out.to(torch.float32)  # (2 * input_ids.1 * B, 64)
        proj_out = torch.ops.transformers.grouped_mm_fallback.default(proj_out, out, offs=offsets)
        del offsets
        weighted_out = proj_out * sample_weights_g.unsqueeze(-1)
        inv_perm = torch.empty_like(perm)  # (2 * input_ids.1 * B,)
        inv_perm[perm] = torch.arange(perm.shape[0], device=top_k_weights.device)
        weighted_out = weighted_out[inv_perm]  # (2 * input_ids.1 * B, 32)
        final_hidden_states: Tensor = weighted_out.view(top_k_weights.shape[0], 2, 32).sum(1)
        final_hidden_states = final_hidden_states.to(torch.float32)
        return final_hidden_states


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    # modeling_mixtral.py:226-229
    cos = cos.unsqueeze(1)  # (1, 1, input_ids.1, 8)
    sin = sin.unsqueeze(1)
    q_embed = q * cos + rotate_half(q) * sin  # (B, 4, input_ids.1, 8)
    k_embed = k * cos + rotate_half(k) * sin  # (B, 2, input_ids.1, 8)
    return q_embed, k_embed


class MixtralSparseMoeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = MixtralTopKRouter()
        self.experts = MixtralExperts()

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_mixtral.py:125-128
        shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, 32)  # (input_ids.1 * B, 32)
        top_k_index, router_top_value = self.gate(hidden_states)
        hidden_states = self.experts(router_top_value, top_k_index, hidden_states)
        hidden_states = hidden_states.reshape(*shape)  # (B, input_ids.1, 32)
        return hidden_states


class MixtralAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 32, bias=False)
        self.k_proj = nn.Linear(32, 16, bias=False)
        self.v_proj = nn.Linear(32, 16, bias=False)
        self.o_proj = nn.Linear(32, 32, bias=False)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # modeling_mixtral.py:299-326
        shape = hidden_states.shape[:2]
        query_states = self.q_proj(hidden_states).view(*shape, -1, 8).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(*shape, -1, 8).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(*shape, -1, 8).transpose(1, 2)
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        attn_output: Tensor = sdpa_attention_forward(query_states, key_states, value_states)
        attn_output = attn_output.reshape(*shape, -1)  # (B, input_ids.1, 32)
        attn_output = self.o_proj(attn_output)
        return attn_output


class MixtralDecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = MixtralAttention()
        self.mlp = MixtralSparseMoeBlock()
        self.input_layernorm = MixtralRMSNorm()
        self.post_attention_layernorm = MixtralRMSNorm()

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # modeling_mixtral.py:351-364
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), cos, sin
        )
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states
