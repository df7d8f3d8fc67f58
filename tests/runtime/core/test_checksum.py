"""The checksum by which replicas compare what they have read, and files are held against what was
written: any difference tells."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_compiler.runtime.core.stored_weights import Weights
from gpipe_compiler.runtime.core.weights import checksum, load_file, save_file
from gpipe_compiler.runtime.errors import WeightsError

SIZES = (1, 3, 7, 1001, 16_384, 163_849)
"""Bytes."""


def of(*tensors: torch.Tensor) -> int:
    return checksum((f"x{place}", tensor) for place, tensor in enumerate(tensors))


@pytest.mark.parametrize("size", SIZES)
def test_one_bit_tells(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    whole = of(data)

    for place in {0, size // 2, size - 1, *torch.randint(0, size, (20,)).tolist()}:
        for bit in (0, 7):
            other = data.clone()
            other[place] ^= 1 << bit
            assert of(other) != whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_what_batches_differ_in_tells(dtype: torch.dtype) -> None:
    """Signs, order, rows that changed places near and far, shapes, types, and which input it is."""
    x = torch.arange(1, 1 + 24_576).to(dtype).reshape(6, -1)
    batches = [
        (x, x.flip(0)),
        (-x, x.flip(0)),
        (x, -x.flip(0)),
        (-x, -x.flip(0)),
        (x.flip(0), x),
        (x.flip(1), x.flip(0)),
        (x[[0, 2, 1, 3, 4, 5]], x.flip(0)),
        (x[[5, 1, 2, 3, 4, 0]], x.flip(0)),
        (x.reshape(3, -1), x.flip(0)),
        (x.to(torch.complex64), x.flip(0)),
        (x.t(), x.flip(0)),
        (x, x.flip(0)[:5]),
        (x[:0], x.flip(0)),
    ]
    for (one, first), (other, second) in itertools.combinations(enumerate(batches), 2):
        assert of(*first) != of(*second), (one, other)


def test_numbers_tell_and_not_where_they_lie() -> None:
    x = torch.randint(0, 256, (50, 31), dtype=torch.uint8)
    apart = torch.zeros(100, 31, dtype=torch.uint8)[::2]
    apart.copy_(x)
    assert of(x) == of(apart) == of(torch.cat([x[:1], x])[1:])
    z = torch.randn(5, dtype=torch.complex64)
    assert of(z.conj()) == of(z.conj().resolve_conj())


def test_every_process_comes_to_the_same() -> None:
    told = "import torch\nfrom gpipe_compiler.runtime.core.weights import checksum\n"
    told += "print(checksum([('x', torch.arange(99999))]))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    words = [sys.executable, "-c", told]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)

    assert int(done.stdout) == checksum([("x", torch.arange(99999))])


def test_it_takes_less_than_a_hundredth_of_a_step(one_thread: None) -> None:
    """In processor time, of a small convolutional network; of larger ones it takes less."""
    x = torch.randn(8, 3, 64, 64)
    layers = [nn.Conv2d(3, 64, 3), *(nn.Conv2d(64, 64, 3) for _ in range(3))]
    model = nn.Sequential(*layers)

    def seconds(work: Callable[[], object]) -> float:
        begun = time.process_time()
        work()
        return time.process_time() - begun

    step_s = min(seconds(lambda: model(x).square().mean().backward()) for _ in range(2))
    assert min(seconds(lambda: of(x, x)) for _ in range(5)) < 0.01 * step_s


def test_a_changed_bit_of_a_file_is_refused_or_means_nothing(tmp_path: Path) -> None:
    tensors = {"layer.weight": torch.randn(3, 2), "count": torch.tensor(7), "none": torch.empty(0)}
    file = tmp_path / "file.safetensors"
    save_file(tensors, file)
    content, refused = file.read_bytes(), list[str]()
    for place, bit in zip(range(len(content)), itertools.cycle((0, 3, 6, 1, 4, 7, 2, 5))):
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        file.write_bytes(changed)
        try:
            found = load_file(file)
        except WeightsError as error:
            refused.append(f"{error.problem}: {error.hint}")
        else:
            assert found.keys() == tensors.keys()
            assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert len(refused) > 0.9 * len(content)
    assert all(str(file) in told and "bring an undamaged copy" in told for told in refused)
    for size in range(0, len(content), 9):
        file.write_bytes(content[:size])
        with pytest.raises(WeightsError, match="cannot read"):
            load_file(file)


def test_weights_are_held_against_their_checksums(tmp_path: Path) -> None:
    weights, file = Weights(tmp_path, {"a": "ab", "b": "ab"}), tmp_path / "ab"
    save_file({"a": torch.ones(4), "b": torch.ones(4)}, file)
    file.write_bytes(file.read_bytes()[:-1] + b"\0")

    like = {name: torch.empty(4, device="meta") for name in ("a", "b")}
    assert weights.load({"a": like["a"]}, torch.device("cpu"))["a"].tolist() == [1.0] * 4
    with pytest.raises(WeightsError, match="ab is damaged: b is not what was saved"):
        weights.load(like, torch.device("cpu"))
