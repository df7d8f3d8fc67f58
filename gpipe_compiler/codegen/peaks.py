"""Which values a stage has to let go of for its peak to be as planned.

A method holds its variables until it returns. The peak of a stage is that of its `forward`, where
all memory ends with its last use, as in its memory trace. What a method holds beyond that may fill
the room below this peak; a block has the room that its calls leave it. The rest is let go of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from gpipe_compiler.codegen.expressions import runs_again
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.blocks import BlockCall, Part
from gpipe_compiler.ir.classes import MethodBlocks
from gpipe_compiler.passes.saved_tensors import OpRun

NO_OTHERS: Mapping[int, int] = MappingProxyType({})

SMALL = 1000
"""One part in this many of a peak is not worth a line."""


@dataclass(frozen=True, slots=True)
class _Need:
    """What a part takes beside its inputs.

    Attributes:
        peak: bytes, at most, with what it makes.
        kept: bytes that autograd keeps after it, of no value that others see.
        saved: the storages that autograd keeps.
    """

    peak: int = 0
    kept: int = 0
    saved: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Curve:
    """What a method holds beside its arguments, where all memory ends with its last use.

    Attributes:
        before: bytes before each part.
        needs: of each part.
        ending: for each part the storages that end with it, and their bytes.
        after: bytes in the end.
    """

    before: list[int]
    needs: list[_Need]
    ending: list[list[tuple[int, int]]]
    after: int

    @property
    def peak(self) -> int:
        pairs = zip(self.before, self.needs, strict=True)
        return max((now + need.peak for now, need in pairs), default=0)


@dataclass
class Peaks:
    """Finds what the methods of one stage have to let go of.

    Attributes:
        segments: by name, what runs again in the backward.
        worth: the storages found, as the first call of each block numbers them; those of all
            stages, which have blocks in common.
    """

    graph: Graph
    runs: Mapping[str, OpRun]
    blocks: MethodBlocks
    segments: Mapping[str, BlockCall]
    worth: set[int]
    _known: dict[tuple[int, bool], _Need] = field(default_factory=dict)

    @cached_property
    def _bytes(self) -> Mapping[int, int]:
        """Bytes of every storage that an op makes, by number."""
        found: dict[int, int] = {}
        for op in self.graph.ops:
            run = self.runs.get(op.name)
            for value, size in zip(op.outputs, run.sizes if run else (), strict=False):
                found.setdefault(self._storage(value), size)
        return found

    def _storage(self, value: str) -> int:
        known = self.graph.values.get(value)
        return -1 if known is None else known.storage

    def _storages(self, values: Iterable[str]) -> frozenset[int]:
        return frozenset(map(self._storage, values)) - {-1}

    def method(self, content: BlockCall, first: Mapping[int, int] = NO_OTHERS) -> None:
        """Takes note of what a method and the blocks in it have to let go of.

        Args:
            first: as in `_fill`.
        """
        peak = self._curve(content, saves=True).peak
        self._fill(content, peak + peak // SMALL, first, saves=True)

    def _fill(
        self, content: BlockCall, limit: int, first: Mapping[int, int], *, saves: bool
    ) -> None:
        """Fills the room below a limit; what does not fit is worth letting go of.

        Args:
            first: the storages of the content as the first call of its block numbers them.
        """
        curve = self._curve(content, saves=saves)
        longer = [0] * (len(content.parts) + 1)  # bytes, by the part after which they still live
        room = math.inf
        for place in reversed(range(len(content.parts))):
            for storage, size in sorted(curve.ending[place], key=lambda item: item[1]):
                if size <= room:
                    room -= size
                    longer[place + 1] += size
                else:
                    self.worth.add(first.get(storage, storage))
            room = min(room, limit - curve.before[place] - curve.needs[place].peak)
        held = 0
        for place, part in enumerate(content.parts):
            held += longer[place]
            self._fill_part(part, limit - curve.before[place] - held, saves=saves)

    def _fill_part(self, part: Part, limit: int, *, saves: bool) -> None:
        first: Mapping[int, int] = NO_OTHERS
        if isinstance(part, BlockCall):
            block = self.blocks.of_path[part.path].first
            pairs = zip(_outputs(part), _outputs(block), strict=True)
            first = {self._storage(one): self._storage(other) for one, other in pairs}
        again = self._again(part)
        if again is not None:
            self._fill(again, limit, first, saves=False)
            self.method(again, first)
        elif isinstance(part, BlockCall):
            self._fill(part, limit, first, saves=saves)

    def _again(self, part: Part) -> BlockCall | None:
        """What runs again in the backward, of a call that does."""
        if isinstance(part, BlockCall):
            return part if part.again else None
        # An op inside may have the name of its segment.
        return self.segments.get(part.name) if runs_again(part.call) else None

    def _need(self, part: Part, *, saves: bool) -> _Need:
        key = id(part), saves
        if key not in self._known:
            self._known[key] = self._found(part, saves=saves)
        return self._known[key]

    def _found(self, part: Part, *, saves: bool) -> _Need:
        again = self._again(part)
        if again is not None:
            peak = self._curve(again, saves=False).peak
            return _Need(peak, 0, self._storages(part.inputs))
        if isinstance(part, BlockCall):
            made = self._storages(part.outputs) - self._storages(part.inputs)
            curve = self._curve(part, saves=saves)
            saved = (self._need(inner, saves=saves).saved for inner in part.parts)
            kept = curve.after - sum(self._bytes.get(storage, 0) for storage in made)
            return _Need(curve.peak, kept, frozenset().union(*saved))
        run = self.runs.get(part.name)
        if run is None:
            return _Need()
        if not saves:
            return _Need(run.peak)
        return _Need(run.peak, run.kept, self._storages(run.saved))

    def _curve(self, content: BlockCall, *, saves: bool) -> _Curve:
        needs = [self._need(part, saves=saves) for part in content.parts]
        last: dict[int, int] = {}
        for place, part in enumerate(content.parts):
            last.update(dict.fromkeys(self._storages((*part.inputs, *part.outputs)), place))
        staying = self._storages((*content.inputs, *content.outputs))
        staying = staying.union(*(need.saved for need in needs))
        seen = set(self._storages(content.inputs))
        before: list[int] = []
        ending: list[list[tuple[int, int]]] = [[] for _ in needs]
        now = 0
        for place, (part, need) in enumerate(zip(content.parts, needs, strict=True)):
            before.append(now)
            now += need.kept
            for storage in self._storages(part.outputs) - seen:
                size = self._bytes.get(storage, 0)
                seen.add(storage)
                now += size
                if size and storage not in staying:
                    ending[last[storage]].append((storage, size))
            now -= sum(size for _, size in ending[place])
        return _Curve(before, needs, ending, now)


def _outputs(call: BlockCall) -> tuple[str, ...]:
    return tuple(value for part in call.parts for value in part.outputs)
