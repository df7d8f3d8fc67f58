"""The blocks of all stages: found together, and written once where several stages have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from gpipe_compiler.codegen.blocks import StageBlocks, StageMethods
from gpipe_compiler.codegen.calls import HelperCall, enter_calls
from gpipe_compiler.codegen.construction import SourceFile, WrittenBlock
from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.names import RESERVED, Identifiers, class_name
from gpipe_compiler.codegen.parameter_names import parameter_names
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.blocks import BlockClass, Body, turns_around
from gpipe_compiler.ir.classes import Methods, find_blocks
from gpipe_compiler.ir.contents import Contents, prefixes


def find_stage_blocks(facts: CodeFacts, stages: Iterable[StageMethods]) -> tuple[StageBlocks, ...]:
    """The blocks of some stages, found together; none is written yet."""
    known = tuple(stages)
    helpers: list[dict[str, HelperCall]] = [{} for _ in known]
    searched = [_methods(facts.graph, *pair) for pair in zip(known, helpers, strict=True)]
    blocks = find_blocks(searched, facts.shapes)
    for own, inside in zip(known, blocks, strict=True):
        own.state.root.prune(inside.of_path)
    found = zip(known, helpers, searched, blocks, strict=True)
    written: dict[int, WrittenBlock] = {}
    worth: set[int] = set()
    return tuple(
        StageBlocks(facts, *parts, written, worth, SourceFile(Identifiers())) for parts in found
    )


def write_blocks(stages: Sequence[StageBlocks]) -> SourceFile:
    """Writes the blocks of some stages; gives the file of those that several of them call."""
    classes, written = stages[0].blocks.classes, stages[0].written
    reserved = (*RESERVED, *(stage.own.class_name for stage in stages))
    layers = SourceFile(Identifiers(reserved), shared=True)
    made = {stage.own.stage.index: stage for stage in stages}
    for stage in stages:
        stage.peaks.method(next(iter(stage.bodies.values())))
    wanted = _names(classes, made)
    for block in (block for block in classes if len(block.stages) > 1):
        written[id(block)] = made[block.first.stage].write(block, wanted[id(block)], layers)
    for stage in stages:
        stage.file.names = Identifiers(layers.names.taken)
    for block in (block for block in classes if len(block.stages) == 1):
        stage = made[block.first.stage]
        written[id(block)] = stage.write(block, wanted[id(block)], stage.file)
    return layers


def _methods(graph: Graph, own: StageMethods, helpers: dict[str, HelperCall]) -> Methods:
    """A stage as blocks are looked for in it; the calls of functions in it are noted."""
    bodies = [
        Body(enter_calls(method.ops, helpers), method.returns) for method in own.methods.values()
    ]
    states = tuple(name for name in own.state.places if name not in own.state.unread)
    here = frozenset(own.stage.ops)
    parted = {*turns_around(op for op in graph.ops if op.name not in here)}
    displaced = {prefix for path in own.state.displaced for prefix in prefixes(path)}
    kept = {holder.prefix[:-1] for holder in own.state.root.all()} - displaced
    return Methods(
        Contents(graph, tuple(own.state.modules), states, {p: c.name for p, c in helpers.items()}),
        bodies,
        [*(path for path in graph.module_classes if path in kept), *helpers],
        parted,
        own.stage.index,
        own.again,
    )


def _names(classes: Sequence[BlockClass], stages: Mapping[int, StageBlocks]) -> dict[int, str]:
    """The user's names; of several classes or functions that have one, with what distinguishes
    them: a module that one holds, or what it is given."""
    alike: dict[tuple[str, bool], dict[int, frozenset[str]]] = {}
    names: dict[int, str] = {}
    for block in classes:
        stage = stages[block.first.stage]
        function = block.first.path in stage.helpers
        held = () if function else stage.holders[block.first.path].members
        given = parameter_names(stage.facts.graph, block.first).values()
        if (block.first.path, block.first.turn) in stage.searched.parted:
            names[id(block)] = f"{class_name(block.user)}Part"
        else:
            words = frozenset(word for word in (*held, *given) if word.isidentifier())
            alike.setdefault((block.user, function), {})[id(block)] = words
    for (user, function), several in alike.items():
        counts = Counter(word for words in several.values() for word in words)
        for own, words in several.items():
            rarest = min(sorted(words), key=counts.__getitem__, default="")
            apart = bool(rarest) and counts[rarest] < len(several)
            if function:
                names[own] = f"{user}_with_{rarest}" if apart else user
            else:
                names[own] = class_name(user) + (f"With{class_name(rarest)}" if apart else "")
    return names
