"""A process that reads its stages of a folder holds these and one tensor, never the whole."""

from __future__ import annotations

import json
from pathlib import Path

import folders
import forked
import pytest
import torch
import transformers

SLACK = 48 << 20
"""Bytes of libraries that are used for the first time, and of tensors that are read at once."""

MEASURED = """
import json, sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
from package import SPEC, WEIGHTS
from package.runtime.core.building import build_stage
from package.runtime.core.stored_weights import Weights

def told(name):
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if name in x]
    return int(line.split()[1]) << 10

Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before = told("VmRSS")
stage = build_stage(
    SPEC.stages[int(sys.argv[2])], Weights.open(WEIGHTS), torch.device("cpu"), 0
)
held = [*stage.parameters(), *stage.buffers()]
print(json.dumps({
    "peak": told("VmHWM") - before,
    "stage": sum(x.nbytes for x in held),
    "largest": max(x.nbytes for x in held),
}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 170 million parameters in bf16, in files of up to 100 MB."""
    config = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        vocab_size=8000,
        max_position_embeddings=64,
        dtype=torch.bfloat16,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    place = tmp_path_factory.mktemp("large") / "llama"
    model.save_pretrained(place, max_shard_size="100MB")
    return place


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells peaks there")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_stage_is_read_within_its_size_and_one_tensor(
    large: Path, dtype: str, tmp_path: Path
) -> None:
    words = ("--dtype", dtype, "--mode", "infer", "--input", "input_ids=4x16:int64")
    folders.compiled(large, tmp_path / "package", *words, stages=4)
    script = tmp_path / "measured.py"
    script.write_text(MEASURED)
    whole = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    whole *= 2 if dtype == "float32" else 1
    for stage in range(4):
        done = forked.run([script, tmp_path, stage])
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["stage"] < 0.4 * whole
        assert told["peak"] >= told["stage"]
        assert told["peak"] < told["stage"] + told["largest"] + SLACK, told
        print(dtype, stage, {name: round(size / 2**20, 1) for name, size in told.items()})
