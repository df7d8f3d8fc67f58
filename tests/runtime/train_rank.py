"""What every rank of `test_train_ranks.py` runs: the command of a package, as `run.py` calls it."""

from __future__ import annotations

import sys
from pathlib import Path

import sized_pipelines
import torch
from tiny_pipelines import SPECS, twice_spec

from gpipe_compiler.runtime.sizes import Size
from gpipe_compiler.runtime.train.command import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    name, folder, *words = sys.argv[1:]
    sized_pipelines.TOKENS = Size("tokens", of=("ids", 1), example=8)
    specs = {**SPECS, "twice": twice_spec, "sized": sized_pipelines.sized_spec}
    sys.exit(main(specs[name](), Path(folder), None, str(Path(folder, "model.py")), words))
