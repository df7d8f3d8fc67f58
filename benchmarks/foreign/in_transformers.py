"""Of transformers: one model of every `model_type` that has a form of FORMS, the first it has.

Configurations are the library's defaults with sizes made small by their names (SMALL), nested ones
too, and lists of sizes made shorter; dropout and all else stays. Language models are called as
`Trainer` calls them, with labels, and with an attention mask where batches are padded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreign.model import Foreign, classes

FORMS = {
    "CausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MaskedLM": "MODEL_FOR_MASKED_LM_MAPPING",
    "ConditionalGeneration": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "SequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "ImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
}
WORDS, TOKENS, LAYERS = 99, 12, 2
IMAGE_TOKEN = 90
SMALL: dict[tuple[str, ...], object] = {
    ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "embedding_size"): 32,
    ("attention_hidden_size", "q_lora_rank", "kv_lora_rank", "lru_width", "model_dim"): 32,
    ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "d_inner"): 64,
    ("encoder_ffn_dim", "decoder_ffn_dim", "feed_forward_size", "dim_ff", "ffn_size"): 64,
    ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"): 32,
    ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers"): LAYERS,
    ("encoder_layers", "decoder_layers", "num_encoder_layers", "num_blocks"): LAYERS,
    ("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"): 4,
    ("decoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"): 4,
    ("num_key_value_heads", "n_kv_heads", "num_kv_heads"): 2,
    ("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "d_head", "kv_channels"): 8,
    ("qk_rope_head_dim", "rotary_dim", "attention_head_size"): 8,
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"): 4,
    ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k", "moe_topk"): 2,
    ("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"): 1,
    ("vocab_size", "vocab_size_per_layer_input", "text_vocab_size"): WORDS,
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"): 64,
    ("sliding_window", "attention_window", "local_attention"): 8,
    ("image_size",): 32,
    ("patch_size",): 8,
    ("pad_token_id",): 0,
    ("bos_token_id",): 1,
    ("eos_token_id", "sep_token_id"): 2,
}
SIZES = {name: value for names, value in SMALL.items() for name in names}
WIDTHS = ("hidden_sizes", "embed_dims", "neck_hidden_sizes", "widths", "embedding_sizes")
_WINDOWS = {
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 4,
    "patch_size": 2,
}
_ATTENDS = {"layer_types": ["linear_attention", "full_attention"]}
_NESTED = {
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
    "intermediate_size": 64, "activation_sparsity_pattern": [0.95, 0.0],
}  # fmt: skip
_INDEXED = {
    "layer_types": ["linear_attention", "indexed_attention"], "num_hidden_layers": LAYERS,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1,
    "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
}  # fmt: skip
OTHERS: dict[str, dict[str, object]] = {
    "bailing_hybrid": {"num_expert_group": 2},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "blt": {
        "use_cache": False, "encoder_hash_byte_group_vocab": WORDS,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "bit": {"hidden_sizes": [32, 32, 64, 64], "embedding_size": 32, "num_groups": 4},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "donut-swin": _WINDOWS,
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "encoder-decoder": {"pad_token_id": 0},
    "esm": {"vocab_size": WORDS, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n": {"text_config": _NESTED, "vision_config": {"architecture": "resnet18"}},
    "gemma3n_text": _NESTED,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, **_ATTENDS},
    "hgnet_v2": {
        "stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 32, 64],
        "stage_mid_channels": [8, 8, 16, 16], "stage_out_channels": [16, 32, 64, 128],
        "stage_num_blocks": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 128],
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "levit": {"image_size": 64, "patch_size": 16, "hidden_sizes": [32, 48, 64]},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48},
    "longcat_flash": {"zero_expert_num": 2},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "mistral4": {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
            "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64,
        }
    },
    "mobilevit": {"hidden_sizes": [16, 16, 16], "image_size": 64},
    "mobilevitv2": {"image_size": 64},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "neomme": {"head_dim": 16},
    "perceiver": {
        "num_latents": 16, "d_latents": 32, "num_self_attends_per_block": 2,
        "max_position_embeddings": TOKENS,
    },
    "qwen4_exp": _INDEXED,
    "qwen4_exp_text": _INDEXED,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2,
    },
    "shieldgemma2": {
        "yes_token_index": 5, "no_token_index": 6, "image_token_index": IMAGE_TOKEN,
        "mm_tokens_per_image": 4,
    },
    "siglip2": {"vision_config": {"num_patches": 16}},
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "textnet": {
        "hidden_sizes": [64, 64, 64, 64, 64], "image_size": [64, 64],
        "conv_layer_kernel_sizes": [[[3, 3]], [[3, 1]], [[1, 3]], [[3, 3]]],
        "conv_layer_strides": [[2], [2], [2], [2]],
    },
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "zamba": {
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "attention_hidden_size": 64,
    },
    "zamba2": {"attention_hidden_size": 64, "adapter_rank": 8},
}  # fmt: skip
"""What some configurations need besides, since their sizes depend on one another."""


def _coloured(samples: int) -> dict[str, Tensor]:
    """Pictures as sequences of colours, each a word."""
    return {
        "input_ids": torch.randint(WORDS - 1, (samples, 16)),
        "labels": torch.randint(2, (samples,)),
    }


def _patched(samples: int) -> dict[str, Tensor]:
    """Pictures of sizes of their own, as patches with their numbers of rows and columns."""
    return {
        "pixel_values": torch.randn(samples, 16, 192),
        "pixel_attention_mask": torch.ones(samples, 16, dtype=torch.long),
        "spatial_shapes": torch.full((samples, 2), 4),
        "labels": torch.randint(2, (samples,)),
    }


def _sung(samples: int) -> dict[str, Tensor]:
    """Codes of four codebooks, from which the model makes its inputs."""
    return {"labels": torch.randint(3, WORDS, (samples, TOKENS, 4))}


def _prompted(samples: int) -> dict[str, Tensor]:
    """Pictures, each with a question that it stands in."""
    words = torch.randint(7, 80, (samples, TOKENS))
    words[:, 1:5] = IMAGE_TOKEN
    return {"input_ids": words, "pixel_values": torch.randn(samples, 3, 32, 32)}


def _heard(samples: int) -> dict[str, Tensor]:
    """Sound beside words, eight frames to each."""
    words = torch.randint(3, WORDS, (samples, TOKENS))
    sound = torch.randn(samples, 128, 8 * TOKENS)
    return {"input_ids": words, "input_features": sound, "labels": words.clone()}


def _captioned(samples: int) -> dict[str, Tensor]:
    """A picture before words."""
    words = torch.randint(3, WORDS, (samples, TOKENS))
    picture = torch.randn(samples, 3, 32, 32)
    return {"input_ids": words, "pixel_values": picture, "labels": words.clone()}


BATCHES: dict[str, Callable[[int], dict[str, Any]]] = {
    "git": _captioned,
    "imagegpt": _coloured,
    "musicgen": _sung,
    "musicgen_melody": _sung,
    "pp_lcnet": lambda samples: {"pixel_values": torch.randn(samples, 3, 32, 32)},
    "shieldgemma2": _prompted,
    "siglip2": _patched,
    "voxtral_realtime": _heard,
}
"""Of those that are called in another way than their form says."""
OUTPUTS = {"pp_lcnet": "last_hidden_state", "shieldgemma2": "logits"}
"""What a loss is taken of, of those that return none."""


def _classified(name: str, output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output[name], target)


def _classes() -> dict[str, tuple[str, str]]:
    """By model_type: its form, and the class of the model."""
    from transformers.models.auto import modeling_auto as auto

    found: dict[str, tuple[str, str]] = {}
    for form, mapping in FORMS.items():
        for kind, name in getattr(auto, f"{mapping}_NAMES").items():
            found.setdefault(kind, (form, name if isinstance(name, str) else name[0]))
    return found


def names() -> list[str]:
    """Every `model_type` with one of the forms."""
    return sorted(_classes())


def foreign(name: str) -> Foreign:
    """The model of a `model_type`."""
    import transformers

    form, class_name = _classes()[name]
    cls: Any = getattr(transformers, class_name)
    config = small(cls.config_class, OTHERS.get(name, {}))
    accepted = inspect.signature(cls.forward).parameters

    def build() -> nn.Module:
        made: nn.Module = cls(config)
        return made.train()

    inputs = BATCHES.get(name) or _inputs(config, form, set(accepted))
    if name not in OUTPUTS:
        return Foreign(build, inputs)
    return Foreign(build, inputs, partial(_classified, OUTPUTS[name]), classes(2))


def small(cls: Any, others: dict[str, object]) -> Any:
    """The default configuration of a class, with small sizes."""
    plain = cls()
    settings = _shrunk(plain, others)
    for name in getattr(cls, "sub_configs", None) or {}:
        nested, mine = getattr(plain, name, None), others.get(name, {})
        chosen = isinstance(mine, dict) and "model_type" in mine
        if nested is not None and hasattr(nested, "to_dict") and not chosen:
            settings[name] = small(type(nested), mine if isinstance(mine, dict) else {}).to_dict()
    if getattr(plain, "is_encoder_decoder", False):
        settings.setdefault("decoder_start_token_id", 0)
    return cls(**settings)


def _shrunk(plain: Any, others: dict[str, object]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    given = plain.to_dict()
    for name, value in given.items():
        if name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            found[name] = min(value, SIZES[name]) if name != "vocab_size" else WORDS  # type: ignore[type-var]
        elif name in WIDTHS and isinstance(value, list):
            found[name] = [max(8, item // 8) for item in value]
        elif name in ("depths", "layers") and isinstance(value, list):
            found[name] = [1 for _ in value]
        elif name in ("layer_types", "mlp_layer_types", "layers_block_type") and value:
            distinct = list(dict.fromkeys(value))
            found[name] = (distinct * LAYERS)[: max(LAYERS, len(distinct))]
            found["num_hidden_layers"] = len(found[name])
    if "kv_lora_rank" in given:  # latent attention has keys for every head
        found["num_key_value_heads"] = SIZES["num_attention_heads"]
    return {**found, **others}


def _inputs(config: Any, form: str, accepted: set[str]) -> Callable[[int], dict[str, Any]]:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    words = getattr(text, "vocab_size", WORDS)

    def batch(samples: int) -> dict[str, Any]:
        if form == "ImageClassification":
            side = getattr(config, "image_size", 32)
            side = side if isinstance(side, int) else side[0]
            found: dict[str, Any] = {
                "pixel_values": torch.randn(samples, getattr(config, "num_channels", 3), side, side)
            }
        else:
            found = {"input_ids": torch.randint(3, words, (samples, TOKENS))}
        if form in ("MaskedLM", "SequenceClassification", "ConditionalGeneration"):
            lengths = torch.randint(TOKENS // 2, TOKENS + 1, (samples, 1)).clamp(max=TOKENS)
            lengths[0] = TOKENS
            if "attention_mask" in accepted:
                found["attention_mask"] = (torch.arange(TOKENS) < lengths).long()
        if form.endswith("Classification"):
            found["labels"] = torch.randint(2, (samples,))
        elif form == "ConditionalGeneration":
            found["labels"] = torch.randint(3, words, (samples, TOKENS))
        else:
            found["labels"] = found["input_ids"].clone()
        return found

    return batch
