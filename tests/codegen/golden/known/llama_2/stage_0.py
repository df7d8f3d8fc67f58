"""Stage 0 of LlamaForCausalLM, the 1st of 4.

From model.embed_tokens to model.layers.0.self_attn.o_proj.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LlamaRotaryEmbedding(nn.Module):
    inv_freq: Tensor
    original_inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(4), persistent=False)
        self.register_buffer("original_inv_freq", torch.empty(4), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # modeling_llama.py:111-116
        with torch.no_grad():
            freqs = x.unsqueeze(2).float() * self.inv_freq.to(torch.float32)
            emb = torch.cat([freqs, freqs], -1)
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
        hidden_states = hidden_states.to(torch.float32)  # (B, 16, 32)
        variance = (hidden_states**2).mean(-1, True)  # (B, 16, 1)
        hidden_states = hidden_states * torch.rsqrt(variance + 1e-06)  # (B, 16, 32)
        return self.weight * hidden_states.to(torch.float32)


class LlamaAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 32, bias=False)
        self.k_proj = nn.Linear(32, 16, bias=False)
        self.v_proj = nn.Linear(32, 16, bias=False)
        self.o_proj = nn.Linear(32, 32, bias=False)

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # masking_utils.py:880, modeling_llama.py:121-269, sdpa_attention.py:193-206
        batch = hidden_states.shape[0]
        query_states = self.q_proj(hidden_states).view(batch, 16, -1, 8).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(batch, 16, -1, 8).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(batch, 16, -1, 8).transpose(1, 2)
        cos = cos.unsqueeze(1)  # (1, 1, 16, 8)
        sin = sin.unsqueeze(1)
        mul = query_states * cos  # (B, 4, 16, 8)
        x1 = query_states[..., :4]  # (B, 4, 16, 4)
        x2 = query_states[..., 4:]
        rotate_half_out = torch.cat([-x2, x1], -1)  # (B, 4, 16, 8)
        del query_states, x1, x2
        mul_2 = rotate_half_out * sin
        del rotate_half_out
        q_embed = mul + mul_2
        del mul, mul_2
        mul = key_states * cos  # (B, 2, 16, 8)
        x1 = key_states[..., :4]  # (B, 2, 16, 4)
        x2 = key_states[..., 4:]
        rotate_half_out = torch.cat([-x2, x1], -1)  # (B, 2, 16, 8)
        del key_states, x1, x2
        mul_2 = rotate_half_out * sin
        del rotate_half_out
        k_embed = mul + mul_2
        del mul, mul_2
        attn_output: Tensor = F.scaled_dot_product_attention(
            q_embed,
            k_embed,
            value_states,
            scale=0.3535533905932738,
            is_causal=True,
            enable_gqa=True,
        )
        attn_output = attn_output.transpose(1, 2)  # (B, 16, 4, 8)
        attn_output = attn_output.reshape(batch, 16, -1)  # (B, 16, 32)
        attn_output = self.o_proj(attn_output)
        return attn_output


class LlamaDecoderLayerPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = LlamaAttention()
        self.input_layernorm = LlamaRMSNorm()

    def forward(self, inputs_embeds: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attn_output: Tensor = self.self_attn(self.input_layernorm(inputs_embeds), cos, sin)
        return attn_output


class LlamaModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 32)
        self.layers = nn.ModuleDict({"0": LlamaDecoderLayerPart()})
        self.rotary_emb = LlamaRotaryEmbedding()


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaModelPart()

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            input_ids: (B, 16) int64, the model's kwargs["input_ids"].

        Returns:
            inputs_embeds: (B, 16, 32) float32, for stage 1.
            attn_output: (B, 16, 32) float32, for stage 1.
        """
        # model (modeling_llama.py:370-378)
        inputs_embeds = self.model.embed_tokens(input_ids)  # (B, 16, 32)
        position_ids = torch.arange(16, device=input_ids.device)  # (16,)
        position_ids = position_ids.unsqueeze(0)  # (1, 16)
        cos, sin = self.model.rotary_emb(position_ids)
        del position_ids
        attn_output = self.model.layers["0"](inputs_embeds, cos, sin)  # (B, 16, 32)
        return inputs_embeds, attn_output
