"""Signals that let a step end, against the handlers that were there before."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from gpipe_compiler.runtime.errors import PipelineError
from gpipe_compiler.runtime.train import process
from gpipe_compiler.runtime.train.process import StopSignals, exit_code


@pytest.fixture
def interruptible():
    """What a shell starts in the background ignores Ctrl-C otherwise."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_the_first_is_noted_and_the_second_acts(capfd):
    with StopSignals(quiet=False) as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        assert "SIGINT: stopping after this step" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert exit_code(signals.received) == 130


def test_handlers_are_put_back(capfd):
    """Those of the program that runs the command, with and without a signal."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with StopSignals(quiet=True) as signals:
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        assert seen == []
        with StopSignals(quiet=True):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capfd.readouterr().err == ""


def test_other_threads_install_nothing():
    before = signal.getsignal(signal.SIGINT)
    found = []

    def look():
        with StopSignals(quiet=True):
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]


def test_a_rank_that_alone_was_told_to_stop(monkeypatch):
    """Rank 0 goes on for longer than signals to all ranks can be apart."""
    now = time.monotonic()
    with StopSignals(quiet=True) as signals:
        signals.check_alone()
        os.kill(os.getpid(), signal.SIGTERM)
        signals.check_alone()
        monkeypatch.setattr(process.time, "monotonic", lambda: now + 2 * process.ALONE_S)
        with pytest.raises(PipelineError, match=r"this rank alone was told to stop \(SIGTERM\)"):
            signals.check_alone()
