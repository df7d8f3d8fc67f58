"""Holds packages against plain PyTorch, in a process that knows nothing of the compiler.

    python judge.py < requests > verdicts

A request is a line of JSON, `{"case": "attention.encoder", "package": "/tmp/encoder_x2"}`; so is
its verdict, `{"compared": 48, "faults": []}`. Model and package get the same weights and batches
that the compiler has never seen. In every manner that the case asks for, compared are:

- of a training step, per batch: the loss, what the model returns, the gradient of every parameter
  and of every input that asks for one, every buffer, and the weights after a step of SGD;
- in eval mode: the loss, and what the model returns, as the same tuples, lists, dicts and classes.

The reference is the model on the whole batch, unless the case says that its user chose a loop of
micro-batches. A tensor may differ by `RELATIVE` of its own largest entry, and by `FLOOR` of the
largest entry of its kind; a 16-bit one, gradients under autocast, and all there where the batch is
in several pieces, by `ROUNDINGS` of their units. Integers and booleans must be equal.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import importlib.util
import itertools
import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

RELATIVE = 1e-4
FLOOR = 1e-6
ROUNDINGS = 8
LEARNING_RATE = 0.1

_COUNTER = itertools.count()


def stand_alone() -> None:
    """Makes the cases importable, and the compiler not."""
    sys.modules["gpipe_compiler"] = None  # type: ignore[assignment]
    package = ModuleType("adversary")
    package.__path__ = [str(Path(__file__).parent)]
    sys.modules["adversary"] = package


_RUNTIMES: dict[str, str] = {}
"""By what is in its files, the name under which a runtime was imported first."""


def _share_runtime(name: str, directory: Path) -> None:
    """Gives a package the runtime of another one, if theirs are the same but for the folder.

    Importing one takes longer than most cases.
    """
    digest = hashlib.sha256()
    for file in sorted((directory / "runtime").rglob("*.py")):
        digest.update(f"{file.relative_to(directory)}\n{file.read_text()}".encode())
    first = _RUNTIMES.setdefault(digest.hexdigest(), f"{name}.runtime")
    for loaded, module in list(sys.modules.items()):
        if loaded == first or loaded.startswith(f"{first}."):
            sys.modules[f"{name}.runtime{loaded.removeprefix(first)}"] = module


def load_package(directory: Path) -> Any:
    """The package in a folder, under a name of its own."""
    name = f"judged_{next(_COUNTER)}"
    _share_runtime(name, directory)
    spec = importlib.util.spec_from_file_location(
        name, directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclasses.dataclass
class Verdict:
    """What was compared, and what differs."""

    compared: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)
    rounded: list[str] = dataclasses.field(default_factory=list)
    """What differs by no more than the model's own rounding lets it."""
    passed: list[str] = dataclasses.field(default_factory=list)
    """What is not compared, as plain PyTorch itself comes to no numbers."""

    def tensors(
        self,
        what: str,
        found: Mapping[str, torch.Tensor | None],
        expected: Mapping[str, torch.Tensor | None],
        coarse: float = 0.0,
        rounding: Mapping[str, float] | None = None,
    ) -> None:
        """Compares tensors of one kind by name; None stands for a tensor of zeros.

        Args:
            coarse: the share of a tensor's size by which it may differ at least.
            rounding: by how much the model's own rounding moves a tensor, by its name.
        """
        sizes = [_size(tensor) for tensor in expected.values() if tensor is not None]
        floor = FLOOR * max(sizes, default=0.0)
        for name in sorted({*found, *expected}):
            self.compared += 1
            fault = _difference(found.get(name), expected.get(name), floor, coarse)
            if not fault:
                continue
            moved = ROUNDINGS * (rounding or {}).get(name, 0.0)
            if moved and not _difference(found.get(name), expected.get(name), moved, coarse):
                self.rounded.append(f"{what} {name}: {fault}")
            else:
                self.faults.append(f"{what} {name}: {fault}")

    def structures(self, what: str, found: object, expected: object, coarse: float) -> None:
        """Compares what a model returns, with its tuples, lists, dicts and classes."""
        left, right = dict(_leaves(found, "")), dict(_leaves(expected, ""))
        kinds = {path: kind for path, (kind, _) in right.items()}
        if {path: kind for path, (kind, _) in left.items()} != kinds:
            shown = {path: kind for path, (kind, _) in left.items()}
            self.faults.append(f"{what}: returned {shown}, expected {kinds}")
            return
        tensors = {path: item for path, (_, item) in left.items() if isinstance(item, torch.Tensor)}
        others = {path: item for path, (_, item) in left.items() if path not in tensors}
        for path, item in others.items():
            self.compared += 1
            if item != right[path][1]:
                self.faults.append(f"{what} {path}: {item!r}, expected {right[path][1]!r}")
        self.tensors(what, tensors, {path: right[path][1] for path in tensors}, coarse)


