"""Stage 0 of LlamaForCausalLM, the 1st of 4.

From model.embed_tokens to model.layers.0.self_attn.o_proj.
"""

import torch
from torch import Tensor, nn

from .layers import LlamaAttention, LlamaRMSNorm, LlamaRotaryEmbedding


class LlamaDecoderLayerPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = LlamaAttention()
        self.input_layernorm = LlamaRMSNorm()

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # modeling_llama.py:295-297
        hidden_states = self.input_layernorm(hidden_states)  # (B, input_ids.1, 32)
        hidden_states = self.self_attn(hidden_states, cos, sin)
        return hidden_states


class LlamaModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 32)
        self.layers = nn.ModuleDict({"0": LlamaDecoderLayerPart()})
        self.rotary_emb = LlamaRotaryEmbedding()
        self.rotary_emb.register_buffer("original_inv_freq", torch.empty(4), persistent=False)


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaModelPart()

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            input_ids: (B, input_ids.1) int64, the model's kwargs["input_ids"].

        Returns:
            inputs_embeds: (B, input_ids.1, 32) float32, for stage 1.
            attn_output: (B, input_ids.1, 32) float32, for stage 1.
        """
        # modeling_llama.py:377
        length = input_ids.shape[1]

        # model (modeling_llama.py:370-392)
        inputs_embeds = self.model.embed_tokens(input_ids)  # (B, input_ids.1, 32)
        position_ids = torch.arange(length, device=input_ids.device).unsqueeze(0)
        cos, sin = self.model.rotary_emb(position_ids)
        del position_ids
        attn_output = self.model.layers["0"](inputs_embeds, cos, sin)  # (B, input_ids.1, 32)
        return inputs_embeds, attn_output
