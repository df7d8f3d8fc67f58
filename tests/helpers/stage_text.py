"""The text of a plan's one stage, and the module that it makes."""

from __future__ import annotations

from typing import Any

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
