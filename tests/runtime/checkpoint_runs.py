"""Training runs that the tests of checkpoints share, and what the processes they start do."""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from tiny_pipelines import SPECS, WIDTH, data_for
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.runtime.checkpoint import (
    BackgroundSaver,
    Progress,
    latest,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.errors import CheckpointError


class PlainTied(nn.Module):
    """The model that `tied_spec` is a pipeline of."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, WIDTH)
        self.l1 = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens, labels):
        h = self.l1(self.emb(tokens)) + self.emb.weight[0]
        logits = self.head(torch.tanh(h))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def two_groups(parameters, rate=0.1):
    """Without weight decay for vectors, and at another rate."""
    parameters = list(parameters)
    flat = [parameter for parameter in parameters if parameter.dim() < 2]
    wide = [parameter for parameter in parameters if parameter.dim() >= 2]
    return torch.optim.AdamW(
        [
            {"params": flat, "weight_decay": 0.0, "lr": rate / 2},
            {"params": wide, "weight_decay": 0.1},
        ],
        lr=rate,
    )


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "groups": two_groups,
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
}


def schedule_for(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)


class Run:
    """A pipeline with optimizer and schedule."""

    def __init__(self, name, kind, devices=None, seed=0, **count):
        if devices is not None:
            count["devices"] = ["cpu"] * devices
        self.name = name
        self.pipe = Pipeline(SPECS[name](), None, seed=seed, **count)
        self.optimizer = OPTIMIZERS[kind](self.pipe.parameters())
        self.schedule = schedule_for(self.optimizer)
        self.step = 0

    def train(self, until):
        while self.step < until:
            inputs, target, _ = data_for(self.name, 8, seed=self.step)
            self.optimizer.zero_grad()
            share = self.pipe.shard(inputs, target)
            self.pipe.step(*(share if self.pipe.feeds else (None, None)))
            self.optimizer.step()
            self.schedule.step()
            self.step += 1

    def save(self, directory, **more):
        return save_checkpoint(
            self.pipe,
            self.optimizer,
            directory,
            Progress(step=self.step),
            scheduler=self.schedule,
            **more,
        )

    def save_meanwhile(self, directory, **more):
        """The same while all of it goes on to be something else."""
        saver = BackgroundSaver(self.pipe)
        progress = Progress(step=self.step)
        saver.save(self.optimizer, directory, progress, scheduler=self.schedule, **more)
        with torch.no_grad():
            for tensor in self.pipe.state_dict().values():
                tensor.fill_(99)
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.fill_(99)
        self.pipe.step_number = 99
        self.schedule.step()
        return saver.wait()

    def load(self, path):
        progress = load_checkpoint(self.pipe, self.optimizer, path, scheduler=self.schedule)
        self.step = progress.step
        return progress

    def state(self):
        """Everything that a checkpoint is to bring back, by name."""
        found = {f"model.{name}": tensor.clone() for name, tensor in self.pipe.state_dict().items()}
        for name, parameter in self.pipe.named_parameters():
            for slot, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}.{slot}"] = torch.as_tensor(value).clone()
        for name, parameter in self.pipe.named_parameters():
            for group in self.optimizer.param_groups:
                if any(parameter is other for other in group["params"]):
                    found[f"{name} lr"] = torch.tensor(group["lr"])
        counts = self.pipe.seed, self.pipe.step_number, self.schedule.last_epoch
        found["counts"] = torch.tensor(counts)
        return found

    def close(self):
        self.pipe.close()


def equal(one, other):
    """Whether two states are the same, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def ranks(directory: Path) -> None:
    """What each rank of a distributed test does."""
    rank = int(os.environ["RANK"])
    run = Run("tied", "groups")
    run.train(3)
    run.save(directory / "written")
    run.train(6)
    torch.save(run.state(), directory / f"truth-{rank}.pt")
    other = Run("tied", "groups", seed=5)
    other.load(directory / "given")
    torch.save(other.state(), directory / f"loaded-{rank}.pt")
    fail(run, directory, rank)
    run.close()


def fail(run: Run, directory: Path, rank: int) -> None:
    """The last rank cannot write, and cannot read: every rank is told, and goes on."""
    last = rank == run.pipe.placement[-1]
    before = os.fsync
    if last:
        os.fsync = lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    try:
        run.save(directory / "written")
    except CheckpointError as error:
        (directory / f"unwritten-{rank}").write_text(str(error))
    os.fsync = before
    state = run.state()
    try:
        run.load(directory / ("nowhere" if last else "given"))
    except CheckpointError as error:
        (directory / f"unread-{rank}").write_text(str(error))
    assert equal(state, run.state())
    run.save(directory / "written")


def replicas(directory: Path) -> None:
    """Two replicas over two devices each: they write one checkpoint, and read it alike."""
    rank = int(os.environ["RANK"])
    run = Run("tied", "groups", data_parallel=2)
    run.train(2)
    path = run.save(directory / "written")
    torch.save(run.state(), directory / f"saved-{rank}.pt")
    run.train(4)
    other = Run("tied", "groups", data_parallel=2, seed=5)
    other.load(path)
    other.train(4)
    assert equal(run.state(), other.state())
    run.close()


def address(directory: Path) -> None:
    """What each rank does with an address that all of them can reach."""
    rank = int(os.environ["RANK"])
    there = f"file://{directory}/written"
    run = Run("tied", "groups", data_parallel=2 if os.environ["WORLD_SIZE"] == "4" else 1)
    run.train(3)
    run.save(there)
    torch.save(run.state(), directory / f"saved-{rank}.pt")
    run.train(5)
    state = run.state()
    run.load(latest(there))
    run.train(5)
    assert equal(run.state(), state)
    if rank == 1:
        run.pipe.state_dict = lambda: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    try:
        run.save(there)
    except CheckpointError as error:
        (directory / f"unwritten-{rank}").write_text(str(error))
    run.close()


FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}


