"""A session on ranks: `session_ranks.py PACKAGE FOLDER`; rank 0 writes what it is given."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from loading import load_package


def main(package: Path, folder: Path) -> None:
    calls = torch.load(folder / "calls.pt")
    with load_package(package).Pipeline() as pipe:
        pipe.eval()
        talk = pipe.session()
        found = [talk(call if pipe.feeds else None) for call in calls]
        if pipe.rank == 0:
            torch.save([logits for logits, _ in found], folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
