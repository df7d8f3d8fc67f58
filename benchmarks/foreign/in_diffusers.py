"""Of diffusers: denoisers (UNets and transformers) and autoencoders, a model a family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foreign.model import Foreign, images, squares

BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
DOWN, UP = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
ENCODER = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}


def _noisy(size: int, channels: int = 4, **others: tuple[int, ...]) -> Callable[[int], Any]:
    def batch(samples: int) -> dict[str, torch.Tensor]:
        found = {name: torch.randn(samples, *shape) for name, shape in others.items()}
        return {
            "sample": torch.randn(samples, channels, size, size),
            "timestep": torch.randint(1000, (samples,)),
            **found,
        }

    return batch


def _latents(name: str, *shape: int, **others: tuple[int, ...]) -> Callable[[int], Any]:
    """Inputs whose first is called so; the dtype of a time is that of a number in [0, 1)."""

    def batch(samples: int) -> dict[str, torch.Tensor]:
        found = {key: torch.randn(samples, *size) for key, size in others.items()}
        return {name: torch.randn(samples, *shape), "timestep": torch.rand(samples), **found}

    return batch


def _dit(samples: int) -> dict[str, torch.Tensor]:
    return {
        "hidden_states": torch.randn(samples, 4, 8, 8),
        "timestep": torch.randint(1000, (samples,)),
        "class_labels": torch.randint(10, (samples,)),
    }


def _flux(samples: int) -> dict[str, torch.Tensor]:
    return {
        **_latents("hidden_states", 16, 4, encoder_hidden_states=(6, 32))(samples),
        "pooled_projections": torch.randn(samples, 32),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }


def _control(samples: int) -> dict[str, torch.Tensor]:
    return {
        **_noisy(16, encoder_hidden_states=(5, 32))(samples),
        "controlnet_cond": torch.randn(samples, 3, 128, 128),
    }


def _cog(samples: int) -> dict[str, torch.Tensor]:
    return {
        "hidden_states": torch.randn(samples, 2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(samples, 6, 32),
        "timestep": torch.randint(1000, (samples,)),
    }


def _pixart(samples: int) -> dict[str, torch.Tensor]:
    return {
        "hidden_states": torch.randn(samples, 4, 8, 8),
        "encoder_hidden_states": torch.randn(samples, 6, 32),
        "timestep": torch.randint(1000, (samples,)),
        "encoder_attention_mask": torch.ones(samples, 6),
    }


MODELS: dict[str, tuple[str, dict[str, Any], Callable[[int], Any], tuple[int, ...]]] = {
    "unet2d": (
        "UNet2DModel",
        {**BLOCKS, "down_block_types": DOWN, "up_block_types": UP, "attention_head_dim": 8,
         "sample_size": 16},
        _noisy(16, 3), (3, 16, 16),
    ),
    "unet2d-condition": (
        "UNet2DConditionModel", {**BLOCKS, **CROSS, "sample_size": 16},
        _noisy(16, encoder_hidden_states=(5, 32)), (4, 16, 16),
    ),
    "unet1d": (
        "UNet1DModel",
        {"block_out_channels": (8, 8, 16), "in_channels": 14, "out_channels": 14,
         "extra_in_channels": 0, "time_embedding_type": "positional",
         "use_timestep_embedding": True, "act_fn": "silu", "freq_shift": 1.0,
         "flip_sin_to_cos": False, "norm_num_groups": 8,
         "out_block_type": "OutConv1DBlock", "mid_block_type": "MidResTemporalBlock1D",
         "down_block_types": ("DownResnetBlock1D",) * 3,
         "up_block_types": ("UpResnetBlock1D",) * 2},
        lambda n: {"sample": torch.randn(n, 14, 16), "timestep": torch.randint(1000, (n,))},
        (14, 16),
    ),
    "controlnet": (
        "ControlNetModel",
        {**BLOCKS, "down_block_types": CROSS["down_block_types"], "cross_attention_dim": 32,
         "attention_head_dim": 8, "conditioning_embedding_out_channels": (8, 8, 8, 8)},
        _control, (32, 16, 16),
    ),
    "dit": (
        "DiTTransformer2DModel", {**HEADS, "sample_size": 8, "norm_num_groups": 4,
                                  "num_embeds_ada_norm": 10}, _dit, (4, 8, 8),
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {**HEADS, "sample_size": 8, "cross_attention_dim": 32, "caption_channels": 32,
         "norm_num_groups": 4},
        _pixart, (8, 8, 8),
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {**HEADS, "sample_size": 8, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 32,
         "caption_projection_dim": 32, "pooled_projection_dim": 32, "pos_embed_max_size": 8},
        _latents("hidden_states", 4, 8, 8, encoder_hidden_states=(6, 32), pooled_projections=(32,)),
        (4, 8, 8),
    ),
    "flux": (
        "FluxTransformer2DModel",
        {**HEADS, "in_channels": 4, "num_single_layers": 2, "joint_attention_dim": 32,
         "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)},
        _flux, (16, 4),
    ),
    "auraflow": (
        "AuraFlowTransformer2DModel",
        {"num_attention_heads": 2, "attention_head_dim": 16, "sample_size": 8,
         "num_mmdit_layers": 1, "num_single_dit_layers": 1, "joint_attention_dim": 32,
         "caption_projection_dim": 32,
         "pos_embed_max_size": 16},
        _latents("hidden_states", 4, 8, 8, encoder_hidden_states=(6, 32)), (4, 8, 8),
    ),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        {**HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 4, "text_embed_dim": 32,
         "sample_width": 8, "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 6},
        _cog, (2, 4, 8, 8),
    ),
    "uvit": (
        "UVit2DModel",
        {"hidden_size": 32, "cond_embed_dim": 32, "encoder_hidden_size": 32,
         "block_out_channels": 32, "in_channels": 32, "num_hidden_layers": 2,
         "num_attention_heads": 2, "vocab_size": 40,
         "codebook_size": 38, "micro_cond_encode_dim": 4, "micro_cond_embed_dim": 20,
         "intermediate_size": 64, "num_res_blocks": 1},
        lambda n: {"input_ids": torch.randint(38, (n, 8, 8)),
                   "encoder_hidden_states": torch.randn(n, 5, 32),
                   "pooled_text_emb": torch.randn(n, 32), "micro_conds": torch.rand(n, 5)},
        (38, 8, 8),
    ),
    "prior": (
        "PriorTransformer",
        {**HEADS, "embedding_dim": 8, "num_embeddings": 7, "additional_embeddings": 4},
        lambda n: {"hidden_states": torch.randn(n, 8), "timestep": torch.randint(1000, (n,)),
                   "proj_embedding": torch.randn(n, 8),
                   "encoder_hidden_states": torch.randn(n, 7, 8)},
        (8,),
    ),
    "kl-autoencoder": ("AutoencoderKL", {**BLOCKS, **ENCODER}, images(16), (3, 16, 16)),
    "vq-autoencoder": (
        "VQModel", {**BLOCKS, **ENCODER, "latent_channels": 3, "num_vq_embeddings": 16},
        images(16), (3, 16, 16),
    ),
    "tiny-autoencoder": (
        "AutoencoderTiny",
        {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8),
         "num_encoder_blocks": (1, 2), "num_decoder_blocks": (2, 1)},
        images(16), (3, 16, 16),
    ),
    "asymmetric-autoencoder": (
        "AsymmetricAutoencoderKL",
        {"down_block_types": ("DownEncoderBlock2D",), "down_block_out_channels": (32,),
         "layers_per_down_block": 1, "up_block_types": ("UpDecoderBlock2D",),
         "up_block_out_channels": (32,), "layers_per_up_block": 1},
        images(16), (3, 16, 16),
    ),
    "dc-autoencoder": (
        "AutoencoderDC",
        {"in_channels": 3, "latent_channels": 4, "attention_head_dim": 2,
         "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
         "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
         "encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8),
         "encoder_qkv_multiscales": ((), (5,)), "decoder_qkv_multiscales": ((), (5,)),
         "encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1),
         "downsample_block_type": "conv", "upsample_block_type": "interpolate",
         "decoder_norm_types": "rms_norm", "decoder_act_fns": "silu"},
        images(16), (3, 16, 16),
    ),
}  # fmt: skip
"""By name: class, settings, a batch of inputs, and the shape of a sample of the output."""


def names() -> list[str]:
    """A model a family."""
    return list(MODELS)


def foreign(name: str) -> Foreign:
    """The model of a name."""
    import diffusers

    kind, settings, inputs, shape = MODELS[name]
    return Foreign(
        lambda: getattr(diffusers, kind)(**settings),
        inputs,
        squares,
        lambda samples: torch.randn(samples, *shape),
        4,
    )
