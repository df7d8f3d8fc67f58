"""Stage 2 of LlamaForCausalLM, the 3rd of 4: model to model.layers.6.input_layernorm."""

import torch
from torch import Tensor, nn

from .layers import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding


class LlamaDecoderLayerPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm()

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_llama.py:295
        input_layernorm_out: Tensor = self.input_layernorm(hidden_states)  # (B, input_ids.1, 32)
        return input_layernorm_out


class LlamaModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {**{str(i): LlamaDecoderLayer() for i in range(4, 6)}, "6": LlamaDecoderLayerPart()}
        )
        self.rotary_emb = LlamaRotaryEmbedding()


class Stage2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaModelPart()

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            hidden_states: (B, input_ids.1, 32) float32, from stage 1, made at
                modeling_llama.py:312.

        Returns:
            hidden_states: (B, input_ids.1, 32) float32, for stage 3.
            input_layernorm_out: (B, input_ids.1, 32) float32, for stage 3.
        """
        length = hidden_states.shape[1]

        # model (modeling_llama.py:377-392)
        position_ids = torch.arange(length, device=hidden_states.device)  # (input_ids.1,)
        position_ids = position_ids.unsqueeze(0)  # (1, input_ids.1)
        cos, sin = self.model.rotary_emb(position_ids)
        for index in range(4, 6):
            hidden_states = self.model.layers[str(index)](hidden_states, cos, sin)
        input_layernorm_out = self.model.layers["6"](hidden_states)
        return hidden_states, input_layernorm_out
