"""Stage 1 of MixtralForCausalLM, the 2nd of 4: model to model.layers.1.mlp.experts.act_fn."""

import torch
from torch import Tensor, nn

from .layers import MixtralDecoderLayer, MixtralRotaryEmbedding


class MixtralModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"1": MixtralDecoderLayer()})
        self.rotary_emb = MixtralRotaryEmbedding()


class Stage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = MixtralModelPart()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            hidden_states: (B, input_ids.1, 32) float32, from stage 0, made at
                modeling_mixtral.py:364.

        Returns:
            hidden_states: (B, input_ids.1, 32) float32, for stage 2.
        """
        length = hidden_states.shape[1]

        # model (modeling_mixtral.py:440-456)
        position_ids = torch.arange(length, device=hidden_states.device)  # (input_ids.1,)
        position_ids = position_ids.unsqueeze(0)  # (1, input_ids.1)
        cos, sin = self.model.rotary_emb(position_ids)
        hidden_states = self.model.layers["1"](hidden_states, cos, sin)  # (B, input_ids.1, 32)
        return hidden_states
