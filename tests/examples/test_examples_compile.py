"""Every example compiles, is validated, and trains as a pipeline to the plain loop's weights."""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path

import forked
import pytest
import torch
from small_examples import SMALL, Size, Small, load, loss_of, split
from torch import Tensor
from torch.utils._pytree import tree_map
from train_package import train

from gpipe_compiler.cluster import DEFAULT_HOST, IN_PROCESS, Cluster
from gpipe_compiler.compile import CompileOptions, emit, plan, trace_subject
from gpipe_compiler.compile import compile as compile_package
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import Policy
from gpipe_compiler.runtime.core.random import SeededRandom
from gpipe_compiler.runtime.spec import ScheduleKind

MICROBATCHES = 4
STEPS = 3
LEARNING_RATE = 0.05
TOLERANCE = 1e-9
"""Of a tensor's largest element, after `STEPS` steps in fp64. Sums in another order are off by
1e-16 at first, and training with BatchNorm over two samples multiplies that; a term dropped from
one gradient moves a weight by a hundredth."""
FP32_TOLERANCE = 1e-6
"""Where the loss is computed in fp32."""

CLUSTER = Cluster.of(DEFAULT_HOST, IN_PROCESS)
"""Not this machine as it is measured at the moment, so that cuts are the same every day."""

FEW = {
    (2, ScheduleKind.GPIPE),
    (4, ScheduleKind.ONE_F_ONE_B),
    (4, ScheduleKind.INTERLEAVED),
    (2, ScheduleKind.ZB_H1),
    (4, ScheduleKind.ZBV),
}
"""Every schedule and every number of stages once; the others are slow as they are many."""

ONE = {(4, ScheduleKind.ZBV)}
"""Of the larger examples."""

NONE: set[tuple[int, ScheduleKind]] = set()
"""Of the examples that take long to cut."""

QUICK = {Size.SMALL: FEW, Size.LARGER: ONE, Size.WIDE: NONE}

every_pipeline = pytest.mark.parametrize(
    ("small", "stages", "schedule"),
    [
        pytest.param(
            small,
            stages,
            schedule,
            marks=() if (stages, schedule) in QUICK[small.size] else pytest.mark.slow,
            id=f"{small}-K{stages}-{schedule.value}",
        )
        for small, stages, schedule in itertools.product(SMALL, (2, 4), ScheduleKind)
    ],
)

State = dict[str, Tensor]


def in_fp64(nest: object) -> object:
    """The same nest with its floating tensors in fp64."""
    return tree_map(
        lambda leaf: (
            leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
        ),
        nest,
    )


def subject_of(small: Small, *, fp64: bool = False) -> Subject:
    """The example as the command would load it, or in fp64."""
    example = small.load()
    inputs, target = in_fp64(small.batch()) if fp64 else small.batch()
    model = example.build_model(**small.model)
    args, kwargs = inputs if isinstance(inputs, tuple) else ((inputs,), {})
    if isinstance(inputs, dict):
        args, kwargs = (), inputs
    return Subject(
        name=small.name,
        model=model.double() if fp64 else model,
        args=args,
        kwargs=kwargs,
        target=target,
        loss_fn=getattr(example, "loss_fn", None),
    )


def small_named(name: str) -> Small:
    """The small example of this name."""
    return next(small for small in SMALL if small.name == name)


@functools.cache
def graph_of(small_name: str) -> Graph:
    """The example's graph, traced once for all the pipelines that are cut out of it."""
    return trace_subject(subject_of(small_named(small_name), fp64=True))


@functools.cache
def plain_training(small_name: str) -> tuple[list[float], State]:
    """Losses and final state of the plain loop over micro-batches."""
    small = small_named(small_name)
    example = small.load()
    model = example.build_model(**small.model).double().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    inputs, target = in_fp64(small.batch())
    parts = list(zip(split(inputs, MICROBATCHES), split(target, MICROBATCHES), strict=True))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for microbatch, (some_inputs, some_target) in enumerate(parts):
            with SeededRandom(seed=0, step=step, microbatch=microbatch, numbers=()):
                loss = loss_of(example, model, some_inputs, some_target) / MICROBATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict()


def assert_equals_plain_training(small: Small, losses: list[float], state: State) -> None:
    """The losses of the plain loop, and its state under the same names."""
    expected_losses, expected = plain_training(small.name)
    tolerance = FP32_TOLERANCE if small.fp32_loss else TOLERANCE
    far = {}
    for name, tensor in expected.items():
        distance = (tensor.double() - state[name].double()).abs().max().item()
        if distance > tolerance * max(1.0, tensor.abs().max().item()):
            far[name] = distance

    assert expected_losses == pytest.approx(losses, rel=tolerance)
    assert expected.keys() == state.keys()
    assert far == {}


