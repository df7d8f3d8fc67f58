"""Puts hosts full of devices together to a cluster."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpipe_compiler.cluster.catalogue import GLOO, Card
from gpipe_compiler.cluster.machines import Cluster, Link


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
    def is_joined(self) -> bool:
        """Whether it is known what joins every two devices."""
        kinds = Counter(self.cards)
        twice = (card for card, count in kinds.items() if count > 1)
        pairs = itertools.chain(((c, c) for c in twice), itertools.combinations(kinds, 2))
        return all(self.between(*pair) is not None for pair in pairs)


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
    devices = [card.device for host in hosts for card in host.cards]
    numbers = [number for number, host in enumerate(hosts) for _ in host.cards]
    within: dict[tuple[int, int], Link] = {}
    first = 0
    for host in hosts:
        for one, other in itertools.combinations(range(len(host.cards)), 2):
            link = host.between(host.cards[one], host.cards[other])
            if link is not None:
                within[first + one, first + other] = link
        first += len(host.cards)
    lone = hosts[0].link or hosts[0].cards[0].link or network or GLOO
    usual = max(Counter(within.values()).items(), key=lambda item: item[1])[0] if within else lone
    special = {pair: link for pair, link in within.items() if link != usual} | dict(
        exceptions or {}
    )
    return Cluster(
        tuple(devices),
        usual,
        network,
        tuple(numbers) if len(hosts) > 1 else (),
        tuple((*pair, link) for pair, link in special.items()),
    )
