"""What the caller of a pipeline may choose, from the words he uses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import torch

from .distributed import launched
from .errors import UsageError
from .spec import BatchNorm, PipelineSpec, Precision, Remat

Choice = TypeVar("Choice", bound=Enum)


class TransportKind(Enum):
    """How values get from stage to stage."""

    LOCAL = "local"
    DISTRIBUTED = "distributed"


@dataclass(frozen=True, slots=True)
class Manner:
    """How the stages compute.

    Attributes:
        remat: what each stage keeps between forward and backward.
    """

    batchnorm: BatchNorm
    precision: Precision
    remat: tuple[Remat, ...]


def chosen(kind: type[Choice], what: str, word: Choice | str | None, planned: Choice) -> Choice:
    """The member of an Enum that a caller names, or the planned one.

    Args:
        what: what the Enum's members are, for the message: "schedule".

    Raises:
        UsageError: when there is none of this name.
    """
    if word is None:
        return planned
    try:
        return kind(word)
    except ValueError as error:
        known = ", ".join(str(member.value) for member in kind)
        raise UsageError(f"there is no {what} {word!r}; there are {known}") from error


def manner(
    spec: PipelineSpec,
    batchnorm: BatchNorm | str | None,
    precision: Precision | str | None,
    remat: Remat | str | None,
) -> Manner:
    """How the stages of a pipeline compute: as planned, unless a caller says otherwise.

    Raises:
        UsageError: for a word that names nothing, and for a precision in which the model does
            something else than the stages.
    """
    computed_in = chosen(Precision, "precision", precision, spec.precision)
    if computed_in in spec.unlike:
        raise UsageError(
            f"in {computed_in.value} the model is another program than these stages: "
            f"{spec.unlike[computed_in]}",
            hint=f"compile it with --precision {computed_in.value}",
        )
    return Manner(
        chosen(BatchNorm, "batchnorm", batchnorm, spec.batchnorm),
        computed_in,
        tuple(chosen(Remat, "remat", remat, stage.remat) for stage in spec.stages),
    )


def transport_kind(transport: TransportKind | str | None) -> TransportKind:
    """The transport of this name; unless given, what the process was started for.

    Raises:
        UsageError: when there is none.
    """
    natural = TransportKind.DISTRIBUTED if launched() else TransportKind.LOCAL
    return chosen(TransportKind, "transport", transport, natural)


def listed_devices(
    devices: Sequence[torch.device | str] | torch.device | str | None,
) -> tuple[torch.device, ...]:
    """The devices that were named, none for None.

    Raises:
        UsageError: when torch knows no such device.
    """
    if devices is None:
        return ()
    listed = [devices] if isinstance(devices, torch.device | str) else devices
    try:
        return tuple(torch.device(device) for device in listed)
    except RuntimeError as error:
        raise UsageError(str(error).splitlines()[0]) from error


def own_device(given: Sequence[torch.device]) -> torch.device | None:
    """This rank's device among those given for all ranks."""
    if len(given) > 1:
        return given[int(os.environ.get("RANK", "0"))]
    return given[0] if given else None