def written(small: Small, stages: int, schedule: ScheduleKind, folder: Path) -> tuple[Path, int]:
    """A package that has not been validated, and how many devices it is planned for."""
    made = plan(
        graph_of(small.name),
        stages=stages,
        microbatches=MICROBATCHES,
        policy=Policy(schedule=schedule),
        cluster=CLUSTER,
    )
    package = folder / f"{small.name}_{schedule.name.lower()}_x{stages}"
    emit(made, package)
    return package, len(made.orders)


def train_in_processes(
    package: Path, batches: list[tuple[object, object]], ranks: int
) -> tuple[list[float], State]:
    """What `train_package.py` finds in `ranks` processes."""
    result = package.with_suffix(".result")
    torch.save(batches, package.with_suffix(".batches"))
    script = Path(__file__).with_name("train_package.py")
    command = [script, package, package.with_suffix(".batches"), LEARNING_RATE, result]
    finished = forked.run(command, ranks=ranks)

    assert finished.returncode == 0, finished.stderr[-3000:]
    return torch.load(result)


@every_pipeline
def test_trains_on_threads_to_the_weights_of_the_plain_loop(
    small: Small, stages: int, schedule: ScheduleKind, tmp_path: Path
) -> None:
    package, _ = written(small, stages, schedule, tmp_path)
    losses, state, _ = train(package, [in_fp64(small.batch())] * STEPS, LEARNING_RATE)

    assert_equals_plain_training(small, losses, state)


@pytest.mark.parametrize(
    ("name", "stages", "ranks", "schedule"),
    [
        ("transformer", 4, 2, ScheduleKind.ONE_F_ONE_B),
        ("inputs", 2, 2, ScheduleKind.GPIPE),
    ],
)
def test_trains_in_processes_to_the_weights_of_the_plain_loop(
    name: str, stages: int, ranks: int, schedule: ScheduleKind, tmp_path: Path
) -> None:
    """Two of the combinations, one of them with two stages in each process."""
    small = small_named(name)
    package, _ = written(small, stages, schedule, tmp_path)

    trained = train_in_processes(package, [in_fp64(small.batch())] * STEPS, ranks)

    assert_equals_plain_training(small, *trained)


@pytest.mark.slow
@every_pipeline
def test_compiles_validates_and_trains_in_processes(
    small: Small, stages: int, schedule: ScheduleKind, tmp_path: Path
) -> None:
    """The whole matrix, as a user would meet it."""
    options = CompileOptions(
        stages=stages, microbatches=MICROBATCHES, schedule=schedule, cluster=CLUSTER
    )
    package = tmp_path / f"{small.name}_{schedule.name.lower()}_torchrun_x{stages}"
    compiled = compile_package(subject_of(small), options, package)

    assert compiled.validation is not None
    assert compiled.validation.passed, str(compiled.validation)

    fp64, ranks = written(small, stages, schedule, tmp_path)
    trained = train_in_processes(fp64, [in_fp64(small.batch())] * STEPS, ranks)

    assert_equals_plain_training(small, *trained)


def test_validation_finds_the_package_equal_to_the_model(tmp_path: Path) -> None:
    """One compile with everything in it; the others are in the slow matrix."""
    small = small_named("inception")
    options = CompileOptions(stages=4, microbatches=MICROBATCHES, cluster=CLUSTER)
    compiled = compile_package(subject_of(small), options, tmp_path / "validated_x4")

    assert compiled.validation is not None
    assert compiled.validation.passed, str(compiled.validation)
    assert (tmp_path / "validated_x4" / "run.py").exists()


def test_four_stages_learn_to_read_digits(tmp_path: Path) -> None:
    """Over 95% of the test set, with the weights that the plain loop comes to."""
    pytest.importorskip("sklearn")
    digits = load("mlp_digits")
    subject = Subject(
        "digits",
        digits.build_model(),
        (digits.example_inputs(),),
        target=digits.example_target(),
        loss_fn=digits.loss_fn,
    )
    made = plan(trace_subject(subject), stages=4, microbatches=MICROBATCHES, cluster=CLUSTER)
    emit(made, tmp_path / "digits_x4")
    sys.path.insert(0, str(tmp_path))
    try:
        from digits_x4 import Pipeline
    finally:
        sys.path.remove(str(tmp_path))

    model = digits.build_model()
    plain = digits.make_optimizer(model.parameters())
    with Pipeline() as pipe:
        optimizer = digits.make_optimizer(pipe.parameters())
        for _ in range(digits.EPOCHS):
            for pixels, labels in digits.train_data():
                optimizer.zero_grad()
                plain.zero_grad()
                pipe.step(pixels, labels)
                digits.loss_fn(model(pixels), labels).backward()
                optimizer.step()
                plain.step()
        pixels, labels = digits.test_set()
        accuracy = (pipe.eval()(pixels).argmax(dim=1) == labels).float().mean()
        state = pipe.state_dict()

    assert accuracy > 0.95
    assert state.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=5e-6)
