"""The times of a pipeline's stages, as `stage_clock` has measured them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one micro-batch in one stage, with the work of its device on what crosses.

    Attributes:
        backward_s: of all gradients, or where the schedule splits it of those of what the stage
            received; without running the forward again.
        weight_s: of the gradients of parameters, where the schedule splits the backward.
        again_s: of a backward with the forward run again before it; 0 where none is.
    """

    forward_s: float
    backward_s: float = 0.0
    weight_s: float = 0.0
    again_s: float = 0.0


@dataclass(frozen=True)
class Clocked:
    """What was measured of a pipeline.

    Attributes:
        alone, together: of every stage, while the other devices rest and while they work.
        receive_s, gradient_s: of every stage, seconds in which what it receives for a micro-batch
            comes from another device, and in which its gradients go back.
        around_s: seconds of a step outside the work of the devices, sums of gradients that
            stages share among them.
    """

    alone: tuple[StageSeconds, ...]
    together: tuple[StageSeconds, ...]
    receive_s: tuple[float, ...]
    gradient_s: tuple[float, ...]
    around_s: float

    def __str__(self) -> str:
        lines = ["stage  phase          alone  beside others"]
        for stage, (one, both) in enumerate(zip(self.alone, self.together, strict=True)):
            rows = zip(asdict(one).items(), asdict(both).values(), strict=True)
            lines += [
                f"{stage:5}  {name.removesuffix('_s'):9} {_ms(fast):>10} {_ms(slow):>14}"
                for (name, fast), slow in rows
                if fast or slow
            ]
            lines += [
                f"{stage:5}  {name:9} {_ms(seconds):>10}"
                for name, seconds in (
                    ("receives", self.receive_s[stage]),
                    ("returns", self.gradient_s[stage]),
                )
                if seconds
            ]
        return "\n".join([*lines, f"around the stages {_ms(self.around_s)} a step"])

    def fields(self) -> Mapping[str, Any]:
        """What JSON can hold; `of` makes the same of it again."""
        return asdict(self)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Clocked:
        """What `fields` has told."""
        return cls(
            tuple(StageSeconds(**stage) for stage in fields["alone"]),
            tuple(StageSeconds(**stage) for stage in fields["together"]),
            tuple(fields["receive_s"]),
            tuple(fields["gradient_s"]),
            fields["around_s"],
        )

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(self.fields(), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Clocked:
        """What `write` has written."""
        return cls.of(json.loads(path.read_text(encoding="utf-8")))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
