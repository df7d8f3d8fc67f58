"""The blocks of all stages: found together, and written once where several stages have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpipe_compiler.codegen.blocks import StageBlocks, StageMethods
from gpipe_compiler.codegen.construction import SourceFile, WrittenBlock
from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.helpers import HelperCalls
from gpipe_compiler.codegen.names import RESERVED, Identifiers, class_name
from gpipe_compiler.codegen.peaks import Peaks
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.blocks import BlockCall, BlockClass, Body, calls_in
from gpipe_compiler.ir.classes import MethodBlocks, Methods, find_blocks
from gpipe_compiler.ir.contents import Contents, prefixes


@dataclass(frozen=True)
class FoundBlocks:
    """The blocks of some stages; for each, what was looked through and what was found."""

    stages: tuple[StageMethods, ...]
    helpers: tuple[HelperCalls, ...]
    methods: tuple[Methods, ...]
    blocks: tuple[MethodBlocks, ...]

    @classmethod
    def of(cls, facts: CodeFacts, stages: Iterable[StageMethods]) -> FoundBlocks:
        known = tuple(stages)
        helpers = tuple(HelperCalls() for _ in known)
        methods = tuple(
            _methods(facts.graph, own, calls) for own, calls in zip(known, helpers, strict=True)
        )
        return cls(known, helpers, methods, find_blocks(methods, facts.templates))

    def again(self, place: int) -> frozenset[str]:
        """Of the modules of a stage that are to run again, those that are called once, as blocks.

        Args:
            place: of the stage among these.
        """
        bodies, methods = self.blocks[place].bodies, self.stages[place].methods.values()
        calls = (c for parts in bodies for c in calls_in(parts) if c.again)
        counts = Counter(call.path for call in calls if call.outputs)
        ops = [op for method in methods for op in method.ops]
        turns = {(path, op.turn(path)) for op in ops for path in prefixes(op.module)}
        called = Counter(path for path, _ in turns)
        return frozenset(path for path, count in counts.items() if count == called[path] == 1)


def write_blocks(
    facts: CodeFacts, found: FoundBlocks
) -> tuple[tuple[StageBlocks, ...], SourceFile]:
    """The blocks of some stages, written, and the file of those that several of them call."""
    classes = found.blocks[0].classes
    reserved = (*RESERVED, *(own.class_name for own in found.stages))
    layers = SourceFile(Identifiers(reserved), shared=True)
    written: dict[int, WrittenBlock] = {}
    worth: set[int] = set()
    made: dict[int, StageBlocks] = {}
    for own, helpers, methods, blocks in zip(
        found.stages, found.helpers, found.methods, found.blocks, strict=True
    ):
        made[own.stage.index] = StageBlocks(
            facts,
            own,
            helpers,
            methods,
            blocks,
            _peaks(facts, own, blocks, worth),
            written,
            SourceFile(layers.names),
        )
    wanted = _names(classes, made)
    for block in (block for block in classes if len(block.stages) > 1):
        written[id(block)] = made[block.first.stage].write(block, wanted[id(block)], layers)
    for stage in made.values():
        stage.file.names = Identifiers(layers.names.taken)
    for block in (block for block in classes if len(block.stages) == 1):
        stage = made[block.first.stage]
        written[id(block)] = stage.write(block, wanted[id(block)], stage.file)
    return tuple(made.values()), layers


def _methods(graph: Graph, own: StageMethods, helpers: HelperCalls) -> Methods:
    """A stage as blocks are looked for in it; the calls of functions in it are noted."""
    bodies = [Body(helpers.enter(method.ops), method.returns) for method in own.methods.values()]
    states = tuple(name for name in own.state.places if name not in own.state.unread)
    here = frozenset(own.stage.ops)
    parted = {
        (path, op.turn(path))
        for op in graph.ops
        if op.name not in here
        for path in prefixes(op.module)
    }
    displaced = {prefix for path in own.state.displaced for prefix in prefixes(path)}
    kept = {holder.prefix[:-1] for holder in own.state.root.all()} - displaced
    return Methods(
        Contents(graph, tuple(own.state.modules), states, helpers.names),
        bodies,
        [*(path for path in graph.module_classes if path in kept), *helpers.found],
        parted,
        own.stage.index,
        own.again,
    )


def _peaks(facts: CodeFacts, own: StageMethods, blocks: MethodBlocks, worth: set[int]) -> Peaks:
    """The memory peaks of the methods of a stage; storages to free early are added to `worth`."""
    first, *others = (
        BlockCall("", parts, method.arguments, method.returns)
        for method, parts in zip(own.methods.values(), blocks.bodies, strict=True)
    )
    segments = dict(zip(list(own.methods)[1:], others, strict=True))
    peaks = Peaks(facts.graph, facts.runs, blocks, segments, worth)
    peaks.method(first)
    return peaks


def _names(classes: Sequence[BlockClass], stages: Mapping[int, StageBlocks]) -> dict[int, str]:
    """The user's names; of several classes that have one, with what distinguishes them."""

    def is_part(block: BlockClass) -> bool:
        first = block.first
        return (first.path, first.turn) in stages[first.stage].searched.parted

    functions = [b for b in classes if b.first.path in stages[b.first.stage].helpers.found]
    names = {id(block): block.user for block in functions}
    classes = [block for block in classes if block not in functions]
    held = {id(b): stages[b.first.stage].holders[b.first.path].members for b in classes}
    for block in classes:
        own = names[id(block)] = class_name(block.user)
        whole = [held[id(b)] for b in classes if b.user == block.user and not is_part(b)]
        words = (word for word in held[id(block)] if word.isidentifier())
        holding = {word: sum(word in members for members in whole) for word in words}
        rarest = min(holding, key=holding.__getitem__, default="")
        if is_part(block):
            names[id(block)] = f"{own}Part"
        elif rarest and holding[rarest] < len(whole):
            names[id(block)] = f"{own}With{class_name(rarest)}"
    return names
