"""Stage 0 of MixtralForCausalLM, the 1st of 4.

From model.embed_tokens to model.layers.0.mlp.experts.act_fn.
"""

import torch
from torch import Tensor, nn

from .layers import MixtralDecoderLayer, MixtralRotaryEmbedding


class MixtralModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 32)
        self.layers = nn.ModuleDict({"0": MixtralDecoderLayer()})
        self.rotary_emb = MixtralRotaryEmbedding()
        self.rotary_emb.register_buffer("original_inv_freq", torch.empty(4), persistent=False)


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = MixtralModelPart()

    def forward(self, input_ids: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            input_ids: (B, input_ids.1) int64, the model's kwargs["input_ids"].

        Returns:
            hidden_states: (B, input_ids.1, 32) float32, for stage 1.
        """
        # modeling_mixtral.py:440
        length = input_ids.shape[1]

        # model (modeling_mixtral.py:436-456)
        inputs_embeds = self.model.embed_tokens(input_ids)  # (B, input_ids.1, 32)
        position_ids = torch.arange(length, device=input_ids.device)  # (input_ids.1,)
        position_ids = position_ids.unsqueeze(0)  # (1, input_ids.1)
        cos, sin = self.model.rotary_emb(position_ids)
        hidden_states: Tensor = self.model.layers["0"](inputs_embeds, cos, sin)
        return hidden_states
