"""Stage 0 of MixtralForCausalLM, the 1st of 4.

From model.embed_tokens to model.layers.0.mlp.experts.act_fn.
"""

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers torch.ops.transformers)
from torch import Tensor, nn

from .layers import MixtralAttention, MixtralRMSNorm, MixtralTopKRouter


class MixtralRotaryEmbeddingWithOriginalInvFreq(nn.Module):
    inv_freq: Tensor
    original_inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(4), persistent=False)
        self.register_buffer("original_inv_freq", torch.empty(4), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # modeling_mixtral.py:192-197
        with torch.no_grad():
            freqs = x.unsqueeze(2).float() * self.inv_freq.to(torch.float32)
            emb = torch.cat([freqs, freqs], -1)
            cos = torch.cos(emb)
            sin = torch.sin(emb)
            cos = cos.to(torch.float32)
            sin = sin.to(torch.float32)
        return cos, sin


class MixtralExperts2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(4, 128, 32))
        self.down_proj = nn.Parameter(torch.empty(4, 32, 64))

    def forward(self, top_k_weights: Tensor, top_k_index: Tensor, hidden_states: Tensor) -> Tensor:
        # masking_utils.py:880, moe.py:383-579, activations.py:103
        batch = top_k_weights.shape[0] // 16
        sample_weights = top_k_weights.reshape(-1)  # (32*B,)
        expert_ids = top_k_index.reshape(-1)
        expert_ids_g, perm = expert_ids.sort()
        selected_hidden_states_g = hidden_states[perm // 2]  # (32*B, 32)
        sample_weights_g = sample_weights[perm]  # (32*B,)
        histc_input = expert_ids_g.float()
        del expert_ids_g
        tokens_per_expert = torch.histc(histc_input, 4, 0, 3)  # (4,)
        del histc_input
        offsets = tokens_per_expert.cumsum(0, dtype=torch.int32)
        del tokens_per_expert
        out = self.gate_up_proj.transpose(-2, -1)  # (4, 32, 128)
        selected_hidden_states_g = selected_hidden_states_g.to(torch.float32)  # (32*B, 32)
        grouped_mm_out = torch.ops.transformers.grouped_mm_fallback.default(
            selected_hidden_states_g, out, offsets
        )
        gate, up = grouped_mm_out.chunk(2, -1)
        act_fn_out = F.silu(gate)  # (32*B, 64)
        default_apply_gate_out = act_fn_out * up
        out = self.down_proj.transpose(-2, -1)  # (4, 64, 32)
        default_apply_gate_out = default_apply_gate_out.to(torch.float32)  # (32*B, 64)
        grouped_mm_out = torch.ops.transformers.grouped_mm_fallback.default(
            default_apply_gate_out, out, offsets
        )
        del offsets
        weighted_out = grouped_mm_out * sample_weights_g.unsqueeze(-1)
        inv_perm = torch.empty_like(perm)  # (32*B,)
        inv_perm.index_put_([perm], torch.arange(32 * batch, device=top_k_weights.device))
        weighted_out = weighted_out[inv_perm]  # (32*B, 32)
        mul = 16 * batch
        view = weighted_out.view(mul, 2, 32)  # (16*B, 2, 32)
        final_hidden_states: Tensor = view.sum(1)  # (16*B, 32)
        final_hidden_states = final_hidden_states.to(torch.float32)
        return final_hidden_states


class MixtralSparseMoeBlock2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = MixtralTopKRouter()
        self.experts = MixtralExperts2()

    def forward(self, post_attention_layernorm_out: Tensor) -> Tensor:
        # masking_utils.py:880, modeling_mixtral.py:125-128
        batch = post_attention_layernorm_out.shape[0]
        hidden_states: Tensor = post_attention_layernorm_out.view(-1, 32)  # (16*B, 32)
        router_indices, router_top_value = self.gate(hidden_states)
        grouped_mm_experts_forward_out = self.experts(
            router_top_value, router_indices, hidden_states
        )
        hidden_states = grouped_mm_experts_forward_out.reshape(batch, 16, 32)  # (B, 16, 32)
        return hidden_states


class MixtralDecoderLayer2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = MixtralAttention()
        self.input_layernorm = MixtralRMSNorm()
        self.post_attention_layernorm = MixtralRMSNorm()
        self.mlp = MixtralSparseMoeBlock2()

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # modeling_mixtral.py:360-364
        attn_output = self.self_attn(self.input_layernorm(hidden_states), cos, sin)  # (B, 16, 32)
        hidden_states = hidden_states + attn_output
        del attn_output
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states


class MixtralModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 32)
        self.layers = nn.ModuleDict({"0": MixtralDecoderLayer2()})
        self.rotary_emb = MixtralRotaryEmbeddingWithOriginalInvFreq()


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = MixtralModelPart()

    def forward(self, input_ids: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            input_ids: (B, 16) int64, the model's kwargs["input_ids"].

        Returns:
            hidden_states: (B, 16, 32) float32, for stage 1.
        """
        # model (modeling_mixtral.py:436-441)
        inputs_embeds = self.model.embed_tokens(input_ids)  # (B, 16, 32)
        position_ids = torch.arange(16, device=input_ids.device)  # (16,)
        position_ids = position_ids.unsqueeze(0)  # (1, 16)
        cos, sin = self.model.rotary_emb(position_ids)
        hidden_states: Tensor = self.model.layers["0"](inputs_embeds, cos, sin)  # (B, 16, 32)
        return hidden_states
