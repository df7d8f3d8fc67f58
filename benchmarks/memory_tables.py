"""Published memory of pipelines beside what is rebuilt and what this compiler predicts.

    python benchmarks/memory_tables.py torchgpipe    # Table 1 of GPipe as torchgpipe measured it
    python benchmarks/memory_tables.py predicted     # the same rows, as packages of ours
    python benchmarks/memory_tables.py amoebanet transformer [--devices 1 2 4 8]    # what fits 8 GB

The first is `torchgpipe_memory.py`: its own balances, order and allocator. The second has the same
balances and GPipe's schedule, every stage recomputing, in our runtime: from the memory traces of
its stages. The last two look for the largest networks that fit devices of 8 GB, with our cut, 1F1B
and `--remat auto`, in as many micro-batches as there are samples. All of it from tensors without
numbers; nothing is measured.

Table 1 of GPipe (arXiv 1811.06965) has 224 x 224 images, mini-batches of 128 and 12 bytes for every
parameter; its Transformers have 1024 words in mini-batches of 32.
"""

from __future__ import annotations

import argparse
import bisect
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from fitting_memory import (
    BYTES_EACH,
    MEMORY,
    Fit,
    Sized,
    amoebanet,
    largest,
    most_parameters,
    planned,
    transformer,
)
from tables import markdown
from torchgpipe_memory import BASELINE, MICRO_BATCHES, PUBLISHED, Published, footprints, network

from gpipe_compiler.options import RematChoice
from gpipe_compiler.runtime.spec import ScheduleKind

GIB = 2**30
WITHIN = 0.03
"""A row counts as reproduced when it is off by no more."""

P40 = 24 * 10**9
"""Bytes of the devices that torchgpipe ran on."""

AMOEBANET_B = 557_294_088
"""Parameters of AmoebaNet-B (18, 512), which GPipe tells as 557 million."""


def parameters_of(row: Published) -> int:
    """Of torchgpipe's network, counted."""
    return sum(parameter.numel() for parameter in network(row.layers, row.filters).parameters())


def torchgpipe() -> str:
    """Table 1 as torchgpipe measured it, rebuilt."""
    header = (
        *("", "(L, D)", "parameters", "12 bytes each, GiB", "activations, GiB", "rebuilt"),
        *("", "in one pool", "live", "GPipe: parameters, activations, GB"),
    )
    rows = []
    for row in (BASELINE, *PUBLISHED):
        parameters = parameters_of(row)
        if parameters != row.parameters:
            raise SystemExit(f"{row.name}: {parameters} parameters instead of {row.parameters}")
        state = BYTES_EACH * parameters

        def rebuilt(
            *, streams: bool, row: Published = row, state: int = state
        ) -> tuple[float, ...]:
            found = footprints(row, streams=streams)
            return tuple(
                (sum(getattr(each, name) for each in found) - state) / GIB
                for name in ("reserved", "live")
            )

        reserved, live = rebuilt(streams=True)
        pooled, _ = rebuilt(streams=False)
        if row.activations_gib is None:
            beyond = reserved * GIB + state > P40
            printed, verdict = "out of memory", "reproduced" if beyond else "would have fitted"
        else:
            off = reserved / row.activations_gib - 1
            printed = f"{row.activations_gib:.2f}"
            verdict = f"{'reproduced' if abs(off) <= WITHIN else 'off'} ({off:+.1%})"
        rows.append(
            (
                row.name,
                f"({row.layers}, {row.filters})",
                f"{parameters:,}",
                f"{state / GIB:.2f}",
                printed,
                f"{reserved:.2f}",
                verdict,
                f"{pooled:.2f}",
                f"{live:.2f}",
                "{}, {}".format(*row.gpipe_gb),
            )
        )
    return f"### torchgpipe, rebuilt\n\n{markdown(header, rows)}\n\n{amoebanet_b()}\n"


def amoebanet_b() -> str:
    """Whether AmoebaNet-B has as many parameters as published."""
    import amoebanet as example

    with torch.device("meta"):
        found = sum(p.numel() for p in example.amoebanet_b(18, 512).parameters())
    if found != AMOEBANET_B:
        raise SystemExit(f"AmoebaNet-B (18, 512): {found} parameters instead of {AMOEBANET_B}")
    return f"AmoebaNet-B (18, 512): {found:,} parameters, as published (557M)."


def predicted(rows: Sequence[Published]) -> str:
    """The rows of Table 1 as packages of ours: live bytes."""
    header = ("", "(L, D)", "GPipe's schedule, GiB", "largest device", "1F1B, GiB", "seconds")
    lines = []
    for row in rows:
        start = time.perf_counter()
        model = amoebanet(row.layers, row.filters)
        fits = [
            planned(
                model,
                len(row.balance),
                microbatches=row.micro_batches,
                schedule=schedule,
                remat=RematChoice.FULL if row.micro_batches > 1 else RematChoice.NONE,
                memory=10**15,
                balance=row.balance,
            )
            for schedule in (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B)
        ]
        lines.append(
            (
                row.name,
                model.name,
                f"{fits[0].activations / GIB:.2f}",
                f"{max(fits[0].bytes) / GIB:.2f}",
                f"{fits[1].activations / GIB:.2f}",
                f"{time.perf_counter() - start:.0f}",
            )
        )
    return f"### Table 1, as packages of ours\n\n{markdown(header, lines)}\n"


