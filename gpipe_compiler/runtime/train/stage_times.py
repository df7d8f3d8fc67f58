"""The measured times of a pipeline's stages, as `stage_clock` finds them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


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
class MeasuredStages:
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
            for (name, fast), slow in zip(asdict(one).items(), asdict(both).values(), strict=True):
                if fast or slow:
                    what = name.removesuffix("_s")
                    lines.append(f"{stage:5}  {what:9} {_ms(fast):>10} {_ms(slow):>14}")
            links = {"receives": self.receive_s[stage], "returns": self.gradient_s[stage]}
            lines += [f"{stage:5}  {name:9} {_ms(s):>10}" for name, s in links.items() if s]
        return "\n".join([*lines, f"around the stages {_ms(self.around_s)} a step"])

    def to_json(self) -> str:
        """As JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> MeasuredStages:
        """What `to_json` gave."""
        fields = json.loads(text)
        for name in ("alone", "together"):
            fields[name] = tuple(StageSeconds(**stage) for stage in fields[name])
        for name in ("receive_s", "gradient_s"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
