"""Stage 2 of T5ForConditionalGeneration, the 3rd of 4: decoder to decoder.block.2.layer.0."""

from torch import Tensor, nn

from .layers import (
    T5BlockWithEncoderHiddenStates,
    T5LayerFF,
    T5LayerSelfAttentionWithPositionBias,
    create_causal_mask,
)


class T5BlockPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleDict({"2": T5LayerFF()})

    def forward(self, layer_output: Tensor) -> Tensor:
        # modeling_t5.py:498
        hidden_states: Tensor = self.layer["2"](layer_output)  # (B, labels.1, 32)
        return hidden_states


class T5BlockPart2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleDict({"0": T5LayerSelfAttentionWithPositionBias()})

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, position_bias: Tensor
    ) -> Tensor:
        # modeling_t5.py:459
        hidden_states = self.layer["0"](hidden_states, attention_mask, position_bias)
        return hidden_states


class T5StackPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict(
            {"0": T5BlockPart(), "1": T5BlockWithEncoderHiddenStates(), "2": T5BlockPart2()}
        )


class Stage2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = T5StackPart()

    def forward(
        self, layer_output: Tensor, SelfAttention_out: Tensor, encoder_outputs: Tensor
    ) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            layer_output: (B, labels.1, 32) float32, from stage 1, made at modeling_t5.py:431.
            SelfAttention_out: (1, 4, labels.1, labels.1) float32, from stage 0, made at
                modeling_t5.py:278.
            encoder_outputs: (B, input_ids.1, 32) float32, from stage 1, made at modeling_t5.py:745.

        Returns:
            attention_output: (B, labels.1, 32) float32, for stage 3.
        """
        # decoder (modeling_t5.py:698-728)
        attention_mask = create_causal_mask(layer_output.shape[1], layer_output.device)
        hidden_states = self.decoder.block["0"](layer_output)  # (B, labels.1, 32)
        hidden_states = self.decoder.block["1"](
            hidden_states, attention_mask, SelfAttention_out, encoder_outputs
        )
        attention_output: Tensor = self.decoder.block["2"](
            hidden_states, attention_mask, SelfAttention_out
        )
        return attention_output
