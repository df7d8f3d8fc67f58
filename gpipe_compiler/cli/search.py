"""The arguments of gpipe-compile that say what to look for, and what the stages keep to."""

from __future__ import annotations

import argparse
import math
import re

from gpipe_compiler.options import CUT_INSIDE, Auto, Constraints, Objective
from gpipe_compiler.runtime.core.typed import positive, shown
from gpipe_compiler.runtime.spec import OptimizerKind, ScheduleKind, WeightSharding


def setting_arguments(parser: argparse.ArgumentParser) -> None:
    """How many stages and micro-batches, in which order of work; each may be `auto`."""
    parser.add_argument(
        "-k",
        "--stages",
        metavar="K",
        type=count_or_auto,
        help="stages to cut it into; auto: as many as are best on the devices there are",
    )
    parser.add_argument(
        "-m",
        "--microbatches",
        metavar="M",
        type=count_or_auto,
        help="micro-batches in a mini-batch; auto: as many as are best (default: the most that "
        "divide the batch, up to 4 for every stage, of two samples or more for BatchNorm)",
    )
    parser.add_argument(
        "--schedule",
        choices=[*(kind.value for kind in ScheduleKind), Auto.AUTO.value],
        default=ScheduleKind.GPIPE.value,
        help="the order of the work; auto: the best one (default %(default)s)",
    )


def sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Several plans of one trace, in place of a package."""
    group = parser.add_argument_group("plans to compare (nothing is written)")
    group.add_argument(
        "--sweep",
        metavar="N,N,...",
        type=_counts,
        default=(),
        help="in place of --stages, plans for so many devices each, as a table: 1,2,4,8",
    )
    group.add_argument(
        "--batch",
        choices=[Auto.AUTO.value],
        help="auto: mini-batches of twice and twice the example's, up to the first that does not "
        "fit (or half and half, down to the first that does)",
    )


def _counts(text: str) -> tuple[int, ...]:
    """Numbers, each once, in their order."""
    try:
        return tuple(dict.fromkeys(positive(part.strip()) for part in text.split(",")))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}: write numbers, such as 1,2,4,8") from error


def search_arguments(parser: argparse.ArgumentParser) -> None:
    """What is to be short, what else counts, and what the user knows better."""
    group = parser.add_argument_group(
        "what is looked for (with auto for stages, microbatches or schedule, the fastest settings "
        "that fit; --remat auto then compares all of none, full and auto)"
    )
    group.add_argument(
        "--objective",
        choices=[objective.value for objective in Objective],
        default=Objective.STEP.value,
        help="what the stages are to make short: the simulated step, or the longest stage with "
        "its transfers (default %(default)s)",
    )
    group.add_argument(
        "--cut-inside",
        metavar="SHARE",
        type=_share,
        default=CUT_INSIDE,
        help="of all cuts that take at most this share more than the best, the one is taken that "
        "opens the fewest modules of the model; 0: the best, which may cut anywhere "
        "(default %(default)s)",
    )
    group.add_argument(
        "--prove",
        action="store_true",
        help="go on until the cut is proved to be the best, or it is known how far it may be from "
        "that, which may take minutes (default: a bound that costs no time)",
    )
    group.add_argument(
        "--optimizer",
        choices=[kind.value for kind in OptimizerKind],
        help="whose memory and time count (default: the file's make_optimizer(), else sgd)",
    )
    group.add_argument(
        "--data-parallel",
        metavar="R",
        type=positive,
        default=1,
        help="replicas of the pipeline that share every mini-batch (default %(default)s)",
    )
    group.add_argument(
        "--shard",
        nargs="?",
        const=Auto.AUTO.value,
        choices=[Auto.AUTO.value, *(k.value for k in WeightSharding if k.described)],
        help="let replicas divide what the optimizer remembers, and the weights between steps "
        "(optimizer), or weights and gradients always (full); auto, as without a word, is the "
        "first, or the second where only that fits",
    )
    _constraint_arguments(group)


def _constraint_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--pin",
        metavar="MODULE=STAGE",
        action="append",
        type=_pin,
        default=[],
        help="all ops of this module (or this op, or value) lie in this stage, from 0, or from "
        "the end as -1; may be repeated, as the next two",
    )
    group.add_argument(
        "--keep-together",
        metavar="MODULE",
        action="append",
        default=[],
        help="all ops of this module lie in one stage",
    )
    group.add_argument(
        "--split-at",
        metavar="MODULE",
        action="append",
        default=[],
        help="a new stage begins with this module",
    )


def constraints_of(arguments: argparse.Namespace) -> Constraints:
    return Constraints(
        tuple(arguments.pin), tuple(arguments.keep_together), tuple(arguments.split_at)
    )


def sharding_of(arguments: argparse.Namespace) -> WeightSharding | Auto:
    """What `--shard` says."""
    if arguments.shard == Auto.AUTO.value:
        return Auto.AUTO
    return WeightSharding(arguments.shard or WeightSharding.NONE.value)


def schedule_of(arguments: argparse.Namespace) -> ScheduleKind | Auto:
    named: str = arguments.schedule
    return Auto.AUTO if named == Auto.AUTO.value else ScheduleKind(named)


def count_or_auto(text: str) -> int | Auto:
    """A number of things, or `auto`."""
    if text == Auto.AUTO.value:
        return Auto.AUTO
    try:
        return positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, and it is not auto") from error


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share < math.inf:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no share, such as 0.03")
    return share


def _pin(text: str) -> tuple[str, int]:
    module, _, stage = text.rpartition("=")
    if not module or not re.fullmatch(r"-?\d{1,9}", stage, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} pins nothing: write MODULE=STAGE, such as encoder.0=1 or head=-1"
        )
    return module, int(stage)
