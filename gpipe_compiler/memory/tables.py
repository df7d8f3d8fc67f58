"""What the engine of a device holds, and where it is on its way."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from gpipe_compiler.memory.job import InFlight
from gpipe_compiler.memory.ref_counts import SharedBuffer
from gpipe_compiler.runtime.schedule.actions import Transfer

Posted = tuple[str, int, int, int, bool]
"""A transfer by its fields, which is looked up sooner than the transfer itself."""


@dataclass(slots=True)
class Tables:
    """All that decides what the next actions of a device take, beside its program.

    Values of the batch, which count elsewhere, are not in the tables.

    Attributes:
        flights: by stage and micro-batch.
        values: by name and micro-batch.
        gradients: by the value's name, the stage that made them, and micro-batch.
        posted: what has been received and not been read.
        under_way: what has been sent and not left.
        forwards, backwards, weights: the stages that have had one.
    """

    flights: dict[tuple[int, int], InFlight] = field(default_factory=dict)
    values: dict[tuple[str, int], SharedBuffer | None] = field(default_factory=dict)
    gradients: dict[tuple[str, int, int], SharedBuffer | None] = field(default_factory=dict)
    posted: dict[Posted, SharedBuffer] = field(default_factory=dict)
    under_way: list[SharedBuffer | None] = field(default_factory=list)
    forwards: set[int] = field(default_factory=set)
    backwards: set[int] = field(default_factory=set)
    weights: set[int] = field(default_factory=set)

    def seen_from(self, microbatch: int) -> Hashable:
        """Equal for tables that differ in their micro-batches alone, counted from this one.

        Storages are told by when they first come up, so that who holds what together is told too.
        """
        numbers: dict[int, int] = {}
        storages: list[Hashable] = []

        def number(held: SharedBuffer | None) -> int:
            if held is None:
                return -1
            found = numbers.get(id(held))
            if found is None:
                found = numbers[id(held)] = len(storages)
                storages.append((held.bytes, held.category, held.name, held.stage, held.holders))
            return found

        flights = tuple(
            (stage, m - microbatch, flight.again, flight.without,
             tuple([(block, number(held)) for block, held in flight.blocks.items()]))
            for (stage, m), flight in self.flights.items()
        )  # fmt: skip
        values = tuple([(n, m - microbatch, number(h)) for (n, m), h in self.values.items()])
        gradients = tuple(
            [(n, stage, m - microbatch, number(h)) for (n, stage, m), h in self.gradients.items()]
        )
        posted = tuple(
            [(n, m - microbatch, *ends, number(h)) for (n, m, *ends), h in self.posted.items()]
        )
        under_way = tuple(map(number, self.under_way))
        begun = len(self.forwards), len(self.backwards), len(self.weights)
        return flights, values, gradients, posted, under_way, begun, tuple(storages)

    def move_on(self, by: int) -> None:
        """What is of a micro-batch becomes that of one further by so many."""
        self.flights = {(stage, m + by): item for (stage, m), item in self.flights.items()}
        self.values = {(name, m + by): item for (name, m), item in self.values.items()}
        self.gradients = {
            (n, stage, m + by): item for (n, stage, m), item in self.gradients.items()
        }
        self.posted = {
            (n, m + by, source, target, gradient): item
            for (n, m, source, target, gradient), item in self.posted.items()
        }


def posted(transfer: Transfer) -> Posted:
    """A transfer as the tables have it."""
    return (
        transfer.value,
        transfer.microbatch,
        transfer.source,
        transfer.target,
        transfer.gradient,
    )
