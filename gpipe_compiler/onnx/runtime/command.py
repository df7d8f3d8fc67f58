"""The command of a package of ONNX stages: `run.py infer | check | bench`."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from ...runtime.core.typed import Version, microbatches, natural, path, positive
from ...runtime.errors import PipelineError, UsageError
from ...runtime.wording import printable, printable_lines, printable_message
from .arrays import arrays_of, leaves, random_arrays, write_arrays
from .bench import compared, pipeline_speed, spread
from .check import Closeness, compare, format_rows
from .distributed import rank_here
from .pipeline import OnnxPipeline
from .session_options import add_session_options, configuring, options_of
from .spec import OnnxPipelineSpec
from .stage import Whole

FAILED_CHECK = 3
INTERRUPTED = 130
_LOOK_S = 0.1


def main(spec: OnnxPipelineSpec, folder: Path, argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Returns:
        0 when done, 1 when a stage fails, 2 for wrong usage, 3 for a failed check. Ctrl-C ends the
        process, with 130.
    """
    for stream in (sys.stdout, sys.stderr):  # of any encoding
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    codes: list[int] = []
    # ONNX Runtime does not survive a KeyboardInterrupt in the middle of a call. Python raises it in
    # the main thread alone, so that one only waits.
    try:
        parser = parser_for(spec)
        parser.add_argument("--version", action=Version, directory=folder)
        arguments = parser.parse_args(argv)
        worker = threading.Thread(
            target=lambda: codes.append(_obey(spec, folder, arguments)), daemon=True
        )
        worker.start()
        while worker.is_alive():
            worker.join(_LOOK_S)  # a signal that another thread takes does not end the wait
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr, flush=True)
        _leave(INTERRUPTED)  # without waiting for what still runs
    return codes[0] if codes else 1


