"""What a process of a package takes beside its tensors: prints two numbers of bytes.

Run as a script, with the folder of the runtime: `python bare_process.py gpipe_compiler/runtime`. It
imports what packages import, and makes a step of a model of a few parameters with the common
kernels, so that their code is there: the first number, of the most that was in memory. Then it
trains convolutions of ever other shapes, for each of which oneDNN writes code of its own: the
second is what each adds. Nothing of the compiler is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

SHAPES = 24
"""Convolutions that are trained for the second number."""


def _main(runtime: str) -> None:
    name = "package_runtime"
    found = importlib.util.spec_from_file_location(
        name, Path(runtime) / "__init__.py", submodule_search_locations=[runtime]
    )
    assert found is not None
    assert found.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(sys.modules[name])
    importlib.import_module(f"{name}.train.command")
    resident = importlib.import_module(f"{name}.train.process").resident
    import torch
    from torch import nn

    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 16)]
    model = nn.Sequential(*layers, nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = model(torch.randn(4, 3, 8, 8))
        loss = nn.functional.cross_entropy(output, torch.zeros(4, dtype=torch.int64))
        torch.autograd.backward(loss)
        optimizer.step()
    print(resident())
    before = resident("VmRSS:")
    for channels in range(16, 16 + SHAPES):
        convolution = nn.Conv2d(channels, 16, 3)
        torch.autograd.backward(convolution(torch.randn(2, channels, 8, 8)).sum())
    print(max(0, resident("VmRSS:") - before) // SHAPES)


if __name__ == "__main__":
    _main(sys.argv[1])
