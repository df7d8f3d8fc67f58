"""All devices in this process: a thread each, and values that are handed over without a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from onnxruntime import OrtValue

from ...runtime.errors import PipelineError
from .engine import OnnxEngine, orders_for
from .spec import OnnxPipelineSpec
from .stage import Values

AHEAD = 2
"""Micro-batches per device that may be on their way: enough to keep all devices busy, so that a
fast first stage does not fill the memory."""


class StoppedError(PipelineError):
    """Another device has failed, so this one stops."""


class Exchange:
    """What the devices of one run hand to one another; `Links`.

    Args:
        placement: the device of each stage.
    """

    def __init__(self, placement: Sequence[int], devices: int) -> None:
        self._placement = placement
        self._changed = threading.Condition()
        self._values: dict[tuple[str, int, int], OrtValue] = {}
        self._ended = [0] * devices
        self._stopped = False

    def stop(self) -> None:
        """Wake all who wait: nothing more will come."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def begin(self, microbatch: int) -> None:
        """Wait until the slowest device is near enough."""
        with self._changed:
            self._wait(lambda: microbatch < min(self._ended) + AHEAD * len(self._ended))

    def end(self, device: int) -> None:
        """A device is done with another micro-batch."""
        with self._changed:
            self._ended[device] += 1
            self._changed.notify_all()

    def take(self, name: str, microbatch: int, source: int, device: int) -> OrtValue:
        """A value for a device; waits for it."""
        key = name, microbatch, device
        with self._changed:
            self._wait(lambda: key in self._values)
            return self._values.pop(key)

    def send(self, name: str, microbatch: int, value: OrtValue, targets: Sequence[int]) -> None:
        """A value for the devices of these stages."""
        with self._changed:
            for device in {self._placement[target] for target in targets}:
                self._values[name, microbatch, device] = value
            self._changed.notify_all()

    def flush(self) -> None:
        """Nothing is on its way: what is sent is there."""

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._stopped or ready())
        if self._stopped:
            raise StoppedError("another device has failed")


def run_local(
    spec: OnnxPipelineSpec, engines: Mapping[int, OnnxEngine], inputs: Sequence[Values]
) -> list[Values]:
    """The outputs of every micro-batch.

    Args:
        engines: of all devices, by number.

    Raises:
        PipelineError: the first that a device has raised; the others have stopped.
    """
    exchange = Exchange(spec.placement, len(engines))
    orders = orders_for(spec, len(inputs))
    results: dict[int, list[Values]] = {}
    errors: list[BaseException] = []

    def work(device: int, engine: OnnxEngine) -> None:
        try:
            results[device] = engine.run(orders[device], inputs, exchange)
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001  # raised in the caller's thread
            errors.append(error)
            exchange.stop()

    threads = [
        threading.Thread(target=work, args=item, name=f"device {item[0]}", daemon=True)
        for item in engines.items()
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C: let the devices stop before the caller goes on
        exchange.stop()
        for thread in threads:
            thread.join()
        raise
    if errors:
        raise errors[0]
    return [
        {name: value for found in results.values() for name, value in found[number].items()}
        for number in range(len(inputs))
    ]
