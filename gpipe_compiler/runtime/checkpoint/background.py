"""Writes checkpoints while training goes on."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..core.address import Place, place_of
from ..core.pipeline import Pipeline
from ..core.shards import is_divided, local
from .extra import States
from .progress import Progress, Stateful
from .saving import Collected, Saving


class BackgroundSaver:
    """Writes checkpoints while training goes on, one at a time. Every rank makes the same calls.

        saver = BackgroundSaver(pipe)
        saver.save(optimizer, directory, Progress(step=100))  # returns when all is copied
        saver.poll()  # after every step: what all ranks have written by now appears
        saver.wait()  # at the end

    Everything is copied into host memory, which stays for the next checkpoint, and written by a
    thread, which exchanges no messages. As one that is written at once, a checkpoint is complete or
    not there; until it appears, the one before is the newest.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._copies = _HostCopies()
        self._under_way: tuple[Saving, threading.Thread] | None = None

    def save(
        self,
        optimizer: torch.optim.Optimizer,
        directory: Place | str,
        progress: Progress,
        *,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        states: States | None = None,
        keep: int | None = 3,
        permitted: Callable[[], object] | None = None,
    ) -> Place | None:
        """Begin to write a checkpoint, as `save_checkpoint` does; first, wait for the one before.

        Returns:
            The one before, if it was not there yet.

        Raises:
            CheckpointError: on every rank, when any of them failed, also at the one before.
            TransportError: when another process is gone.
        """
        before, place = self.wait(), place_of(directory)
        saving = Saving(
            *(self._pipe, optimizer, place, progress, scheduler, scaler, states or {}),
            *(keep, permitted, self._copies.of),
        )
        saving.begin()
        # A daemon: where another process is gone, nothing waits for it.
        thread = threading.Thread(target=saving.write, name="checkpoint", daemon=True)
        self._under_way = saving, thread
        thread.start()
        return before

    def poll(self) -> Place | None:
        """The checkpoint under way, if every rank has written it; else None. Raises as `save`."""
        if self._under_way is None:
            return None
        writing = torch.tensor(float(self._under_way[1].is_alive()))
        if self._pipe.world.maximum(writing, "whether the checkpoint is written"):
            return None
        return self.wait()

    def wait(self) -> Place | None:
        """The checkpoint under way, once it is there; None where none is. Raises as `save`."""
        if self._under_way is None:
            return None
        (saving, thread), self._under_way = self._under_way, None
        thread.join()
        return saving.finish()


class _HostCopies:
    """Copies of tensors in host memory that is used again."""

    def __init__(self) -> None:
        self._memory: dict[tuple[Any, ...], torch.Tensor] = {}

    def of(self, collected: Collected) -> Collected:
        """All that a rank has to write, as it is now."""
        made = dataclasses.replace(
            collected,
            groups=copy.deepcopy(collected.groups),
            tree=self._copied(collected.tree, ()),
            trainer=copy.deepcopy(collected.trainer),
        )
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch
            for device in range(torch.cuda.device_count()):
                torch.cuda.synchronize(device)
        return made

    def _copied(self, item: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(item, torch.Tensor):
            return self._in_host_memory(item.detach(), path)
        if isinstance(item, Mapping):
            return {key: self._copied(inner, (*path, key)) for key, inner in item.items()}
        return copy.deepcopy(item)

    def _in_host_memory(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> torch.Tensor:
        own = self._memory.get(path)
        if own is None or (own.shape, own.dtype) != (tensor.shape, tensor.dtype):
            own = self._memory[path] = _memory_for(tensor)
        local(own).copy_(local(tensor), non_blocking=True)
        return own


def _memory_for(tensor: torch.Tensor) -> torch.Tensor:
    if is_divided(tensor):
        return tensor.clone()  # which lies where the replicas reach it: on a GPU, if they have one
    pinned = tensor.device.type == "cuda"
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
