"""Writes a package: stage modules, schedule, scripts, runtime, weights and plan."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import safetensors
import torch

import gpipe_compiler.runtime
from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.functions import own_code_of
from gpipe_compiler.codegen.loss_weight import MODULE, write_loss_weight
from gpipe_compiler.codegen.names import identifier
from gpipe_compiler.codegen.schedule import write_schedule
from gpipe_compiler.codegen.scripts import write_init, write_readme, write_run
from gpipe_compiler.codegen.stage import StageSource, write_stages
from gpipe_compiler.errors import EmitError, Notice, ValidationError
from gpipe_compiler.frontend.hook_files import hook_files
from gpipe_compiler.frontend.subject import Hooks, Pretrained
from gpipe_compiler.ir import FunctionCall, Graph
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.core.storing import HeldError, locked
from gpipe_compiler.runtime.core.weights import INDEX, save_file
from gpipe_compiler.runtime.train.hooks import HOOKS
from gpipe_compiler.runtime.train.loading import HUGGING_FACE, NAMES
from gpipe_compiler.text.escaping import is_text

Progress = Callable[[str], None]
"""Told, in a few words, what is about to be done."""

PLAN = "plan.json"
"""The file by which a folder is known to be a package."""


def place(
    directory: Path,
    write: Callable[[Path], None],
    *,
    force: bool,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """Has a package written beside its place, checked, and moved there.

    So a folder is either complete or not there.

    Args:
        write: writes all files into the folder that it is given.
        check: called with the finished folder before it is moved to its place. When it raises a
            ValidationError the folder is left aside, as `<directory>.failed`.

    Returns:
        The absolute path of the package.

    Raises:
        EmitError: when something stands there already, or it cannot be written.
    """
    target = Path(os.path.abspath(directory))  # noqa: PTH100  # resolve() would follow a link
    refuse_taken(target, force=force)
    with _beside(target) as folder:
        write(folder)
        if check is not None:
            try:
                check(folder)
            except ValidationError:
                failed = failed_place(target)
                shutil.rmtree(failed, ignore_errors=True)
                _move(folder, failed, force=False)
                raise
        for cache in [*folder.rglob("__pycache__")]:
            shutil.rmtree(cache)
        _move(folder, target, force)
    return target


def failed_place(directory: Path) -> Path:
    """Where a package stands that was meant for `directory` and did not pass its check."""
    return directory.with_name(f"{directory.name}.failed")


def write_package(
    plan: Plan,
    folder: Path,
    hooks: Hooks | None,
    tell: Progress,
    example: Mapping[str, torch.Tensor] | None = None,
    pretrained: Pretrained | None = None,
) -> None:
    """Writes the files of a package into an empty folder, the report apart."""
    graph = plan.known_graph
    tell("writing the stages")
    facts = CodeFacts.of(graph)
    sources = write_stages(plan, facts)
    stages = sources.stages
    texts = {f"stage_{stage.index}.py": stage.text for stage in stages}
    if sources.layers:
        texts["layers.py"] = sources.layers
    texts.update(own_files(graph))
    weight = write_loss_weight(plan, graph)
    if weight is not None:
        texts[f"{MODULE}.py"] = weight.text
    texts["schedule.py"] = write_schedule(plan, graph, stages, weight)
    has_weights = not graph.on_meta or (pretrained is not None and bool(pretrained.stored))
    texts["__init__.py"] = write_init(plan, weights=has_weights)
    package = identifier(f"{plan.name}_x{len(stages)}")
    texts["run.py"] = write_run(plan, hooks, package=package)
    texts["README.md"] = write_readme(
        *(plan, graph, stages),
        package=package,
        weights=has_weights,
        folder=pretrained.folder.name if pretrained is not None and pretrained.stored else "",
    )
    texts[PLAN] = plan.to_json()
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    copy_runtime(gpipe_compiler.runtime, folder / "runtime")
    real = graph.example if example is None else example
    write_weights(graph, stages, folder / "weights", tell, real)
    if pretrained is not None:
        write_pretrained(pretrained, folder, tell)
    if hooks is not None and hooks.names and plan.training:
        write_hooks(hooks, folder / HOOKS)


def write_hooks(hooks: Hooks, folder: Path) -> None:
    """Copies the user's own file with those that it imports, or tells why the package has none."""
    found = hook_files(hooks)
    if isinstance(found, str):
        text = f"{hooks.where} is not copied into the package, which is trained with --hooks FILE"
        warnings.warn(Notice(f"{text}: {found}"), stacklevel=2)
        return
    for note in found.notes:
        warnings.warn(Notice(f"{note}; run.py train --hooks FILE reads yours"), stacklevel=2)
    for place_there, file in found.files.items():
        target = folder / place_there
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def own_files(graph: Graph) -> dict[str, str]:
    """The files with the user's own functions and operators, by their names."""
    statements: dict[str, dict[int, str]] = {}
    calls = (op.call for op in graph.ops)
    own = (own_code_of(call.function) for call in calls if isinstance(call, FunctionCall))
    for written, _ in filter(None, own):
        for file, held in written.files:
            known = statements.setdefault(file, {})
            for line, text in held:
                # Of an import each function has the names that it uses.
                texts = known.get(line, text), text
                lines = dict.fromkeys(part for each in texts for part in each.splitlines())
                known[line] = text if texts[0] == text else "\n".join(lines)
    return {
        f"{file}.py": _OWN_FILE + "\n\n".join(held[line].rstrip() for line in sorted(held)) + "\n"
        for file, held in statements.items()
    }


_OWN_FILE = '"""What the model computes in functions that are called whole."""\n\n# ruff: noqa\n'


