"""A deep chain trained in the memory of a short one: measured on real tensors, by
what the host's allocator gives out."""

from __future__ import annotations

from pathlib import Path

import pytest
from chain_memory import Chain, compare


@pytest.mark.slow
def test_many_layers_in_the_memory_of_few(tmp_path: Path) -> None:
    few, many, compiled = compare(Chain(few=5, many=30, width=16, batch=256), tmp_path)
    assert many.beyond > 5 * few.beyond
    assert compiled.weights == many.weights
    assert compiled.beyond <= few.beyond
