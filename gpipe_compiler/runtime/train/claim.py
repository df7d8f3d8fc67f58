"""The claim of a run on an address, where storage has no locks: who has made it last writes."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from dataclasses import dataclass

from ..core.address import Address
from ..core.storing import HeldError
from ..errors import CheckpointError

_CLAIM = "run"
"""The file beside the checkpoints that says whose they are."""


@dataclass(frozen=True, slots=True)
class Claim:
    """That of this run, kept until it ends or another one takes it.

    Attributes:
        text: by lines: the process, torchrun's name of the job, and what no other run has.
    """

    file: Address
    text: str

    @classmethod
    def take(cls, directory: Address, job: str, *, again: bool, resumed: bool) -> Claim:
        """Claim an address.

        Args:
            again: whether torchrun has restarted the job: it takes its own claim, and no other.
            resumed: whether the user wants to go on from what is there, whoever wrote it: a run
                that was killed leaves its claim.

        Raises:
            HeldError: when another run has begun there and has not ended.
            OSError: when the address cannot be reached.
        """
        file = directory / _CLAIM
        held = _read(file)
        holder, _, rest = held.partition("\n")
        own = again and rest.partition("\n")[0] == job
        if held and not own and (again or not resumed):
            raise HeldError(holder)
        process = f"process {os.getpid()} on {socket.gethostname()}"
        claim = cls(file, f"{process}\n{job}\n{uuid.uuid4()}\n")
        file.write_text(claim.text, encoding="utf-8")
        return claim

    def check(self) -> None:
        """Raises a CheckpointError when another run has claimed the address since."""
        held = _read(self.file)
        if held != self.text:
            holder = held.partition("\n")[0] or "a run that has ended"
            raise CheckpointError(
                f"another run has gone on from {self.file.parent}: {holder}",
                hint="only the newest run writes there; name another --checkpoint-dir",
            )

    def release(self) -> None:
        with contextlib.suppress(OSError):
            if _read(self.file) == self.text:
                self.file.unlink()


def _read(file: Address) -> str:
    """What the claim says, nothing where there is none."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
