"""Of transformers, too: sound, clips, detection, segmentation, series, pictures with words.

Of every such auto class the models most in use; sizes by `in_transformers.small`, whatever else
their configurations need in MODELS. Those whose own loss matches boxes on the host are trained by a
loss of the queries as they come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreign.in_transformers import small
from foreign.model import Foreign

Inputs = Callable[[int], dict[str, Any]]
WORDS, SIDE, CLASSES = 99, 32, 5
IMAGE_TOKEN = 90

CONVOLUTIONS = {
    "conv_dim": [16, 16, 16], "conv_kernel": [10, 3, 3], "conv_stride": [5, 2, 2],
    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4, "vocab_size": 20, "ctc_zero_infinity": True,
}  # fmt: skip
PLAIN = {"mask_time_prob": 0.0, "layerdrop": 0.0}
"""Without what is drawn by numpy, and without layers that are left out on the host."""
RESNET = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1], "layer_type": "basic", "out_features": ["stage4"],
}  # fmt: skip
SWIN = {
    "model_type": "swin", "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 4, 4],
    "window_size": 2, "patch_size": 2, "image_size": SIDE,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip


def _sound(samples: int) -> dict[str, Tensor]:
    return {
        "input_values": torch.randn(samples, 800),
        "attention_mask": torch.ones(samples, 800, dtype=torch.long),
        "labels": torch.randint(1, 20, (samples, 5)),
    }


def _spectrogram(samples: int) -> dict[str, Tensor]:
    return {
        "input_values": torch.randn(samples, 64, 32),
        "labels": torch.randint(2, (samples,)),
    }


def _spoken(samples: int) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(samples, 40, 16),
        "attention_mask": torch.ones(samples, 40, dtype=torch.long),
        "labels": torch.randint(3, WORDS, (samples, 6)),
    }


def _waves(samples: int) -> dict[str, Tensor]:
    return {
        "input_values": torch.randn(samples, 4000),
        "labels": torch.randint(3, WORDS, (samples, 6)),
    }


def _clip(samples: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(samples, 4, 3, SIDE, SIDE),
        "labels": torch.randint(2, (samples,)),
    }


def _picture(samples: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(samples, 3, SIDE, SIDE)}


def _labelled(samples: int) -> dict[str, Tensor]:
    return {**_picture(samples), "labels": torch.randint(2, (samples, SIDE, SIDE))}


def _captioned(tokens: int) -> Inputs:
    """A picture that stands for so many words of its caption, as processors lay them out."""

    def batch(samples: int) -> dict[str, Tensor]:
        own = torch.randint(3, 80, (samples, 6))
        places = torch.full((samples, tokens), IMAGE_TOKEN)
        words = torch.cat([own[:, :1], places, own[:, 1:]], 1)
        return {
            **_picture(samples),
            "input_ids": words,
            "attention_mask": torch.ones_like(words),
            "labels": words.masked_fill(words == IMAGE_TOKEN, -100),
        }

    return batch


def _answered(samples: int) -> dict[str, Tensor]:
    """What is asked of a picture, and the answer, told apart."""
    found = _captioned(16)(samples)
    answer = torch.arange(found["input_ids"].shape[1]) >= 19
    return {**found, "token_type_ids": answer.int().expand_as(found["input_ids"]).contiguous()}


def _regions(samples: int) -> dict[str, Tensor]:
    """Words, and the features of the regions of a picture with their boxes."""
    words = torch.randint(3, 80, (samples, 6))
    return {
        "input_ids": words,
        "attention_mask": torch.ones_like(words),
        "visual_feats": torch.randn(samples, 5, 24),
        "visual_pos": torch.rand(samples, 5, 4),
    }


def _seen(samples: int) -> dict[str, Tensor]:
    """Words, and the features of the regions of a picture."""
    words = torch.randint(3, 80, (samples, 6))
    return {
        "input_ids": words,
        "attention_mask": torch.ones_like(words),
        "visual_embeds": torch.randn(samples, 5, 24),
        "visual_attention_mask": torch.ones(samples, 5, dtype=torch.long),
        "visual_token_type_ids": torch.ones(samples, 5, dtype=torch.long),
    }


def _packed(samples: int) -> dict[str, Tensor]:
    """The patches of all pictures in one list, as many of each as its grid says."""
    words = _captioned(16)(samples)
    return {
        **words,
        "mm_token_type_ids": (words["input_ids"] == IMAGE_TOKEN).int(),
        "pixel_values": torch.randn(samples * 64, 96),
        "image_grid_thw": torch.tensor([[1, 8, 8]]).repeat(samples, 1),
    }


def _beside(samples: int) -> dict[str, Tensor]:
    """A picture beside words."""
    words = torch.randint(3, 80, (samples, 6))
    return {**_picture(samples), "input_ids": words, "attention_mask": torch.ones_like(words)}


def _captioning(samples: int) -> dict[str, Tensor]:
    found = _beside(samples)
    return {**found, "labels": found["input_ids"].clone()}


def _series(samples: int) -> dict[str, Tensor]:
    return {
        "past_values": torch.randn(samples, 32, 2),
        "future_values": torch.randn(samples, 8, 2),
    }


def _forecast(samples: int) -> dict[str, Tensor]:
    return {
        "past_values": torch.randn(samples, 24),
        "past_time_features": torch.randn(samples, 24, 1),
        "past_observed_mask": torch.ones(samples, 24),
        "future_values": torch.randn(samples, 8),
        "future_time_features": torch.randn(samples, 8, 1),
    }


def _decisions(samples: int) -> dict[str, Tensor]:
    return {
        "states": torch.randn(samples, 6, 17),
        "actions": torch.randn(samples, 6, 4),
        "rewards": torch.randn(samples, 6, 1),
        "returns_to_go": torch.randn(samples, 6, 1),
        "timesteps": torch.arange(6).expand(samples, 6).contiguous(),
        "attention_mask": torch.ones(samples, 6),
    }


def boxes(output: Any, target: tuple[Tensor, Tensor]) -> Tensor:
    """Of every query its class and its box, in the order of the queries."""
    classes, where = target
    return F.cross_entropy(output["logits"].flatten(0, 1), classes.flatten()) + F.l1_loss(
        output["pred_boxes"], where
    )


def masks(output: Any, target: tuple[Tensor, Tensor]) -> Tensor:
    """Of every query its class and its mask."""
    classes, where = target
    logits = output["masks_queries_logits"]
    where = F.interpolate(where, logits.shape[-2:])
    return F.cross_entropy(
        output["class_queries_logits"].flatten(0, 1), classes.flatten()
    ) + F.binary_cross_entropy_with_logits(logits, where)


def alike(output: Any, target: Tensor) -> Tensor:
    """How far pictures and words lie apart, pair by pair."""
    return (1 - F.cosine_similarity(output["image_embeds"], output["text_embeds"]) * target).mean()


def depths(output: Any, target: Tensor) -> Tensor:
    """The mean distance of depths."""
    return F.l1_loss(output["predicted_depth"], target)


def pictures(output: Any, target: Tensor) -> Tensor:
    """The mean distance of pictures."""
    return F.l1_loss(output["reconstruction"], target)


def actions(output: Any, target: Tensor) -> Tensor:
    """The mean squared error of the actions."""
    return F.mse_loss(output["action_preds"], target)


def _queries(count: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randint(3, (n, count)), torch.rand(n, count, 4))


def _masks(count: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randint(3, (n, count)), torch.rand(n, count, 16, 16).round())


@dataclass(frozen=True)
class Model:
    """A class, what its configuration needs, its batches, and a loss if it has none of its own."""

    kind: str
    settings: dict[str, Any]
    inputs: Inputs
    loss: Callable[..., Tensor] | None = None
    target: Callable[[int], object] | None = None


WAV = {**CONVOLUTIONS, "do_stable_layer_norm": False}
VISION = {"image_size": SIDE, "patch_size": 8}
MODELS: dict[str, Model] = {
    "wav2vec2": Model("Wav2Vec2ForCTC", WAV, _sound),
    "wav2vec2-layerdrop": Model("Wav2Vec2ForCTC", {**WAV, "mask_time_prob": 0.0}, _sound),
    "hubert": Model("HubertForCTC", {**WAV, **PLAIN}, _sound),
    "wavlm": Model("WavLMForCTC", {**WAV, **PLAIN}, _sound),
    "sew": Model("SEWForCTC", {**WAV, **PLAIN, "squeeze_factor": 2}, _sound),
    "unispeech-sat": Model("UniSpeechSatForCTC", {**WAV, **PLAIN}, _sound),
    "data2vec-audio": Model("Data2VecAudioForCTC", {**WAV, **PLAIN}, _sound),
    "wav2vec2-conformer": Model("Wav2Vec2ConformerForCTC", {**WAV, **PLAIN}, _sound),
    "audio-spectrogram-transformer": Model(
        "ASTForAudioClassification",
        {"max_length": 64, "num_mel_bins": 32, "patch_size": 8, "frequency_stride": 8,
         "time_stride": 8},
        _spectrogram,
    ),
    "speech_to_text": Model(
        "Speech2TextForConditionalGeneration",
        {"input_feat_per_channel": 16, "conv_channels": 32, "max_source_positions": 64,
         "max_target_positions": 64},
        _spoken,
    ),
    "moonshine": Model(
        "MoonshineForConditionalGeneration",
        {"decoder_start_token_id": 1, "pad_token_id": 0}, _waves,
    ),
    "timesformer": Model(
        "TimesformerForVideoClassification", {**VISION, "num_frames": 4}, _clip,
    ),
    "videomae": Model("VideoMAEForVideoClassification", {**VISION, "num_frames": 4}, _clip),
    "vivit": Model(
        "VivitForVideoClassification",
        {"image_size": SIDE, "num_frames": 4, "tubelet_size": [2, 8, 8]}, _clip,
    ),
    "yolos": Model(
        "YolosForObjectDetection",
        {"image_size": [SIDE, SIDE], "patch_size": 8, "num_detection_tokens": 6, "num_labels": 2},
        _picture, boxes, _queries(6),
    ),
    "detr": Model(
        "DetrForObjectDetection",
        {"backbone_config": RESNET, "num_queries": 6, "num_labels": 2},
        _picture, boxes, _queries(6),
    ),
    "maskformer": Model(
        "MaskFormerForInstanceSegmentation",
        {"backbone_config": SWIN, "fpn_feature_size": 32, "mask_feature_size": 32,
         "num_labels": 2, "decoder_config": {
             "model_type": "detr", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
             "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
             "decoder_ffn_dim": 64, "num_queries": 6}},
        _picture, masks, _masks(6),
    ),
    "upernet": Model(
        "UperNetForSemanticSegmentation",
        {"backbone_config": SWIN, "hidden_size": 16, "auxiliary_in_channels": 64,
         "auxiliary_channels": 16, "num_labels": 2, "pool_scales": [1, 2]},
        _labelled,
    ),
    "dpt": Model(
        "DPTForSemanticSegmentation",
        {**VISION, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
         "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8, "num_labels": 2,
         "is_hybrid": False},
        _labelled,
    ),
    "glpn": Model(
        "GLPNForDepthEstimation",
        {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16,
         "num_attention_heads": [1, 2, 2, 4]},
        _picture, depths, lambda n: torch.rand(n, SIDE, SIDE),
    ),
    "patchtst": Model(
        "PatchTSTForPrediction",
        {"num_input_channels": 2, "context_length": 32, "patch_length": 4, "patch_stride": 4,
         "prediction_length": 8},
        _series,
    ),
    "patchtsmixer": Model(
        "PatchTSMixerForPrediction",
        {"num_input_channels": 2, "context_length": 32, "patch_length": 4, "patch_stride": 4,
         "prediction_length": 8},
        _series,
    ),
    "time_series_transformer": Model(
        "TimeSeriesTransformerForPrediction",
        {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2, 8],
         "num_time_features": 1},
        _forecast,
    ),
    "autoformer": Model(
        "AutoformerForPrediction",
        {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2, 8],
         "num_time_features": 1, "label_length": 4},
        _forecast,
    ),
    "decision_transformer": Model(
        "DecisionTransformerModel", {"max_ep_len": 16}, _decisions, actions,
        lambda n: torch.randn(n, 6, 4),
    ),
    "llava": Model(
        "LlavaForConditionalGeneration", {"image_token_index": IMAGE_TOKEN}, _captioned(16),
    ),
    "paligemma": Model(
        "PaliGemmaForConditionalGeneration",
        {"image_token_index": IMAGE_TOKEN, "projection_dim": 32}, _answered,
    ),
    "blip": Model("BlipForConditionalGeneration", {}, _captioning),
    "blip-2": Model(
        "Blip2ForConditionalGeneration", {"num_query_tokens": 4, "image_token_index": IMAGE_TOKEN},
        _captioned(4),
    ),
    "vilt": Model(
        "ViltForQuestionAnswering", {**VISION, "num_labels": 4, "max_image_length": -1},
        lambda n: {**_beside(n), "labels": torch.rand(n, 4)},
    ),
    "qwen2_vl": Model(
        "Qwen2VLForConditionalGeneration",
        {"image_token_id": IMAGE_TOKEN, "text_config": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                "mrope_section": [2, 1, 1]}}, "vision_config": {
            "depth": 2, "embed_dim": 32, "hidden_size": 32,
            "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "mlp_ratio": 2}},
        _packed,
    ),
    "smolvlm": Model(
        "Idefics3ForConditionalGeneration", {"image_token_id": IMAGE_TOKEN, "scale_factor": 2},
        lambda n: {**_captioned(4)(n), "pixel_values": torch.randn(n, 1, 3, SIDE, SIDE)},
    ),
    "segformer": Model("SegformerForSemanticSegmentation", {
        "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16,
        "num_attention_heads": [1, 2, 2, 4]}, _labelled,
    ),
    "mobilevit": Model(
        "MobileViTForSemanticSegmentation",
        {"hidden_sizes": [16, 16, 16], "image_size": 64, "aspp_out_channels": 16},
        lambda n: {"pixel_values": torch.randn(n, 3, 64, 64),
                   "labels": torch.randint(2, (n, 64, 64))},
    ),
    "beit": Model(
        "BeitForSemanticSegmentation",
        {**VISION, "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "num_labels": 2,
         "pool_scales": [1, 2], "auxiliary_channels": 16}, _labelled,
    ),
    "depth_anything": Model(
        "DepthAnythingForDepthEstimation",
        {"backbone_config": {"model_type": "dinov2", "image_size": SIDE, "patch_size": 8,
                             "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
                             "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False},
         "reassemble_hidden_size": 32, "patch_size": 8, "neck_hidden_sizes": [8, 8, 16, 16],
         "fusion_hidden_size": 8, "head_hidden_size": 8},
        _picture, depths, lambda n: torch.rand(n, SIDE, SIDE),
    ),
    "conditional_detr": Model(
        "ConditionalDetrForObjectDetection",
        {"backbone_config": RESNET, "num_queries": 6, "num_labels": 3},
        _picture, boxes, _queries(6),
    ),
    "swin2sr": Model(
        "Swin2SRForImageSuperResolution",
        {"image_size": SIDE, "patch_size": 1, "embed_dim": 16, "depths": [1, 1],
         "num_heads": [2, 2], "window_size": 4, "upscale": 2},
        _picture, pictures, lambda n: torch.rand(n, 3, 2 * SIDE, 2 * SIDE),
    ),
    "lxmert": Model(
        "LxmertForQuestionAnswering",
        {"visual_feat_dim": 24, "num_qa_labels": 4, "l_layers": 2, "x_layers": 2, "r_layers": 2},
        lambda n: {**_regions(n), "labels": torch.randint(4, (n,))},
    ),
    "visual_bert": Model(
        "VisualBertForQuestionAnswering", {"visual_embedding_dim": 24, "num_labels": 4},
        lambda n: {**_seen(n), "labels": torch.rand(n, 4).softmax(-1)},
    ),
    "pix2struct": Model(
        "Pix2StructForConditionalGeneration",
        {"vision_config": {"patch_embed_hidden_size": 24, "seq_len": 16}},
        lambda n: {"flattened_patches": torch.cat(
            [torch.randint(1, 5, (n, 9, 2)).float(), torch.randn(n, 9, 24)], -1),
            "attention_mask": torch.ones(n, 9),
            "labels": torch.randint(3, WORDS, (n, 6))},
    ),
    "clipseg": Model(
        "CLIPSegForImageSegmentation",
        {"extract_layers": [0, 1], "reduce_dim": 16, "projection_dim": 32,
         "decoder_num_attention_heads": 4, "decoder_intermediate_size": 32},
        lambda n: {**_beside(n), "labels": torch.rand(n, SIDE, SIDE).round()},
    ),
    "owlvit": Model("OwlViTModel", {}, _beside, alike, torch.rand),
}  # fmt: skip


def names() -> list[str]:
    """All of them."""
    return list(MODELS)


def foreign(name: str) -> Foreign:
    """The model of a name."""
    import transformers

    chosen = MODELS[name]
    cls: Any = getattr(transformers, chosen.kind)
    config = small(cls.config_class, chosen.settings)

    def build() -> nn.Module:
        made: nn.Module = cls(config)
        return made.train()

    return Foreign(build, chosen.inputs, chosen.loss, chosen.target)
