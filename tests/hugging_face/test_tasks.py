"""The example calls that are made up for tasks: the library's own models run on them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gpipe_compiler.errors import UsageError
from gpipe_compiler.frontend.hugging_face import TASKS, FolderOptions, completed, load_folder
from gpipe_compiler.frontend.materialise import real_example

ENCODER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
SOUND = ENCODER | {
    "vocab_size": 20,
    "conv_dim": (8, 8),
    "conv_kernel": (10, 8),
    "conv_stride": (8, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
}
SPEECH = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_source_positions": 20,
    "max_target_positions": 24,
    "num_mel_bins": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
SEGFORMER = {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "decoder_hidden_size": 8}
MODELS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "multiple-choice": ("BertForMultipleChoice", "Bert", {"vocab_size": 40, **ENCODER}),
    "semantic-segmentation": ("SegformerForSemanticSegmentation", "Segformer", SEGFORMER),
    "audio-classification": ("Wav2Vec2ForSequenceClassification", "Wav2Vec2", SOUND),
    "ctc": ("Wav2Vec2ForCTC", "Wav2Vec2", SOUND),
    "speech-seq2seq": ("WhisperForConditionalGeneration", "Whisper", SPEECH),
}
PICTURED = {"max_length": 64, "num_mel_bins": 32, **ENCODER}


@pytest.mark.parametrize(
    ("task", "name", "kind", "sizes"),
    [
        *((task, *model) for task, model in MODELS.items()),
        ("audio-classification", "ASTForAudioClassification", "AST", PICTURED),
    ],
)
def test_the_model_computes_its_loss(
    task: str, name: str, kind: str, sizes: dict[str, Any]
) -> None:
    config = getattr(transformers, f"{kind}Config")(**sizes)
    cls = getattr(transformers, name)

    args, kwargs = completed(TASKS[task], ((), {}), config, cls.main_input_name, labels=True)

    assert cls.main_input_name in kwargs
    assert "labels" in kwargs
    with torch.random.fork_rng():
        loss = cls(config)(*args, **kwargs).loss
    assert loss.isfinite()
    assert loss > 0


def test_what_a_configuration_does_not_tell_is_asked_for() -> None:
    config = transformers.Wav2Vec2BertConfig()
    with pytest.raises(UsageError, match="input_features, whose sizes") as told:
        completed(TASKS["ctc"], ((), {}), config, "input_features", labels=True)
    assert "--input input_features=" in told.value.hint


def test_the_examples_of_the_users_file_stay_as_they_are(llama: Path, tmp_path: Path) -> None:
    hooks = tmp_path / "hooks.py"
    hooks.write_text(
        "import torch\n"
        "def example_inputs():\n"
        "    return {'input_ids': torch.arange(24).reshape(4, 6)}\n"
    )
    given = real_example(load_folder(llama, FolderOptions(hooks=hooks)))
    assert torch.equal(given["input_ids"], torch.arange(24).reshape(4, 6))
    assert torch.equal(given["labels"], given["input_ids"])
    specs = ["input_ids=4x6:int64", "attention_mask=4x8:int64"]
    made = real_example(load_folder(llama, FolderOptions(), input_specs=specs))
    assert made["input_ids"].max() > 1
    assert made["attention_mask"].sum(1).tolist() == [8, 6, 8, 6]
