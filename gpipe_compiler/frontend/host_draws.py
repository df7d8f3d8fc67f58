"""Refuses models that draw numbers to decide in Python what they compute, whoever draws them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn

from gpipe_compiler.errors import ModelError, SourceLocation, TraceError
from gpipe_compiler.frontend.both_ways import decided_by_draws
from gpipe_compiler.frontend.comparable_runs import host_state, restore_host
from gpipe_compiler.frontend.deciding import Decisions
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.locate import calling_line, is_users, location
from gpipe_compiler.frontend.recompute import activations_kept
from gpipe_compiler.frontend.state import isolated
from gpipe_compiler.frontend.subject import Subject

_TRIES = 24
"""Runs with other numbers, of a model that draws: what it skips may be rare."""


def refuse_host_draws(entry: Entry, samples: int) -> None:
    """Refuses a model that computes something else by what `random` or `numpy.random` draws.

    A trace holds what one draw led to. A model that draws, and computes the same whatever it gets,
    is let through; so is one on meta, whose runs have no numbers.
    """
    if entry.states.on_meta:
        return
    inputs = entry.signature.samples(samples)

    def run() -> list[Any]:
        with entry.on_a_copy(), torch.random.fork_rng(), torch.no_grad(), activations_kept():
            torch.manual_seed(0)
            return [x.clone() for x in entry(*inputs) if isinstance(x, torch.Tensor)]

    kept = host_state()
    try:
        first = run()
        if all(_equal(first, run()) for _ in range(_TRIES)):
            return
        where = _line_of_change(run)
    except Exception:  # noqa: BLE001  # whatever the user's code raises: the trace reports it
        return
    finally:
        restore_host(kept)
    raise ModelError(
        "the model draws numbers of Python's or NumPy's to decide what it computes: a stage would "
        "hold what one draw led to",
        location=where,
        hint="draw by torch.rand for every sample, and choose by torch.where, as stochastic depth "
        "does; or leave the choice to your training loop",
    )


def refuse_seeding(model: nn.Module, entry: Entry, samples: int) -> None:
    """Refuses a model whose forward seeds torch's generator.

    Args:
        entry: left with a copy of the model.
    """
    lines: list[SourceLocation | None] = []
    seed = torch.manual_seed

    def watched(number: int) -> torch.Generator:
        lines.append(calling_line())
        return seed(number)

    entry.model = isolated(model).train(entry.training)
    watch = mock.patch.object(torch, "manual_seed", watched)
    with torch.random.fork_rng(), torch.no_grad(), activations_kept(), watch:
        entry(*entry.signature.samples(samples))
    if lines:
        raise ModelError(
            "forward seeds torch's generator: a package draws by seeds of its own, which depend on "
            "the step and the micro-batch",
            location=lines[0],
            hint="draw what is always the same once, into a buffer in __init__; or seed outside "
            "of forward, before training",
        )


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


def _line_of_change(run: Callable[[], object]) -> SourceLocation | None:
    """The user's line in which a generator is first used."""
    last: tuple[str, int, str] | None = None
    found: list[SourceLocation] = []
    state = host_state()

    def look(frame: FrameType, _event: str, _arg: object) -> Any:
        nonlocal last
        code = frame.f_code
        if found or not is_users(code.co_filename):
            return None
        if last is not None and host_state() != state:
            found.append(location(*last))
            return None
        last = code.co_filename, frame.f_lineno, code.co_name
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        run()
    finally:
        sys.settrace(before)
    return found[0] if found else location(*last) if last else None


def keeps_layers(subject: Subject) -> tuple[TraceError, bool | None] | None:
    """Why a model cannot be traced as it is that lets a draw of torch decide what it runs.

    And what Python is to be told for all layers to run: with what more is run; None where a draw
    gives Python other numbers than those that it decides by. Nothing for any other model.
    """
    if not subject.training:
        return None
    ways: dict[bool, Decisions] = {}
    for keeps in (False, True):
        entry = Entry(subject, training=True)
        way = ways[keeps] = Decisions(lambda _, keeps=keeps: keeps)  # type: ignore[misc]  # bound at once
        followed = True
        with entry.on_a_copy():
            try:
                with torch.random.fork_rng(), torch.no_grad(), way:
                    entry(*entry.signature.samples(2))
            except Exception:  # noqa: BLE001  # whatever the user's code raises: the trace reports it
                followed = False
        if way.line is None:
            return None
        if way.others is not None or not followed:
            return decided_by_draws(way.line), None
    return decided_by_draws(ways[True].line), ways[True].calls > ways[False].calls
