"""Clusters put together from hosts, and from words such as `4xH200`, `2xV100,2xP40`, `local`."""

from __future__ import annotations

import itertools
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpipe_compiler.cluster.catalogue import DEFAULT_HOST, GLOO, Card, built_in, plain
from gpipe_compiler.cluster.machines import Cluster, Device, Link, refuse_too_many
from gpipe_compiler.errors import UsageError

_GROUP = re.compile(r"(?:(\d{1,9})\s*[x×]\s*)?(.+)")  # noqa: RUF001  # the multiplication sign is meant
LOCAL, _MEASURED = "local", "measured"

HOST_NAME = f"{platform.machine()} host"
"""The processor of this machine, as a device."""


def is_host(device: Device) -> bool:
    """Whether a device is a processor: of a machine like this one, or of any (`DEFAULT_HOST`)."""
    return device.name in (HOST_NAME, DEFAULT_HOST.name)


@dataclass(frozen=True, slots=True)
class Host:
    """The devices of one host.

    Attributes:
        link: between any two of them; None for what the devices have themselves.
    """

    cards: tuple[Card, ...]
    link: Link | None = None

    def between(self, one: Card, other: Card) -> Link | None:
        """What joins two of the devices: their own link if they are of a kind, else the bus.

        None where neither the host nor the devices say.
        """
        if self.link is not None:
            return self.link
        if one == other:
            return one.link
        if one.bus is None or other.bus is None:
            return None
        return min(one.bus, other.bus, key=lambda link: link.bandwidth)

    @property
    def pairs(self) -> Counter[tuple[Card, Card]]:
        """How many pairs of devices there are of every two kinds."""
        kinds = Counter(self.cards)
        found = {(one, one): count * (count - 1) // 2 for one, count in kinds.items()}
        mixed = {
            (one, other): kinds[one] * kinds[other]
            for one, other in itertools.combinations(kinds, 2)
        }
        return +Counter(found | mixed)

    @property
    def is_joined(self) -> bool:
        """Whether it is known what joins every two devices."""
        return all(self.between(*pair) is not None for pair in self.pairs)


def cluster_of(
    hosts: Sequence[Host],
    network: Link | None = None,
    exceptions: Mapping[tuple[int, int], Link] | None = None,
) -> Cluster:
    """The cluster of these hosts, every one of them joined.

    The link of the cluster is the one that most pairs within hosts have, so that few of them are
    exceptions.

    Args:
        exceptions: pairs of devices, the lower number first, that something else joins.
    """
    usual = _usual_link(hosts, network)
    special: dict[tuple[int, int], Link] = {}
    first = 0
    for host in hosts:
        if any(host.between(*pair) != usual for pair in host.pairs):
            for one, other in itertools.combinations(range(len(host.cards)), 2):
                link = host.between(host.cards[one], host.cards[other])
                if link is not None and link != usual:
                    special[first + one, first + other] = link
        first += len(host.cards)
    special |= dict(exceptions or {})
    numbers = tuple(number for number, host in enumerate(hosts) for _ in host.cards)
    return Cluster(
        tuple(card.device for host in hosts for card in host.cards),
        usual,
        network,
        numbers if len(hosts) > 1 else (),
        tuple((*pair, link) for pair, link in special.items()),
    )


def _usual_link(hosts: Sequence[Host], network: Link | None) -> Link:
    """The link that joins most pairs within hosts; where there are none, what would join them."""
    count: Counter[Link] = Counter()
    for host in hosts:
        for pair, number in host.pairs.items():
            link = host.between(*pair)
            if link is not None:
                count[link] += number
    if count:
        return count.most_common(1)[0][0]
    return hosts[0].link or hosts[0].cards[0].link or network or GLOO


def device_group(text: str) -> tuple[int | None, str]:
    """How many devices, and their name, from `4xH200` or `H200`: None for as many as needed.

    Raises:
        UsageError: for anything else.
    """
    match = _GROUP.fullmatch(text.strip())
    if match is None or match[1] == "0" * len(match[1] or ""):
        raise UsageError(
            f"{text!r} names no devices",
            hint="write a number and a name, such as 4xH200, or a name alone",
        )
    if match[1] is None:
        return None, match[2]
    refuse_too_many(int(match[1]))
    return int(match[1]), match[2]


def devices_named(text: str) -> Cluster:
    """The cluster that `--devices` names: built-in GPUs in one host, or this machine.

    A name without a number is of any number of them. `local` is this machine, its links taken from
    experience; `measured` is the same with its links measured too. Devices of one kind are joined
    by their own link, those of two kinds by the slower of their buses.

    Raises:
        UsageError: for a name that is not known, or what does not go together.
    """
    groups = [device_group(part) for part in text.split(",")]
    here = [(count, name) for count, name in groups if plain(name) in (LOCAL, _MEASURED)]
    if here and len(groups) > 1:
        raise UsageError(
            f"{here[0][1]} does not mix with other devices",
            hint="describe this machine and the others in a file for --cluster",
        )
    if here:
        return _this_machine(*here[0])
    if len(groups) > 1:
        groups = [(count or 1, name) for count, name in groups]
    return _joined([(count, built_in(name)) for count, name in groups])


def _this_machine(count: int | None, name: str) -> Cluster:
    # Here, as they need torch, which takes seconds to import.
    from gpipe_compiler.cluster.local import local_cluster, timed_link

    cluster = local_cluster(timed_link() if plain(name) == _MEASURED else None)
    if count is None:
        return cluster
    alike = replace(cluster, devices=cluster.devices[:1], endless=True)
    return replace(alike.sized(count), endless=False, pooled=False, places=None)


def _joined(groups: list[tuple[int | None, Card]]) -> Cluster:
    count, first = groups[0]
    if count is None:
        return replace(cluster_of([Host((first,))]), endless=True)
    cards = tuple(card for count, card in groups for _ in range(count or 1))
    refuse_too_many(len(cards))
    return cluster_of([Host(cards)])
