"""What the arguments of gpipe-compile ask for, as the values that the compiler takes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from gpipe_compiler.cli.values import AUTO
from gpipe_compiler.cluster import Cluster, devices_named, is_host, read_cluster
from gpipe_compiler.errors import UsageError
from gpipe_compiler.options import (
    Auto,
    Calibration,
    CompileOptions,
    Constraints,
    Objective,
    RematChoice,
)
from gpipe_compiler.runtime.spec import (
    BatchNorm,
    OptimizerKind,
    Precision,
    ScheduleKind,
    WeightSharding,
)
from gpipe_compiler.runtime.wording import printable
from gpipe_compiler.targets import of_file

T = TypeVar("T")


def options_of(arguments: argparse.Namespace, stages: int | Auto) -> CompileOptions:
    """The options.

    Raises:
        UsageError: for devices or a calibration that there are not, and what cannot be together.
    """
    shard = arguments.shard or WeightSharding.NONE.value
    return CompileOptions(
        stages=stages,
        microbatches=arguments.microbatches,
        schedule=schedule_of(arguments),
        loss_over_batch=arguments.loss_over == "batch",
        remat=RematChoice(arguments.remat),
        batchnorm=BatchNorm(arguments.batchnorm),
        precision=Precision(arguments.precision),
        training=arguments.mode == "train",
        measured=arguments.cost == "measured",
        cluster=cluster_asked(arguments),
        validate=not arguments.no_validate,
        force=arguments.force,
        seed=arguments.seed,
        per_microbatch=arguments.per_microbatch,
        objective=Objective(arguments.objective),
        constraints=Constraints(
            tuple(arguments.pin), tuple(arguments.keep_together), tuple(arguments.split_at)
        ),
        data_parallel=arguments.data_parallel,
        sharding=Auto.AUTO if shard == AUTO else WeightSharding(shard),
        optimizer=OptimizerKind(arguments.optimizer) if arguments.optimizer else None,
        must_fit=arguments.memory is not None,
        search_s=arguments.search_time,
        in_place=not arguments.no_inplace,
        cut_inside=arguments.cut_inside,
        prove=arguments.prove,
        calibration=_calibration(arguments.calibration, arguments.target, arguments.model),
        remedies=arguments.remedies,
        target=of_file(arguments.model) or arguments.target,
        print_after=tuple(arguments.print_after),
        pass_options=tuple(arguments.pass_option),
        words=arguments.words,
    )


def schedule_of(arguments: argparse.Namespace) -> ScheduleKind | Auto:
    return Auto.AUTO if arguments.schedule == AUTO else ScheduleKind(arguments.schedule)


def _calibration(file: Path | None, target: str, model: str) -> Calibration | None:
    """What `run.py bench --calibrate` has written.

    Raises:
        UsageError: for a file that is none, or stages that are not torch's.
    """
    if file is None:
        return None
    if of_file(model) is not None or target != "torch":
        raise UsageError("--calibration is for stages of torch")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        factors = float(found["forward"]), float(found["backward"])
        if not all(0 < factor < math.inf for factor in factors):
            raise ValueError("a factor is not above 0")
        return Calibration(*factors, printable(str(found["measured"])))
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError) as error:
        raise UsageError(
            f"{file} is no calibration: {type(error).__name__}: {error}",
            hint="run.py bench --calibrate FILE writes one",
        ) from error


def cluster_asked(arguments: argparse.Namespace) -> Cluster:
    """The cluster that these arguments describe.

    Raises:
        UsageError: for devices that are not known, or a file that describes no cluster.
    """
    if arguments.cluster is None:
        cluster = devices_named(arguments.devices)
    else:
        cluster = read_cluster(arguments.cluster)
    linked = cluster.with_links(arguments.bandwidth, arguments.latency)
    # Of ops from elsewhere nothing is known of what runs them.
    least = 0 if str(arguments.model).endswith(".json") else arguments.memory
    return _of_tensors(linked.with_memory(arguments.memory), least)


def _of_tensors(cluster: Cluster, size: int | None) -> Cluster:
    """A cluster whose processors count tensors alone, where `size` bytes are less than a process
    takes before it holds any; None for no such limit."""
    if size is None:
        return cluster
    devices = tuple(
        dataclasses.replace(each, kept_free=0) if is_host(each) and size <= each.kept_free else each
        for each in cluster.devices
    )
    return dataclasses.replace(cluster, devices=devices)


def options_given(
    arguments: argparse.Namespace, parser: argparse.ArgumentParser, names: Iterable[str]
) -> list[str]:
    """Those of some options, as they are typed, that do not have the parser's defaults."""
    given = (name for name in names if getattr(arguments, name) != parser.get_default(name))
    return [typed(name) for name in given]


def typed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def each_once(option: str, pairs: Sequence[tuple[str, T]]) -> dict[str, T]:
    """What is said of each name; raises UsageError where that is two things."""
    found: dict[str, T] = {}
    for name, said in pairs:
        if found.setdefault(name, said) != said:
            raise UsageError(f"{option} says {found[name]} and {said} of {name}")
    return found
