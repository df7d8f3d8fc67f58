"""Clusters of one host as a few words: `4xH200`, `2xV100,2xP40`, `local`, `4xmeasured`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from gpipe_compiler.cluster.catalogue import Card, built_in, plain
from gpipe_compiler.cluster.hosts import Host, cluster_of
from gpipe_compiler.cluster.machines import Cluster, refuse_too_many
from gpipe_compiler.errors import UsageError

_GROUP = re.compile(r"(?:(\d{1,9})\s*[x×]\s*)?(.+)")  # noqa: RUF001  # the multiplication sign is meant
LOCAL, _MEASURED = "local", "measured"


@dataclass(frozen=True, slots=True)
class Group:
    """So many equal devices; None for as many as needed."""

    count: int | None
    name: str

    @classmethod
    def parse(cls, text: str) -> Group:
        """From `4xH200` or `H200`.

        Raises:
            UsageError: for anything else.
        """
        match = _GROUP.fullmatch(text.strip())
        if match is None or match[1] == "0" * len(match[1] or ""):
            raise UsageError(
                f"{text!r} names no devices",
                hint="write a number and a name, such as 4xH200, or a name alone",
            )
        if match[1] is not None:
            refuse_too_many(int(match[1]))
        return cls(None if match[1] is None else int(match[1]), match[2])


def devices_named(text: str) -> Cluster:
    """The cluster that `--devices` names: built-in GPUs in one host, or this machine.

    A name without a number is of any number of them. `local` is this machine, its links taken from
    experience; `measured` is the same with its links measured too. Devices of one kind are joined
    by their own link, those of two kinds by the slower of their buses.

    Raises:
        UsageError: for a name that is not known, or what does not go together.
    """
    groups = [Group.parse(part) for part in text.split(",")]
    here = [group for group in groups if plain(group.name) in (LOCAL, _MEASURED)]
    if here and len(groups) > 1:
        raise UsageError(
            f"{here[0].name} does not mix with other devices",
            hint="describe this machine and the others in a file for --cluster",
        )
    if here:
        return _this_machine(here[0])
    if len(groups) > 1:
        groups = [replace(group, count=group.count or 1) for group in groups]
    return _joined([(group.count, built_in(group.name)) for group in groups])


def _this_machine(group: Group) -> Cluster:
    # Here, as they need torch, which takes seconds to import.
    from gpipe_compiler.cluster.local import local_cluster
    from gpipe_compiler.cluster.timing import timed_link

    cluster = local_cluster(timed_link() if plain(group.name) == _MEASURED else None)
    if group.count is None:
        return cluster
    alike = replace(cluster, devices=cluster.devices[:1], endless=True)
    return replace(alike.sized(group.count), endless=False, pooled=False, places=None)


def _joined(groups: list[tuple[int | None, Card]]) -> Cluster:
    """Groups of devices in one host."""
    count, first = groups[0]
    if count is None:
        return replace(cluster_of([Host((first,))]), endless=True)
    cards = tuple(card for count, card in groups for _ in range(count or 1))
    refuse_too_many(len(cards))
    return cluster_of([Host(cards)])
