"""What each process holds of memory while it runs packages, one after another.

    torchrun --nproc-per-node 2 live_memory.py CASES

CASES is a file that `torch.save` wrote: of each case its package, its batch (inputs, target) and
its optimizer, None for inference. Every rank writes a line of JSON per case to `CASES.rank`. Of
the third step, the optimizer's included, or of the third batch:

    live        what the allocator has given out, less what a kernel takes and gives back in itself
    allocated   all of it; on a GPU torch.cuda.max_memory_allocated, which then is `live` too

On the host both come from the profiler's record of every allocation. A dispatch mode would see
nothing else, but more where gradients meet: torch adds them in place only while no such mode is on.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
from live_bytes import measured, peak

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True)
class Case:
    """A package and what it is to be run with."""

    package: str
    batch: tuple[object, object]
    optimizer: str | None


class Running:
    """A package at work, in this process."""

    def __init__(self, case: Case) -> None:
        package = Path(case.package)
        sys.path.insert(0, str(package.parent))
        self.pipe = importlib.import_module(package.name).Pipeline()
        self.optimizer: torch.optim.Optimizer | None = None
        if case.optimizer is None:
            self.pipe.eval()
        else:
            self.optimizer = OPTIMIZERS[case.optimizer](self.pipe.parameters())
        self.batch = case.batch if self.pipe.feeds else (None, None)

    def step(self) -> None:
        """As `run.py` makes it, but gradients are forgotten at its end."""
        if self.optimizer is None:
            with torch.no_grad():
                self.pipe(self.batch[0])
            return
        self.pipe.step(*self.batch)
        self.optimizer.step()
        self.pipe.zero_grad()

    def fixed_bytes(self) -> int:
        """What is there between two steps."""
        stages = self.pipe.stages.values()
        held = [t for stage in stages for t in (*stage.parameters(), *stage.buffers())]
        for stage in stages:
            for module in stage.modules():
                held.extend(v for v in vars(module).values() if isinstance(v, torch.Tensor))
        if self.optimizer is None:
            return _bytes([*held, *tree_leaves(self.batch[0])])
        remembered = [t for state in self.optimizer.state.values() for t in state.values()]
        return _bytes([*held, *remembered, *tree_leaves(self.batch)])


def _bytes(items: Iterable[object]) -> int:
    storages = (item.untyped_storage() for item in items if isinstance(item, torch.Tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def count(case: Case) -> tuple[int, int]:
    """`live` and `allocated` of one case, in this process."""
    running = Running(case)
    running.step()
    running.step()
    gc.collect()
    fixed = running.fixed_bytes()
    device = next(iter(running.pipe.parameters())).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        running.step()
        most = torch.cuda.max_memory_allocated(device)
        found = most, most
    else:
        live = peak(measured([("step", running.step)])["step"])
        found = fixed + live, fixed + _most_allocated(running.step)
    running.pipe.close()
    return found


def _most_allocated(action: Callable[[], object]) -> int:
    """The most bytes of the host's allocator during an action, above those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        action()
    pending = list(seen.profiler.kineto_results.experimental_event_tree())
    events = []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.typed[0] == torch._C._profiler._EventType.Allocation:
            events.append((event.start_time_ns, event.typed[1].alloc_size))
    now = most = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        now += size
        most = max(most, now)
    return most


def main() -> None:
    """What every rank does."""
    torch.set_num_threads(1)
    path = sys.argv[1]
    cases = torch.load(path, weights_only=False)
    with Path(f"{path}.{os.environ.get('RANK', '0')}").open("w") as lines:
        for case in cases:
            lines.write(json.dumps(count(Case(**case))) + "\n")


if __name__ == "__main__":
    main()
