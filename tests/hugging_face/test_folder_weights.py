"""Where packages of folders read their weights, and what else they take."""

from __future__ import annotations

import shutil
from pathlib import Path

import folders
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from folders import read, run
from loading import load_package
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpipe_compiler.runtime.core.building import build_stage
from gpipe_compiler.runtime.core.stored_weights import Weights
from gpipe_compiler.runtime.errors import WeightsError


def held(package: Path, **options: object) -> dict[str, Tensor]:
    """What the stages of a package hold."""
    with load_package(package).Pipeline(**options) as pipe:
        return {name: tensor.detach().clone() for name, tensor in pipe.state_dict().items()}


def outputs(package: Path, place: Path, *words: object, code: int = 0) -> Tensor | str:
    """The logits of the example; what the command says, where it fails."""
    said = run(package, "infer", "--output", place, *words, code=code)
    return said if code else load_file(place)["logits"]


@pytest.fixture
def moved(llama: Path, package: Path, tmp_path: Path) -> Path:
    """A copy of the package beside a copy of its folder."""
    shutil.copytree(llama, tmp_path / "llama")
    return shutil.copytree(package, tmp_path / "llama_x2")


@pytest.fixture
def other(llama: Path, tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """Another folder of the model, in one file, and its numbers."""
    model = read(llama)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.save_pretrained(tmp_path / "other")
    return tmp_path / "other", {name: x.detach() for name, x in model.state_dict().items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_weights_are_those_of_from_pretrained_by_a_relative_path(
    llama: Path, package: Path, moved: Path
) -> None:
    expected = read(llama).state_dict()
    same(held(package), expected)
    same(held(moved), expected)
    for package_of in (package, moved):
        assert not list((package_of / "weights").glob("model*"))
    assert str(llama) not in (package / "weights" / "index.json").read_text()


def test_a_stage_needs_the_files_with_its_own_tensors_alone(moved: Path) -> None:
    spec, weights = load_package(moved).SPEC, Weights.open(moved / "weights")
    needed = {
        (weights.directory / weights.files[name]).resolve()
        for name in spec.stages[0].state.values()
        if name in weights.files
    }
    others = [file for file in (moved.parent / "llama").glob("*.safetensors") if file not in needed]
    assert others
    for file in others:
        file.unlink()

    stage = build_stage(spec.stages[0], weights, torch.device("cpu"), 0)
    assert not any(tensor.is_meta for tensor in (*stage.parameters(), *stage.buffers()))
    with pytest.raises(WeightsError, match="is missing"):
        build_stage(spec.stages[1], weights, torch.device("cpu"), 0)


def test_a_package_without_its_folder_names_a_file_and_takes_another_folder(
    moved: Path, other: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    there = outputs(moved, tmp_path / "o.safetensors")
    (moved.parent / "llama").rename(tmp_path / "elsewhere")
    said = outputs(moved, tmp_path / "o.safetensors", code=1)
    assert "is missing" in said
    assert "--weights DIR" in said

    elsewhere = ("--weights", tmp_path / "elsewhere")
    assert torch.equal(outputs(moved, tmp_path / "o.safetensors", *elsewhere), there)
    another = outputs(moved, tmp_path / "o.safetensors", "--weights", other[0])
    assert not torch.equal(another, there)
    assert "loss" in run(moved, "train", "--steps", 1, "--weights", other[0], ranks=2)
    said = outputs(moved, tmp_path / "o.safetensors", "--weights", tmp_path, code=1)
    assert "index.json is missing" in said


def test_a_base_models_folder_is_taken_for_a_model_with_a_head(
    llama: Path, package: Path, tmp_path: Path
) -> None:
    """Its keys lack the first word of those with a head."""
    read(llama).model.save_pretrained(tmp_path / "base")
    weights = Weights.open(package / "weights").moved(tmp_path / "base")

    same(held(package, weights=weights), read(llama).state_dict())


def test_none_begins_as_a_new_model_does(package: Path) -> None:
    new = held(package, weights=None)
    assert new.keys() == held(package).keys()
    assert float(new["model.layers.0.mlp.up_proj.weight"].std()) == pytest.approx(0.02, rel=0.2)
    assert "loss" in run(package, "train", "--steps", 1, "--weights", "none")


def test_copied_weights_travel_with_the_package(llama: Path, tmp_path: Path) -> None:
    package = folders.compiled(llama, tmp_path / "p", "--copy-weights", "--mode", "infer")
    shutil.move(package, tmp_path / "deep" / "er" / "p")

    same(held(tmp_path / "deep" / "er" / "p"), read(llama).state_dict())


@pytest.mark.parametrize(
    "form",
    ["folder", "pt", *(pytest.param(f, marks=pytest.mark.slow) for f in ("file", "nested", "dcp"))],
)
def test_load_takes_over_weights_of_any_form(
    form: str, package: Path, other: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, expected = other
    place = tmp_path / "given"
    match form:
        case "folder":
            read(folder).save_pretrained(place, max_shard_size="8KB")
        case "file":
            place = folder / "model.safetensors"
        case "pt":
            torch.save(expected, place := tmp_path / "w.pt")
        case "nested":
            torch.save({"model": expected, "step": 3}, place := tmp_path / "w.pt")
        case _:
            dcp.save({"model": expected}, checkpoint_id=place)
    loaded = ("--load", place, "--lr", 1e-46, "--optimizer", "sgd", "--steps", 1)
    saved = tmp_path / "saved.safetensors"
    run(package, "train", *loaded, "--save", saved, ranks=2)

    found = load_file(saved)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_weights_of_another_model_are_refused_by_name(
    package: Path, other: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    weights = dict(other[1])
    del weights["lm_head.weight"]
    place = tmp_path / "w.safetensors"
    norm = weights.pop("model.norm.weight")
    save_file(weights | {"model.more": norm}, place)
    said = outputs(package, tmp_path / "o", "--load", place, code=2)
    assert "model.norm.weight is missing; model.more is unknown" in said
    save_file(weights | {"model.norm.weight": norm[:-1].clone()}, place)
    assert "model.norm.weight has shape (15,)" in outputs(
        package, tmp_path / "o", "--load", place, code=2
    )
    torch.save({"a": [print]}, tmp_path / "w.pt")
    assert "weights_only" in outputs(package, tmp_path / "o", "--load", tmp_path / "w.pt", code=1)
    torch.save([norm], tmp_path / "w.pt")
    assert "holds no state_dict" in outputs(
        package, tmp_path / "o", "--load", tmp_path / "w.pt", code=2
    )


@pytest.mark.slow
def test_files_in_bf16_make_weights_of_the_type_that_is_asked_for(tmp_path: Path) -> None:
    folders.written("Llama", tmp_path / "half", dtype=torch.bfloat16)
    model = read(tmp_path / "half")
    same(held(folders.compiled(tmp_path / "half", tmp_path / "p")), model.state_dict())
    package = folders.compiled(tmp_path / "half", tmp_path / "p", "--dtype", "float32")
    same(held(package), model.float().state_dict())


@pytest.mark.slow
def test_a_head_that_the_folder_lacks_begins_anew(llama: Path, tmp_path: Path) -> None:
    words = ("--task", "sequence-classification", "--input", f"input_ids=8x{folders.LENGTH}:int64")
    package = folders.compiled(llama, tmp_path / "p", *words)
    found, expected = held(package), read(llama).state_dict()
    head = found.pop("score.weight")
    same(found, {name: x for name, x in expected.items() if name != "lm_head.weight"})
    assert float(head.std()) == pytest.approx(0.02, rel=0.5)
    run(package, "train", "--steps", 2, "--checkpoint-dir", tmp_path / "c")
    words = ("export", "--checkpoint", tmp_path / "c", "--format", "huggingface")
    run(package, *words, "-o", tmp_path / "out")
    made = read(tmp_path / "out", "AutoModelForSequenceClassification")
    assert type(made).__name__ == "LlamaForSequenceClassification"
    assert "exists" in run(package, *words, "-o", tmp_path / "out", code=2)


@pytest.mark.slow
def test_what_the_model_does_not_use_is_exported_too(tmp_path: Path) -> None:
    """The mask token of a vision model, which its pictures are not masked by."""
    config = transformers.Dinov2Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=28,
        patch_size=7,
        num_labels=3,
    )
    model = transformers.Dinov2ForImageClassification(config)
    token = "dinov2.embeddings.mask_token"
    with torch.no_grad():
        model.get_parameter(token).normal_()
    model.save_pretrained(tmp_path / "dino")
    package = folders.compiled(
        tmp_path / "dino", tmp_path / "p", "--input", "pixel_values=4x3x28x28"
    )
    run(package, "train", "--steps", 1, "--checkpoint-dir", tmp_path / "c")
    words = ("export", "--checkpoint", tmp_path / "c", "--format", "huggingface")
    run(package, *words, "-o", tmp_path / "out")

    found = read(tmp_path / "out", "AutoModelForImageClassification")
    assert torch.equal(found.get_parameter(token), model.get_parameter(token))
