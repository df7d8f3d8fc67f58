"""Models of other people's libraries through the whole command: right, refused, or wrong.

    python benchmarks/coverage.py [--only PATTERN ...] [--mixed] [--resume FILE] [--json]

Each of `benchmarks/foreign/` is compiled by `gpipe-compile MODEL --stages 2` with all defaults,
which validates it on the example and on a second batch. Then a judge that knows plain PyTorch only
(`tests/adversary/judge.py`) trains model and package on two batches that neither has seen, one of
another number of samples, and compares losses, outputs, gradients, buffers and weights; of a model
that draws in training, outputs in eval mode. Processes of their own, with limits. Outcomes:

- right: compiled, validated, and judged equal;
- refused: exit code 1, or a refusal at the step, with what is said;
- wrong: compiled and judged unequal, or exit code 3;
- unjudged: plain PyTorch itself comes to no finite numbers on every batch of the judge;
- not made: plain PyTorch cannot build or call the model here, for a library or a size;
- traceback: any other end;
- late: not done within the limit.

Needs `pip install --no-deps torchvision timm transformers diffusers peft accelerate`. Where PyPI's
torchvision does not load beside this torch, packages that import transformers need its operators
declared, too: by `foreign/__init__.py`, copied into site-packages for a .pth file to import.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ADVERSARY = HERE.parent / "tests"
TRACEBACK = "Traceback (most recent call last)"
NOT_MADE = re.compile(r"build_model\(\) (raises|fails)|the model raises \w+ on the example inputs")
USER_FILE = """\
# {name}, as its user would write it down.
import sys

sys.path.insert(0, {here!r})
from foreign.model import foreign

globals().update(foreign({name!r}).user_file())
"""


@dataclass(frozen=True)
class Row:
    """What became of a model; processor seconds of compiling and judging it."""

    name: str
    outcome: str
    why: str = ""
    compile_s: float = 0.0
    judge_s: float = 0.0
    stage_lines: int = 0
    commit: str = ""


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its exit code (None: at its limit; negative: by a signal, as where
    memory ran out), output, processor seconds."""

    code: int | None
    text: str
    seconds: float


def run(words: list[str], limit_s: int) -> Ended:
    """Runs a process; its limit is of processor time, and thrice as long by the clock."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 5))

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    try:
        ended = subprocess.run(
            words,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=3 * limit_s,
            preexec_fn=limited,
        )
        code, text = ended.returncode, ended.stdout
    except subprocess.TimeoutExpired as late:
        code, text = None, str(late.stdout or "")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    late = code in (-signal.SIGXCPU, -signal.SIGKILL) and seconds >= limit_s
    return Ended(None if late else code, text, seconds)


def measured(name: str, limit_s: int, keep: Path | None) -> Row:
    """Compiles a model, and judges its package."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = (keep / re.sub(r"\W+", "_", name)) if keep else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        file, package = folder / "model.py", folder / "package"
        file.write_text(USER_FILE.format(name=name, here=str(HERE)), encoding="utf-8")
        words = ["-m", "gpipe_compiler", str(file), "--stages", "2", "--force", "-o", str(package)]
        try:
            words += options_of(name).split()
        except Exception as error:  # whatever a library says of its own default settings
            return Row(name, "not made", f"{type(error).__name__}: {' '.join(str(error).split())}")
        made = run([sys.executable, *words], limit_s)
        (folder / "output.txt").write_text(made.text, encoding="utf-8")
        if made.code != 0 or TRACEBACK in made.text:
            return Row(name, *_failed(made), round(made.seconds, 1))
        lines = sum(len(f.read_text().splitlines()) for f in package.glob("stage_*.py"))
        found = run([sys.executable, __file__, "--judge", name, str(package)], limit_s)
        row = Row(name, "right", "", round(made.seconds, 1), round(found.seconds, 1), lines)
        if found.code is None:
            return dataclasses.replace(row, outcome="late", why="the judge")
        try:
            verdict = json.loads(found.text.strip().splitlines()[-1])
        except (ValueError, IndexError):
            _, refused, said = found.text.partition("errors.UsageError: ")
            end = found.text.strip()[-400:] or f"the judge ended with exit code {found.code}"
            why = f"at the step: {' '.join(said.split())}" if refused else end
            return dataclasses.replace(row, outcome="refused" if refused else "unjudged", why=why)
        faults: list[str] = verdict["faults"]
        if faults:
            return dataclasses.replace(row, outcome="wrong", why="; ".join(faults[:4])[:600])
        outcome = "right" if verdict["compared"] else "unjudged"
        return dataclasses.replace(row, outcome=outcome, why=verdict["note"])


def _failed(made: Ended) -> tuple[str, str]:
    """The outcome of a compile that failed, and the end of what it said."""
    said = made.text[made.text.find("error:") :] if "error:" in made.text else made.text[-600:]
    said = " ".join(said.split())[:600]
    if TRACEBACK in made.text:
        return "traceback", " ".join(made.text[-500:].split())
    if made.code is None:
        return "late", " ".join(made.text[-200:].split())
    if made.code == 3:
        return "wrong", said
    if NOT_MADE.search(said):
        return "not made", said
    return ("refused", said) if made.code == 1 else ("traceback", f"exit {made.code}: {said}")


