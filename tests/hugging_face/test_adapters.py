"""LoRA: adapters alone are trained, as peft trains them, and written as peft writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
from folders import distance, logits, read, run, trained
from loading import load_package
from safetensors.torch import load_file
from torch import nn

from gpipe_compiler.errors import ModelError, UsageError
from gpipe_compiler.frontend.hugging_face import FolderOptions, load_folder
from gpipe_compiler.frontend.source import load

peft = pytest.importorskip("peft")

STEPS = 20
LAYERS = ["q_proj", "v_proj", "down_proj"]


def described(place: Path, **settings: Any) -> Path:
    """An adapter_config.json."""
    chosen = {"r": 2, "lora_alpha": 8, "target_modules": LAYERS, "task_type": "CAUSAL_LM"}
    peft.LoraConfig(**{**chosen, **settings}).save_pretrained(place)
    return place / "adapter_config.json"


def adapted(folder: Path, package: Path, file: Path, head: str = "") -> nn.Module:
    """Peft's model, whose adapters begin as those of the package."""
    config = peft.PeftConfig.from_pretrained(str(file.parent))
    model: nn.Module = peft.get_peft_model(read(folder, head), config)
    with load_package(package).Pipeline() as pipe:
        trainable = {name for name, x in pipe.named_parameters() if x.requires_grad}
        assert trainable == {name for name, x in model.named_parameters() if x.requires_grad}
        model.load_state_dict(pipe.state_dict())
    return model


def test_adapters_are_trained_and_exported_as_by_peft(llama: Path, tmp_path: Path) -> None:
    file, hooks = described(tmp_path / "lora"), folders.hooks(llama)
    words = ("--peft", file, "--hooks", hooks)
    package = folders.compiled(llama, llama.with_name("lora_x2"), *words)
    words = ("--steps", STEPS, "--clip-norm", 1.0, "--checkpoint-dir", tmp_path / "c")
    run(package, "train", *words, ranks=2)
    out = tmp_path / "out"
    run(package, "export", "--checkpoint", tmp_path / "c", "--format", "huggingface", "-o", out)

    begun = adapted(llama, package, file)
    own = dict(begun.named_parameters())
    for name, parameter in own.items():
        if ".lora_B." in name:
            assert not parameter.any()
        elif ".lora_A." in name:  # uniform, within the bound of a layer's weights
            assert 0.5 < float(parameter.abs().max()) * parameter.shape[1] ** 0.5 <= 1.0
    model = trained(begun, hooks, STEPS)
    assert {path.name for path in out.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    model.save_pretrained(tmp_path / "peft")
    written = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert load_file(out / "adapter_model.safetensors").keys() == written.keys()
    loaded = peft.PeftModel.from_pretrained(read(llama), out)
    expected = logits(model, hooks)
    assert distance(logits(loaded, hooks), expected) < 1e-5
    assert distance(logits(read(llama), hooks), expected) > 0.01


@pytest.mark.slow
def test_adapters_with_a_head_of_their_own_and_a_second_training(
    llama: Path, tmp_path: Path
) -> None:
    """A head that is trained beside them begins anew; a second run goes on from their files."""
    settings = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
    file = described(tmp_path / "lora", **settings)
    words = ("--task", "sequence-classification", "--input", f"input_ids=8x{folders.LENGTH}:int64")
    package = folders.compiled(llama, tmp_path / "p", "--peft", file, "--validate", *words)
    run(package, "train", "--steps", 3, "--lr", 1, "--checkpoint-dir", tmp_path / "c")
    out = tmp_path / "out"
    run(package, "export", "--checkpoint", tmp_path / "c", "--format", "huggingface", "-o", out)
    stored = load_file(out / "adapter_model.safetensors")
    assert "base_model.model.score.weight" in stored

    def adapters_of(package: Path, *words: object) -> dict[str, torch.Tensor]:
        place = tmp_path / "saved.safetensors"
        rate = ("--steps", 1, "--optimizer", "sgd", "--lr", 1e-46)
        run(package, "train", *rate, "--save", place, *words)
        found = load_file(place)
        names = json.loads((package / "huggingface" / "names.json").read_text())["names"]
        return {key: found[name] for key, name in names.items()}

    loaded = adapters_of(package, "--load", out)
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in stored.items())
    again = adapters_of(folders.compiled(llama, tmp_path / "q", "--peft", out, *words))
    assert all(torch.equal(again[key], tensor) for key, tensor in stored.items())


def test_configurations_that_are_refused(llama: Path, tmp_path: Path) -> None:
    def load(file: Path) -> None:
        load_folder(llama, FolderOptions(peft=file))

    with pytest.raises(UsageError, match="there is no file"):
        load(tmp_path / "nowhere")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="is no configuration of adapters"):
        load(tmp_path / "adapter_config.json")
    with pytest.raises(ModelError, match="init_lora_weights='pissa' an adapter begins with what"):
        load(described(tmp_path / "pissa", init_lora_weights="pissa"))
    with pytest.raises(ModelError, match="use_dora an adapter"):
        load(described(tmp_path / "dora", use_dora=True))
    with pytest.raises(ModelError, match="nothing_of_it"):
        load(described(tmp_path / "other", target_modules=["nothing_of_it"]))


MODEL = """
import peft, torch, transformers

def build_model():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=50, num_hidden_layers=2, **sizes)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))

def example_inputs():
    words = torch.ones(4, 8, dtype=torch.int64)
    return {"input_ids": words, "labels": words}
"""


def test_adapters_of_a_model_file_on_meta_begin_as_peft_fills_them(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    initial = load(str(tmp_path / "model.py")).initial

    first, *_ = {steps for name, steps in initial.items() if ".lora_B." in name}
    assert first == (("zero_",),)
    (steps,) = {steps for name, steps in initial.items() if ".lora_A." in name}
    assert steps[0][0] == "uniform_"
    (steps,) = {steps for name, steps in initial.items() if "q_proj.base_layer" in name}
    assert steps[0] == ("normal_", 0.0, 0.02)
