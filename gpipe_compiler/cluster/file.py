"""Reads a cluster file, as `examples/clusters/` has them, and lists all that is wrong with it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeGuard

from gpipe_compiler.cluster.catalogue import LINKS, Card, built_in, known_devices, plain
from gpipe_compiler.cluster.hosts import LOCAL, Host, cluster_of, device_group
from gpipe_compiler.cluster.machines import MOST_DEVICES, Arithmetic, Cluster, Device, Link
from gpipe_compiler.cluster.quantities import BANDWIDTH, SIZE, SPEED, TIME
from gpipe_compiler.cluster.toml_table import Faults, Table
from gpipe_compiler.errors import UsageError

_DEFAULT_LATENCY_S = 1e-5
_DEFAULT_LAUNCH_S = 5e-6
_DEVICES = 'devices = "4xH100" or ["2xV100", "2xP40"]'
_PAIRS = "pairs = [[0, 1], [2, 3]]"


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
    """Turns tables into hosts and links, and collects the faults."""

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
        network = _link(file, "network")
        if len(hosts) > 1 and not file.has("network"):
            self._faults.add(
                "network",
                "is missing: say what joins the hosts, such as network = { bandwidth = "
                '"400Gb/s", latency = "5us" }',
            )
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
        needed = not table.has("like")
        base = table.value("like", self._known)
        old = base.device if base else Device("", 1.0, 1.0, 1, _DEFAULT_LAUNCH_S)
        speeds = self._speeds(table, needed=needed)
        launch_s = table.quantity("launch", TIME)
        workspace = table.quantity("workspace", SIZE)
        kept_free = table.quantity("kept_free", SIZE)
        code = table.quantity("convolution_code", SIZE)
        device = Device(
            name,
            speeds.get(Arithmetic.FP32, old.flops),
            table.quantity("memory_bandwidth", BANDWIDTH, needed=needed) or old.memory_bandwidth,
            int(table.quantity("memory", SIZE, needed=needed) or old.memory),
            old.launch_s if launch_s is None else launch_s,
            half_flops=speeds.get(Arithmetic.FP16, old.half_flops),
            tf32_flops=speeds.get(Arithmetic.TF32, old.tf32_flops),
            bf16_flops=speeds.get(Arithmetic.BF16, old.bf16_flops),
            workspace=old.workspace if workspace is None else int(workspace),
            kept_free=old.kept_free if kept_free is None else int(kept_free),
            convolution_code=old.convolution_code if code is None else int(code),
        )
        link = _link(table, "link")
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
        count = table.value("count", _count) or 1
        cards = table.value("devices", self._cards, _DEVICES) or ()
        host = Host(cards, _link(table, "link"))
        table.refuse_others()
        if not host.is_joined:
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

    def _cards(self, written: object) -> tuple[Card, ...]:
        """The devices of `"4xH100"` or of `["2xV100", "2xP40"]`; none of one that is wrong."""
        texts = written if isinstance(written, list) else [written]
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError(f"{written!r} names no devices: write {_DEVICES}")
        try:
            groups = [device_group(part) for text in texts for part in str(text).split(",")]
        except UsageError as error:
            raise ValueError(f"{error.problem}: {error.hint}") from error
        cards: list[Card] = []
        for count, written_name in groups:
            name = plain(written_name)
            card = self._own[name] if name in self._own else self._known(written_name)
            cards += [card] * (count or 1) if card else []
        return tuple(cards)

    def _known(self, written: object) -> Card:
        """A device that is not of the file: this machine, or a built-in one."""
        if plain(str(written)) == LOCAL:
            from gpipe_compiler.cluster.local import local_card  # needs torch: seconds to import

            # Measured once: a second measurement would be another kind of device.
            self._local = self._local or local_card()
            return self._local
        try:
            return built_in(str(written))
        except UsageError as error:
            raise ValueError(
                f"{written!r} is no device: {known_devices()}, under [devices.<name>]"
            ) from error

    def _exceptions(self, file: Table, count: int | None) -> Mapping[tuple[int, int], Link]:
        found: dict[tuple[int, int], Link] = {}
        for table in file.tables("exceptions"):
            link = _described(table)
            for pair in table.value("pairs", _pairs, _PAIRS) or ():
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


def _link(table: Table, key: str) -> Link | None:
    """A link by name, or as described; None where there is none or it is wrong."""
    if not table.is_table(key):
        return table.value(key, _named_link)
    inner = table.inner(key)
    link = _described(inner)
    inner.refuse_others()
    return link


def _named_link(written: object) -> Link:
    found = LINKS.get(plain(str(written)))
    if found is None:
        raise ValueError(
            f"{written!r} is no link: known are {', '.join(LINKS)}; or give "
            "{ bandwidth = ..., latency = ... }"
        )
    return found


def _described(table: Table) -> Link | None:
    bandwidth = table.quantity("bandwidth", BANDWIDTH, needed=True)
    latency_s = table.quantity("latency", TIME)
    name = table.value("name", _name) or ""
    if bandwidth is None:
        return None
    return Link(bandwidth, _DEFAULT_LATENCY_S if latency_s is None else latency_s, name)


def _name(written: object) -> str:
    if isinstance(written, str) and written.strip():
        return written
    raise ValueError(f"{written!r} is no name")


def _count(written: object) -> int:
    if _is_whole(written, 1):
        return written
    raise ValueError(f"{written!r} is not a whole number of at least 1")


def _pairs(written: object) -> list[list[int]]:
    if isinstance(written, list) and written and all(map(_is_pair, written)):
        return written
    raise ValueError(f"{written!r} is no list of pairs: write {_PAIRS}")


def _is_pair(item: object) -> bool:
    return isinstance(item, list) and len(item) == 2 and all(_is_whole(n, 0) for n in item)


def _is_whole(item: object, least: int) -> TypeGuard[int]:
    return isinstance(item, int) and not isinstance(item, bool) and item >= least
