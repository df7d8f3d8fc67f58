"""Stage 1 of LlamaForCausalLM, the 2nd of 4: model.layers.0 to model.layers.1.input_layernorm."""

from torch import Tensor, nn

from .layers import LlamaMLP, LlamaRMSNorm


class LlamaDecoderLayerPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = LlamaMLP()
        self.post_attention_layernorm = LlamaRMSNorm()

    def forward(self, residual: Tensor, attn_output: Tensor) -> Tensor:
        # modeling_llama.py:306-312
        hidden_states: Tensor = residual + attn_output  # (B, input_ids.1, 32)
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states


class LlamaDecoderLayerPart2(nn.Module):
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
        self.layers = nn.ModuleDict({"0": LlamaDecoderLayerPart(), "1": LlamaDecoderLayerPart2()})


class Stage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaModelPart()

    def forward(self, inputs_embeds: Tensor, attn_output: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            inputs_embeds: (B, input_ids.1, 32) float32, from stage 0, made at
                modeling_llama.py:370.
            attn_output: (B, input_ids.1, 32) float32, from stage 0, made at modeling_llama.py:269.

        Returns:
            hidden_states: (B, input_ids.1, 32) float32, for stage 2.
            input_layernorm_out: (B, input_ids.1, 32) float32, for stage 2.
        """
        # model (modeling_llama.py:392)
        hidden_states = self.model.layers["0"](inputs_embeds, attn_output)  # (B, input_ids.1, 32)
        input_layernorm_out = self.model.layers["1"](hidden_states)
        return hidden_states, input_layernorm_out
