"""`run.py` and `__init__.py`."""

from __future__ import annotations

from gpipe_compiler.codegen.constants import quote
from gpipe_compiler.codegen.layout import lay_out, name
from gpipe_compiler.codegen.templating import render
from gpipe_compiler.frontend.subject import Hooks
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.wording import listed


def write_run(plan: Plan, hooks: Hooks | None, *, package: str) -> str:
    """The source of `run.py`.

    Args:
        package: the name under which the script imports the folder, whatever the folder is called.
    """
    offered = sorted(hooks.names) if hooks is not None else []
    return render(
        "run.py.jinja",
        name=plan.name,
        package=package,
        training=plan.training,
        hooks=_hooks(hooks) if hooks is not None and offered else None,
        offered=listed(offered),
        command="train.command",
    )


def _hooks(hooks: Hooks) -> list[str]:
    place = str(hooks.file) if hooks.file is not None else hooks.module
    return lay_out(name(quote(place)), prefix="HOOKS = ")


def write_init(plan: Plan, *, weights: bool) -> str:
    """The source of `__init__.py`, with the Pipeline of the package."""
    return render(
        "init.py.jinja",
        name=plan.name,
        stages=len(plan.stages),
        training=plan.training,
        weights=weights,
    )
