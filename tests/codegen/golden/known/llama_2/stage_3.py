"""Stage 3 of LlamaForCausalLM, the 4th of 4: model.layers.1.mlp.gate_proj to lm_head."""

import torch.nn.functional as F
from torch import Tensor, nn

from .layers import LlamaMLP, LlamaRMSNorm


class LlamaDecoderLayerPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = LlamaMLP()

    def forward(self, residual: Tensor, post_attention_layernorm_out: Tensor) -> Tensor:
        # modeling_llama.py:311-312
        hidden_states: Tensor = residual + self.mlp(post_attention_layernorm_out)
        return hidden_states


class LlamaModelPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"1": LlamaDecoderLayerPart()})
        self.norm = LlamaRMSNorm()


class Stage3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaModelPart()
        self.lm_head = nn.Linear(32, 64, bias=False)

    def forward(self, post_attention_layernorm_out: Tensor, residual: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            post_attention_layernorm_out: (B, input_ids.1, 32) float32, from stage 2, made at
                modeling_llama.py:66.
            residual: (B, input_ids.1, 32) float32, from stage 2, made at modeling_llama.py:306.

        Returns:
            logits: (B, input_ids.1, 64) float32, for the caller.
        """
        # model (modeling_llama.py:392-402)
        hidden_states = self.model.layers["1"](residual, post_attention_layernorm_out)
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
