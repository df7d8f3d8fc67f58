"""Writes a checkpoint: every rank its own part, into one folder."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ..core.address import Place, place_of, reaching
from ..core.pipeline import Pipeline
from ..core.ranks import FAILURES, described, together
from ..core.shards import is_divided, local
from ..errors import CheckpointError, UsageError
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
    parts = scheduler, scaler, states or {}
    saving = Saving(pipe, optimizer, place_of(directory), progress, *parts, keep, permitted)
    saving.begin()
    saving.write()
    return saving.finish()


@dataclass(frozen=True)
class Collected:
    """What one rank has to write.

    Attributes:
        groups: of its optimizer.
        tree: tensors and values, as torch.distributed.checkpoint names them.
        trainer, kinds, counts: what rank 0 writes besides.
    """

    groups: Groups
    tree: dict[str, Any]
    trainer: dict[str, Any]
    kinds: Mapping[str, str]
    counts: Mapping[str, int]


@dataclass(eq=False)
class Saving:
    """One checkpoint in the making, on one rank: begun, written by each by itself, and finished.

    Args:
        copy: gives what does not change when training goes on, to be written later.
    """

    pipe: Pipeline
    optimizer: torch.optim.Optimizer
    directory: Place
    progress: Progress
    scheduler: Stateful | None
    scaler: Stateful | None
    states: States
    keep: int | None
    permitted: Callable[[], object] | None
    copy: Callable[[Collected], Collected] = lambda collected: collected
    _metadata: Metadata = field(default_factory=lambda: Metadata({}), init=False)
    _written: Written | BaseException | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise CheckpointError(
                f"{self.keep} checkpoints cannot be kept", hint="keep at least one"
            )
        # Of a state the first rank's tensor is kept; weights are the same on all that have them.
        self.planner = DefaultSavePlanner(dedup_save_to_lowest_rank=bool(self.states))

    def begin(self) -> None:
        """Let every rank know what it writes, and have it by itself."""
        world, directory = self.pipe.world, self.directory
        kept: list[Collected] = []

        def collect() -> Groups:
            kept.append(self.copy(self._collected()))
            return kept[0].groups

        with self._explained():
            self.folder, groups = together(
                world,
                "the content of the checkpoint",
                collect,
                lambda found: (make_temporary(directory, self.progress.step), merged(found)),
            )
        self.collected, self.writer = kept[0], RankFileWriter(self.folder)
        with self._explained(self.folder):
            plans = together(
                world,
                "the plan of the checkpoint",
                lambda: self._plan(groups),
                self._plan_all,
            )
        self.plan = plans[self.pipe.rank]

    def write(self) -> None:
        """Write this rank's part, without a word to the others; on any thread."""
        try:
            self._written = self._write()
        except FAILURES as error:  # `finish` raises it, for all ranks to know
            self._written = error

    def finish(self) -> Place:
        """Let the checkpoint appear."""

        def written() -> Written:
            if isinstance(self._written, BaseException):
                raise self._written
            assert self._written is not None  # by `write`
            return self._written

        with self._explained(self.folder):
            return together(self.pipe.world, "the writing of the checkpoint", written, self._finish)

    def _collected(self) -> Collected:
        """What this rank has to write, as it is now.

        Raises:
            CheckpointError: for a state that cannot be stored.
        """
        pipe = self.pipe
        own = {"scheduler": self.scheduler, "scaler": self.scaler}
        others = {key: part for key, part in own.items() if part is not None}
        states = {name: part.state_dict() for name, part in self.states.items()}
        progress = dataclasses.replace(self.progress, seed=pipe.seed, step_number=pipe.step_number)
        kinds = {"optimizer": self.optimizer, **others}
        trainer = {
            **items_of(progress),
            **{key: part.state_dict() for key, part in others.items()},
            TRAINER_KEY: {name: rest_of(state) for name, state in states.items()},
        }
        groups, tree = self._held(states)
        return Collected(
            groups,
            tree,
            trainer,
            {key: type(part).__name__ for key, part in kinds.items()} | kinds_of(self.states),
            counts_of(progress),
        )

    def _held(self, states: Mapping[str, Mapping[str, Any]]) -> tuple[Groups, dict[str, Any]]:
        """What this rank has to write: what the first replica's ranks hold, and its own rows."""
        naming = Naming(self.pipe.named_parameters(), self.pipe.parameters())
        groups = [] if self.pipe.replica else named_groups(self.optimizer, naming)
        aliases = self.pipe.spec.aliases
        model = {n: tensor for n, tensor in self.pipe.state_dict().items() if n not in aliases}
        slots = self._own(named_states(self.optimizer, naming))
        extra = {name: tensors_in(state) for name, state in states.items()}
        own = {KEY: found} if (found := self._own(extra)) else {}
        return groups, {"model": self._own(model), "optimizer": {"state": slots}, **own}

    def _own(self, tree: Mapping[Any, Any]) -> dict[Any, Any]:
        """What of dicts within dicts this rank writes: of what is divided, rows that there are."""
        found = {}
        for key, item in tree.items():
            if isinstance(item, Mapping):
                if inner := self._own(item):
                    found[key] = inner
            elif local(item).numel() > 0 if is_divided(item) else self.pipe.replica == 0:
                found[key] = item
        return found

    @contextlib.contextmanager
    def _explained(self, folder: Place | None = None) -> Iterator[None]:
        """Removes the folder after an error, and says that the others are as they were."""
        try:
            yield
        except (CheckpointError, UsageError) as error:
            if self.pipe.rank == 0 and folder is not None:
                discard(folder)
            hint = error.hint or f"earlier checkpoints in {self.directory} are as they were"
            raise type(error)(error.problem, hint=hint) from error.__cause__

    def _plan(self, groups: Groups) -> SavePlan:
        first, tree = self.pipe.rank == 0, self.collected.tree
        if first:
            tree = {**tree, "optimizer": {**tree["optimizer"], "param_groups": groups}}
        self.planner.set_up_planner(tree, is_coordinator=first)
        self.writer.set_up_storage_writer(first)
        plan: SavePlan = self.writer.prepare_local_plan(self.planner.create_local_plan())
        return plan

    def _plan_all(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        finished, self._metadata = self.planner.create_global_plan(list(plans))
        result: list[SavePlan] = self.writer.prepare_global_plan(finished)
        return result

    def _write(self) -> Written:
        folder, plan = self.folder, self.planner.finish_plan(self.plan)
        if not plan.items:
            return [], []
        file = folder / f"__{self.pipe.rank}_0.distcp"
        try:
            with reaching(folder):
                results: list[WriteResult] = self.writer.write_data(plan, self.planner).wait()
            sync_path(file)
            return results, checksums(folder, results)
        except (OSError, RuntimeError) as error:
            reason = described(_system_error(error) or error)
            raise CheckpointError(f"cannot write {file}: {reason}") from error

    def _finish(self, written: Sequence[Written]) -> Place:
        """On rank 0: what all ranks have written becomes a checkpoint."""
        folder, directory = self.folder, self.directory
        results = [result for found, _ in written for result in found]
        aliases = {
            f"model.{alias}": f"model.{name}" for alias, name in self.pipe.spec.aliases.items()
        }
        metadata, results = with_aliases(self._metadata, results, aliases)
        with reaching(folder):
            self.writer.finish(metadata, [results])
        sync_path(folder / METADATA)  # torch does so before its buffer is empty
        write_trainer(folder, self.collected.trainer)
        sums = {found[0].storage_data.relative_path: sums for found, sums in written if found}
        for name in (METADATA, TRAINER):
            size = (folder / name).stat().st_size
            sums[name] = [(0, size, checksum(folder / name))]
        numbers = [index.number for index, _ in entries(directory)]
        index = Index(
            number=max(numbers, default=0) + 1,
            kinds=self.collected.kinds,
            counts=self.collected.counts,
            aliases=dict(self.pipe.spec.aliases),
            files={name: max(at + size for at, size, _ in parts) for name, parts in sums.items()},
            checksums=sums,
        )
        index.check(folder)
        if self.permitted is not None:
            self.permitted()
        index.write(folder)
        final = commit(folder)
        prune(directory, self.keep)
        return final


def _system_error(error: BaseException) -> OSError | None:
    """The system's own error behind one of torch, which buries it."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found
