"""From a folder to a fine-tuned folder: equal to plain training of from_pretrained."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import folders
import pytest
import torch
from folders import distance, logits, read, run, trained

STEPS = 20
TRAIN = ("train", "--steps", STEPS, "--clip-norm", 1.0)


def exported(package: Path, checkpoints: Path, place: Path, *words: object) -> Path:
    run(package, "export", "--checkpoint", checkpoints, "--format", "huggingface", "-o", place)
    return place


def test_a_folder_is_trained_and_exported_as_in_plain_pytorch(
    llama: Path, package: Path, tmp_path: Path
) -> None:
    hooks = llama.with_name("hooks.py")
    said = run(package, *TRAIN, "--checkpoint-dir", tmp_path / "c", ranks=2)
    words = ("--format", "huggingface", "--shard-size", "8KB", "-o", tmp_path / "out")
    run(package, "export", "--checkpoint", tmp_path / "c", *words)

    before = read(llama)
    after = trained(before, hooks, STEPS)
    expected = logits(after, hooks)
    assert distance(logits(read(tmp_path / "out"), hooks), expected) < 1e-5
    told = float(re.findall(r"evaluation after step 20: loss (\S+)", said)[-1])
    assert told == pytest.approx(after(**next(folders.batches(hooks))).loss.item(), rel=1e-4)
    assert distance(logits(before, hooks), expected) > 0.1
    beside = {"config.json", "generation_config.json", "tokenizer_config.json"}
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {name for name in files if "safetensors" not in name} == beside
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    stored = json.loads((llama / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored["weight_map"].keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("GPT2", "AutoModelForCausalLM"),
        ("Bert", "AutoModelForMaskedLM"),
        ("T5", "AutoModelForSeq2SeqLM"),
    ],
)
def test_other_architectures(kind: str, head: str, tmp_path: Path) -> None:
    folder, hooks = tmp_path / "model", folders.hooks(tmp_path / "model")
    folders.written(kind, folder)
    package = folders.compiled(folder, tmp_path / "package", "--hooks", hooks, "--validate")
    run(package, *TRAIN, "--checkpoint-dir", tmp_path / "c")
    exported(package, tmp_path / "c", tmp_path / "out")

    expected = logits(trained(read(folder, head), hooks, STEPS), hooks)
    assert distance(logits(read(tmp_path / "out", head), hooks), expected) < 1e-5


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_in_other_numbers_of_stages_and_replicas(
    llama: Path, package: Path, tmp_path: Path
) -> None:
    hooks = llama.with_name("hooks.py")
    other = folders.compiled(llama, llama.with_name("llama_x4"), "--hooks", hooks, stages=4)
    checkpoints = tmp_path / "c"
    words = [other / "run.py", "train", "--steps", 100_000, "--clip-norm", 1.0]
    words += ["--checkpoint-dir", checkpoints, "--checkpoint-every", 3]
    killed = subprocess.Popen([sys.executable, *map(str, words)], stdout=subprocess.DEVNULL)
    try:
        while not list(checkpoints.glob("step_*6/.metadata")):
            assert killed.poll() is None
            time.sleep(0.02)
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    reached = max(int(path.name[5:]) for path in checkpoints.glob("step_*"))
    steps = reached + 7
    words = ["train", "--steps", steps, "--clip-norm", 1.0, "--checkpoint-dir", checkpoints]
    run(package, *words, "--resume", "--data-parallel", 2, ranks=4)
    exported(package, checkpoints, tmp_path / "out")

    expected = logits(trained(read(llama), hooks, steps), hooks)
    assert distance(logits(read(tmp_path / "out"), hooks), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
def test_in_bf16_it_is_as_far_from_fp32_as_plain_training_is(weights: str, tmp_path: Path) -> None:
    """With weights of 16 bits, and under autocast with such of 32."""
    dtype = getattr(torch, weights)
    folder, hooks = tmp_path / "model", folders.hooks(tmp_path / "model")
    folders.written("Llama", folder, dtype=dtype)
    under = {"dtype": torch.bfloat16} if dtype is torch.float32 else {}
    precision = ("--precision", "bf16") if under else ()
    package = folders.compiled(folder, tmp_path / "package", "--hooks", hooks, *precision)
    run(package, *TRAIN, "--checkpoint-dir", tmp_path / "c", ranks=2)
    exported(package, tmp_path / "c", tmp_path / "out")

    before = read(folder)
    exact = logits(trained(before.float(), hooks, STEPS), hooks)
    plain = logits(trained(before.to(dtype), hooks, STEPS, **under).float(), hooks)
    out = read(tmp_path / "out")
    assert out.dtype is dtype
    found = logits(out.float(), hooks)
    assert distance(found, exact) < 1.5 * distance(plain, exact)
    assert distance(found, plain) < 2 * distance(plain, exact)
