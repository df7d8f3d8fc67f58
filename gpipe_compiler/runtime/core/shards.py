"""Trained weights that are divided among the replicas, and whole while stages compute with them.

What divides and gathers them is torch's `fully_shard` (FSDP2): every replica keeps the rows of a
weight that are its own, as a DTensor, which is what the optimizer steps and remembers. None of its
hooks is used: when weights are gathered, and when gradients are reduced, the pipeline says, because
all forwards of a step come before its backwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from ..errors import UsageError
from ..spec import PipelineSpec
from .distributed import others_there
from .topology import Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Shard:
    """A trained parameter that is divided.

    Attributes:
        whole: what the stage computes with, and its gradient is added to; it has memory while the
            weights are gathered.
        own: the rows of this replica, a DTensor: what the optimizer steps.
    """

    whole: nn.Parameter
    own: nn.Parameter

    @property
    def part(self) -> torch.Tensor:
        """The rows of this replica."""
        return local(self.own.detach())


@dataclass(eq=False)
class Group:
    """Weights that are gathered together.

    Attributes:
        shards: of parameters of one stage and of one type.
        places: of each of them, the modules that hold it, and under which names.
        is_block: whether it is gathered for every micro-batch, and not for a step.
    """

    stage: int
    shards: Sequence[Shard]
    places: Sequence[Sequence[tuple[nn.Module, str]]]
    is_block: bool
    _sharded: FSDPModule
    _has_memory: bool = field(default=False, init=False)

    def gather(self) -> None:
        """Let stages compute with the weights.

        Raises:
            TransportError: when another replica is gone.
        """
        if self._has_memory:
            return
        with others_there(lambda: "the weights of the other replicas do not come"):
            self._sharded.unshard()
        self._has_memory = True

    def free(self) -> None:
        """Free the memory of the weights, which modules go on to hold."""
        if self._has_memory:
            self.rest()
            self.show(whole=True)

    def rest(self) -> None:
        """Free it, and let modules hold the rows of this replica."""
        if self._has_memory:
            self._sharded.reshard()
            self._has_memory = False
        else:
            self.show(whole=False)

    def show(self, *, whole: bool) -> None:
        """Let modules hold the weights that have no memory, or the rows of this replica."""
        for shard, places in zip(self.shards, self.places, strict=True):
            for module, name in places:
                setattr(module, name, shard.whole if whole else shard.own)


@dataclass(eq=False)
class Shards:
    """The trained weights of the stages of a process, each divided by its rows.

    A number (a tensor without dimensions), or a complex tensor, stays whole, and so does what is
    not trained.

    Attributes:
        named: by the model's own names.
    """

    named: Mapping[str, Shard]
    groups: Sequence[Group]
    _gathered: bool = field(default=False, init=False)
    _users: int = field(default=0, init=False)
    _kept: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict, init=False)
    _by_whole: dict[int, Shard] = field(default_factory=dict, init=False)
    _in_blocks: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._by_whole = {id(shard.whole): shard for shard in self.named.values()}
        blocks = (group for group in self.groups if group.is_block)
        self._in_blocks = {id(shard.whole) for group in blocks for shard in group.shards}

    def of(self, parameter: nn.Parameter) -> Shard | None:
        """That of what a stage computes with; None where it is not divided."""
        return self._by_whole.get(id(parameter))

    def in_block(self, parameter: nn.Parameter) -> bool:
        """Whether what a stage computes with is gathered and reduced for every micro-batch."""
        return id(parameter) in self._in_blocks

    def whole(
        self, state: Mapping[str, torch.Tensor], aliases: Mapping[str, str], *, copy: bool
    ) -> dict[str, torch.Tensor]:
        """Tensors by name, with those that are divided as they are gathered now.

        Args:
            copy: to the CPU, where they outlast what is gathered.
        """
        found = dict(state)
        for name in state:
            shard = self.named.get(aliases.get(name, name))
            if shard is not None:
                whole = shard.whole.detach()
                found[name] = whole.to("cpu", copy=True) if copy else whole
        return found

    @contextlib.contextmanager
    def gathered(self, *, blocks: bool = False) -> Iterator[None]:
        """Around all that computes with the weights; every rank comes here alike.

        Args:
            blocks: whether to gather also what is gathered for every micro-batch.

        Raises:
            TransportError: when another replica is gone.
        """
        of_blocks = [group for group in self.groups if group.is_block]
        if not self._gathered:
            for group in self.groups:
                if group.is_block:
                    group.show(whole=True)
                else:
                    group.gather()
            self._gathered = True
        for group in of_blocks if blocks else ():
            group.gather()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            for group in of_blocks if blocks else ():
                group.free()
            if not (self._users or self._kept):
                self.release()

    def release(self) -> None:
        """Free what was gathered. Gradients that are not reduced yet stay."""
        if self._users == 0 and self._gathered:
            for group in self.groups:
                group.rest()
            self._gathered = False

    def begin(self) -> None:
        """Before a step: forget what was accumulated, where the optimizer has forgotten it."""
        for shard in self.named.values():
            kept = self._kept.get(id(shard.whole))
            if kept is None:
                continue
            mark, version = kept
            if shard.own.grad is not mark or local(mark)._version != version:
                shard.whole.grad = None
        self._kept = {}

    def keep(self) -> None:
        """After a step whose gradients are not reduced yet, by the side of which zeros stand."""
        for shard in self.named.values():
            if shard.whole.grad is None:
                continue
            if shard.own.grad is None:
                shard.own.grad = torch.zeros_like(shard.own)
            self._kept[id(shard.whole)] = shard.own.grad, local(shard.own.grad)._version

    def refuse_kept(self) -> None:
        """UsageError where gradients of earlier steps are not reduced yet."""
        if self._kept:
            raise UsageError(
                "what steps have left to be averaged, where replicas divide the weights, is lost "
                "by a loss that calls backward",
                hint="call step() once outside of no_sync() before",
            )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a divided tensor that lies here; of any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else cast(torch.Tensor, to_local())


def is_divided(tensor: object) -> bool:
    """Whether only some rows of a tensor lie here."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "to_local")