def copy_runtime(package: ModuleType, folder: Path) -> None:
    source = Path(package.__file__ or "").parent
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "tests"))


def refuse_taken(target: Path, *, force: bool) -> None:
    """Refuses a place where something stands that may not be replaced, or no weights could be read.

    Raises:
        EmitError: saying what would free the place.
    """
    if not is_text(os.path.abspath(target)):  # noqa: PTH100  # as `place` has it
        raise EmitError(
            f"{target} is no path in UTF-8, and the library that reads weights takes no other",
            hint="choose another folder",
        )
    if not os.path.lexists(target):
        return
    if not force:
        raise EmitError(f"{target} exists", hint="choose another folder, or replace it: --force")
    is_package = target.is_dir() and (target / PLAN).is_file()
    is_empty = target.is_dir() and not any(target.iterdir())
    if target.is_symlink() or not (is_package or is_empty):
        raise EmitError(
            f"{target} is no package, so it is not replaced", hint="choose another folder"
        )


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A new folder beside the target; gone afterwards, together with parents made for it.

    One process at a time has one.
    """
    made: list[Path] = []
    folder: Path | None = None
    try:
        missing = [
            parent for parent in (target.parent, *target.parent.parents) if not parent.exists()
        ]
        for parent in reversed(missing):
            parent.mkdir()
            made.append(parent)
        with locked(target.with_name(f".{target.name}.lock")):
            folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            yield folder
    except HeldError as error:
        raise EmitError(
            f"{target} is being written by another compile, {error}",
            hint="let that one end, or choose another folder",
        ) from error
    except (OSError, safetensors.SafetensorError) as error:
        raise EmitError(f"cannot write {target}: {error}") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(target):
            # A package that failed its check may have been left beside the target.
            with contextlib.suppress(OSError):
                for parent in reversed(made):
                    parent.rmdir()


def _move(folder: Path, target: Path, force: bool) -> None:
    """Puts the finished folder in its place; what it replaces comes back when that fails."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    if not os.path.lexists(target):
        folder.rename(target)
        return
    refuse_taken(target, force=force)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    old = target.rename(aside / "old")
    try:
        folder.rename(target)
    except OSError:
        old.rename(target)
        aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


EXAMPLE = "example.safetensors"


def write_weights(
    graph: Graph,
    stages: Sequence[StageSource],
    directory: Path,
    progress: Callable[[str], None],
    example: Mapping[str, torch.Tensor],
) -> None:
    """Writes `stage_<k>.safetensors` and the index; a tensor of several stages goes to the first.

    Nothing but the example inputs is written for a model without values.

    Raises:
        EmitError: for a tensor of a type that safetensors files do not have.
    """
    _check_types({**graph.tensors, **example})
    directory.mkdir()
    real = {name: tensor for name, tensor in example.items() if not tensor.is_meta}
    if real:
        save_file(real, directory / EXAMPLE)
    if graph.on_meta:
        return
    placed: dict[str, str] = {}
    size = 0
    for stage in stages:
        names = [name for name in dict.fromkeys(stage.state.values()) if name not in placed]
        if not names:
            continue
        file = f"stage_{stage.index}.safetensors"
        progress(f"writing weights/{file}")
        save_file({name: graph.tensors[name] for name in names}, directory / file)
        placed.update(dict.fromkeys(names, file))
        size += sum(graph.state[name].bytes for name in names)
    index = {"metadata": {"total_size": size}, "weight_map": placed}
    (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _check_types(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype == torch.complex128:
            raise EmitError(
                f"{name} is of the type complex128, which safetensors files cannot hold",
                hint="use complex64, or a real tensor and torch.view_as_complex",
            )


def write_pretrained(pretrained: Pretrained, folder: Path, progress: Callable[[str], None]) -> None:
    """Writes `weights/index.json`, which refers to the folder's own files by paths relative to it,
    and the folder of what an export takes along.

    Args:
        folder: the package, which may be moved to another name in the folder that it is in.
    """
    weights = folder / "weights"
    if pretrained.stored:
        home = weights.resolve()
        places: dict[Path, str] = {}
        stored = pretrained.stored
        for file in dict.fromkeys(file for tensor in stored.values() for file in tensor.files):
            places[file] = os.path.relpath(file, home)
            if pretrained.copied_weights:
                progress(f"copying {file.name}")
                places[file] = file.name
                shutil.copyfile(file, weights / file.name)
        keys = {name: tensor.made.plain for name, tensor in stored.items()}
        known = {how.plain: key for key, how in pretrained.exported.items()}
        assembled = {name: stored[name] for name, key in keys.items() if key is None}
        index = {
            "weight_map": {n: places[stored[n].files[0]] for n, key in keys.items() if key},
            "keys": {name: key for name, key in keys.items() if key and key != name}
            | {name: known[name] for name in pretrained.anew if name in known},
            "anew": sorted(pretrained.anew),
        }
        if assembled:
            index["assembled"] = {name: each.made.written() for name, each in assembled.items()}
            index["pieces"] = {
                key: places[file]
                for each in assembled.values()
                for key, file in zip(each.made.of, each.files, strict=True)
            }
        (weights / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    beside = folder / HUGGING_FACE
    beside.mkdir()
    for name, text in pretrained.texts.items():
        (beside / name).write_text(text, encoding="utf-8")
    for file in pretrained.copies:
        shutil.copyfile(file, beside / file.name)
    exported = pretrained.exported.items()
    content = {
        "adapter": pretrained.adapter,
        "names": {key: how.plain for key, how in exported if how.plain},
        "assembled": {key: how.written() for key, how in exported if not how.plain},
    }
    (beside / NAMES).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
