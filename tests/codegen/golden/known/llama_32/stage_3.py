"""Stage 3 of LlamaForCausalLM, the 4th of 4: model to lm_head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding


class LlamaModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): LlamaDecoderLayer() for i in range(24, 32)})
        self.norm = LlamaRMSNorm()
        self.rotary_emb = LlamaRotaryEmbedding()


class Stage3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaModelPart()
        self.lm_head = nn.Linear(32, 64, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            hidden_states: (B, input_ids.1, 32) float32, from stage 2, made at
                modeling_llama.py:312.

        Returns:
            logits: (B, input_ids.1, 64) float32, for the caller.
        """
        length = hidden_states.shape[1]

        # model (modeling_llama.py:377-402)
        position_ids = torch.arange(length, device=hidden_states.device)  # (input_ids.1,)
        position_ids = position_ids.unsqueeze(0)  # (1, input_ids.1)
        cos, sin = self.model.rotary_emb(position_ids)
        for decoder_layer in self.model.layers.values():
            hidden_states = decoder_layer(hidden_states, cos, sin)  # (B, input_ids.1, 32)
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
