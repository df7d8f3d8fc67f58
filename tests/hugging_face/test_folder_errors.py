"""What is wrong with a folder is told by a compile, before anything is traced."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path

import folders
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpipe_compiler.cli.main import compile_command
from gpipe_compiler.errors import ModelError, Notice, UsageError
from gpipe_compiler.frontend.hugging_face import FolderOptions, load_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folders.written("Llama", tmp_path / "llama", shard="12KB")
    return tmp_path / "llama"


def first_file(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def refused(folder: Path, match: str, **options: object) -> None:
    with pytest.raises(ModelError, match=match):
        load_folder(folder, FolderOptions(**options))  # type: ignore[arg-type]  # a test's own


def test_a_missing_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = first_file(folder)
    gone.unlink()
    refused(folder, f"{gone.name} is missing, which model.safetensors.index.json says holds")
    assert compile_command([str(folder), "--stages", "2", "--dry-run"]) == 1
    assert "is missing" in capsys.readouterr().err


def test_a_damaged_file(folder: Path) -> None:
    whole = first_file(folder).read_bytes()
    first_file(folder).write_bytes(whole[: len(whole) // 2])
    refused(folder, "cannot read")


def test_an_index_that_is_none(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[1")
    refused(folder, "is no index of weights")


def test_a_missing_tensor(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, r"does not hold model\.norm\.weight of LlamaForCausalLM")


def test_a_tensor_that_the_index_is_wrong_about(folder: Path) -> None:
    file = first_file(folder)
    tensors = load_file(file)
    name = min(tensors)
    tensors["another"] = tensors.pop(name)
    save_file(tensors, file)
    refused(folder, f"does not hold {name}, which model.safetensors.index.json says it does")


def test_another_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, r"has shape \((16, 24|24, 16)\) in .*, and \((16, 32|32, 16)\) in the")


def test_two_tensors_that_the_configuration_ties(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "are one tensor of the model, and differ in its files")


def test_pickled_weights_alone(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    refused(folder, "pickled weights alone")


def test_no_weights_at_all_begin_anew(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    with pytest.warns(Notice, match="begins as a new model does"):
        subject = load_folder(folder, FolderOptions())
    assert subject.pretrained is not None
    assert not subject.pretrained.stored


def test_tasks(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a llama model has no head for it"):
        load_folder(folder, FolderOptions(task="masked-lm"))
    assert compile_command([str(folder), "--stages", "2", "--task", "translation"]) == 2
    base = shutil.copytree(folder, tmp_path / "base")
    config = json.loads((base / "config.json").read_text()) | {"architectures": ["LlamaModel"]}
    (base / "config.json").write_text(json.dumps(config))
    refused(base, "has no head and no loss")
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        subject = load_folder(base, FolderOptions(task="causal-lm"))
    assert type(subject.model).__name__ == "LlamaForCausalLM"
    (base / "config.json").write_text(json.dumps(config | {"architectures": None}))
    refused(base, "names no architecture")


def test_quantised_weights(folder: Path) -> None:
    quantised = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    refused(folder, "quantised")


def test_a_configuration_that_is_none(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    refused(folder, "config.json")


def test_a_library_that_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError) as told:
        load_folder(folder, FolderOptions())
    assert "pip install 'gpipe-compiler[huggingface]'" in told.value.hint
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError) as told:
        load_folder(folder, FolderOptions(peft=folder))
    assert "pip install" in told.value.hint


def test_options_of_folders_are_for_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text("")
    words = [str(tmp_path / "model.py"), "--stages", "2", "--copy-weights", "--task", "causal-lm"]
    assert compile_command(words) == 2
    assert "--task, --copy-weights" in capsys.readouterr().err
    assert compile_command([str(tmp_path), "--stages", "2"]) == 2
    assert "config.json" in capsys.readouterr().err


def test_links_are_read_by_their_own_names(folder: Path, tmp_path: Path) -> None:
    """As they lie in the cache of the hub."""
    blobs, links = tmp_path / "blobs", tmp_path / "snapshot"
    links.mkdir()
    shutil.copytree(folder, blobs)
    for number, file in enumerate(sorted(blobs.iterdir())):
        (links / file.name).symlink_to(file.rename(blobs / str(number)))
    subject = load_folder(links, FolderOptions())

    assert subject.pretrained is not None
    files = {file for tensor in subject.pretrained.stored.values() for file in tensor.files}
    assert files == {
        path.resolve().parent.parent / "snapshot" / path.name
        for path in links.glob("*.safetensors")
    }
