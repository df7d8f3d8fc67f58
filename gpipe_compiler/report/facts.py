"""What tables, pictures and the HTML report have in common, and how templates are rendered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.text import Text

from gpipe_compiler.plan import Plan, Stage
from gpipe_compiler.plan.plan import crossing_bytes
from gpipe_compiler.plan.stages import OpNote
from gpipe_compiler.runtime.spec import BatchNorm, Crossing, Precision, WeightSharding
from gpipe_compiler.runtime.wording import counted, printable, printable_lines
from gpipe_compiler.text import units


@dataclass(frozen=True, slots=True)
class Boundary:
    """A value that crosses between stages, with where it comes from.

    Attributes:
        bytes: of one micro-batch, sent once to every target.
        label: what makes it: `Conv2d layer1.0.conv1`, or `input of the model`.
        source: `file:line` of the user's program, "" where unknown.
    """

    crossing: Crossing
    bytes: int
    label: str
    source: str


def makers(plan: Plan) -> Mapping[str, OpNote]:
    return {value: note for note in plan.ops for value in note.outputs}


def boundaries(plan: Plan) -> tuple[Boundary, ...]:
    made_by = makers(plan)
    found = []
    for crossing in plan.crossings:
        note = made_by.get(crossing.value)
        if note is None:
            label, source = ("input of the model" if plan.ops else ""), ""
        else:
            label, source = printable(f"{note.label} {note.module}".rstrip()), note.source
        found.append(Boundary(crossing, crossing_bytes(crossing), label, source))
    return tuple(found)


def boundary_bytes(plan: Plan) -> int:
    """Bytes that one micro-batch moves between stages, forward and back, over all boundaries."""
    return sum(stage.receive_bytes + stage.gradient_bytes for stage in plan.stages)


def parameter_count(plan: Plan) -> int:
    """Elements of all parameters; without the graph, one that several stages own counts in each."""
    if plan.graph is not None:
        return plan.graph.parameter_count
    return sum(stage.parameter_count for stage in plan.stages)


BETWEEN = " … "
"""Stands between the first and the last module of a stage."""


def modules_of(plan: Plan, stage: Stage) -> str:
    """The first and last module of a stage: `conv1 … layer1.2`.

    For a stage whose ops all stand in the model's own forward, what they call.
    """
    notes = plan.note_of
    duplicates = set(stage.duplicates)
    own = [notes[name] for name in stage.ops if name in notes and name not in duplicates]
    names = [note.module for note in own if note.module] or [note.label for note in own]
    if not names:
        return ""
    ends = dict.fromkeys(map(printable, (names[0], names[-1])))
    return BETWEEN.join(ends)


def machines(plan: Plan) -> str:
    """The devices that the pipeline runs on and their links, in a few words."""
    count = len(plan.orders)
    return str(plan.cluster.sized(count).part(plan.slots or range(count)))


def device_bytes(plan: Plan) -> tuple[int, ...]:
    """Peak bytes of every device of the pipeline, by rank."""
    if plan.prediction.device_bytes:
        return plan.prediction.device_bytes
    sizes = [0] * len(plan.orders)
    places = plan.placement or range(len(plan.stages))
    for place, size in zip(places, plan.prediction.peak_bytes, strict=True):
        sizes[place] += size
    return tuple(sizes)


def fullest_device(plan: Plan) -> tuple[int, int]:
    """What the device needs at its peak that lacks the most memory, or has the least to spare; and
    what it has."""
    pairs = zip(device_bytes(plan), plan.devices, strict=True)
    return max(((size, d.memory) for size, d in pairs), key=lambda pair: pair[0] - pair[1])


def placed(plan: Plan) -> tuple[str, ...]:
    """For every stage, the rank that runs it, and its device where devices differ.

    Empty where every stage has a device of its own, and all devices are equal.
    """
    if len(plan.orders) == len(plan.stages) and len(set(plan.devices)) == 1:
        return ()
    ranks = plan.placement or tuple(range(len(plan.stages)))
    if len(set(plan.devices)) == 1:
        return tuple(map(str, ranks))
    return tuple(f"{rank} ({plan.devices[rank].name})" for rank in ranks)


def headline(plan: Plan) -> Text:
    work = "trains" if plan.training else "infers"
    return Text.assemble(
        (printable(plan.name), "bold"),
        f" {work} in {_times(plan.replicas)}{counted(len(plan.stages), 'stage')} on "
        f"{machines(plan)}: "
        f"{plan.schedule.value}, a batch of {plan.batch_size} in "
        f"{_times(plan.replicas)}{counted(plan.microbatches, 'micro-batch', 'es')} of "
        f"{plan.microbatch_size}"
        f"{_modes(plan)}",
    )


def _times(replicas: int) -> str:
    return f"{replicas} x " if replicas > 1 else ""


def _modes(plan: Plan) -> str:
    """What is not as the plain model does it micro-batch by micro-batch."""
    words = []
    if plan.batchnorm is not BatchNorm.MICRO:
        words.append(f"BatchNorm {plan.batchnorm.value}")
    if plan.precision is not Precision.FP32:
        words.append(plan.precision.value)
    if plan.sharding is not WeightSharding.NONE:
        words.append(plan.sharding.described)
    return f"; {', '.join(words)}" if words else ""


# --- templates that people look at: everything in them is escaped ---------------------------------


def _printable(value: object) -> object:
    """What stands for a value: XML takes no control characters, and a reader no hidden ones."""
    return printable_lines(value) if type(value) is str else value


def render(template: str, **context: object) -> str:
    """The text of a template.

    Args:
        context: what the template names; a name that is missing raises.
    """
    environment = Environment(
        loader=PackageLoader("gpipe_compiler.templates", ""),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_printable,
    )
    environment.filters |= {"bytes": units.format_bytes, "share": units.format_share}
    return environment.get_template(template).render(**context)
