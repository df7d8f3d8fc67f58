"""Folders as save_pretrained writes them, packages of them, and plain training to compare with."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import forked
import torch
import transformers
from torch import Tensor, nn

from gpipe_compiler.cli.main import compile_command

WORDS, LENGTH = 50, 12

DECODER: Mapping[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
SIZES: Mapping[str, dict[str, Any]] = {
    "Llama": {**DECODER},
    "GPT2": {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "Bert": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "T5": {
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    "Mixtral": {**DECODER, "num_local_experts": 4},
}
HEADS = {
    "Llama": "LlamaForCausalLM",
    "GPT2": "GPT2LMHeadModel",
    "Bert": "BertForMaskedLM",
    "T5": "T5ForConditionalGeneration",
    "Mixtral": "MixtralForCausalLM",
}

HOOKS = '''
import torch

def train_data():
    """Four batches of texts, of which the ends of some are padding that does not count."""
    for seed in range(4):
        random = torch.Generator().manual_seed(seed)
        words = torch.randint(1, 50, (8, 12), generator=random)
        labels = words.clone()
        labels[::3, 9:] = -100
        yield {"input_ids": words, "labels": labels}, None

def eval_data():
    yield next(iter(train_data()))

def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3)

def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
'''


def written(kind: str, place: Path, head: str = "", **settings: Any) -> nn.Module:
    """The model of a new folder, with weights that begin at random."""
    torch.manual_seed(0)
    known = {"dtype": torch.float32, "shard": "8KB", "pad_token_id": 0} | settings
    dtype, shard = known.pop("dtype"), known.pop("shard")
    config = getattr(transformers, f"{kind}Config")(vocab_size=WORDS, **SIZES[kind], **known)
    model: Any = getattr(transformers, head or HEADS[kind])(config).to(dtype)
    with torch.no_grad():  # as trained ones are, with large logits; a T5 begins with such
        for parameter in model.parameters() if kind != "T5" else ():
            parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(0.1)
    model.save_pretrained(place, max_shard_size=shard)
    return model  # type: ignore[no-any-return]


def hooks(beside: Path) -> Path:
    """The file of `HOOKS`, beside a folder."""
    file = beside.with_name("hooks.py")
    file.write_text(HOOKS)
    return file


def compiled(folder: Path, package: Path, *words: object, stages: int = 2) -> Path:
    """A package of a folder, which is not compared with its model unless words say so."""
    own = [str(word) for word in words]
    if "--input" not in own:
        own += ["--input", f"input_ids=8x{LENGTH}:int64"]
    plain = [] if "--validate" in own else ["--no-validate"]
    own = [word for word in own if word != "--validate"]
    code = compile_command(
        [str(folder), "--stages", str(stages), "-o", str(package), "--force", *plain, *own]
    )
    assert code == 0
    return package


def run(package: Path, *words: object, ranks: int = 0, code: int = 0) -> str:
    """What a command of a package prints."""
    done = forked.run([package / "run.py", *words], ranks=ranks)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def batches(file: Path) -> Iterator[dict[str, Tensor]]:
    """The batches of a file of hooks, pass after pass."""
    offered = runpy.run_path(str(file))
    while True:
        for inputs, _ in offered["train_data"]():
            yield inputs


def trained(model: nn.Module, file: Path, steps: int, **autocast: Any) -> nn.Module:
    """A copy of a model, trained in plain PyTorch with what a file of hooks offers."""
    model = copy.deepcopy(model).train()
    found = (parameter for parameter in model.parameters() if parameter.requires_grad)
    offered = runpy.run_path(str(file))
    optimizer = offered["make_optimizer"](found)
    scheduler = offered["make_scheduler"](optimizer)
    for _, batch in zip(range(steps), batches(file), strict=False):
        optimizer.zero_grad()
        with torch.autocast("cpu", **autocast) if autocast else torch.enable_grad():
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return model


def read(folder: Path, kind: str = "") -> nn.Module:
    """The model of a folder; it holds all tensors of it, and no other."""
    head = getattr(transformers, kind or "AutoModelForCausalLM")
    model, said = head.from_pretrained(folder, output_loading_info=True)
    assert not any(said.values()), said
    return model  # type: ignore[no-any-return]


@torch.no_grad()
def logits(model: nn.Module, file: Path) -> Tensor:
    """Those of the first batch of a file of hooks."""
    batch = next(batches(file))
    return model.eval()(**batch).logits.float()  # type: ignore[no-any-return]


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((one - other).abs().max() / other.abs().max())