def judge(name: str, package: Path) -> dict[str, Any]:
    """What plain PyTorch says of a package; in this process, which never loads the compiler."""
    sys.path[:0] = [str(HERE), str(ADVERSARY / "adversary")]
    import judge as plain
    import torch

    plain.stand_alone()
    from adversary.case import Case
    from foreign.model import foreign

    torch.set_num_threads(1)
    subject = foreign(name)
    torch.manual_seed(0)
    model, inputs = subject.build(), subject.inputs(2)
    draws, always = (
        _draws(model, training, lambda: plain.call(model, inputs)) for training in (True, False)
    )
    whole = not _normalises(model, lambda: plain.call(model, inputs))

    class Planned(Case):
        """Where layers normalise over micro-batches, these are as large as they were planned."""

        def least_samples(self, microbatches: int) -> int:
            return 2 if subject.samples >= 2 * microbatches else 1

    case = Planned(
        name,
        subject.build,
        subject.inputs,
        subject.loss,
        subject.target,
        options=subject.options,
        microbatches=None,
        sizes=(subject.samples, subject.samples // 2 + 1),
        reference="whole" if whole else "micro-batches",
        manners=({},),
        random=draws,
        rounding=True,
    )
    made = plain.load_package(package)
    if always:
        verdict = plain.Verdict()
        plain.hold_together(case, made, verdict)
    else:
        verdict = plain.judge(case, made, case.reference)
    note = "training in two ways, as it draws in eval mode" if always else ""
    if draws and not always:
        note = "eval mode, and training in two ways"
    if verdict.rounded:
        note = f"{len(verdict.rounded)} within what the model's own rounding moves: " + "; ".join(
            verdict.rounded[:2]
        )
    if verdict.passed:
        note = f"plain PyTorch itself comes to no finite numbers: {'; '.join(verdict.passed)}"
    return {**dataclasses.asdict(verdict), "note": note}


def _draws(model: Any, training: bool, call: Callable[[], object]) -> bool:
    """Whether a model draws in a mode: its dropouts, or itself."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model.train(training)
        before = torch.get_rng_state()
        call()
        return not torch.equal(before, torch.get_rng_state())


def _normalises(model: Any, call: Callable[[], object]) -> bool:
    """Whether a call runs a layer that normalises over the batch."""
    import torch

    ran: list[object] = []
    kind = torch.nn.modules.batchnorm._BatchNorm
    layers = (module for module in model.modules() if isinstance(module, kind))
    hooks = [layer.register_forward_hook(lambda *_: ran.append(None)) for layer in layers]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        call()
    for hook in hooks:
        hook.remove()
    return bool(ran)


def commit() -> str:
    """Of the code that runs; with a plus where files differ from it."""
    words = ("git", "-C", str(HERE), "describe", "--always", "--abbrev=7", "--exclude=*")
    told = subprocess.run((*words, "--dirty=+"), check=True, text=True, stdout=subprocess.PIPE)
    return told.stdout.strip()


def chosen(patterns: Iterable[str]) -> list[str]:
    """The models that match a pattern of a shell; without one, all."""
    sys.path.insert(0, str(HERE))
    from foreign.model import names

    return list(names(tuple(patterns) or ("*",)))


def mixed(names: Iterable[str]) -> list[str]:
    """The names in an order of which every beginning is a sample that is fair to all libraries.

    A library's models are drawn by the checksums of their names, in equal shares of each library.
    """
    by_library: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        by_library.setdefault(name.partition(":")[0], []).append(name)
    shares = {
        name: (place + 0.5) / len(own)
        for own in by_library.values()
        for place, name in enumerate(own)
    }
    return sorted(shares, key=shares.__getitem__)


def options_of(name: str) -> str:
    """The options with which a user would compile a model."""
    sys.path.insert(0, str(HERE))
    from foreign.model import foreign

    return foreign(name).options


def table(rows: list[Row]) -> str:
    """What became of all of them, in Markdown."""
    from tables import markdown

    counts = Counter(row.outcome for row in rows)
    seconds = sorted(row.compile_s for row in rows if row.outcome == "right") or [0.0]
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    lines = [
        (r.name, r.outcome, f"{r.compile_s:.1f}", r.commit, r.why.replace("|", "\\|")[:160])
        for r in rows
    ]
    return (
        f"{len(rows)} models: {summary}. Processor seconds of a compile that is right: median "
        f"{seconds[len(seconds) // 2]:.1f}, largest {seconds[-1]:.1f}.\n\n"
        + markdown(("model", "outcome", "seconds", "commit", "note"), lines)
    )


def main() -> None:
    """Parses the arguments, runs the models, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="JSON lines; rows in it stand")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the packages there")
    parser.add_argument("--limit", type=int, default=300, help="processor seconds of a compile")
    parser.add_argument("--within", type=float, default=1e9, help="seconds for all of them")
    parser.add_argument("--mixed", action="store_true", help="in an order to stop at any time")
    parser.add_argument("--list", action="store_true", help="the names alone")
    parser.add_argument("--json", action="store_true", help="the rows alone")
    parser.add_argument("--judge", nargs=2, metavar=("NAME", "PACKAGE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.judge:
        print(json.dumps(judge(arguments.judge[0], Path(arguments.judge[1]))))
        return
    names, end = chosen(arguments.only), time.monotonic() + arguments.within
    names = mixed(names) if arguments.mixed else names
    if arguments.list:
        print("\n".join(names))
        return
    rows: dict[str, Row] = {}
    if arguments.resume and arguments.resume.exists():
        for line in arguments.resume.read_text(encoding="utf-8").splitlines():
            row = Row(**json.loads(line))
            rows[row.name] = row
    for name in names:
        if name in rows or time.monotonic() > end:
            continue
        row = measured(name, arguments.limit, arguments.keep)
        rows[name] = dataclasses.replace(row, commit=commit())
        print(f"{name}: {rows[name].outcome} {rows[name].why[:150]}", file=sys.stderr, flush=True)
        if arguments.resume:
            with arguments.resume.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(rows[name])) + "\n")
    found = [rows[name] for name in names if name in rows]
    if arguments.json:
        print(json.dumps([dataclasses.asdict(row) for row in found], indent=1))
    else:
        print(table(found))


if __name__ == "__main__":
    main()