def _leaves(item: object, path: str) -> Iterator[tuple[str, tuple[str, object]]]:
    """Every leaf and every container, with its path and kind."""
    kind = type(item).__name__
    if isinstance(item, torch.Tensor):
        yield path, ("tensor", item)
    elif isinstance(item, Mapping):
        yield path, (kind, len(item))
        for key, value in item.items():
            yield from _leaves(value, f"{path}[{key!r}]")
    elif isinstance(item, tuple | list):
        fields = getattr(item, "_fields", range(len(item)))
        yield path, (kind, len(item))
        for key, value in zip(fields, item, strict=True):
            yield from _leaves(value, f"{path}.{key}")
    elif kind == "Unreturned":  # the package's stand-in for an object of this class
        yield path, (item.cls, None)  # type: ignore[attr-defined]  # known by its name alone
    elif dataclasses.is_dataclass(item) or isinstance(item, SimpleNamespace):
        yield path, (kind, len(vars(item)))
        for key, value in vars(item).items():
            yield from _leaves(value, f"{path}.{key}")
    elif hasattr(item, "__dict__") and not callable(item):  # such as a cache: by its class
        yield path, (kind, None)
    else:
        yield path, (kind, item)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _size(tensor: torch.Tensor) -> float:
    tensor = _dense(tensor)
    finite = tensor[tensor.isfinite()] if tensor.dtype != torch.bool else tensor.float()
    return float(finite.abs().max()) if finite.numel() else 0.0


