"""Stage 3 of T5ForConditionalGeneration, the 4th of 4: decoder to lm_head."""

import torch.nn.functional as F
from torch import Tensor, nn

from .layers import (
    T5BlockWithEncoderHiddenStates,
    T5LayerCrossAttention,
    T5LayerFF,
    T5LayerNorm,
    create_causal_mask,
)


class T5BlockPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleDict({"1": T5LayerCrossAttention(), "2": T5LayerFF()})

    def forward(self, encoder_hidden_states: Tensor, attention_output: Tensor) -> Tensor:
        # modeling_t5.py:479-498
        hidden_states: Tensor = self.layer["1"](attention_output, encoder_hidden_states)
        hidden_states = self.layer["2"](hidden_states)
        return hidden_states


class T5StackPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"2": T5BlockPart(), "3": T5BlockWithEncoderHiddenStates()})
        self.final_layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(0.1)


class Stage3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = T5StackPart()
        self.lm_head = nn.Linear(32, 64, bias=False)

    def forward(
        self,
        attention_output: Tensor,
        encoder_outputs: Tensor,
        SelfAttention_out: Tensor,
        labels: Tensor,
    ) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            attention_output: (B, labels.1, 32) float32, from stage 2, made at modeling_t5.py:400.
            encoder_outputs: (B, input_ids.1, 32) float32, from stage 1, made at modeling_t5.py:745.
            SelfAttention_out: (1, 4, labels.1, labels.1) float32, from stage 0, made at
                modeling_t5.py:278.
            labels: (B, labels.1) int64, the model's kwargs["labels"].

        Returns:
            lm_logits: (B, labels.1, 64) float32, for the caller.
        """
        # modeling_t5.py:628
        length = labels.shape[1]

        # decoder (modeling_t5.py:698-745)
        attention_mask = create_causal_mask(length, attention_output.device)
        hidden_states = self.decoder.block["2"](encoder_outputs, attention_output)
        hidden_states = self.decoder.block["3"](
            hidden_states, attention_mask, SelfAttention_out, encoder_outputs
        )
        hidden_states = self.decoder.dropout(self.decoder.final_layer_norm(hidden_states))

        # modeling_t5.py:1045-1047
        hidden_states *= 32**-0.5
        lm_logits: Tensor = self.lm_head(hidden_states)  # (B, labels.1, 64)
        return lm_logits

    def loss(self, lm_logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of one micro-batch.

        Args:
            lm_logits: (B, labels.1, 64) float32, what forward returned.
            labels: (B, labels.1) int64, the model's kwargs["labels"].
        """
        # modeling_t5.py:1054
        loss = F.cross_entropy(lm_logits.view(-1, 64), labels.view(-1))
        return loss
