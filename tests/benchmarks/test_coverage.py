"""Models of other people's libraries: what is needed of them here, and what becomes of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from foreign.in_idioms import MODELS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", MODELS)
def test_an_idiom_can_be_trained(name: str) -> None:
    file = MODELS[name].user_file()
    torch.manual_seed(0)
    model, inputs = file["build_model"](), file["example_inputs"]()

    output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    loss = (
        file["loss_fn"](output, file["example_target"]()) if "loss_fn" in file else output["loss"]
    )
    loss.backward()

    assert torch.isfinite(loss)
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.slow
def test_an_idiom_is_compiled_and_judged(tmp_path: Path) -> None:
    """A row that is in the file to resume from stands as it is."""
    resume = tmp_path / "rows.jsonl"
    known = {"name": "idioms:byol", "outcome": "refused", "why": "as told"}
    resume.write_text(json.dumps(known) + "\n")
    words = [
        "--only",
        "idioms:hypernet",
        "--only",
        "idioms:byol",
        "--resume",
        str(resume),
        "--json",
    ]

    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "coverage.py"), *words],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
    )

    found = {row["name"]: row["outcome"] for row in json.loads(done.stdout)}
    assert found == {"idioms:hypernet": "right", "idioms:byol": "refused"}
