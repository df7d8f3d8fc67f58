"""What every rank of the tests of replicas runs: each case leaves its findings in a file."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from pathlib import Path

import torch
from replica_models import RATE, Plain, batch_for, spec_for
from torch.distributed.tensor import DTensor

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.errors import PipelineError

STEPS = 3


def train(name, replicas, samples, *, microbatches=2, accumulate=1, sync=True, **more):
    """Some steps as replicas, and on rank 0 the same in a plain loop: pairs to compare."""
    spec = spec_for(name)
    found, expected = {}, {}
    with Pipeline(spec, None, data_parallel=replicas, microbatches=microbatches, **more) as pipe:
        state = pipe.gather_state_dict()
        plain = Plain(spec, state) if pipe.rank == 0 else None
        optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
        for step in range(STEPS):
            pipe.zero_grad()
            for turn in range(accumulate):
                inputs, target, values = batch_for(name, samples, seed=10 * step + turn)
                last = turn == accumulate - 1
                with contextlib.nullcontext() if sync or last else pipe.no_sync():
                    loss = pipe.step(*pipe.shard(inputs, target), weight=1 / accumulate)
                found[f"loss {step} {turn}"] = loss
                if plain is not None:
                    count = whole_count(pipe, samples)
                    expected[f"loss {step} {turn}"] = plain.step(values, count, 1 / accumulate)
            gradients = gather_gradients(pipe)
            optimizer.step()
            if plain is not None:
                found.update({f"{n}' {step}": g for n, g in gradients.items()})
                expected.update({f"{n}' {step}": g for n, g in plain.update().items()})
        same_everywhere(pipe)
        found.update(pipe.gather_state_dict())
        if plain is not None:
            expected.update(plain.state)
            for alias, canonical in spec.aliases.items():
                expected[alias] = plain.state[canonical]
        found["evaluated"], expected["evaluated"] = evaluated(pipe, plain, name, samples)
        return pipe.rank == 0, found, expected


def whole_count(pipe, samples):
    least = 2 if any(stage.mixes for stage in pipe.spec.stages) else 1
    return min(pipe.replicas * pipe.microbatches, samples // least)


def evaluated(pipe, plain, name, samples):
    """The loss in evaluation mode."""
    inputs, target, values = batch_for(name, samples, seed=99)
    pipe.eval()
    found = pipe.evaluate(*pipe.shard(inputs, target))
    return found, plain and plain.evaluate(values, whole_count(pipe, samples))


def gather_gradients(pipe):
    """Of all parameters of the first replica, None where there is none."""
    held = {
        name: torch.empty(0) if parameter.grad is None else whole(parameter.grad)
        for name, parameter in pipe.named_parameters()
        if parameter.requires_grad
    }
    if pipe.replica:
        return {}
    gathered = pipe._topology.pipeline.gather(held)
    return {name: g if g.numel() else None for name, g in gathered.items()}


def whole(tensor):
    """All rows of a tensor that replicas divide among them, on each of them; others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same_everywhere(pipe):
    """Every tensor has the same bits on all ranks that hold it."""
    state = {name: whole(tensor.detach()).double() for name, tensor in pipe.state_dict().items()}
    names = sorted({name for stage in pipe.spec.stages for name in stage.state.values()})
    for name in names:
        mine = state.get(name)
        marks = torch.zeros(2, dtype=torch.int64)
        if mine is not None:
            row = mine.reshape(-1).view(torch.int64)
            marks = torch.tensor([1, int((row * torch.arange(1, len(row) + 1)).sum())])
        all_marks = pipe.world.gathered(marks, "marks")
        assert len({int(mark) for there, mark in all_marks if there}) == 1, name


def deferred(replicas, samples):
    """Deferred BatchNorm against one pipeline in one process, with all the micro-batches."""
    spec = spec_for("norm")
    found, expected = {}, {}
    with Pipeline(spec, None, data_parallel=replicas, microbatches=2, batchnorm="deferred") as pipe:
        run(pipe, samples, found)
        first = pipe.rank == 0
    if first:
        with Pipeline(
            spec, None, transport="local", microbatches=2 * replicas, batchnorm="deferred"
        ) as one:
            run(one, samples, expected)
    return first, found, expected


def run(pipe, samples, found):
    optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
    for step in range(STEPS):
        pipe.zero_grad()
        found[f"loss {step}"] = pipe.step(*pipe.shard(*batch_for("norm", samples, seed=step)[:2]))
        optimizer.step()
    found.update(pipe.gather_state_dict())


def micro(replicas, samples):
    """BatchNorm by micro-batches: the first replica's running statistics count."""
    spec = spec_for("norm")
    found, expected = {}, {}
    with Pipeline(spec, None, data_parallel=replicas, microbatches=2) as pipe:
        state = {name: tensor.clone() for name, tensor in pipe.gather_state_dict().items()}
        inputs, target, _ = batch_for("norm", samples, seed=3)
        own = pipe.shard(inputs, target)
        pipe.step(*own)
        same_everywhere(pipe)
        found.update(pipe.gather_state_dict())
        first = pipe.rank == 0
    if first:
        with Pipeline(spec, None, transport="local", microbatches=2) as one:
            one.load_state_dict(state)
            one.step(*own)
            expected.update(one.gather_state_dict())
    return first, found, expected