def _leave(code: int) -> NoReturn:
    """Ends the process at once, with the threads in it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _obey(spec: OnnxPipelineSpec, folder: Path, arguments: argparse.Namespace) -> int:
    """Does what is asked; errors become one message on stderr."""
    pipe: OnnxPipeline | None = None
    try:
        if arguments.compile:
            raise UsageError(
                "--compile is for stages of torch: ONNX Runtime fuses the ops of its own by itself",
                hint="leave it out",
            )
        count = len(spec.stages)
        if arguments.work is _bench and not arguments.cpus and rank_here() is None:
            arguments.cpus = spread(count)
        pipe = OnnxPipeline(
            spec,
            folder,
            devices=arguments.devices,
            threads=arguments.threads,
            cpus=arguments.cpus,
            provider_options=options_of(arguments.provider_option, count),
            custom_ops=arguments.custom_ops,
            configure=configuring(arguments.session_option, arguments.profile, count),
        )
        if pipe.rank:
            pipe.serve()
            return 0
        return int(arguments.work(pipe, folder, arguments))
    except (PipelineError, OSError) as error:
        print(printable_message(f"error: {error}"), file=sys.stderr)
        code = error.exit_code if isinstance(error, PipelineError) else 1
        if pipe is not None and pipe.broken:
            _leave(code)  # torch aborts where a thread waits for a message when the process ends
        return code
    finally:
        if pipe is not None:
            pipe.close()


def parser_for(spec: OnnxPipelineSpec) -> argparse.ArgumentParser:
    """Of the commands of a package."""
    count = len(spec.devices)
    named = printable(spec.name).replace("%(", "% (")  # no place that argparse fills
    parser = argparse.ArgumentParser(
        prog="run.py",
        description=f"{named} as a pipeline of {len(spec.stages)} stages on {count} devices, "
        f"in ONNX Runtime. Under torchrun: --nproc-per-node {count}.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    infer = commands.add_parser("infer", help="run the model")
    infer.add_argument(
        "--output", type=path, metavar="FILE", help=".npz to write; one output: .npy"
    )
    infer.set_defaults(work=_infer)
    check = commands.add_parser("check", help="compare with the whole model")
    check.add_argument(
        "--reference", type=path, metavar="FILE", help="the model (.onnx), or its outputs (.npz)"
    )
    check.add_argument("--report", type=path, metavar="FILE", help="JSON to write")
    check.set_defaults(work=_check)
    bench = commands.add_parser("bench", help="time it")
    bench.add_argument("--steps", type=positive, default=10, metavar="N")
    bench.add_argument(
        "--against",
        type=path,
        metavar="FILE",
        help="the whole model, in one session",
    )
    bench.set_defaults(work=_bench)
    for command in (infer, check, bench):
        _add_common(command, spec)
    return parser


def _add_common(command: argparse.ArgumentParser, spec: OnnxPipelineSpec) -> None:
    planned = ",".join(spec.devices)
    command.add_argument("--input", type=path, metavar="FILE", help=".npz, by name; else random")
    command.add_argument(
        "--devices", metavar="D", help=f"such as cpu,cuda:0; one for all (default {planned})"
    )
    add_session_options(command)
    command.add_argument(
        "--microbatches", type=microbatches, metavar="M", help="that a batch is split into"
    )
    command.add_argument(
        "--batch-size",
        type=positive,
        default=spec.microbatches * spec.microbatch_size,
        metavar="B",
        help="samples of random inputs (default %(default)s)",
    )
    command.add_argument("--seed", type=natural, default=0, help="of random inputs")
    command.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    command.add_argument(
        "--custom-ops",
        type=path,
        action="append",
        default=[],
        metavar="LIB",
        help="a library of custom operators; may be given again",
    )


def _inputs(pipe: OnnxPipeline, arguments: argparse.Namespace) -> dict[str, np.ndarray]:
    if arguments.input is not None:
        return arrays_of([source.name for source in pipe.spec.inputs], arguments.input)
    return random_arrays(pipe.spec, arguments.batch_size, arguments.seed)


def _refuse_unwritable(file: Path | None) -> None:
    """Raises UsageError for a file that could not be written, before anything is computed."""
    if file is None:
        return
    if file.is_dir():
        raise UsageError(f"{file} is a directory")
    if not os.access(file.parent, os.W_OK):
        raise UsageError(f"{file} cannot be written: there is no writable folder {file.parent}")


def _infer(pipe: OnnxPipeline, _: Path, arguments: argparse.Namespace) -> int:
    output = arguments.output
    _refuse_unwritable(output)
    if output is not None and output.suffix == ".npy" and len(pipe.spec.outputs) != 1:
        raise UsageError(f"{output}: there are {len(pipe.spec.outputs)} outputs: name an .npz")
    outputs = pipe(_inputs(pipe, arguments), microbatches=arguments.microbatches)
    for name, array in leaves(outputs).items():
        print(f"{printable(name)}: {'x'.join(map(str, array.shape)) or 'scalar'} {array.dtype}")
    if output is not None:
        write_arrays(output, outputs)
        print(f"outputs saved to {output}")
    return 0


def _check(pipe: OnnxPipeline, folder: Path, arguments: argparse.Namespace) -> int:
    _refuse_unwritable(arguments.report)
    spec = pipe.spec
    inputs = _inputs(pipe, arguments)
    found = pipe(inputs, microbatches=arguments.microbatches)
    reference = arguments.reference or next(iter(folder.glob("*.staged.onnx")), None)
    expected = _expected(spec, reference, arguments, inputs)
    kinds = {output.name: output.dtype for output in spec.outputs if output.dtype}
    close = Closeness(spec.tolerance, spec.quantised, kinds)
    rows = compare(expected, found, close)
    if reference is not None and reference.suffix == ".onnx" and any(row.fault for row in rows):
        plain = Whole(reference, max(arguments.threads), arguments.custom_ops, optimised=False)
        rows = compare(expected, found, close.with_rounding(expected, plain(inputs)))
    print(printable_lines(format_rows(rows)))
    if arguments.report is not None:
        arguments.report.write_text(json.dumps([dataclasses.asdict(row) for row in rows]))
    return FAILED_CHECK if any(row.fault for row in rows) else 0


def _expected(
    spec: OnnxPipelineSpec,
    reference: Path | None,
    arguments: argparse.Namespace,
    inputs: dict[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """What the whole model makes of the inputs, or what a file says that it does."""
    if reference is None:
        raise UsageError("there is no model to compare with: --reference model.onnx")
    if reference.suffix == ".onnx":
        if not reference.is_file():
            raise UsageError(f"there is no file {reference}")
        return Whole(reference, max(arguments.threads), arguments.custom_ops)(inputs)
    expected = arrays_of([output.name for output in spec.outputs], reference)
    if not expected:
        raise UsageError(f"{reference} holds no outputs to compare with")
    return expected


def _bench(pipe: OnnxPipeline, folder: Path, arguments: argparse.Namespace) -> int:
    inputs = _inputs(pipe, arguments)
    speed = pipeline_speed(pipe, inputs, arguments.steps, arguments.microbatches)
    samples = pipe.samples(inputs)
    print(
        f"inference: median {speed.latency_s * 1e3:.3g} ms of {arguments.steps}, fastest "
        f"{speed.fastest_s * 1e3:.3g} ms, {samples / speed.latency_s:.1f} samples/s; streamed: "
        f"{speed.throughput:.4g} samples/s"
    )
    model = arguments.against or next(iter(folder.glob("*.staged.onnx")), None)
    if model is None or rank_here() is not None or any(d.kind != "cpu" for d in pipe.devices):
        return 0  # one session has as many threads only where all stages share one processor
    count = len(pipe.spec.stages)
    threads = sum(_for_all(arguments.threads, count))
    cpus = frozenset[int]().union(*arguments.cpus)
    asked, libraries = arguments.microbatches, tuple(arguments.custom_ops)
    for line in compared(pipe, model, threads, cpus, arguments.steps, asked, libraries):
        print(line, flush=True)
    return 0


def _for_all(threads: Sequence[int], stages: int) -> Sequence[int]:
    return threads if len(threads) == stages else list(threads) * stages
