"""The picture of the README, against the plan that it is drawn from."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from loading import load_script
from torch import nn
from torch.nn import functional as F

from gpipe_compiler import plan, trace
from gpipe_compiler.cli.main import compile_command
from gpipe_compiler.cluster import devices_named
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.stages import list_ops

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    return load_script(ROOT / "docs" / "draw_overview.py")


def test_every_module_stage_and_action_is_drawn(drawing: ModuleType) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    batch = torch.randn(8, 64), torch.randint(64, (8,))
    graph = trace(model, (batch[0],), target=batch[1], loss_fn=F.cross_entropy)
    bare = plan(graph, stages=2, microbatches=4, cluster=devices_named("2xV100"))
    made = replace(bare, noted=list_ops(graph, samples=2))
    text = drawing.draw(made)
    actions = [str(action) for order in made.orders for action in order]

    assert re.findall(r"stage_\d.py", text) == ["stage_0.py", "stage_1.py"]
    assert [len(re.findall(rf"<title>{module}</title>", text)) for module in range(4)] == [1] * 4
    assert len(actions) == 16
    for action in actions:
        assert f"<title>{action}: " in text


@pytest.mark.slow
def test_the_picture_is_that_of_resnet50(
    drawing: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it is not, the first lines of `docs/draw_overview.py` say how it is drawn."""
    words = ["--stages", "4", "--microbatches", "4", "--devices", "4xV100", "--dry-run", "--json"]
    assert compile_command([str(ROOT / "examples/resnet50.py"), *words]) == 0
    made = Plan.from_json(json.dumps(json.loads(capsys.readouterr().out)["plan"]))

    assert drawing.draw(made) == (ROOT / "docs/overview.svg").read_text(encoding="utf-8")
