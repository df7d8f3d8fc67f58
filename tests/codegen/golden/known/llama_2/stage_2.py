"""Stage 2 of LlamaForCausalLM, the 3rd of 4: model to model.layers.1.post_attention_layernorm."""

import torch
from torch import Tensor, nn

from .layers import LlamaAttention, LlamaRMSNorm, LlamaRotaryEmbedding


class LlamaDecoderLayerPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = LlamaAttention()
        self.post_attention_layernorm = LlamaRMSNorm()

    def forward(
        self, residual: Tensor, cos: Tensor, sin: Tensor, input_layernorm_out: Tensor
    ) -> tuple[Tensor, Tensor]:
        # modeling_llama.py:297-310
        residual = residual + self.self_attn(input_layernorm_out, cos, sin)  # (B, input_ids.1, 32)
        post_attention_layernorm_out = self.post_attention_layernorm(residual)
        return residual, post_attention_layernorm_out


class LlamaModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"1": LlamaDecoderLayerPart()})
        self.rotary_emb = LlamaRotaryEmbedding()


class Stage2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaModelPart()

    def forward(self, input_layernorm_out: Tensor, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            input_layernorm_out: (B, input_ids.1, 32) float32, from stage 1, made at
                modeling_llama.py:66.
            hidden_states: (B, input_ids.1, 32) float32, from stage 1, made at
                modeling_llama.py:312.

        Returns:
            residual: (B, input_ids.1, 32) float32, for stage 3.
            post_attention_layernorm_out: (B, input_ids.1, 32) float32, for stage 3.
        """
        # model (modeling_llama.py:377-392)
        position_ids = torch.arange(input_layernorm_out.shape[1], device=input_layernorm_out.device)
        position_ids = position_ids.unsqueeze(0)  # (1, input_ids.1)
        cos, sin = self.model.rotary_emb(position_ids)
        del position_ids
        residual, post_attention_layernorm_out = self.model.layers["1"](
            hidden_states, cos, sin, input_layernorm_out
        )
        return residual, post_attention_layernorm_out
