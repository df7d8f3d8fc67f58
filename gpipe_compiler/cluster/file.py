"""Reads a cluster file, as `examples/clusters/` has them, and lists all that is wrong with it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gpipe_compiler.cluster.catalogue import LINKS, Card, built_in, known_devices, plain
from gpipe_compiler.cluster.hosts import Host, cluster_of
from gpipe_compiler.cluster.machines import MOST_DEVICES, Arithmetic, Cluster, Device, Link
from gpipe_compiler.cluster.quantities import BANDWIDTH, SIZE, SPEED, TIME
from gpipe_compiler.cluster.tables import Faults, Table
from gpipe_compiler.cluster.words import LOCAL, Group
from gpipe_compiler.errors import UsageError

_DEFAULT_LATENCY_S = 1e-5
_DEFAULT_LAUNCH_S = 5e-6


def read_cluster(path: Path) -> Cluster:
    """The cluster that a TOML file describes.

    Raises:
        UsageError: listing all faults of the file, each with its line and key.
    """
    try:
        text = path.read_text(encoding="utf-8")
        written = tomllib.loads(text)
    except FileNotFoundError:
        raise UsageError(
            f"there is no file {path}", hint="examples/clusters/ has files to start from"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text") from error
    except RecursionError:
        raise UsageError(f"{path} describes no cluster: lists within lists without end") from None
    except ValueError as error:  # of TOML, or of a number of more digits than Python converts
        raise UsageError(f"{path} is no TOML: {error}") from error
    faults = Faults(text)
    cluster = _Reader(faults).read(Table(written, "", faults))
    if cluster is None:
        raise UsageError(
            f"{path} describes no cluster:{faults.listing}",
            hint="examples/clusters/ has files that explain themselves",
        )
    return cluster


class _Reader:
    """Turns tables into hosts and links; where something is wrong, notes it and goes on."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._own: dict[str, Card | None] = {}
        self._local: Card | None = None

    def read(self, file: Table) -> Cluster | None:
        """The cluster; None when nothing can be made of the file."""
        self._read_devices(file)
        hosts = [host for table in file.tables("hosts") for host in self._hosts(table)]
        if not file.has("hosts"):
            self._faults.add("hosts", "is missing: at least one host with devices is needed")
        network = self._network(file, len(hosts))
        count = sum(len(host.cards) for host in hosts)
        if count > MOST_DEVICES:
            self._faults.add("hosts", f"has {count:,} devices, more than {MOST_DEVICES:,}")
        # Where devices are missing, their numbers are not those that were meant.
        exceptions = self._exceptions(file, None if self._faults else count)
        file.refuse_others()
        return None if self._faults else cluster_of(hosts, network, exceptions)

    def _read_devices(self, file: Table) -> None:
        for name, table in file.named_tables("devices"):
            if plain(name) == LOCAL:
                table.wrong("", "is what this machine is called: take another name")
            self._own[plain(name)] = self._device(name, table)
            table.refuse_others()

    def _device(self, name: str, table: Table) -> Card | None:
        """A device as described; None when something is wrong with it."""
        before = len(self._faults)
        base: Card | None = None
        like = table.text("like")
        if like is not None:
            base = self._card(like, table, "like", own=False)
        needed = not table.has("like")
        old = base.device if base else Device("", 1.0, 1.0, 1, _DEFAULT_LAUNCH_S)
        speeds = self._speeds(table, needed=needed)
        device = Device(
            name,
            speeds.get(Arithmetic.FP32, old.flops),
            table.quantity("memory_bandwidth", BANDWIDTH, needed=needed) or old.memory_bandwidth,
            int(table.quantity("memory", SIZE, needed=needed) or old.memory),
            table.quantity("launch", TIME, default=old.launch_s) or 0.0,
            half_flops=speeds.get(Arithmetic.FP16, old.half_flops),
            tf32_flops=speeds.get(Arithmetic.TF32, old.tf32_flops),
            bf16_flops=speeds.get(Arithmetic.BF16, old.bf16_flops),
        )
        link = self._link(table, "link")
        if len(self._faults) > before:
            return None
        if link is not None:
            return Card(device, link, link)
        return replace(base, device=device) if base else Card(device, None, None)

    def _speeds(self, table: Table, *, needed: bool) -> dict[Arithmetic, float]:
        """FLOP/s by arithmetic, of a table or of a single speed for all."""
        if not table.is_table("flops"):
            speed = table.quantity("flops", SPEED, needed=needed)
            return {} if speed is None else {Arithmetic.FP32: speed}
        inner = table.inner("flops")
        found = {}
        for arithmetic in Arithmetic:
            must = needed and arithmetic is Arithmetic.FP32
            speed = inner.quantity(arithmetic.value, SPEED, needed=must)
            if speed is not None:
                found[arithmetic] = speed
        inner.refuse_others()
        if Arithmetic.BF16 in found:
            found.setdefault(Arithmetic.FP16, found[Arithmetic.BF16])
        return found

    def _hosts(self, table: Table) -> list[Host]:
        """So many equal hosts as a table says."""
        count = table.count("count", default=1)
        texts = table.texts("devices")
        cards = [card for text in texts for card in self._cards(text, table)]
        link = self._link(table, "link")
        table.refuse_others()
        host = Host(tuple(cards), link)
        if cards and not host.is_joined:
            table.wrong(
                "link",
                'is missing: say what joins its devices, such as link = "NVLink4" or '
                'link = { bandwidth = "25GB/s", latency = "10us" }',
            )
        if count * len(cards) > MOST_DEVICES:
            table.wrong(
                "count", f"makes {count * len(cards):,} devices, more than {MOST_DEVICES:,}"
            )
            return [host]
        return [host] * count

    def _cards(self, text: str, table: Table) -> list[Card]:
        try:
            groups = [Group.parse(part) for part in text.split(",")]
        except UsageError as error:
            table.wrong("devices", f"{error.problem}: {error.hint}")
            return []
        cards = []
        for group in groups:
            card = self._card(group.name, table, "devices", own=True)
            cards += [card] * (group.count or 1) if card else []
        return cards

    def _card(self, name: str, table: Table, key: str, *, own: bool) -> Card | None:
        """A device by its name: one of the file's own where allowed, this machine, a built-in."""
        if own and plain(name) in self._own:
            return self._own[plain(name)]
        if plain(name) == LOCAL:
            from gpipe_compiler.cluster.local import local_card  # needs torch: seconds to import

            # Measured once: a second measurement would be another kind of device.
            self._local = self._local or local_card()
            return self._local
        try:
            return built_in(name)
        except UsageError as error:
            table.wrong(key, f"{error.problem}: {known_devices()}, under [devices.<name>]")
            return None

    def _network(self, file: Table, hosts: int) -> Link | None:
        network = self._link(file, "network")
        if network is None and hosts > 1 and not file.has("network"):
            self._faults.add(
                "network",
                "is missing: say what joins the hosts, such as network = { bandwidth = "
                '"400Gb/s", latency = "5us" }',
            )
        return network

    def _link(self, table: Table, key: str) -> Link | None:
        """A link by name, or as described; None where there is none or it is wrong."""
        if table.is_table(key):
            inner = table.inner(key)
            link = _described(inner)
            inner.refuse_others()
            return link
        name = table.text(key)
        if name is None:
            return None
        link = LINKS.get(plain(name))
        if link is None:
            table.wrong(
                key,
                f"{name!r} is no link: known are {', '.join(LINKS)}; or give "
                "{ bandwidth = ..., latency = ... }",
            )
        return link

    def _exceptions(self, file: Table, count: int | None) -> Mapping[tuple[int, int], Link]:
        found: dict[tuple[int, int], Link] = {}
        for table in file.tables("exceptions"):
            link = _described(table)
            for pair in table.pairs("pairs"):
                one, other = sorted(pair)
                if count is not None and other >= count:
                    table.wrong(
                        "pairs",
                        f"{pair} names device {other}, but they are numbered from 0 to {count - 1}",
                    )
                elif one == other:
                    table.wrong("pairs", f"{pair} is a single device")
                elif (one, other) in found:
                    table.wrong("pairs", f"{pair} has a link already")
                elif link is not None:
                    found[one, other] = link
            table.refuse_others()
        return found


def _described(table: Table) -> Link | None:
    bandwidth = table.quantity("bandwidth", BANDWIDTH, needed=True)
    latency = table.quantity("latency", TIME, default=_DEFAULT_LATENCY_S)
    name = table.text("name")
    if bandwidth is None or latency is None:
        return None
    return Link(bandwidth, latency, name or "")
