"""What every rank of `test_train_ranks.py` runs: the command of a package, as `run.py` calls it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tiny_pipelines import SPECS, twice_spec

from gpipe_compiler.runtime.train.command import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    name, folder, *words = sys.argv[1:]
    specs = {**SPECS, "twice": twice_spec}
    sys.exit(main(specs[name](), Path(folder), None, str(Path(folder, "model.py")), words))
