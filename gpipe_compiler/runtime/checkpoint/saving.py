"""Writes a checkpoint: every rank its own part, into one folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ..core.address import Place, place_of, reaching
from ..core.pipeline import Pipeline
from ..core.ranks import described, together
from ..core.shards import is_divided, local
from ..errors import CheckpointError
from .extra import KEY, TRAINER_KEY, States, kinds_of, rest_of, tensors_in
from .files import RankFileWriter, checksums, with_aliases, write_trainer
from .folder import (
    METADATA,
    TRAINER,
    Index,
    checksum,
    commit,
    discard,
    entries,
    make_temporary,
    prune,
    sync_path,
)
from .optimizer import Groups, Naming, merged, named_groups, named_states
from .progress import Progress, Stateful, counts_of, items_of

Written: TypeAlias = tuple[list[WriteResult], list[tuple[int, int, int]]]
"""What a rank has written, with checksums."""


def save_checkpoint(
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer,
    directory: Place | str,
    progress: Progress,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    states: States | None = None,
    keep: int | None = 3,
    permitted: Callable[[], object] | None = None,
) -> Place:
    """Write a checkpoint into a folder of checkpoints. Every rank calls it, between two steps.

    Each rank writes what it holds into the one folder; of several replicas those of the first, and
    of what they divide among them each its own rows. Gradients are not written. The checkpoint
    appears when it is complete, and older ones beyond `keep` go afterwards.

    Args:
        directory: on several hosts, on a file system that they share; or an address of fsspec, such
            as `s3://bucket/run`.
        progress: `seed` and `step_number` are taken from the pipeline.
        scheduler, scaler: rank 0's are written.
        states: objects of the user's by name, of every rank its own: each rank writes the tensors
            in the dicts of its state, one that several have by the first; the rest is rank 0's.
        keep: how many checkpoints stay, with this one; None for all.
        permitted: called on rank 0 before the checkpoint appears, which an error prevents.

    Returns:
        Where the checkpoint is.

    Raises:
        CheckpointError: on every rank, when any of them failed; earlier checkpoints are untouched.
        TransportError: when another process is gone.
    """
    if keep is not None and keep < 1:
        raise CheckpointError(f"{keep} checkpoints cannot be kept", hint="keep at least one")
    progress = dataclasses.replace(progress, seed=pipe.seed, step_number=pipe.step_number)
    extra = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    saving = _Saving(
        pipe, optimizer, place_of(directory), permitted or (lambda: None), dict(states or {})
    )
    return saving.run(
        progress, {key: part for key, part in extra.items() if part is not None}, keep
    )


class _Saving:
    """One checkpoint in the making, on one rank."""

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: torch.optim.Optimizer,
        directory: Place,
        permitted: Callable[[], object],
        states: States,
    ) -> None:
        self.pipe = pipe
        self.optimizer = optimizer
        self.directory = directory
        self.permitted = permitted
        self.naming = Naming(pipe.named_parameters(), pipe.parameters())
        self.parts = states
        self.states: Mapping[str, dict[str, Any]] = {}
        self.planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        self.metadata = Metadata({})

    def run(self, progress: Progress, others: Mapping[str, Any], keep: int | None) -> Place:
        """All steps, each of which fails on all ranks or on none."""
        world = self.pipe.world
        folder, groups = together(
            world,
            "the groups of the optimizer",
            self._groups,
            lambda found: (make_temporary(self.directory, progress.step), merged(found)),
        )
        try:
            writer = RankFileWriter(folder)
            plans = together(
                world,
                "the plan of the checkpoint",
                lambda: self._plan(writer, groups),
                lambda found: self._plan_all(writer, found),
            )
            return together(
                world,
                "the writing of the checkpoint",
                lambda: self._write(writer, folder, plans[self.pipe.rank]),
                lambda found: self._finish(writer, folder, found, progress, others, keep),
            )
        except CheckpointError as error:
            if self.pipe.rank == 0:
                discard(folder)
            hint = error.hint or f"earlier checkpoints in {self.directory} are as they were"
            raise CheckpointError(error.problem, hint=hint) from error.__cause__

    def _groups(self) -> Groups:
        self.states = {name: part.state_dict() for name, part in self.parts.items()}
        return [] if self.pipe.replica else named_groups(self.optimizer, self.naming)

    def _tree(self, groups: Groups) -> dict[str, Any]:
        """What this rank has to write: what the first replica's ranks hold, and its own rows."""
        aliases = self.pipe.spec.aliases
        model = {n: tensor for n, tensor in self.pipe.state_dict().items() if n not in aliases}
        states = named_states(self.optimizer, self.naming)
        extra = {name: tensors_in(state) for name, state in self.states.items()}
        optimizer: dict[str, Any] = {"state": self._written(states)}
        if self.pipe.rank == 0:
            optimizer["param_groups"] = groups
        own = {KEY: found} if (found := self._written(extra)) else {}
        return {"model": self._written(model), "optimizer": optimizer, **own}

    def _written(self, tree: Mapping[Any, Any]) -> dict[Any, Any]:
        """What of dicts within dicts this rank writes: of what is divided, rows that there are."""
        found = {}
        for key, item in tree.items():
            if isinstance(item, Mapping):
                if inner := self._written(item):
                    found[key] = inner
            elif local(item).numel() > 0 if is_divided(item) else self.pipe.replica == 0:
                found[key] = item
        return found

    def _plan(self, writer: RankFileWriter, groups: Groups) -> SavePlan:
        first = self.pipe.rank == 0
        self.planner.set_up_planner(self._tree(groups), is_coordinator=first)
        writer.set_up_storage_writer(first)
        plan: SavePlan = writer.prepare_local_plan(self.planner.create_local_plan())
        return plan

    def _plan_all(self, writer: RankFileWriter, plans: Sequence[SavePlan]) -> list[SavePlan]:
        finished, self.metadata = self.planner.create_global_plan(list(plans))
        result: list[SavePlan] = writer.prepare_global_plan(finished)
        return result

    def _write(self, writer: RankFileWriter, folder: Place, plan: SavePlan) -> Written:
        plan = self.planner.finish_plan(plan)
        if not plan.items:
            return [], []
        file = folder / f"__{self.pipe.rank}_0.distcp"
        try:
            with reaching(folder):
                results: list[WriteResult] = writer.write_data(plan, self.planner).wait()
            sync_path(file)
            return results, checksums(folder, results)
        except (OSError, RuntimeError) as error:
            reason = described(_system_error(error) or error)
            raise CheckpointError(f"cannot write {file}: {reason}") from error

    def _finish(
        self,
        writer: RankFileWriter,
        folder: Place,
        written: Sequence[Written],
        progress: Progress,
        others: Mapping[str, Any],
        keep: int | None,
    ) -> Place:
        """On rank 0: what all ranks have written becomes a checkpoint."""
        results = [result for found, _ in written for result in found]
        aliases = {
            f"model.{alias}": f"model.{name}" for alias, name in self.pipe.spec.aliases.items()
        }
        metadata, results = with_aliases(self.metadata, results, aliases)
        with reaching(folder):
            writer.finish(metadata, [results])
        sync_path(folder / METADATA)  # torch does so before its buffer is empty
        states = {key: part.state_dict() for key, part in others.items() if key != "optimizer"}
        rests = {name: rest_of(state) for name, state in self.states.items()}
        write_trainer(folder, {**items_of(progress), **states, TRAINER_KEY: rests})
        sums = {found[0].storage_data.relative_path: sums for found, sums in written if found}
        for name in (METADATA, TRAINER):
            size = (folder / name).stat().st_size
            sums[name] = [(0, size, checksum(folder / name))]
        numbers = [index.number for index, _ in entries(self.directory)]
        index = Index(
            number=max(numbers, default=0) + 1,
            kinds={key: type(part).__name__ for key, part in others.items()} | kinds_of(self.parts),
            counts=counts_of(progress),
            aliases=dict(self.pipe.spec.aliases),
            files={name: max(at + size for at, size, _ in parts) for name, parts in sums.items()},
            checksums=sums,
        )
        index.check(folder)
        self.permitted()
        index.write(folder)
        final = commit(folder)
        prune(self.directory, keep)
        return final


def _system_error(error: BaseException) -> OSError | None:
    """The system's own error behind one of torch, which buries it."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found
