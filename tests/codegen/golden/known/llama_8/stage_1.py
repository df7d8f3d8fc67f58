"""Stage 1 of LlamaForCausalLM, the 2nd of 4: model to model.layers.3.mlp.down_proj."""

import torch
from torch import Tensor, nn

from .layers import LlamaDecoderLayer, LlamaRotaryEmbedding


class LlamaModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): LlamaDecoderLayer() for i in range(2, 4)})
        self.rotary_emb = LlamaRotaryEmbedding()


class Stage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaModelPart()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            hidden_states: (B, input_ids.1, 32) float32, from stage 0, made at
                modeling_llama.py:312.

        Returns:
            hidden_states: (B, input_ids.1, 32) float32, for stage 2.
        """
        length = hidden_states.shape[1]

        # model (modeling_llama.py:377-392)
        position_ids = torch.arange(length, device=hidden_states.device)  # (input_ids.1,)
        position_ids = position_ids.unsqueeze(0)  # (1, input_ids.1)
        cos, sin = self.model.rotary_emb(position_ids)
        for decoder_layer in self.model.layers.values():
            hidden_states = decoder_layer(hidden_states, cos, sin)  # (B, input_ids.1, 32)
        return hidden_states