def _difference(
    found: torch.Tensor | None, expected: torch.Tensor | None, floor: float, coarse: float
) -> str:
    """What is wrong with a tensor; "" for nothing."""
    if expected is None or found is None:
        other = found if expected is None else expected
        missing = other is not None and _size(other) > floor
        return f"is {'there' if expected is None else 'missing'}" if missing else ""
    found, expected = _dense(found), _dense(expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return (
            f"is {found.dtype} {tuple(found.shape)}, "
            f"expected {expected.dtype} {tuple(expected.shape)}"
        )
    if not expected.numel():
        return ""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    left, right = found.to(wide), expected.to(wide)
    same = (left == right) | (left.isnan() & right.isnan())
    distance = torch.where(same, 0.0, (left - right).abs()).nan_to_num(torch.inf, torch.inf)
    largest = float(distance.max())
    allowed = 0.0
    if expected.is_floating_point() or expected.is_complex():
        unit = torch.finfo(expected.dtype).eps
        allowed = max(RELATIVE, coarse, ROUNDINGS * unit) * _size(expected) + floor
    return "" if largest <= allowed else f"differs by {largest:.3g} of {_size(expected):.3g}"


# --- plain PyTorch --------------------------------------------------------------------------------


def call(model: nn.Module, inputs: object) -> Any:
    """Calls a model with inputs in any of the forms that a pipeline takes."""
    match inputs:
        case (tuple() as args, dict() as kwargs):
            return model(*args, **kwargs)
        case tuple():
            return model(*inputs)
        case dict():
            return model(**inputs)
        case _:
            return model(inputs)


def fresh(item: Any, *, wide: bool = False) -> Any:
    """A copy of inputs, with tensors of their own that ask for gradients as they did.

    Args:
        wide: fractions in 64 bits.
    """
    match item:
        case torch.Tensor():
            dtype = torch.float64 if wide and item.is_floating_point() else item.dtype
            return item.detach().to(dtype, copy=True).requires_grad_(item.requires_grad)
        case dict():
            return {key: fresh(value, wide=wide) for key, value in item.items()}
        case tuple() if hasattr(item, "_fields"):
            return type(item)(*(fresh(value, wide=wide) for value in item))
        case tuple() | list():
            return type(item)(fresh(value, wide=wide) for value in item)
        case _:
            return copy.deepcopy(item)


def tensors_in(item: object) -> list[torch.Tensor]:
    """The tensors of a nest, in order."""
    return [leaf for _, (_, leaf) in _leaves(item, "") if isinstance(leaf, torch.Tensor)]


def loss_of(case: Any, output: Any, target: object) -> torch.Tensor:
    """The loss of an output: by the user's function, or the model's own."""
    if case.loss is not None:
        return case.loss(output, target)
    return output["loss"] if isinstance(output, Mapping) else output.loss


def without_loss(output: Any) -> Any:
    """An output without the model's own loss."""
    if isinstance(output, Mapping):
        return type(output)((key, item) for key, item in output.items() if key != "loss")
    output = copy.copy(output)
    output.loss = None
    return output


def pieces(item: Any, count: int) -> list[Any]:
    """A batch in so many micro-batches along dimension 0, the larger ones first."""
    match item:
        case torch.Tensor() if item.dim():
            return [part.clone() for part in item.tensor_split(count)]
        case dict():
            parts = {key: pieces(value, count) for key, value in item.items()}
            return [{key: parts[key][m] for key in item} for m in range(count)]
        case tuple() | list():
            rows = [pieces(value, count) for value in item]
            return [type(item)(row[m] for row in rows) for m in range(count)]
        case _:
            return [item] * count


def autocast(precision: str) -> contextlib.AbstractContextManager[object]:
    """What plain PyTorch computes under, in the precision of a pipeline."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def computes_here(case: Any, precision: str) -> bool:
    """Whether plain PyTorch has kernels for a case in this precision on this processor.

    oneDNN has no LSTM in 16 bits where there is no AVX-512, and torch does not look.
    """
    if precision == "fp32":
        return True
    inputs, _ = case.batch(case.sizes[0], seed=1000)
    try:
        with torch.no_grad(), autocast(precision):
            call(case.build(), inputs)
    except Exception as error:  # any other is for the comparison to meet
        return "could not create a primitive" not in str(error)
    return True


# --- the comparison -------------------------------------------------------------------------------


class CutEvaluator:
    """One case, one pipeline, one manner."""

    def __init__(
        self, case: Any, pipe: Any, arguments: Mapping[str, Any], verdict: Verdict, reference: str
    ) -> None:
        self.case, self.pipe, self.precision = case, pipe, case.precision(arguments)
        self.verdict, self.reference = verdict, reference
        self.model = case.build()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.is_floating_point() or parameter.is_complex():
                    parameter.add_(0.05 * torch.randn_like(parameter))
        self.buffers = {name: item.clone() for name, item in self.model.named_buffers()}
        pipe.load_state_dict(self.model.state_dict())
        sixteen = torch.float16 if self.precision == "fp16" else torch.bfloat16
        self.coarse = 0.0 if self.precision == "fp32" else ROUNDINGS * torch.finfo(sixteen).eps
        # In one piece nothing is rounded in another order until gradients are summed.
        self.forward = 0.0 if pipe.microbatches == 1 else self.coarse

    def parts(
        self, inputs: object, target: object, samples: int, reference: str = ""
    ) -> list[tuple[Any, Any, float]]:
        """What the reference runs, each with its share in the loss."""
        if (reference or self.reference) == "whole":
            return [(fresh(inputs), fresh(target), 1.0)]
        count = min(self.pipe.microbatches, samples)
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.model.modules()):
            least = self.case.least_samples(self.pipe.microbatches)
            count = max(1, min(self.pipe.microbatches, samples // least))
        rows = zip(pieces(inputs, count), pieces(target, count), strict=True)
        return [(x, t, len(tensors_in(x)[0]) / samples) for x, t in rows]

    def train(self, inputs: object, target: object, samples: int, what: str) -> None:
        """A training step of both, and what the pipeline came to."""
        self.model.train()
        self.model.zero_grad()
        self.pipe.train()
        optimizer = torch.optim.SGD(self.pipe.parameters(), lr=LEARNING_RATE)
        own = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        optimizer.zero_grad()
        moved = self._moved_by_rounding(inputs, target, samples) if self.case.rounding else None
        given = fresh(inputs)
        if self.case.as_evaluated:
            loss, output = self.pipe.step(given, fresh(target)), None
        else:
            loss, output = self.pipe.step_with_outputs(given, fresh(target))

        total, plain = torch.zeros(()), None
        parts = self.parts(inputs, target, samples)
        for x, t, share in parts:
            with autocast(self.precision):
                plain = (
                    call(self.model, x)
                    if self.case.replay is None
                    else self.case.replay(self.model, x, output)
                )
                mine = loss_of(self.case, plain, t)
            (mine * share).backward()
            total = total + mine.detach() * share
        verdict = self.verdict
        own_grads = [item.grad for item in self.model.parameters() if item.grad is not None]
        finite = all(bool(_dense(item).isfinite().all()) for item in (total, *own_grads))
        if self._passes_over(what, numbers=finite):
            return
        verdict.tensors(what, {"loss": loss}, {"loss": total.to(loss.dtype)}, self.forward / 4)
        if len(parts) == 1 and not self.case.as_evaluated:
            verdict.structures(f"{what} output", output, plain, self.forward)
        asks = [tensor.requires_grad for tensor in tensors_in(inputs)]
        if any(asks) and len(parts) == 1:
            asking = [t.grad for t, a in zip(tensors_in(parts[0][0]), asks, strict=True) if a]
            got = [t.grad for t, a in zip(tensors_in(given), asks, strict=True) if a]
            verdict.tensors(what, _numbered(got), _numbered(asking), self.coarse)
        self._state(what, optimizer, own, moved)

    def _passes_over(self, what: str, *, numbers: bool) -> bool:
        """Whether to compare nothing where plain PyTorch came to no numbers, as where a step has
        gone too far: which are infinite then goes with rounding. Of a case that is about such
        numbers nothing is passed over."""
        passes = self.case.rounding and not numbers
        if passes:
            self.verdict.passed.append(what)
            self.pipe.load_state_dict(self.model.state_dict())
        return passes

    def _moved_by_rounding(self, inputs: object, target: object, samples: int) -> dict[str, float]:
        """By parameter, the most that its gradient moves by rounding, in plain PyTorch alone.

        With all weights one rounding off, for what iterates or normalises small differences makes
        much of them; and micro-batch by micro-batch, where in 64 bits that changes nothing: a
        maximum may be another's by a rounding.
        """
        whole = self.parts(inputs, target, samples)
        exact, *others = (self._gradients(whole, moved=off) for off in (0, 1, -1))
        pieces = self.parts(inputs, target, samples, "micro-batches")
        with contextlib.suppress(RuntimeError):  # what does not run in 64 bits shows nothing
            one, two = (self._gradients(parts, double=True) for parts in (whole, pieces))
            if all(torch.allclose(two[name], item, 1e-9, 1e-12) for name, item in one.items()):
                others.append(self._gradients(pieces))
        return {
            name: max(float((other[name] - grad).abs().max()) for other in others)
            for name, grad in exact.items()
        }

    def _gradients(
        self, parts: list[tuple[Any, Any, float]], moved: int = 0, *, double: bool = False
    ) -> dict[str, torch.Tensor]:
        """The gradients of a copy of the model, its weights moved by so many roundings."""
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for item in model.parameters() if moved else ():
                if item.is_floating_point():
                    signs = torch.randint(2, item.shape) * 2 - 1
                    item.mul_(1 + moved * signs * torch.finfo(item.dtype).eps)
        model = model.double() if double else model
        for x, t, share in parts:
            given, expected = (fresh(x, wide=True), fresh(t, wide=True)) if double else (x, t)
            (loss_of(self.case, call(model, given), expected) * share).backward()
        found = {name: item.grad for name, item in model.named_parameters()}
        return {name: item for name, item in found.items() if item is not None}

    def returned(self, what: str, found: Any, expected: Any) -> None:
        """Compares what both returned, but for the model's own loss, which comes by itself."""
        if self.case.loss is None and not self.case.infers:
            found, expected = without_loss(found), without_loss(expected)
        self.verdict.structures(what, found, expected, self.forward)

    def _state(
        self,
        what: str,
        optimizer: torch.optim.Optimizer,
        own: torch.optim.Optimizer,
        moved: Mapping[str, float] | None,
    ) -> None:
        """Gradients, buffers, and the weights after a step."""
        mine = dict(self.model.named_parameters())
        theirs = dict(self.pipe.named_parameters())
        grads = {name: item.grad for name, item in mine.items()}
        found = {name: item.grad for name, item in theirs.items()}
        self.verdict.tensors(f"{what} gradient", found, grads, self.coarse, moved)
        # A momentum moves on by zeros, and stays where there is no gradient.
        for name in sorted(found):
            if (found[name] is None) is not (grads[name] is None):
                kinds = ("none", "zeros") if found[name] is None else ("zeros", "none")
                self.verdict.faults.append(f"{what} gradient {name}: is %s, expected %s" % kinds)
        buffers = dict(self.model.named_buffers())
        held = {name: item for name, item in self.pipe.named_buffers() if name in buffers}
        for kind, ours, others in (("parameters", mine, theirs), ("buffers", buffers, held)):
            if [name for name in ours if name in others] != list(others):
                self.verdict.faults.append(f"{kind} are in another order: {', '.join(others)}")
        # What the package does not hold is what the model does not change.
        unused = {name: self.buffers[name] for name in buffers if name not in held}
        self.verdict.tensors(f"{what} buffer", {**unused, **held}, buffers, self.coarse)
        optimizer.step()
        own.step()
        weights = {name: item for name, item in mine.items() if name in theirs}
        steps = {name: LEARNING_RATE * by for name, by in (moved or {}).items()}
        self.verdict.tensors(f"{what} weight", dict(theirs), weights, self.coarse, steps)
        # Rounding is not to add up over the batches.
        self.pipe.load_state_dict(self.model.state_dict())

    def infer(self, inputs: object, target: object, samples: int, what: str) -> None:
        """What both return in eval mode, and the loss of it."""
        self.pipe.eval()
        self.model.eval()
        with torch.no_grad():
            output = self.pipe(fresh(inputs))
            with autocast(self.precision):
                parts = self.parts(inputs, target, samples)
                plain = [
                    call(self.model, x)
                    if self.case.replay is None
                    else self.case.replay(self.model, x, output)
                    for x, _, _ in parts
                ]
            made = (item for each in plain for item in tensors_in(each))
            if self._passes_over(what, numbers=not any(bool(x.isnan().any()) for x in made)):
                return
            if len(parts) == 1:
                self.returned(f"{what} output", output, plain[0])
            elif isinstance(output, torch.Tensor):
                self.returned(f"{what} output", output, torch.cat(plain))
            if self.case.infers or self.case.replay is not None or len(parts) > 1:
                return
            with autocast(self.precision):
                expected = loss_of(self.case, plain[0], fresh(target))
            loss = self.pipe.evaluate(fresh(inputs), fresh(target))
            expected = expected.to(loss.dtype)
            self.verdict.tensors(what, {"loss": loss}, {"loss": expected}, self.forward / 4)


def _numbered(items: list[torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {f"input gradient {number}": item for number, item in enumerate(items)}


def judge(case: Any, package: Any, reference: str) -> Verdict:
    """Everything that a case asks for."""
    verdict = Verdict()
    torch.backends.mha.set_fastpath_enabled(not case.by_ops)
    for arguments in case.ways():
        if not computes_here(case, case.precision(arguments)):
            continue
        manner = ", ".join(f"{k}={v}" for k, v in arguments.items()) or "as compiled"
        with package.Pipeline(**arguments) as pipe:
            one = CutEvaluator(case, pipe, arguments, verdict, reference)
            for number, samples in enumerate(case.sizes):
                inputs, target = case.batch(samples, seed=1000 + number)
                what = f"[{manner}, {samples} samples]"
                if not case.infers and not case.random:
                    one.train(inputs, target, samples, f"{what} train")
                one.infer(inputs, target, samples, f"{what} eval")
    if case.random:
        hold_together(case, package, verdict)
    if hasattr(case.expect, "inputs"):
        _refuses(case, package, verdict)
    return verdict


def hold_together(case: Any, package: Any, verdict: Verdict) -> None:
    """What cannot be compared with the model, as it draws, is the same in all manners."""
    inputs, target = case.batch(case.sizes[0], seed=1000)
    losses, gradients = [], []
    for arguments in ({}, {"schedule": "1f1b", "remat": "full"}):
        with package.Pipeline(**arguments) as pipe:
            losses.append(pipe.step(fresh(inputs), fresh(target)))
            gradients.append({name: item.grad for name, item in pipe.named_parameters()})
    verdict.tensors("manners", {"loss": losses[1]}, {"loss": losses[0]})
    verdict.tensors("manners gradient", gradients[1], gradients[0])


def _refuses(case: Any, package: Any, verdict: Verdict) -> None:
    """The batch that the package has to refuse leaves every weight and buffer as it was."""
    verdict.compared += 1
    expect = case.expect
    before: Mapping[str, torch.Tensor] = {}
    pipe = None
    try:
        with package.Pipeline(**expect.arguments) as pipe:
            before = copy.deepcopy(pipe.state_dict())
            if case.infers:
                pipe(expect.inputs())
            else:
                pipe.step(expect.inputs(), expect.target())
    except Exception as error:
        missing = [word for word in (*expect.cause, *expect.way_out) if word not in str(error)]
        if missing:
            verdict.faults.append(f"the refusal does not say {missing}: {error}")
    else:
        verdict.faults.append("the batch was not refused")
    if pipe is not None:
        verdict.tensors("refused", pipe.state_dict(), before)


def main() -> None:
    """Answers requests until there are no more."""
    stand_alone()
    torch.set_num_threads(1)
    from adversary.drawn import drawn_case
    from adversary.registry import cases

    answers, sys.stdout = sys.stdout, sys.stderr  # a user's model may print
    for line in sys.stdin:
        request = json.loads(line)
        try:
            drawn = request.get("drawn")
            case = cases()[request["case"]] if drawn is None else drawn_case(drawn)
            more = request.get("options", "")
            case = dataclasses.replace(case, options=f"{case.options} {more}")
            package = load_package(Path(request["package"]))
            reference = request.get("reference") or case.reference
            verdict = judge(case, package, reference)
        except Exception:
            verdict = Verdict(0, [traceback.format_exc()])
        print(json.dumps(dataclasses.asdict(verdict)), file=answers, flush=True)


if __name__ == "__main__":
    main()
