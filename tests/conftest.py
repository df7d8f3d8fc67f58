"""Settings of the whole suite, and validation without processes.

The tests, and all processes that they start, mean the processor: they see no GPU, whatever the
machine has. Those of `test_gpus.py` see what there is.
"""

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

SEEN_BEFORE = {
    name: os.environ.get(name)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
}
os.environ.update(dict.fromkeys(SEEN_BEFORE, ""))

# What is printed is compared with text: for no terminal in particular.
for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS", "LINES"):
    os.environ.pop(name, None)

# Not this folder itself: those in it have names such as `passes`.
sys.path.insert(0, str(Path(__file__).with_name("helpers")))

# The same examples in every run, so that a run that passed passes again. Looking for new ones:
# pytest --hypothesis-profile=search
settings.register_profile("suite", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, max_examples=500)
settings.load_profile("suite")


SLOW = frozenset(Path(__file__).with_name("slow_tests.txt").read_text("utf-8").splitlines()[1:])
"""Tests that are marked slow by name: in functions of which others are quick, and long ones."""


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def seeing_gpus() -> dict[str, str]:
    """The environment of a process that sees the GPUs of this machine."""
    shown = {name: value for name, value in os.environ.items() if name not in SEEN_BEFORE}
    return {**shown, **{name: value for name, value in SEEN_BEFORE.items() if value is not None}}


@pytest.fixture(scope="session", autouse=True)
def forked_checks() -> Iterator[None]:
    """Checks of packages run in processes that are forked by one that has imported torch."""
    # Not before SEEN_BEFORE is hidden: importing these imports the runtime.
    from forkserver import ForkServer

    from gpipe_compiler.validate import launching

    with pytest.MonkeyPatch.context() as patch:
        server = ForkServer()
        patch.setattr(launching, "subprocess", server)
        yield
        server.end()


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `run.py check` run here, with modules of its own."""

    def check(directory: Path, options: Sequence[object], **_: object) -> None:
        before = set(sys.modules)
        words = [directory / "run.py", "check", *options]
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
            patch.setattr(sys, "argv", [str(word) for word in words])
            try:
                with pytest.raises(SystemExit) as ended:
                    runpy.run_path(str(words[0]), run_name="__main__")
            finally:
                for name in set(sys.modules) - before:
                    del sys.modules[name]

        assert ended.value.code in (0, 3)

    # Not before SEEN_BEFORE is hidden: importing it imports the runtime.
    from gpipe_compiler.validate import package

    monkeypatch.setattr(package, "run_check", check)
