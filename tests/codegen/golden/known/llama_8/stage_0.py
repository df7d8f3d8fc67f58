"""Stage 0 of LlamaForCausalLM, the 1st of 4: model.embed_tokens to model.layers.1.mlp.down_proj."""

import torch
from torch import Tensor, nn

from .layers import LlamaDecoderLayer, LlamaRotaryEmbedding


class LlamaModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 32)
        self.layers = nn.ModuleDict({str(i): LlamaDecoderLayer() for i in range(2)})
        self.rotary_emb = LlamaRotaryEmbedding()
        self.rotary_emb.register_buffer("original_inv_freq", torch.empty(4), persistent=False)


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaModelPart()

    def forward(self, input_ids: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            input_ids: (B, input_ids.1) int64, the model's kwargs["input_ids"].

        Returns:
            inputs_embeds: (B, input_ids.1, 32) float32, for stage 1.
        """
        # modeling_llama.py:377
        length = input_ids.shape[1]

        # model (modeling_llama.py:370-392)
        inputs_embeds: Tensor = self.model.embed_tokens(input_ids)  # (B, input_ids.1, 32)
        position_ids = torch.arange(length, device=input_ids.device)  # (input_ids.1,)
        position_ids = position_ids.unsqueeze(0)  # (1, input_ids.1)
        cos, sin = self.model.rotary_emb(position_ids)
        for decoder_layer in self.model.layers.values():
            inputs_embeds = decoder_layer(inputs_embeds, cos, sin)  # (B, input_ids.1, 32)
        return inputs_embeds
