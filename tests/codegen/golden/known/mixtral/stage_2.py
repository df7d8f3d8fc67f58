"""Stage 2 of MixtralForCausalLM, the 3rd of 4: model to model.layers.3.input_layernorm."""

import torch
from torch import Tensor, nn

from .layers import MixtralDecoderLayer, MixtralRMSNorm, MixtralRotaryEmbedding


class MixtralDecoderLayerPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = MixtralRMSNorm()

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_mixtral.py:351
        input_layernorm_out: Tensor = self.input_layernorm(hidden_states)  # (B, input_ids.1, 32)
        return input_layernorm_out


class MixtralModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"2": MixtralDecoderLayer(), "3": MixtralDecoderLayerPart()})
        self.rotary_emb = MixtralRotaryEmbedding()


class Stage2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = MixtralModelPart()

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            hidden_states: (B, input_ids.1, 32) float32, from stage 1, made at
                modeling_mixtral.py:364.

        Returns:
            hidden_states: (B, input_ids.1, 32) float32, for stage 3.
            input_layernorm_out: (B, input_ids.1, 32) float32, for stage 3.
        """
        length = hidden_states.shape[1]

        # model (modeling_mixtral.py:440-456)
        position_ids = torch.arange(length, device=hidden_states.device)  # (input_ids.1,)
        position_ids = position_ids.unsqueeze(0)  # (1, input_ids.1)
        cos, sin = self.model.rotary_emb(position_ids)
        hidden_states = self.model.layers["2"](hidden_states, cos, sin)  # (B, input_ids.1, 32)
        input_layernorm_out = self.model.layers["3"](hidden_states)
        return hidden_states, input_layernorm_out
