"""Follows sequences that a model packs by their lengths, through recurrent layers.

How many rows a packed sequence has depends on values. So none stands in a graph: a recurrent layer
of one is a layer that is given the padded sequences and their lengths (`runtime/core/packed.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn, Self

import torch
from torch.nn.utils import rnn

from gpipe_compiler.errors import TraceError
from gpipe_compiler.frontend.locate import calling_line
from gpipe_compiler.frontend.trace_errors import PACKED
from gpipe_compiler.frontend.trace_settings import running_as


def _refuse(*_: object) -> NoReturn:
    raise PACKED.at(calling_line())


class Packed(rnn.PackedSequence):
    """Stands for a packed sequence in a trace; nothing can be read of it.

    Attributes:
        padded: what was packed, or what a layer made of it.
        lengths: of the sequences.
        batch_first: whether samples come first in `padded`.
        enforce_sorted: whether they have to be sorted.
        ends_in_zeros: whether what lies behind the ends is 0 in `padded`, as layers make it.
        versions: of `padded` and `lengths`, as they were packed.
    """

    padded: torch.Tensor
    lengths: torch.Tensor
    batch_first: bool
    enforce_sorted: bool
    ends_in_zeros: bool
    versions: tuple[int, int]

    @classmethod
    def of(
        cls,
        padded: torch.Tensor,
        lengths: torch.Tensor,
        batch_first: bool,
        enforce_sorted: bool,
        *,
        ends_in_zeros: bool = False,
    ) -> Self:
        made = tuple.__new__(cls, (None,) * 4)
        vars(made).update(
            padded=padded,
            lengths=lengths,
            batch_first=batch_first,
            enforce_sorted=enforce_sorted,
            ends_in_zeros=ends_in_zeros,
            versions=(padded._version, lengths._version),
        )
        return made

    def laid_out(self, *, batch_first: bool) -> torch.Tensor:
        """The padded sequences in a layout.

        Raises:
            TraceError: when they or their lengths were written to, which torch would have copied.
        """
        if self.versions != (self.padded._version, self.lengths._version):
            raise TraceError(
                "the model writes to what it has packed before the packed sequences are read",
                location=calling_line(),
                hint="write out of place, as x = x * 2, or before pack_padded_sequence",
            )
        return self.padded if self.batch_first is batch_first else self.padded.transpose(0, 1)

    data = batch_sizes = sorted_indices = unsorted_indices = property(_refuse)
    __iter__ = __getitem__ = _refuse


def pack(sequences: Any, lengths: Any, batch_first: bool, enforce_sorted: bool) -> Packed:
    """As torch's own `pack_padded_sequence`."""
    if not isinstance(lengths, torch.Tensor):
        _refuse()
    return Packed.of(sequences, lengths, batch_first, enforce_sorted)


def pad(
    sequence: Any, batch_first: bool, padding_value: float, total_length: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """As torch's own `pad_packed_sequence`, to as many steps as were packed."""
    if not isinstance(sequence, Packed):
        _refuse()
    padded = sequence.laid_out(batch_first=batch_first)
    steps = padded.shape[1 if batch_first else 0]
    if total_length is None or total_length != steps:
        raise TraceError(
            "pad_packed_sequence gives as many steps as the longest sequence of a batch has, which "
            "is another one in a micro-batch, or as many as it is told",
            location=calling_line(),
            hint="pass the steps of what was packed: total_length=x.shape[1], or x.shape[0] where "
            "steps come first",
        )
    if padding_value or not sequence.ends_in_zeros:
        ends = sequence.lengths.to(padded.device).unsqueeze(1)
        behind = torch.arange(steps, device=padded.device) >= ends
        behind = behind if batch_first else behind.transpose(0, 1)
        padded = padded.masked_fill(behind[(...,) + (None,) * (padded.ndim - 2)], padding_value)
    return padded, sequence.lengths.to(torch.int64)


def _packs(input: Any, lengths: Any, batch_first: Any = False, enforce_sorted: Any = True) -> Any:  # noqa: A002  # named as torch's
    from gpipe_compiler.frontend.packing import pack

    return pack(input, lengths, batch_first, enforce_sorted)


def _pads(
    sequence: Any, batch_first: Any = False, padding_value: Any = 0.0, total_length: Any = None
) -> Any:
    from gpipe_compiler.frontend.packing import pad

    return pad(sequence, batch_first, padding_value, total_length)


@contextlib.contextmanager
def packing_followed() -> Iterator[None]:
    """Lets torch's functions pack and pad for a trace."""
    with running_as([(rnn.pack_padded_sequence, _packs), (rnn.pad_packed_sequence, _pads)]):
        yield
