"""What the tests of Hugging Face folders share: folders, and packages of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("transformers")

import folders


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose weights are tied, in several files, beside a tokenizer's."""
    place = tmp_path_factory.mktemp("folders") / "llama"
    folders.written("Llama", place, tie_word_embeddings=True)
    (place / "tokenizer_config.json").write_text('{"padding_side": "right"}\n')
    return place


@pytest.fixture(scope="session")
def package(llama: Path) -> Path:
    """It in two stages, with the data and the optimizer of `folders.HOOKS`."""
    return folders.compiled(llama, llama.with_name("llama_x2"), "--hooks", folders.hooks(llama))
