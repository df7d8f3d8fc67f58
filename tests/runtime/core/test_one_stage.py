"""What a pipeline of one stage does beyond the plain model on a mini-batch in one piece: a few ops
on scalars and views, however many ops, buffers and parameters the stage has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from tiny_pipelines import WIDTH, NormWhole, norm_spec
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.core.random import SeededRandom

X = torch.randn(8, WIDTH)


class Ops(TorchDispatchMode):
    """Counts the ops that run, and those of them that make as much as a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.all: Counter[str] = Counter()
        self.large: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        self.all[str(func)] += 1
        if "detach" not in str(func):  # shares the memory
            made = (item for item in tree_leaves(returned) if isinstance(item, torch.Tensor))
            sizes = [tensor.untyped_storage().size() for tensor in made]
            self.large[str(func)] += max(sizes, default=0) >= 4 * X.numel()
        return returned


def ops_of(call: Callable[[], object]) -> Ops:
    call()
    with Ops() as found:
        call()
    return found


def test_a_step_adds_a_few_small_ops() -> None:
    model = NormWhole()
    pipe = Pipeline(norm_spec(1, microbatches=1), None, transport="local")

    expected = ops_of(lambda: model.loss(model(X)).backward())
    found = ops_of(lambda: pipe.step(X))

    assert (found.large - expected.large).total() == 0, found.large - expected.large
    assert (found.all - expected.all).total() <= 15, found.all - expected.all


def test_inference_adds_no_op_but_views() -> None:
    model = NormWhole().eval()
    pipe = Pipeline(norm_spec(1, microbatches=1), None, transport="local").eval()

    expected = ops_of(lambda: torch.no_grad()(model)(X))
    found = ops_of(lambda: pipe(X))

    assert set(found.all - expected.all) <= {"aten.detach.default"}


def test_only_draws_are_seen_by_a_dispatch_mode(monkeypatch) -> None:
    """Functional dropout, a module's and the loss's: three ops in a step, none of them seen."""
    seen = []
    original = SeededRandom.__torch_dispatch__

    def noted(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(SeededRandom, "__torch_dispatch__", noted)
    pipe = Pipeline(norm_spec(1, microbatches=1), None, transport="local")

    first = pipe.step(X)
    pipe.rewind()
    again = pipe.step(X)

    assert torch.equal(first, again)
    assert not torch.equal(first, pipe.step(X))
    assert seen == []