def own_rows(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The rows of a tensor that lie here where it is divided as `like`; all where that is not."""
    if not is_divided(like):
        return whole
    mesh = cast("DTensor", like).device_mesh
    count = rows_each(len(whole), mesh.size())
    start = min(count * mesh.get_local_rank(), len(whole))
    return whole[start : start + count]


def divided_as(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor divided as another one of its shape; without messages."""
    from torch.distributed.tensor import DTensor  # takes long to import

    assert isinstance(like, DTensor)
    rows = own_rows(whole, like).to(like.device, copy=True).contiguous()
    return _dtensor(rows, like)


def as_gradient(rows: torch.Tensor, own: nn.Parameter) -> torch.Tensor:
    """Rows of a gradient as that of a divided parameter."""
    return _dtensor(rows, cast("DTensor", own))


def _dtensor(rows: torch.Tensor, like: DTensor) -> torch.Tensor:
    made: torch.Tensor = type(like).from_local(
        *(rows, like.device_mesh, like.placements),
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return made


def rows_each(rows: int, replicas: int) -> int:
    """The rows of each replica; the last ones may have fewer, or none."""
    return -(-rows // replicas)


class _Gathered(nn.Module):
    """What `fully_shard` is given for weights that are gathered together.

    The stage is computed by itself, so that none of the hooks of `fully_shard` runs.
    """

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage


def divide(
    spec: PipelineSpec,
    topology: Topology,
    modules: Mapping[int, nn.Module],
    elsewhere: frozenset[int],
    *,
    by_block: bool,
    shared: Collection[str],
) -> Shards:
    """Divide the trained weights of stages among the replicas.

    Args:
        elsewhere: the identities of parameters whose memory is that of another one here.
        by_block: whether they are gathered for every micro-batch, block by block.
        shared: the names of those that several stages own, which are gathered for a step anyway.

    Raises:
        UsageError: where processes cannot gather what lies on their devices.
    """
    if topology.world.by_host and topology.world.device.type != "cpu":
        raise UsageError(
            "replicas with sharded weights on GPUs need a GPU for each process, and NCCL",
            hint="start as many processes as there are GPUs, or train without --shard",
        )
    mesh = topology.collectives.mesh(topology.world.device.type)
    groups = []
    named: dict[str, Shard] = {}
    for index in sorted(modules):
        parameters: dict[str, nn.Parameter] = {}
        for own, parameter in modules[index].named_parameters():
            divisible = parameter.dim() > 0 and parameter.is_floating_point()
            if divisible and parameter.requires_grad and id(parameter) not in elsewhere:
                parameters[spec.stages[index].named(own)] = parameter
        units = blocks_of([n for n in parameters if n not in shared]) if by_block else {}
        kinds: dict[tuple[str, torch.dtype], dict[str, nn.Parameter]] = {}
        for name, parameter in parameters.items():
            kinds.setdefault((units.get(name, ""), parameter.dtype), {})[name] = parameter
        for (unit, _), some in kinds.items():
            group = _group(index, modules[index], list(some.values()), mesh, is_block=bool(unit))
            groups.append(group)
            named |= dict(zip(some, group.shards, strict=True))
    return Shards(named, groups)


def _group(
    stage: int,
    module: nn.Module,
    parameters: Sequence[nn.Parameter],
    mesh: DeviceMesh,
    *,
    is_block: bool,
) -> Group:
    from torch.distributed.fsdp import fully_shard  # takes long to import

    holders: dict[int, list[tuple[nn.Module, str]]] = {id(p): [] for p in parameters}
    for holder in module.modules():
        for name, parameter in holder._parameters.items():
            if id(parameter) in holders:
                holders[id(parameter)].append((holder, name))
    places = list(holders.values())
    ignored = {p for p in module.parameters() if id(p) not in holders}
    sharded = fully_shard(
        _Gathered(module), mesh=mesh, reshard_after_forward=False, ignored_params=ignored
    )
    sharded.unshard()
    whole = [_held(*where[0]) for where in places]
    sharded.reshard()  # the first gathering may replace what was in place before
    own = [_held(*where[0]) for where in places]
    return Group(stage, list(map(Shard, whole, own)), places, is_block, sharded)


def _held(module: nn.Module, name: str) -> nn.Parameter:
    parameter = module._parameters[name]
    assert parameter is not None  # it is one of those that are divided
    return parameter


def blocks_of(names: Sequence[str]) -> dict[str, str]:
    """The block of each parameter: the innermost numbered part of the model that has several
    modules with parameters, as `encoder.layers.3`; for one in none, its module."""
    owners = {name: name.rpartition(".")[0] or name for name in names}
    within: dict[str, set[str]] = {}
    for owner in set(owners.values()):
        for prefix in _numbered(owner):
            within.setdefault(prefix, set()).add(owner)
    found = {}
    for name, owner in owners.items():
        several = [prefix for prefix in _numbered(owner) if len(within[prefix]) > 1]
        found[name] = several[-1] if several else owner
    return found


def _numbered(path: str) -> list[str]:
    """The beginnings of a path that end with a number."""
    parts = path.split(".")
    return [".".join(parts[: n + 1]) for n, part in enumerate(parts) if part.isdecimal()]
