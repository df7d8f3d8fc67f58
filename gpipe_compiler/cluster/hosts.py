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