@dataclass(frozen=True)
class Search:
    """What may fit so many devices, in the order of its size.

    Attributes:
        how: in words.
        published: the largest that GPipe tells of, and its parameters.
        near: a size that may be about the largest; 0 for none.
    """

    how: str
    published: str
    sizes: Sequence[int]
    sized: Callable[[int], Sized]
    devices: int
    microbatches: int
    remat: RematChoice = RematChoice.AUTO
    near: int = 0

    def run(self) -> tuple[Fit | None, Fit | None, float]:
        """The largest that fits, the next one, and the seconds that it took to find them."""
        start = time.perf_counter()

        def fit(size: int) -> Fit:
            found = planned(
                self.sized(size), self.devices, microbatches=self.microbatches, remat=self.remat
            )
            fullest = max(found.bytes) / 1e9
            spent = time.perf_counter() - start
            print(f"    {self.how}: {found.name} {fullest:.3f} GB {spent:.0f} s", flush=True)
            return found

        return *largest(self.sizes, fit, self.near), time.perf_counter() - start


def fitting(searches: Iterable[Search], title: str) -> str:
    """What fits, row by row."""
    header = (
        *("", "largest", "parameters", "GB of them", "activations, GB", "fullest device, GB"),
        *("next", "its fullest device, GB", "GPipe's", "seconds"),
    )
    rows = []
    for search in searches:
        fit, beyond, seconds = search.run()
        found: tuple[str, ...] = ("none", "", "", "", "")
        if fit is not None:
            found = (
                fit.name,
                f"{fit.parameters / 1e6:,.1f}M",
                f"{BYTES_EACH * fit.parameters / 1e9:.2f}",
                f"{fit.activations / 1e9:.2f}",
                f"{max(fit.bytes) / 1e9:.2f}",
            )
        over = ("", "") if beyond is None else (beyond.name, f"{max(beyond.bytes) / 1e9:.2f}")
        rows.append((search.how, *found, *over, search.published, f"{seconds:.0f}"))
    return f"### {title}\n\n{markdown(header, rows)}\n"


GPIPE_AMOEBANET = {
    1: (18, "(18, 416) 318M"),
    2: (18, "(18, 544) 542M"),
    4: (36, "(36, 544) 1.05B"),
    8: (72, "(72, 512) 1.8B"),
}
"""Layers and the network that GPipe fits, by number of devices."""

FILTERS = 16
"""By so many the networks grow."""

LIKELY = {"amoebanet": 0.88, "transformer": 0.84}
"""The share of `most_parameters` that may be about the largest."""


def amoebanet_searches(devices: Sequence[int]) -> list[Search]:
    """AmoebaNet-D with GPipe's numbers of layers and as many filters as fit."""

    def filters(layers: int, most: float) -> range:
        """All whose parameters are no more than that."""
        every = range(2 * FILTERS, 2048, FILTERS)
        return every[: bisect.bisect(every, most, key=lambda f: amoebanet(layers, f, 1).parameters)]

    most = most_parameters(1)
    plain = [
        Search(
            f"plain, {text}", "(18, 208) 82M", filters(18, bound), grow(18), 1, count,
            RematChoice.NONE,
        )
        for text, count, bound in (
            ("the whole mini-batch", 1, most / 5), ("accumulated", MICRO_BATCHES, most)
        )
    ]  # fmt: skip
    ours = []
    for count in devices:
        layers, published = GPIPE_AMOEBANET[count]
        sizes = filters(layers, count * most)
        near = filters(layers, LIKELY["amoebanet"] * count * most)[-1]
        ours.append(
            Search(
                f"ours, K={count}", published, sizes, grow(layers), count, MICRO_BATCHES, near=near
            )
        )
    return [*plain, *ours]


def grow(layers: int) -> Callable[[int], Sized]:
    """AmoebaNet-D of so many layers by its filters."""
    return lambda filters: amoebanet(layers, filters)


def transformer_searches(devices: Sequence[int]) -> list[Search]:
    """Transformer-L with as many layers as fit."""

    def layers(count: int) -> list[int]:
        one, two = (transformer(number, 1).parameters for number in (1, 2))
        return list(range(1, 2 + (most_parameters(count) - one) // (two - one)))

    plain = [
        Search(f"plain, {text}", "3 (16 GB)", layers(1), transformer, 1, count, RematChoice.NONE)
        for text, count in (("the whole mini-batch", 1), ("accumulated", 32))
    ]
    published = {1: "13 (16 GB)", 8: "103 (16 GB)"}
    ours = []
    for count in devices:
        sizes = layers(count)
        near = round(LIKELY["transformer"] * sizes[-1])
        ours.append(
            Search(
                f"ours, K={count}",
                published.get(count, ""),
                sizes,
                transformer,
                count,
                32,
                near=near,
            )
        )
    return [*plain, *ours]


def main() -> None:
    """Prints the tables that are asked for."""
    parser = argparse.ArgumentParser(description="Published memory beside predicted memory.")
    parser.add_argument(
        "tables", nargs="+", choices=["torchgpipe", "predicted", "amoebanet", "transformer"]
    )
    parser.add_argument(
        "--devices", type=int, nargs="+", default=[1, 2, 4, 8], choices=[1, 2, 4, 8]
    )
    parser.add_argument("--ours-only", action="store_true", help="without the plain rows")
    arguments = parser.parse_args()
    for table in arguments.tables:
        if table == "torchgpipe":
            print(torchgpipe())
        elif table == "predicted":
            print(predicted([row for row in PUBLISHED if len(row.balance) in arguments.devices]))
        else:
            make = amoebanet_searches if table == "amoebanet" else transformer_searches
            searches = make(arguments.devices)
            kept = searches[2:] if arguments.ours_only else searches
            name = "AmoebaNet-D" if table == "amoebanet" else "Transformer-L"
            print(fitting(kept, f"{name} in devices of {MEMORY / 1e9:.0f} GB"))


if __name__ == "__main__":
    main()
