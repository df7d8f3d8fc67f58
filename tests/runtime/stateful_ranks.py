"""What every rank runs to show that state and random numbers do not depend on the transport."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from norm_pipeline import data, net_spec
from stateful_pipeline import stateful_data, stateful_spec

from gpipe_compiler.runtime.core.pipeline import Pipeline

CASES = {
    "state-none-gpipe": (stateful_spec, {"remat": "none", "schedule": "gpipe"}),
    "state-full-gpipe": (stateful_spec, {"remat": "full", "schedule": "gpipe"}),
    "state-full-1f1b": (stateful_spec, {"remat": "full", "schedule": "1f1b"}),
    "state-none-zb-h1": (stateful_spec, {"remat": "none", "schedule": "zb-h1"}),
    "state-none-interleaved": (stateful_spec, {"remat": "none", "schedule": "interleaved"}),
    "state-full-zbv": (stateful_spec, {"remat": "full", "schedule": "zbv"}),
    "norm-none-zb-h1": (net_spec, {"schedule": "zb-h1", "batchnorm": "deferred"}),
    "norm-full-1f1b": (net_spec, {"remat": "full", "schedule": "1f1b", "batchnorm": "deferred"}),
}


def collect(case, **more):
    """Losses and the whole state after two steps of an optimizer."""
    make, choices = CASES[case]
    found = {}
    with Pipeline(make(microbatches=3), None, seed=2, **choices, **more) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for step in range(2):
            x, target = (stateful_data if make is stateful_spec else data)(6, seed=step)
            optimizer.zero_grad()
            call = ((x,), target) if pipe.rank == 0 else (None, None)
            found[f"loss {step}"] = pipe.step(*call).clone()
            optimizer.step()
        found.update({name: t.clone() for name, t in pipe.gather_state_dict().items()})
    return found


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    for case in CASES:
        found = collect(case)
        if torch.distributed.get_rank() == 0:
            torch.save(found, directory / f"{case}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