def filled(number: int) -> Run:
    """A run whose every number is `number`."""
    run = Run("norm", "adam", 2)
    with torch.no_grad():
        for tensor in run.pipe.state_dict().values():
            tensor.fill_(number)
        for parameter in run.pipe.parameters():
            parameter.grad = torch.zeros_like(parameter)
    run.optimizer.step()
    for state in run.optimizer.state.values():
        for value in state.values():
            value.fill_(number)
    with torch.no_grad():
        for tensor in run.pipe.state_dict().values():
            tensor.fill_(number)
    run.pipe.step_number = run.step = number
    return run


def whole(directory: Path | str) -> int:
    """The number that the newest checkpoint is filled with."""
    path = latest(directory)
    assert path is not None
    saved = read_checkpoint(path)
    number = saved.progress.step
    states = [value for state in saved.states.values() for value in state.values()]
    assert states
    assert saved.progress.step_number == number
    assert all(bool((tensor == number).all()) for tensor in (*saved.model.values(), *states))
    return number


def child(work) -> int:
    """Do it in a process of its own; how that ended."""
    process = os.fork()
    if process == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(process, 0)[1]


def killed_at(directory: Path, event: int, kind: str, meanwhile: bool) -> bool:
    """Save a third checkpoint beside two, killed at that touch of the files; whether it was."""
    shutil.copytree(directory / "two", directory / "three")
    run = filled(3)

    def work():
        count = 0

        def hook(name, _):
            nonlocal count
            if name in FILE_EVENTS:
                if count == event:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1

        sys.addaudithook(hook)
        save = run.save_meanwhile if meanwhile else run.save
        save(f"{kind}{directory / 'three'}", keep=2)

    killed = os.WIFSIGNALED(child(work))
    run.close()
    assert whole(f"{kind}{directory / 'three'}") in ((2, 3) if killed else (3,))
    return killed


def kill_everywhere(directory: Path, kind: str = "", meanwhile: bool = False) -> None:
    """Kill a save at each of its touches of the file system, one after the other."""
    for number in (1, 2):
        filled(number).save(f"{kind}{directory / 'two'}", keep=2)
    event = 0
    while killed_at(directory, event, kind, meanwhile):
        run = filled(4)
        run.save(f"{kind}{directory / 'three'}", keep=2)
        assert whole(f"{kind}{directory / 'three'}") == 4
        assert len(list((directory / "three").iterdir())) == 2, "something was left"
        shutil.rmtree(directory / "three")
        run.close()
        event += 1
    print("killed", event)


def kill_sometime(directory: Path) -> None:
    """Kill a loop of saves after random times."""
    filled(1).save(directory, keep=2)
    draw = random.Random(0)
    for _ in range(20):
        number = whole(directory)
        process = os.fork()
        if process == 0:
            while True:
                number += 1
                filled(number).save(directory, keep=2)
        time.sleep(draw.uniform(0.05, 0.6))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        assert whole(directory) >= number
    print("reached", whole(directory))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {
        "ranks": ranks,
        "replicas": replicas,
        "kill_everywhere": kill_everywhere,
        "kill_everywhere_at_address": functools.partial(kill_everywhere, kind="file://"),
        "kill_meanwhile": functools.partial(kill_everywhere, meanwhile=True),
        "kill_meanwhile_at_address": functools.partial(
            kill_everywhere, kind="file://", meanwhile=True
        ),
        "address": address,
        "kill_sometime": kill_sometime,
    }[sys.argv[1]](Path(sys.argv[2]))
