"""What `--compile` gains: a step, and inference, of a package with it, without it = 1.

The model is a decoder of the kind of Llama, without dropout. Every round runs `run.py bench` of the
same package without `--compile` and then with it, each in a process of its own, so that other work
on the machine slows both down; told are the medians over the rounds of the median steps, and their
ratio. Compiling itself is not in it, as `bench` warms up first; the first row of each is of small
layers, in which calling kernels takes most of the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpipe_compiler.cli.main import compile_command

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = Norm(width), Norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (y.view(shape).transpose(1, 2) for y in self.qkv(self.before(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH, 4) for _ in range(LAYERS))
        self.norm = Norm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build_model():
    return Decoder()


def example_inputs():
    return torch.randint(WORDS, (BATCH, LENGTH))


def example_target():
    return torch.randint(WORDS, (BATCH, LENGTH))


def loss_fn(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
"""


@dataclass(frozen=True, slots=True)
class Size:
    """Of a decoder, and of its batch."""

    width: int
    layers: int
    length: int
    batch: int

    def package(self, folder: Path, *, training: bool) -> Path:
        """That of two stages, each of which takes two micro-batches."""
        constants = {"WORDS": 256, "WIDTH": self.width, "LAYERS": self.layers}
        constants |= {"LENGTH": self.length, "BATCH": self.batch}
        lines = [f"{name} = {value}" for name, value in constants.items()]
        (folder / "decoder.py").write_text("\n".join(lines) + MODEL)
        words = ["--stages=2", "--microbatches=2", "--no-validate", "--force"]
        words += ["--mode", "train" if training else "infer", "-o", str(folder / "package")]
        if compile_command([str(folder / "decoder.py"), *words]):
            sys.exit("the model is not compiled")
        return folder / "package"


SIZES = (Size(64, 8, 32, 8), Size(256, 4, 128, 4))


def bench(package: Path, steps: int, *words: str) -> float:
    """Seconds of a step, the median."""
    report = package.with_name("times.json")
    line = [sys.executable, package / "run.py", "bench", "--steps", steps, "--report", report]
    subprocess.run([*map(str, line), *words], check=True, stdout=subprocess.DEVNULL)
    return float(json.loads(report.read_text())["step_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    rows = ["| what | width, layers, tokens, batch | without | with `--compile` | ratio |"]
    rows += ["|---|---|--:|--:|--:|"]
    for training in (True, False):
        for size in SIZES:
            with tempfile.TemporaryDirectory() as folder:
                package = size.package(Path(folder), training=training)
                pairs = [
                    (bench(package, arguments.steps), bench(package, arguments.steps, "--compile"))
                    for _ in range(arguments.rounds)
                ]
            plain, compiled = (statistics.median(times) for times in zip(*pairs, strict=True))
            what = "training" if training else "inference"
            sizes = f"{size.width}, {size.layers}, {size.length}, {size.batch}"
            times = f"{plain * 1e3:.3g} ms | {compiled * 1e3:.3g} ms | {compiled / plain:.2f}"
            rows.append(f"| {what} | {sizes} | {times} |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
