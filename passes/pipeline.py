"""The passes: every transformation of a graph in the order in which they run, and the analyses.

A transformation takes an annotated graph and returns one; an analysis returns a table. The graph is
verified after every transformation.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpipe_compiler.errors import UsageError
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.legality import check
from gpipe_compiler.passes.atoms import atoms
from gpipe_compiler.passes.attention import call_attention_plainly
from gpipe_compiler.passes.attention_masks import narrow_masks, simplify_padding_masks
from gpipe_compiler.passes.cross_sample_ops import mixing_ops
from gpipe_compiler.passes.duplicate import duplicable, shape_values
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.empty_parts import without_empty_parts
from gpipe_compiler.passes.inplace import write_in_place
from gpipe_compiler.passes.liveness import liveness
from gpipe_compiler.passes.loss_weight import weigh_loss
from gpipe_compiler.passes.output_terms import weigh_outputs
from gpipe_compiler.passes.pass_setting import PassSetting
from gpipe_compiler.passes.random_ops import random_ops
from gpipe_compiler.passes.saved_tensors import runs_of, saved_tensors
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.passes.simplify import simplify
from gpipe_compiler.passes.stores import read_stores, without_unread_stores
from gpipe_compiler.passes.written_once import freeze_followers
from gpipe_compiler.runtime.wording import counted, printable_lines

ALL = "all"
"""Stands for every transformation where a graph is printed."""

INPLACE = "inplace"


@dataclass(frozen=True, slots=True)
class Pass:
    """A transformation of an annotated graph.

    Attributes:
        name: by which `--print-after` and errors call it.
        run: returns the changed graph, with `values` in order, or empty to have them found anew.
            The fields of a frozen dataclass with a `__call__` are the options of the pass.
    """

    name: str
    run: Callable[[Graph, PassSetting], Graph]


@dataclass(frozen=True, slots=True)
class Analysis:
    """An analysis of a graph after all transformations: a table, which is not kept here."""

    name: str
    run: Callable[[Graph], object]


PASSES: tuple[Pass, ...] = (
    Pass("shapes", lambda graph, at: annotate(graph, at.samples, at.precision)),
    Pass("followers", lambda graph, _: freeze_followers(graph)),
    Pass("empty_parts", lambda graph, at: without_empty_parts(graph, at.kept)),
    Pass("padding_masks", lambda graph, at: simplify_padding_masks(graph, at.kept)),
    Pass("narrow_masks", lambda graph, at: narrow_masks(graph, at.kept)),
    Pass("simplify", lambda graph, at: simplify(graph, at.kept)),
    Pass("attention", lambda graph, at: call_attention_plainly(graph, at.kept)),
    Pass("unread_stores", lambda graph, at: without_unread_stores(graph, at.kept)),
    Pass("stores", lambda graph, _: read_stores(graph)),
    Pass("output_terms", lambda graph, _: weigh_outputs(graph)),
    Pass("loss_weight", lambda graph, _: weigh_loss(graph)),
    # Last: planning undoes those writes that a cut parts.
    Pass(INPLACE, lambda graph, at: write_in_place(graph) if at.in_place else graph),
)
"""In order. The first of them takes a graph that is not annotated."""

ANALYSES: tuple[Analysis, ...] = (
    Analysis("effects", effects),
    Analysis("saved_tensors", saved_tensors),
    Analysis("liveness", liveness),
    Analysis("op_runs", runs_of),
    Analysis("random_ops", random_ops),
    Analysis("cross_sample_ops", mixing_ops),
    Analysis("shape_values", shape_values),
    Analysis("duplicable", lambda graph: duplicable(graph, effects(graph))),
    Analysis("atoms", lambda g: atoms(g, effects(g), duplicable(g, effects(g)))),
)
"""Run where somebody asks for them: what several ask for is kept with the graph (`Graph.once`)."""


def to_stderr(text: str) -> None:
    """Writes where no document of standard output is disturbed."""
    print(printable_lines(text), file=sys.stderr)


@dataclass(frozen=True)
class PassPipeline:
    """Transformations in order, and what is printed of them.

    Attributes:
        printed: names of transformations after which the graph is printed, and of analyses whose
            table is.
    """

    passes: tuple[Pass, ...] = field(default_factory=lambda: PASSES)
    analyses: tuple[Analysis, ...] = field(default_factory=lambda: ANALYSES)
    printed: frozenset[str] = frozenset()
    write: Callable[[str], None] = to_stderr

    def asked(self, print_after: Sequence[str] = (), options: Sequence[str] = ()) -> PassPipeline:
        """The same, as the command line asks for it.

        Args:
            options: `PASS.OPTION=VALUE`.

        Raises:
            UsageError: for a name that there is not, with those that there are.
        """
        names = [step.name for step in self.passes]
        known = [*names, *(analysis.name for analysis in self.analyses), ALL]
        for name in print_after:
            if name not in known:
                raise UsageError(
                    f"--print-after {name}: there is no such pass",
                    hint=f"one of {', '.join(known)}",
                )
        passes = self.passes
        for text in options:
            passes = _with_option(passes, text)
        printed = frozenset(names if ALL in print_after else ()).union(print_after)
        return dataclasses.replace(self, passes=passes, printed=printed)

    def run(self, graph: Graph, at: PassSetting) -> Iterator[tuple[str, Graph]]:
        """After each transformation its name and the graph, annotated and legal.

        Raises:
            ModelError: naming the op that cannot run at this batch size.
            IllegalGraphError: naming the pass that has made an illegal graph.
        """
        for step in self.passes:
            before, graph = graph, step.run(graph, at)
            if graph is not before:
                check(graph, after=step.name)
            if not graph.values:
                graph = annotate(graph, at.samples, at.precision)
            if step.name in self.printed:
                self.write(f"{self._title(step.name, at)}\n{graph}\n")
            yield step.name, graph
        for analysis in self.analyses:
            if analysis.name in self.printed:
                table = "\n".join(_lines(analysis.run(graph)))
                self.write(f"{self._title(analysis.name, at)}\n{table}\n")

    def _title(self, name: str, at: PassSetting) -> str:
        return f"# after {name}: {counted(at.samples, 'sample')}, {at.precision.value}"


def transform(graph: Graph, setting: PassSetting, pipeline: PassPipeline | None = None) -> Graph:
    """The graph after every pass, annotated; see `PassPipeline.run`."""
    for _, made in (pipeline or PassPipeline()).run(graph, setting):
        graph = made
    return graph


def _with_option(passes: Sequence[Pass], text: str) -> tuple[Pass, ...]:
    """The passes, one of them with an option, parsed as the type of its value:
    `PASS.OPTION=VALUE`."""
    place, _, value = text.partition("=")
    known = {f"{step.name}.{key}": (step, key) for step in passes for key in options_of(step)}
    if place not in known:
        raise UsageError(
            f"--pass-option {text}: there is no such option",
            hint=f"PASS.OPTION=VALUE with one of {', '.join(known) or 'none'}",
        )
    step, option = known[place]
    before = options_of(step)[option]
    words = {"true": True, "false": False}
    try:
        found = words[value] if isinstance(before, bool) else type(before)(value)  # type: ignore[call-arg]  # a number or a word
    except (KeyError, ValueError):
        raise UsageError(
            f"--pass-option {text}: {value!r} is no {type(before).__name__}",
            hint=f"such as {place}={str(before).lower()}",
        ) from None
    run = dataclasses.replace(step.run, **{option: found})  # type: ignore[type-var]  # a dataclass, as it has options
    changed = dataclasses.replace(step, run=run)
    return tuple(changed if item is step else item for item in passes)


def options_of(step: Pass) -> Mapping[str, object]:
    """The options of a pass with their values: numbers, words, and what is on or off."""
    run: object = step.run
    if not dataclasses.is_dataclass(run) or isinstance(run, type):
        return {}
    return {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}


def _lines(table: object, indent: str = "") -> Iterator[str]:
    """A table for people: a row a line, what lies inside further in."""
    rows: Mapping[object, object]
    if dataclasses.is_dataclass(table) and not isinstance(table, type):
        rows = {field.name: getattr(table, field.name) for field in dataclasses.fields(table)}
    elif isinstance(table, Mapping):
        rows = table
    else:
        yield f"{indent}{_short(table)}"
        return
    for name, row in rows.items():
        if isinstance(row, Mapping):
            yield f"{indent}{name}:"
            yield from _lines(row, f"{indent}  ")
        else:
            yield f"{indent}{name}: {_short(row)}"


def _short(cell: object) -> str:
    """A cell on one line, sets in order."""
    if isinstance(cell, frozenset):
        return "{" + ", ".join(sorted(map(_short, cell))) + "}"
    if isinstance(cell, tuple):
        return f"({', '.join(map(_short, cell))})"
    return str(cell)