def refusals(directory, replicas):
    """What is refused is refused on all ranks, in words, and the next step works."""
    spec = spec_for("skip")
    with Pipeline(spec, None, data_parallel=replicas, microbatches=2) as pipe:
        good = pipe.shard(*batch_for("skip", 11, seed=0)[:2])
        few = pipe.shard(*batch_for("skip", replicas - 1, seed=0)[:2])
        wrong = (torch.ones(3, 6), None) if pipe.replica == replicas - 1 else good
        calls = {
            "few": lambda: pipe.step(*few),
            "wrong": lambda: pipe.step(*wrong),
            "mixed": lambda: (pipe.evaluate if pipe.replica else pipe.step)(*good),
        }
        inputs, target, _ = batch_for("skip", 11, seed=0)
        if pipe.replica == replicas - 1:
            # In the first sample, which is another replica's.
            inputs = tuple(nudged(item) for item in inputs)
        calls["other"] = lambda: pipe.step(*pipe.shard(inputs, target))
        calls["evaluated"] = lambda: pipe.evaluate(*pipe.shard(inputs, target))
        for name, call in calls.items():
            try:
                call()
            except PipelineError as error:
                (directory / f"{name}-{replicas}-{pipe.rank}").write_text(str(error))
            pipe.zero_grad()
            pipe.step(*good)


def nudged(tensor):
    """With another last bit in its first number."""
    other = tensor.clone()
    first = other.view(-1)[:1]
    first.copy_(torch.nextafter(first, first + 1))
    return other


def equal(directory):
    """All cases that this many processes can run, one after the other in one group."""
    compare(directory, train)


def sharded(directory):
    """The same with weights and optimizer divided among the replicas."""
    compare(directory, functools.partial(train, sharding="optimizer"))


def full(directory):
    """The same with weights and gradients divided too; not in schedules that split backwards."""

    def train_full(name, *args, schedule="gpipe", **more):
        form = "optimizer" if schedule.startswith("zb") else "full"
        case = "uncounted" if name == "moody" else name
        return train(case, *args, schedule=schedule, sharding=form, **more)

    compare(directory, train_full)


def compare(directory, train):
    torch.distributed.init_process_group("gloo")
    world = torch.distributed.get_world_size()
    cases = {"2": {}, "4": {}}[str(world)]
    for replicas in (2,) if world == 2 else (2, 4):
        cases |= {
            f"skip-{replicas}": lambda r=replicas: train("skip", r, 11),
            f"skip small-{replicas}": lambda r=replicas: train("skip", r, 5, microbatches=4),
            f"tied-{replicas}": lambda r=replicas: train("tied", r, 13),
            f"frozen-{replicas}": lambda r=replicas: train("frozen", r, 9),
            f"moody-{replicas}": lambda r=replicas: train("moody", r, 16),
            f"accumulated-{replicas}": lambda r=replicas: train("tied", r, 9, accumulate=3),
            f"no_sync-{replicas}": lambda r=replicas: train(
                "tied", r, 9, accumulate=3, sync=False, schedule="1f1b", remat="full"
            ),
            f"deferred-{replicas}": lambda r=replicas: deferred(r, 18),
            f"micro-{replicas}": lambda r=replicas: micro(r, 17),
            f"zb-h1-{replicas}": lambda r=replicas: train("skip", r, 11, schedule="zb-h1"),
        }
        if world // replicas == 2:
            cases |= {
                "zbv": lambda r=replicas: train("tied", r, 13, schedule="zbv", remat="full"),
                "interleaved": lambda r=replicas: train(
                    "tied", r, 9, accumulate=3, sync=False, schedule="interleaved"
                ),
            }
    for name, case in cases.items():
        first, found, expected = case()
        if first:
            torch.save((found, expected), directory / f"{name}.pt")
    for replicas in (2,) if world == 2 else (2, 4):
        refusals(directory, replicas)
    torch.distributed.destroy_process_group()


def die(directory, sharding="none"):
    """The last device of the last replica ends without a word in its second step."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # every rank ends by itself
    more = {"data_parallel": 2, "sharding": sharding, "timeout_s": 100}
    with Pipeline(spec_for("norm"), None, **more) as pipe:
        batch = pipe.shard(*batch_for("norm", 16, seed=0)[:2])
        pipe.step(*batch)
        if pipe.rank == pipe.world.size - 1:
            pipe.stages[1].register_forward_pre_hook(lambda *_: os._exit(7))
        try:
            pipe.step(*batch)
        except PipelineError as error:
            (directory / f"lost-{pipe.rank}").write_text(str(error))
            raise


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    fatal = {f"die_{kind}": functools.partial(die, sharding=kind) for kind in ("optimizer", "full")}
    {"equal": equal, "sharded": sharded, "full": full, "die": die, **fatal}[sys.argv[1]](
        Path(sys.argv[2])
    )
