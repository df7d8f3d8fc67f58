"""Stage 3 of LlamaForCausalLM, the 4th of 4: model to lm_head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)


class LlamaDecoderLayerPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = LlamaAttention()
        self.mlp = LlamaMLP()
        self.post_attention_layernorm = LlamaRMSNorm()

    def forward(
        self, residual: Tensor, cos: Tensor, sin: Tensor, input_layernorm_out: Tensor
    ) -> Tensor:
        # modeling_llama.py:297-312
        hidden_states: Tensor = residual + self.self_attn(input_layernorm_out, cos, sin)
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states


class LlamaModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"6": LlamaDecoderLayerPart(), "7": LlamaDecoderLayer()})
        self.norm = LlamaRMSNorm()
        self.rotary_emb = LlamaRotaryEmbedding()


class Stage3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaModelPart()
        self.lm_head = nn.Linear(32, 64, bias=False)

    def forward(self, input_layernorm_out: Tensor, hidden_states: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            input_layernorm_out: (B, input_ids.1, 32) float32, from stage 2, made at
                modeling_llama.py:66.
            hidden_states: (B, input_ids.1, 32) float32, from stage 2, made at
                modeling_llama.py:312.

        Returns:
            logits: (B, input_ids.1, 64) float32, for the caller.
        """
        # model (modeling_llama.py:377-402)
        position_ids = torch.arange(input_layernorm_out.shape[1], device=input_layernorm_out.device)
        position_ids = position_ids.unsqueeze(0)  # (1, input_ids.1)
        cos, sin = self.model.rotary_emb(position_ids)
        hidden_states = self.model.layers["6"](hidden_states, cos, sin, input_layernorm_out)
        hidden_states = self.model.layers["7"](hidden_states, cos, sin)
        hidden_states = self.model.norm(hidden_states)

        # modeling_llama.py:468
        logits: Tensor = self.lm_head(hidden_states)  # (B, input_ids.1, 64)
        return logits

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of one micro-batch.

        Args:
            logits: (B, input_ids.1, 64) float32, what forward returned.
            labels: (B, input_ids.1) int64, the model's kwargs["labels"].
        """
        # loss_utils.py:42-70
        logits = logits.float()  # (B, input_ids.1, 64)
        shift_labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()  # (B, input_ids.1)
        logits = logits.view(-1, 64)  # (input_ids.1 * B, 64)
        shift_labels = shift_labels.view(-1)  # (input_ids.1 * B,)
        loss = F.cross_entropy(logits, shift_labels)
        return loss
