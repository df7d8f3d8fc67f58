"""Profiles some steps on every rank, and writes one trace of all of them."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, record_function

from ..core.engine import EngineRun
from ..core.pipeline import Pipeline
from ..core.ranks import together
from ..core.storing import place
from ..core.wiring import ActionStep
from ..schedule.actions import Compute, Phase

_WORDS = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.WEIGHT: "weight gradients",
}
_PROCESSES = 1000
"""Of one rank in a trace, at most: itself and its GPUs."""
_FLOWS = 2**40
"""Arrows of one rank in a trace, at most."""


class StepProfiler:
    """Records steps with torch.profiler; every rank makes one and calls it alike.

    Args:
        folder: of the trace.
        first: the first step of the run, which warms up and is not recorded.
        steps: that are recorded after it; 0 for none.
    """

    def __init__(self, pipe: Pipeline, folder: Path, first: int, steps: int) -> None:
        self.pipe, self.folder, self.first, self.last = pipe, folder, first, first + steps
        self._step: AbstractContextManager[object] | None = None
        self._recorded = 0
        self._prepared = self._started = False
        self._profile = profile(
            # The stages of a process that has several devices run on threads of their own.
            experimental_config=_ExperimentalConfig(profile_all_threads=True)
        )

    def begin(self, step: int) -> None:
        """A step begins."""
        if step == self.first < self.last:
            self._profile.prepare_trace()
            self._prepared = True
        elif self.first < step <= self.last:
            if step == self.first + 1:
                self._profile.start_trace()
                self._started = True
                self._watch(_NamedRun)
            named: AbstractContextManager[object] = record_function(f"step {step}")
            named.__enter__()
            self._step = named

    def end(self, step: int) -> str:
        """A step is done; what to tell the user of."""
        if self._step is None:
            return ""
        self._step.__exit__(None, None, None)
        self._step, self._recorded = None, step
        return self.finish() if step == self.last else ""

    def finish(self) -> str:
        """Write what was recorded, once; what to tell the user of it.

        Raises:
            CheckpointError: on every rank, when the file cannot be written.
        """
        if self.first >= self.last:
            return ""
        first, self.last = self.first + 1, self.first
        if not self._recorded:
            return "nothing was profiled: no step came after the first, which warms up"
        self.close()
        name = f"trace_steps_{first}-{self._recorded}.json"
        file = self.folder / name

        def write(traces: Sequence[bytes]) -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            whole = merged([json.loads(gzip.decompress(trace)) for trace in traces])
            place(file, lambda path: path.write_text(json.dumps(whole), encoding="utf-8"))

        together(self.pipe.world, "writing the trace", self._own, write)
        return f"trace of all ranks: {file} (open it in https://ui.perfetto.dev)"

    def close(self) -> None:
        """End what was begun, however the run ends: torch has one profiler for all of a process."""
        if self._step is not None:  # which failed
            self._step.__exit__(None, None, None)
        if self._prepared and not self._started:
            self._profile.start_trace()  # torch 2.11 does not stop before
        if self._prepared:
            self._profile.stop_trace()
            self._watch(EngineRun)
        self._step, self._prepared, self._started = None, False, False

    def _watch(self, run_class: type[EngineRun]) -> None:
        for engine in self.pipe.execution.engines:
            engine.run_class = run_class

    def _own(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(file))
            return gzip.compress(file.read_bytes(), compresslevel=1)


def merged(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One trace in Chrome's format, in which every rank, and every GPU of one, is a process.

    Times are those of the ranks' clocks.

    Args:
        traces: by rank, as torch.profiler writes them.
    """
    base = traces[0].get("baseTimeNanoseconds", 0)
    events: list[dict[str, Any]] = []
    for rank, trace in enumerate(traces):
        later = (trace.get("baseTimeNanoseconds", 0) - base) / 1e3
        # Those of the profiler itself belong to no numbered process.
        own = [event for event in trace["traceEvents"] if isinstance(event.get("pid"), int)]
        labels = {
            event["pid"]: event["args"]["labels"]
            for event in own
            if event["name"] == "process_labels"
        }
        busy = dict.fromkeys(event["pid"] for event in own if event["ph"] != "M")
        order = sorted(busy, key=lambda pid: labels.get(pid, "CPU") != "CPU")
        numbers = {pid: rank * _PROCESSES + index for index, pid in enumerate(order)}
        for pid, number in numbers.items():
            label = labels.get(pid, "CPU")
            name = f"rank {rank}" if label == "CPU" else f"rank {rank}, {label}"
            named = {"ph": "M", "pid": number, "tid": 0}
            events.append({**named, "name": "process_name", "args": {"name": name}})
            events.append({**named, "name": "process_sort_index", "args": {"sort_index": number}})
        for event in own:
            if event["pid"] not in numbers or event["name"].startswith("process_"):
                continue
            event["pid"] = numbers[event["pid"]]
            if "ts" in event:
                event["ts"] += later
            if "id" in event:
                event["id"] = rank * _FLOWS + int(event["id"])
            events.append(event)
    return {**traces[0], "traceEvents": events}


class _NamedRun(EngineRun):
    """A run whose work on each micro-batch has a name in the trace."""

    def execute(self, step: ActionStep) -> None:
        action = step.action
        if not isinstance(action, Compute):
            super().execute(step)
            return
        joint = self.wiring[action.stage].joint is not None
        batch = "mini-batch" if joint else f"micro-batch {action.microbatch}"
        with record_function(f"stage {action.stage} {_WORDS[action.phase]}, {batch}"):
            super().execute(step)
