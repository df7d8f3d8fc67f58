"""What every rank of the tests of 16 bits runs; each leaves what it sees in a file of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from half_pipelines import half_data, half_spec, picking_spec
from tiny_pipelines import data_for, tied_spec

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.core.shards import local
from gpipe_compiler.runtime.errors import AgreedError
from gpipe_compiler.runtime.spec import Precision

STEPS = 4
OVERFLOWS = 1
"""The step in which a gradient of one rank overflows."""

CLIP = 0.05
SCALE = 2.0**8


def run(replicas, precision, remat, guilty, sharding="none"):
    """Steps with clipping and scaling; a gradient overflows on the rank `guilty`."""
    spec = half_spec(microbatches=4 // replicas)
    seen = {"losses": [], "norms": [], "scales": [], "same": []}
    more = {"schedule": "1f1b", "remat": remat, "precision": precision}
    if replicas > 1:
        more["sharding"] = sharding
    with Pipeline(spec, None, data_parallel=replicas, **more) as pipe:
        seen["before"] = pipe.gather_state_dict()
        seen["before"] = {name: tensor.clone() for name, tensor in seen["before"].items()}
        if pipe.scaler.is_enabled():
            pipe.scaler.update(SCALE)
            pipe.scaler.set_growth_interval(2)
        step = 0
        first = next(p for p in pipe.parameters() if p.requires_grad)
        if pipe._shards is not None:  # what the stage computes with has all rows
            first = next(iter(pipe._shards.named.values())).whole
        if pipe.rank == guilty and precision == "fp16":
            overflow(pipe, first, lambda: step == OVERFLOWS)
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        for step in range(STEPS):
            pipe.zero_grad()
            before = [local(p.detach()).clone() for p in pipe.parameters()]
            seen["losses"].append(pipe.step(*pipe.shard(*half_data(8, step))))
            pipe.scaler.unscale_(optimizer)
            seen["norms"].append(pipe.clip_grad_norm_(CLIP))
            pipe.scaler.step(optimizer)
            pipe.scaler.update()
            seen["scales"].append(pipe.scaler.get_scale())
            pairs = zip(before, pipe.parameters(), strict=True)
            same = all(torch.equal(one, local(other.detach())) for one, other in pairs)
            seen["same"].append(same)
        pipe.eval()
        seen["evaluated"] = pipe.evaluate(*pipe.shard(*half_data(8, 9)))
        seen["after"] = pipe.gather_state_dict()
    return seen


def overflow(pipe, parameter, now):
    """Have a gradient of this rank overflow, in a replica before the mean is taken."""
    if pipe.replicas == 1 or pipe._shards is not None:
        parameter.register_hook(lambda g: torch.full_like(g, torch.inf) if now() else g)
        return
    reducer = pipe._reducer

    def ended(stage, ended=reducer.stage_ended):
        if now() and parameter.grad is not None:
            parameter.grad.fill_(torch.inf)
        ended(stage)

    reducer.stage_ended = ended


def tied():
    """The embedding of three stages on two ranks: its norm, and its copies after a step."""
    inputs, target, _ = data_for("tied", 8)
    seen = {}
    with Pipeline(tied_spec(), None) as pipe:
        pipe.step(*pipe.shard(inputs, target))
        seen["norm"] = pipe.clip_grad_norm_(CLIP)
        seen["again"] = pipe.clip_grad_norm_(CLIP)
        torch.optim.SGD(pipe.parameters(), lr=1.0).step()
        seen["tied"] = dict(pipe.named_parameters())["emb.weight"].detach().clone()
        seen["after"] = pipe.gather_state_dict()
        for parameter in pipe.parameters():
            parameter.grad = parameter.grad if pipe.rank else parameter.grad * torch.inf
        try:
            pipe.clip_grad_norm_(CLIP, error_if_nonfinite=True)
        except AgreedError as error:
            seen["refused"] = str(error)
    return seen


def planned_otherwise():
    """What stages infer that need numbers, planned and run in either of two precisions."""
    seen = {}
    for planned in Precision:
        for precision in ("fp32", "bf16"):
            spec = picking_spec(precision=planned)
            with Pipeline(spec, None, precision=precision) as pipe:
                pipe.eval()
                calls = [pipe(half_data(8)[0]) for _ in range(2)]
                seen[planned.value, precision] = calls
    return seen


CASES = {
    "bf16": lambda: run(1, "bf16", "none", 0),
    "fp16": lambda: run(1, "fp16", "full", 0),
    "replicas": lambda: run(2, "fp16", "none", 1),
    "optimizer": lambda: run(2, "fp16", "none", 1, "optimizer"),
    "full": lambda: run(2, "fp16", "full", 1, "full"),
    "tied": tied,
    "planned otherwise": planned_otherwise,
}


def main(directory):
    torch.distributed.init_process_group("gloo")
    for name, case in CASES.items():
        torch.save(case(), directory / f"{name}-{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
