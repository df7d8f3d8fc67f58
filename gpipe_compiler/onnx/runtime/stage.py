"""Sessions of ONNX Runtime: one of each stage, and one of the whole model to compare them with."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime import GraphOptimizationLevel

from ...runtime.errors import StageError, UsageError
from .arrays import array_of, name_of, value_of
from .devices import CPU, DeviceChoice
from .spec import OnnxStageSpec

_SILENT = 4
"""The level of ONNX Runtime's log at which it says nothing: what is wrong is raised."""

Values = dict[str, Any]
"""Values of one micro-batch, by name: those of ONNX Runtime; strings, sequences, maps and optionals
as Python has them."""


_SPINNING = "session.intra_op.allow_spinning"


@dataclass(frozen=True, slots=True)
class SessionChoice:
    """How the session of a stage is made.

    Attributes:
        threads: of one op.
        cpus: processors that its threads run on; empty for any.
        provider_options: of the provider of its device.
        custom_ops: libraries of custom operators to load.
        configure: called with the options of the session, to change them.
    """

    device: DeviceChoice = CPU
    threads: int = 1
    cpus: frozenset[int] = frozenset()
    provider_options: Mapping[str, str] = field(default_factory=dict)
    custom_ops: tuple[Path, ...] = ()
    configure: Callable[[onnxruntime.SessionOptions], object] | None = None

    def options(self) -> onnxruntime.SessionOptions:
        """What a session is made with."""
        options = onnxruntime.SessionOptions()
        if self.device.kind == "cpu":  # other providers log why they are not available
            options.log_severity_level = _SILENT
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        for library in self.custom_ops:
            options.register_custom_ops_library(str(library))
        if self.configure is not None:
            self.configure(options)
        try:
            options.get_session_config_entry(_SPINNING)
        except RuntimeError:  # the user has not said
            # Threads do not wait in a loop for the next op: slow where stages share cores.
            options.add_session_config_entry(_SPINNING, "0")
        return options

    def session(self, file: Path) -> onnxruntime.InferenceSession:
        """A session whose threads are pinned, as threads inherit that from who makes them."""
        with pinned(self.cpus):
            providers = self.device.providers(self.provider_options)
            return onnxruntime.InferenceSession(str(file), self.options(), providers=providers)


@contextmanager
def pinned(cpus: Collection[int]) -> Iterator[None]:
    """Has this thread, and those that it makes, run on some processors alone.

    Raises:
        UsageError: for processors that this process does not have.
    """
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    missing = sorted(set(cpus) - before)
    if missing:
        raise UsageError(
            f"there are no processors {', '.join(map(str, missing))}: this process has "
            f"{', '.join(map(str, sorted(before)))}"
        )
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True, slots=True)
class Turn:
    """A call of a session.

    Attributes:
        call: its number in the session.
        before: that of the call whose state it goes on from; below 0 for none.
    """

    session: int
    call: int
    before: int


class OnnxStage:
    """The model of one stage, loaded, and the state that sessions have in it.

    Args:
        state: inputs that it holds between the calls of a session, each with the output that it
            becomes.

    Raises:
        StageError: when a file of it is damaged, or ONNX Runtime refuses the model.
    """

    def __init__(
        self,
        index: int,
        spec: OnnxStageSpec,
        folder: Path,
        choice: SessionChoice,
        state: Mapping[str, str],
    ) -> None:
        self.index = index
        self.spec = spec
        self._choice = choice
        self._state = state
        self._held: dict[int, dict[int, Values]] = {}
        refuse_damaged(folder, spec.file)
        try:
            self._session = choice.session(folder / spec.file)
        except UsageError:
            raise
        except Exception as error:  # onnxruntime's errors have no common class
            custom = "is not a registered function" in str(error)
            raise StageError(
                f"ONNX Runtime refuses stage {index} ({spec.file}): {error}"
                f"{'; name the library that has it with --custom-ops' if custom else ''}"
            ) from error
        provider = choice.device.provider
        if provider not in self._session.get_providers():
            raise StageError(
                f"ONNX Runtime cannot load {provider}, which stage {index} is to run on; it has "
                "said why above"
            )
        # A binding gives no more than tensors of numbers; of others ONNX Runtime 1.31 dies.
        ends = (*self._session.get_inputs(), *self._session.get_outputs())
        self._bound = all(_is_numeric(end.type) for end in ends)

    @property
    def state(self) -> frozenset[str]:
        """The outputs that it keeps from a session."""
        return frozenset(self._state.values())

    @property
    def sessions(self) -> int:
        """Of how many it holds state."""
        return len(self._held)

    @property
    def profiled(self) -> bool:
        """Whether ONNX Runtime writes down how long its nodes take."""
        return bool(self._session.get_session_options().enable_profiling)

    @contextmanager
    def working(self) -> Iterator[None]:
        """To be entered by the thread that runs it, as long as it does."""
        with pinned(self._choice.cpus):
            yield
        if self.profiled:
            self._session.end_profiling()

    def forget(self, sessions: Iterable[int]) -> None:
        """Holds nothing of these sessions any more."""
        for session in sessions:
            self._held.pop(session, None)

    def run(
        self, microbatch: int, received: Mapping[str, object], turn: Turn | None = None
    ) -> Values:
        """The outputs of one micro-batch, which stay in the memory of the stage's device.

        Args:
            turn: of a session; what it holds here is taken, and not given.

        Raises:
            StageError: naming stage and micro-batch.
        """
        if not self.spec.outputs:  # all that the caller wants is made elsewhere
            return {}
        values = {name: received[name] for name in self.spec.inputs if name in received}
        if turn is not None and self._state:
            versions = self._held.setdefault(turn.session, {})
            values = {**versions.get(turn.before, {}), **values}
            for call in [call for call in versions if call != turn.before]:
                del versions[call]  # nobody goes on from there
        try:
            found = self._run(values)
        except Exception as error:  # as above
            reason = str(error).strip()
            raise StageError(
                f"stage {self.index} fails on micro-batch {microbatch}: {reason}"
            ) from error
        if turn is not None and self._state:
            versions[turn.call] = {past: found[present] for past, present in self._state.items()}
        return found

    def _run(self, values: Values) -> Values:
        if self._bound:
            return self._with_binding(values)
        found = self._session.run(self.spec.outputs, values)
        return {
            name: value_of(thing)
            if isinstance(thing, np.ndarray) and thing.dtype != object
            else thing
            for name, thing in zip(self.spec.outputs, found, strict=True)
        }

    def _with_binding(self, values: Values) -> Values:
        binding = self._session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name in self.spec.outputs:
            binding.bind_output(name, *self._choice.device.memory)
        self._session.run_with_iobinding(binding)
        return dict(zip(self.spec.outputs, binding.get_outputs(), strict=True))


