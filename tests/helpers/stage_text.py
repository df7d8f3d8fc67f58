"""The text of a plan's one stage, and the module that it makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.stage import write_stages
from gpipe_compiler.plan import Plan


def text_of(plan: Plan) -> str:
    """The source of the one stage of a plan."""
    assert plan.graph is not None
    return write_stages(plan, CodeFacts.of(plan.graph)).stages[0].text


def module_of(text: str) -> nn.Module:
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    made = namespace["Stage0"]()
    assert isinstance(made, nn.Module)
    return made


def trains_as(stage: nn.Module, model: nn.Module, x: torch.Tensor) -> None:
    """Asserts that a stage that is a whole model computes what that does, with its weights."""
    stage.load_state_dict(model.state_dict())

    for module in (model, stage):
        module.train()
        module(x).square().sum().backward()

    torch.testing.assert_close(stage(x), model(x), rtol=0, atol=0)
    own = dict(stage.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(own[name].grad, parameter.grad)
