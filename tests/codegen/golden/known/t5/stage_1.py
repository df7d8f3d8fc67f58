"""Stage 1 of T5ForConditionalGeneration, the 2nd of 4: encoder to decoder.block.0.layer.1."""

from torch import Tensor, nn

from .layers import (
    T5BlockWithPositionBias,
    T5LayerCrossAttention,
    T5LayerNorm,
    create_bidirectional_mask,
)


class T5BlockPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleDict({"1": T5LayerCrossAttention()})

    def forward(self, encoder_hidden_states: Tensor, attention_output: Tensor) -> Tensor:
        # modeling_t5.py:479
        hidden_states: Tensor = self.layer["1"](attention_output, encoder_hidden_states)
        return hidden_states


class T5StackPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({str(i): T5BlockWithPositionBias() for i in range(2, 4)})
        self.final_layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(0.1)


class T5StackPart2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"0": T5BlockPart()})


class Stage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = T5StackPart()
        self.decoder = T5StackPart2()

    def forward(
        self, hidden_states: Tensor, SelfAttention_out: Tensor, attention_output: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            hidden_states: (B, input_ids.1, 32) float32, from stage 0, made at modeling_t5.py:140.
            SelfAttention_out: (1, 4, input_ids.1, input_ids.1) float32, from stage 0, made at
                modeling_t5.py:278.
            attention_output: (B, labels.1, 32) float32, from stage 0, made at modeling_t5.py:400.

        Returns:
            hidden_states: (B, input_ids.1, 32) float32, for stage 2, stage 3 and the caller.
            layer_output: (B, labels.1, 32) float32, for stage 2.
        """
        length = hidden_states.shape[1]

        # encoder (modeling_t5.py:707-745)
        attention_mask = create_bidirectional_mask(length, hidden_states.device)
        for layer_module in self.encoder.block.values():
            hidden_states = layer_module(hidden_states, attention_mask, SelfAttention_out)
        hidden_states = self.encoder.dropout(self.encoder.final_layer_norm(hidden_states))

        # decoder (modeling_t5.py:728)
        layer_output = self.decoder.block["0"](hidden_states, attention_output)  # (B, labels.1, 32)
        return hidden_states, layer_output
