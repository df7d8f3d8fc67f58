"""Folders that store tensors of a model in pieces, as the experts of a mixture."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
import transformers
from folders import distance, logits, read, run, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.stored_layouts import traced
from gpipe_compiler.frontend.stored_names import FolderNames
from gpipe_compiler.runtime.core.assembly import Assembly
from gpipe_compiler.runtime.core.stored_weights import Weights
from gpipe_compiler.runtime.errors import WeightsError

EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
KINDS = ("Mixtral", "Qwen3Moe", "DeepseekV3", "Olmoe", "Ernie4_5_Moe", "Jamba", "Qwen3Next")


def configured(kind: str) -> Any:
    """A small configuration of a mixture of experts, by the names that its class knows."""
    cls = getattr(transformers, f"{kind}Config")
    known = cls()
    sizes = {"vocab_size": folders.WORDS, "pad_token_id": 0, **folders.SIZES["Llama"], **EXPERTS}
    return cls(**{name: value for name, value in sizes.items() if hasattr(known, name)})


def stored(folder: Path) -> dict[str, Tensor]:
    return {key: x for file in folder.glob("*.safetensors") for key, x in load_file(file).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_that_of_from_pretrained_and_is_written_as_it_lay(
    kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = configured(kind)
    cls = getattr(transformers, f"{kind}ForCausalLM")
    cls(config).save_pretrained(tmp_path / "model")
    with torch.device("meta"):
        bare = cls._from_config(configured(kind), dtype=torch.float32)

    names = FolderNames.read(bare, tmp_path / "model", own=True)

    there, expected = stored(tmp_path / "model"), cls.from_pretrained(tmp_path / "model")
    found, pieces = {}, 0
    for key, tensor in bare.state_dict(keep_vars=True).items():
        how = names.stored[names.of[id(tensor)]].made
        pieces += how.plain is None
        found[names.of[id(tensor)]] = how.of_tensors([there[piece] for piece in how.of])
        assert torch.equal(found[names.of[id(tensor)]], expected.state_dict()[key]), key
    assert pieces
    for key, how in names.exported.items():
        assert torch.equal(how.of_tensors([found[name] for name in how.of]), there[key]), key
    assert names.exported.keys() == there.keys()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a mixture, in several files."""
    place = tmp_path_factory.mktemp("pieces") / "mixtral"
    folders.written("Mixtral", place)
    return place


@pytest.fixture(scope="module")
def package(mixtral: Path) -> Path:
    """It in two stages."""
    hooks = folders.hooks(mixtral)
    return folders.compiled(mixtral, mixtral.with_name("p"), "--hooks", hooks, "--validate")


def test_a_mixture_is_trained_and_exported_as_in_plain_pytorch(
    mixtral: Path, package: Path, tmp_path: Path
) -> None:
    hooks, steps = mixtral.with_name("hooks.py"), 6
    words = ("--clip-norm", 1.0, "--checkpoint-dir", tmp_path / "c")
    run(package, "train", "--steps", steps, *words, ranks=2)
    words = ("--format", "huggingface", "--shard-size", "8KB", "-o", tmp_path / "out")
    run(package, "export", "--checkpoint", tmp_path / "c", *words)

    expected = logits(trained(read(mixtral), hooks, steps), hooks)
    assert distance(logits(read(tmp_path / "out"), hooks), expected) < 1e-5
    assert stored(tmp_path / "out").keys() == stored(mixtral).keys()
    plain = tmp_path / "plain.safetensors"
    run(package, "infer", "--load", tmp_path / "out", "--output", plain)
    run(package, "infer", "--weights", tmp_path / "out", "--output", tmp_path / "o.safetensors")
    given = load_file(plain)["logits"]
    assert torch.equal(load_file(tmp_path / "o.safetensors")["logits"], given)
    torch.save(stored(tmp_path / "out"), tmp_path / "given.pt")
    run(package, "infer", "--load", tmp_path / "given.pt", "--output", tmp_path / "o.safetensors")
    assert torch.equal(load_file(tmp_path / "o.safetensors")["logits"], given)
    run(package, "infer", "--output", plain)
    run(package, "infer", "--load", package / "weights", "--output", tmp_path / "o.safetensors")
    assert torch.equal(load_file(tmp_path / "o.safetensors")["logits"], load_file(plain)["logits"])


def test_a_piece_that_is_gone_is_named(mixtral: Path, package: Path, tmp_path: Path) -> None:
    gone = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    there = stored(mixtral)
    rest = {key: tensor for key, tensor in there.items() if key != gone}
    (tmp_path / "less").mkdir()
    save_file(rest, tmp_path / "less" / "model.safetensors", {"format": "pt"})
    (tmp_path / "less" / "config.json").write_text((mixtral / "config.json").read_text())
    with torch.device("meta"):
        bare = transformers.MixtralForCausalLM._from_config(
            transformers.AutoConfig.from_pretrained(mixtral), dtype=torch.float32
        )
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts\.gate_up_proj") as found:
        FolderNames.read(bare, tmp_path / "less", own=True)
    assert "bring all files" in str(found.value)

    whole = Weights.open(package / "weights")
    moved = whole.moved(tmp_path / "less")
    assert whole.assembled.keys() - moved.assembled.keys() == {
        "model.layers.0.mlp.experts.gate_up_proj"
    }
    with pytest.raises(WeightsError, match="down_proj has shape"):
        moved.check({"model.layers.0.mlp.experts.down_proj": torch.empty(0)})


MOVES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "stack": lambda given: [torch.stack(given)],
    "cat": lambda given: [torch.cat(given, dim=-1)],
    "chunk": lambda given: [part.contiguous() for x in given for part in x.chunk(2)],
    "transpose": lambda given: [x.transpose(0, -1) for x in given],
    "halves": lambda given: [x.reshape(2, -1).t().contiguous() for x in given],
    "flat": lambda given: [x.contiguous().view(-1) for x in given],
    "unsqueeze": lambda given: [x.unsqueeze(1) for x in given],
    "first": lambda given: [x[0] for x in given],
}
"""What becomes of some tensors of one shape."""


def fits(move: str, given: Sequence[Tensor]) -> bool:
    first = given[0]
    match move:
        case "chunk":
            return first.ndim > 0 and len(first) % 2 == 0 and len(given) < 4
        case "halves":
            return first.numel() % 2 == 0
        case "stack" | "unsqueeze":
            return 0 < first.ndim < 5
    return first.ndim > (move == "first")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(sorted(MOVES)), min_size=1, max_size=6))
def test_what_moves_elements_is_done_again(moves: list[str]) -> None:
    def moved(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        given = list(tensors)
        for move in moves:
            given = MOVES[move](given) if fits(move, given) else given
        return {str(place): tensor for place, tensor in enumerate(given)}

    tensors = [torch.arange(48.0).reshape(4, 12) + 100 * number for number in range(2)]
    sources = dict(zip("ab", tensors, strict=True))
    how = traced(moved, list(sources), [tensor.to("meta") for tensor in tensors])

    for key, expected in moved(tensors).items():
        again = Assembly.read(json.loads(json.dumps(how[key].written())))
        assert torch.equal(again.of_tensors([sources[name] for name in again.of]), expected)


def test_what_computes_is_refused() -> None:
    with pytest.raises(ModelError, match="computes mul of a"):
        traced(lambda given: {"x": 2 * given[0]}, ["a"], [torch.empty(3, device="meta")])
