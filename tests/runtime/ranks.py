"""What every rank of the distributed tests runs; rank 0 leaves its findings in a file."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import torch
from tiny_pipelines import SPECS, data_for

from gpipe_compiler.runtime.core import outputs, same_host
from gpipe_compiler.runtime.core.distributed import Network
from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.core.topology import device_counts
from gpipe_compiler.runtime.errors import PipelineError
from gpipe_compiler.runtime.spec import ScheduleKind

STEPS = 2


def collect(name, schedule, transport=None, devices=None):
    """Losses, outputs, weights after the steps, in any transport."""
    spec = SPECS[name]()
    found = {}
    with Pipeline(spec, None, schedule=schedule, transport=transport, devices=devices) as pipe:
        owned = list(pipe.parameters())
        optimizer = torch.optim.SGD(owned or [torch.zeros(1)], lr=0.1)
        for step in range(STEPS):
            inputs, target, _ = data_for(name, 8, seed=step)
            mine = (inputs, target) if pipe.rank == 0 else (None, None)
            optimizer.zero_grad()
            loss, outputs = pipe.step_with_outputs(*mine)
            optimizer.step()
            found[f"loss {step}"] = loss
            for number, tensor in enumerate(tensors(outputs)):
                found[f"output {step} {number}"] = tensor
        pipe.eval()
        inputs = data_for(name, 6, seed=9)[0]
        outputs = pipe(inputs if pipe.rank == 0 else None)
        for number, tensor in enumerate(tensors(outputs)):
            found[f"inferred {number}"] = tensor
        found.update(pipe.gather_state_dict())
    return {key: tensor.clone() for key, tensor in found.items()}


def tensors(outputs):
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, tuple | list):
        return [tensor for item in outputs for tensor in tensors(item)]
    return []


def equal(directory: Path) -> None:
    """Every pipeline and schedule that so many ranks can have, one after the other in one group."""
    torch.distributed.init_process_group("gloo")
    size = torch.distributed.get_world_size()
    for name in sorted(SPECS):
        for kind in ScheduleKind:
            schedule, stages = kind.value, len(SPECS[name]().stages)
            if str(size) in re.split(", | or ", device_counts(stages, kind)):
                found = collect(name, schedule)
                if torch.distributed.get_rank() == 0:
                    torch.save(found, directory / f"{name}-{schedule}.pt")
    if size == 2:
        refuse(directory)
        make_no_loss(directory)
    tell_all()
    torch.distributed.destroy_process_group()


def refuse(directory: Path) -> None:
    """Rank 0 refuses its inputs; nobody hangs, and the next step works."""
    with Pipeline(SPECS["norm"](), None) as pipe:
        try:
            pipe.step(torch.ones(0, 6) if pipe.rank == 0 else None)
        except PipelineError as error:
            (directory / f"refused-{pipe.rank}").write_text(str(error))
        pipe.step(torch.ones(8, 6) if pipe.rank == 0 else None)


def make_no_loss(directory: Path) -> None:
    """The rank that should make the loss makes none."""
    with Pipeline(SPECS["norm"](), None) as pipe:
        outputs.total_of = lambda *_: None
        try:
            pipe.step(torch.ones(8, 6) if pipe.rank == 0 else None)
        except PipelineError as error:
            (directory / f"lossless-{pipe.rank}").write_text(str(error))


def tell_all() -> None:
    """Objects of one message and of several, from any rank."""
    network = Network.of_all(torch.device("cpu"), 60)
    for length in (0, 10, 1000, 100_000):
        for source in range(network.size):
            own = [source, "x" * length] if network.rank == source else None
            assert network.broadcast_object(own, source, "a text") == [source, "x" * length]


def by_gloo(directory: Path) -> None:
    """One pipeline, between processes that cannot share memory."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    assert 1 - rank not in same_host.join_peers(rank, 2)
    found = collect("skip", "1f1b")
    if rank == 0:
        torch.save(found, directory / "skip-1f1b.pt")
    torch.distributed.destroy_process_group()


def die(directory: Path) -> None:
    """Rank 1 ends without a word in its second step."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 ends by itself
    with Pipeline(SPECS["norm"](), None, timeout_s=100) as pipe:
        pipe.step(data_for("norm", 8)[0])
        if pipe.rank == 1:
            pipe.stages[1].register_forward_pre_hook(lambda *_: os._exit(7))
        try:
            pipe.step(data_for("norm", 8)[0])
        except PipelineError as error:
            (directory / f"lost-{pipe.rank}").write_text(str(error))
            try:
                pipe.step(data_for("norm", 8)[0])
            except PipelineError as again:
                (directory / f"again-{pipe.rank}").write_text(str(again))
            raise


def stall(directory: Path) -> None:
    """Rank 1 is too slow, but not in coming."""
    torch.distributed.init_process_group("gloo")
    patience_s = 100 if torch.distributed.get_rank() else 15
    torch.distributed.barrier()
    with Pipeline(SPECS["norm"](), None, timeout_s=patience_s) as pipe:
        if pipe.rank == 1:
            pipe.stages[1].register_forward_pre_hook(lambda *_: __import__("time").sleep(60))
        try:
            pipe.step(data_for("norm", 8)[0])
        except PipelineError as error:
            (directory / f"lost-{pipe.rank}").write_text(str(error))
            raise


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"equal": equal, "by_gloo": by_gloo, "die": die, "stall": stall}[sys.argv[1]](Path(sys.argv[2]))