def _is_numeric(kind: str) -> bool:
    """Whether it is a tensor of numbers, and no strings, sequence, map or optional."""
    return kind.startswith("tensor(") and kind != "tensor(string)"


def _as_it_is(options: onnxruntime.SessionOptions) -> None:
    options.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL


class Whole:
    """A model on the processor.

    Args:
        optimised: whether ONNX Runtime fuses nodes, so that it rounds in another order.

    Raises:
        StageError: when ONNX Runtime refuses the model.
    """

    def __init__(
        self,
        model: Path,
        threads: int = 1,
        custom_ops: Sequence[Path] = (),
        *,
        optimised: bool = True,
        cpus: frozenset[int] = frozenset(),
    ) -> None:
        choice = SessionChoice(
            threads=threads,
            cpus=cpus,
            custom_ops=tuple(custom_ops),
            configure=None if optimised else _as_it_is,
        )
        try:
            self._session = choice.session(model)
        except Exception as error:  # onnxruntime's errors have no common class
            raise StageError(f"ONNX Runtime refuses {model}: {error}") from error

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs, by name; those of types that numpy does not have as integers.

        Raises:
            StageError: when the model fails.
        """
        try:
            return run_session(self._session, arrays)
        except StageError:
            raise
        except Exception as error:  # as above
            raise StageError(f"the whole model fails: {error}") from error


def run_values(
    session: onnxruntime.InferenceSession, arrays: Mapping[str, np.ndarray], names: Sequence[str]
) -> list[Any]:
    """Outputs of a session as ONNX Runtime has them; of one that takes strings as Python does."""
    if any(array.dtype.kind in "OU" for array in arrays.values()):
        return list(session.run(list(names), dict(arrays)))
    kinds = {source.name: name_of(source.type) for source in session.get_inputs()}
    values = {name: value_of(array, kinds.get(name, "")) for name, array in arrays.items()}
    return list(session.run_with_ort_values(list(names), values))


def run_session(
    session: onnxruntime.InferenceSession, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The outputs of a session, by name; arrays may stand for types that numpy does not have."""
    names = [output.name for output in session.get_outputs()]
    if not all(output.type.startswith("tensor(") for output in session.get_outputs()):
        return dict(zip(names, session.run(names, dict(arrays)), strict=True))
    found = run_values(session, arrays, names)
    return {name: array_of(value) for name, value in zip(names, found, strict=True)}


# --- checksums of the files of stages, held against them when they are loaded --------------------


CHECKSUMS = "checksums.json"
"""Size and CRC-32 of each file of the stages, by its name."""

_BLOCK = 1 << 24


def write_checksums(folder: Path, stages: list[str]) -> None:
    """Writes those of the files of stages, and of the weights that stand beside them."""
    files = sorted(path for stage in stages for path in folder.glob(f"{stage}*"))
    sums = {path.name: _sum_of(path) for path in files}
    (folder / CHECKSUMS).write_text(f"{json.dumps(sums, indent=2)}\n", encoding="utf-8")


def refuse_damaged(folder: Path, stage: str) -> None:
    """Holds the files of a stage against their checksums, where there are any.

    Raises:
        StageError: naming the file that is another one.
    """
    path = folder / CHECKSUMS
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        sums = {str(name): [int(item) for item in pair] for name, pair in known.items()}
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _damaged(path) from error
    names = {stage, *(name for name in sums if name.startswith(f"{stage}."))}
    for name in sorted(names):
        file = folder / name
        if not file.is_file() or sums.get(name) != _sum_of(file):
            raise _damaged(file)


def _damaged(file: Path) -> StageError:
    return StageError(
        f"{file} is missing, or is not what was written",
        hint=f"compile once more; to run files that you have changed yourself, delete {CHECKSUMS}",
    )


def _sum_of(path: Path) -> list[int]:
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]
