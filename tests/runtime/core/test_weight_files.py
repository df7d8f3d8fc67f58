"""Files of weights are what the safetensors library reads, and writes."""

from __future__ import annotations

import pytest
import safetensors
import safetensors.torch
import torch

from gpipe_compiler.runtime.core.weights import load_file, save_file, write_file

TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.float8_e4m3fn),
)


def tensors(*types):
    return {
        f"{place} «{str(dtype).removeprefix('torch.')}»": tensor.to(dtype)
        for dtype in types
        for place, tensor in {
            "matrix": torch.arange(15).reshape(3, 5) % 2,
            "number": torch.tensor(1),
            "nothing": torch.empty(0, 4),
        }.items()
    }


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert found[name].shape == tensor.shape
        assert bytes_of(found[name]).equal(bytes_of(tensor))


@pytest.mark.parametrize("types", [*((dtype,) for dtype in TYPES), TYPES, TYPES[:10]])
def test_the_library_reads_what_is_written(tmp_path, types):
    given = tensors(*types)

    write_file(given, tmp_path / "file", {"words": 'an "é"'})

    assert_equal(safetensors.torch.load_file(tmp_path / "file"), given)
    with safetensors.safe_open(tmp_path / "file", framework="pt") as opened:
        assert opened.metadata() == {"words": 'an "é"'}


def test_the_contents_are_those_of_the_library_and_begin_with_a_cache_line(tmp_path):
    given = tensors(torch.float32, torch.int8, torch.float64)
    write_file(given, tmp_path / "own")
    safetensors.torch.save_file(given, tmp_path / "library")

    def contents(name):
        whole = (tmp_path / name).read_bytes()
        start = 8 + int.from_bytes(whole[:8], "little")
        return start, whole[start:]

    start, found = contents("own")
    assert start % 64 == 0
    assert found == contents("library")[1]


def test_whole_cache_lines_lie_as_torch_has_them(tmp_path):
    """So that they need not be copied when they are read, whatever else is in the file."""
    given = {"a": torch.ones(5), "b": torch.ones(32), "c": torch.ones(3, dtype=torch.float64)}
    given |= {"d": torch.ones(64, dtype=torch.bfloat16), "e": torch.ones(1, dtype=torch.int8)}
    write_file(given, tmp_path / "file")

    found = load_file(tmp_path / "file")
    assert_equal(found, given)
    assert all(found[name].data_ptr() % 64 == 0 for name in ("b", "d"))
    assert all(found[name].data_ptr() % found[name].itemsize == 0 for name in given)


def test_what_shares_memory_or_lies_elsewhere_is_written_as_it_is_read(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    given = {"whole": whole, "turned": whole.t(), "rows": whole[1:], "conjugate": whole.clone()}

    save_file(given, tmp_path / "file")

    assert_equal(load_file(tmp_path / "file"), {n: t.contiguous() for n, t in given.items()})


def test_nothing_is_a_file_too(tmp_path):
    write_file({}, tmp_path / "file")

    assert safetensors.torch.load_file(tmp_path / "file") == {}
