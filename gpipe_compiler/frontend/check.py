"""Compares a graph with the eager model.

What is compared, in train mode (same random seed) and in eval mode: outputs, loss, buffers
afterwards, and the names of the state; in train mode the gradient of every parameter and
floating-point input too. Models on meta have no numbers: shapes and types are compared instead.

Each mode is compared for 2 and for 3 samples, or 4 where the model takes no 3; then with other
sizes of dimensions that are free too, near the example's, or larger ones where the model takes
none of these. Less is done where a comparison takes over a second: train mode is compared for 2
samples, eval mode for the other size. A model without batched inputs is compared as it is called,
and one that takes 2 samples only is compared for these, with a warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from gpipe_compiler.errors import GPipeCompilerError, ModelError, Notice, summary
from gpipe_compiler.frontend.comparable_runs import (
    EvenDraws,
    different,
    host_state,
    is_noise,
    larger_batch,
    may_be_rounding,
    may_be_tried,
    widening,
    with_other_weights,
)
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.host_draws import refuse_host_draws, refuse_seeding
from gpipe_compiler.frontend.python_state import buffer_assigned
from gpipe_compiler.frontend.recompute import activations_kept, refuse_other_recomputation
from gpipe_compiler.frontend.repeated_calls import refuse_remembered
from gpipe_compiler.frontend.run_results import (
    BUFFER,
    SEED,
    ComparedRun,
    inputs_of,
    run_graph,
    run_model,
)
from gpipe_compiler.frontend.signature import Signature
from gpipe_compiler.frontend.state import isolated
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.surroundings import ambient, kind_of
from gpipe_compiler.frontend.trace_errors import BOTH_WAYS, by_values
from gpipe_compiler.frontend.user_code import RUNS_ON_FEWER, raised
from gpipe_compiler.ir import Graph, StateKind
from gpipe_compiler.ir.branches import required_lines
from gpipe_compiler.ir.sizes import SMALLEST, SampleRule, least_sizes, other_sizes
from gpipe_compiler.runtime.core.precision import lower_dtype
from gpipe_compiler.runtime.core.required import BranchError

_BATCHES = ((2,), (3, 4))
"""In how many samples every input comes: in each place the first number that the model takes."""

_INPUTS = ((True, True), (True, False), (False, True))
"""Whether inputs require gradients, and whether they are leaves: the first that the model takes."""

_FEWER_BITS = frozenset({torch.float32, torch.bfloat16, torch.float16})

_SLOW_S = 1.0
"""Processor seconds of a comparison from which on each mode is compared at one size only: train
mode at the first, eval mode at the second. The package is compared at others besides."""


def differences(graph: Graph, subject: Subject) -> list[str]:
    """How the graph differs from the model, as `compared` finds it."""
    return compared(graph, subject)[0]


def compared(graph: Graph, subject: Subject) -> tuple[list[str], Graph]:
    """How the graph differs from the model, in words; and the graph, which now says for which
    numbers of samples it is not the model, or was not compared.

    The comparison ends with the first mode and size that differ. The subject's model stays as it
    is.

    Raises:
        ModelError: when the model itself raises at the first size.
    """
    found = list(_state_differences(graph, subject))
    sizes = _BATCHES if any(source.batched for source in graph.inputs) else ((1,),)
    others = other_sizes(graph.sizes, graph.requires)
    slow, untried = False, None
    modes = (True, False) if subject.training else (False,)
    entries = [Entry(subject, mode, reduces=False) for mode in modes]
    for entry in entries:
        training = entry.training
        # Auxiliary outputs of train mode are no outputs of the graph: only the loss uses them.
        outputs = entry.structure == entries[-1].structure
        longest = 0.0
        for place, batches in enumerate(sizes):
            if slow and place == int(training):
                continue
            started = time.process_time()
            freed = (entry.signature.at(graph.inputs, free) for free in others if place)
            examples = (*freed, entry.signature)
            found.extend(_compare(graph, subject, entry, batches, examples, outputs))
            entry.signature = examples[-1]
            longest = max(longest, time.process_time() - started)
            slow = slow or longest > _SLOW_S
            if found:
                return found, graph
        if training:
            refuse_late_checkpoints(graph, subject, entry, sizes[0][0])
        few, seconds = max(sizes[-1]), longest
        many = larger_batch(few, longest) if len(sizes) > 1 else 0
        tried: dict[int, SampleRule | None] = {many: None, **_near(graph.sample_rules)}
        for samples in sorted(tried.keys() - {0, SMALLEST}):
            rule = tried[samples]
            # The package runs the example in any case, and would refuse it beyond a limit.
            known = rule is None or rule.samples <= entry.signature.batch_size
            if not (known or samples == many) and not may_be_tried(samples, few, seconds):
                untried = rule
                break
            larger = (samples, *sizes[0])  # what takes no more is compared again as before
            started = time.process_time()
            try:
                found.extend(_compare(graph, subject, entry, larger, (entry.signature,), outputs))
            except ModelError:
                if known:
                    raise
                untried = rule  # the graph is none of so many
                break
            few, seconds = samples, time.process_time() - started
            if found:
                return found, graph
    graph = graph.replace(untried=untried, alone=_alone(graph, subject, entries))
    if slow or subject.training or entries[-1].states.on_meta:
        return found, graph
    return found, graph.replace(least=_least(graph, subject, entries[-1]))


def _least(graph: Graph, subject: Subject, entry: Entry) -> dict[str, int]:
    """The sizes that may be below SMALLEST, and down to what, as is tried: a decoder that goes on
    from what it has seen is given one token, and has seen nothing at first."""

    def fits(numbers: Mapping[str, int]) -> bool:
        signature = entry.signature.at(graph.inputs, {**examples, **numbers})
        try:
            return not any(_compare(graph, subject, entry, (2,), (signature,), True))
        except GPipeCompilerError:  # the model does not take it, or another
            return False
        finally:
            entry.signature = own

    own, examples = entry.signature, {size.name: size.example for size in graph.sizes}
    return least_sizes(graph.sizes, graph.requires, fits)


def _near(rules: Sequence[SampleRule]) -> dict[int, SampleRule | None]:
    """Numbers of samples to try for the sake of rules.

    At the limit itself what a rule decides is often the same, as in `max(len(x), 500)`. What tells
    a single sample from several is not among them: several are always compared.
    """
    told = (rule for rule in rules if rule.samples > SMALLEST)
    return {rule.samples + more: rule for rule in told for more in (1, 0)}


def _alone(graph: Graph, subject: Subject, entries: Sequence[Entry]) -> dict[bool, SampleRule]:
    """The rule by which the model computes something else of one sample than the graph, by mode.

    With other weights: those that a normalisation begins with hide it.
    """
    rule = next((rule for rule in graph.sample_rules if rule.samples == SMALLEST), None)
    if rule is None:
        return {}
    moved = with_other_weights(subject.model)
    if moved is not None:
        subject = dataclasses.replace(subject, model=moved)
        weights = dict(moved.named_parameters(remove_duplicate=False))
        graph = graph.replace(tensors={n: weights.get(n, t) for n, t in graph.tensors.items()})
    found = {}
    for entry in entries:
        outputs = entry.structure == entries[-1].structure
        with contextlib.suppress(ModelError):  # it takes no single sample
            if any(_compare(graph, subject, entry, (1,), (entry.signature,), outputs)):
                found[entry.training] = rule
    return found


def _state_differences(graph: Graph, subject: Subject) -> Iterator[str]:
    model = subject.model
    own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    kept = {n for n, state in graph.state.items() if state.kind is not StateKind.CONSTANT}
    for name in sorted(own ^ kept):
        where = "the model only" if name in own else "the graph only"
        yield f"the state {name} is in {where}"


def _compare(
    graph: Graph,
    subject: Subject,
    entry: Entry,
    batches: Sequence[int],
    examples: Sequence[Signature],
    outputs: bool,
) -> Iterator[str]:
    """The differences in one mode, for the first of these examples and batch sizes that the model
    takes."""
    around = ambient(lower_dtype(graph.traced_in), kind_of(entry))
    with torch.random.fork_rng(), around:
        drawn = host_state()
        run = _first_run(graph, subject, entry, batches, examples)
        if run is None:
            return
        batch, expected = run
        if host_state() != drawn:
            refuse_host_draws(entry, batch)
        if expected.remembers and not entry.states.on_meta:
            _refuse_remembered(subject, entry, batch)
        mode = f"{'train' if entry.training else 'eval'} mode, batch {batch}"
        try:
            actual = run_graph(graph, entry, batch)
        except ModelError:
            raise
        except BranchError as error:
            raise by_values(required_lines(graph.ops)[error.line], BOTH_WAYS) from error
        except Exception as error:  # a graph may call anything
            yield f"{mode}: the graph raises {summary(error)}"
            return
        found = dict(different(expected.results, actual.results))
        if found and may_be_rounding(found, expected.results, actual.results):
            again = _in_double(graph, subject, entry, batch)
            noise = again is None and is_noise(found, expected.results, actual.results)
            found = {} if noise else found if again is None else again
        if found and not entry.states.on_meta:
            refuse_seeding(subject.model, entry, batch)
    for name, text in found.items():
        if name in expected.assigned:
            one, other = (run.results[name] for run in (expected, actual))
            resized = one is not None and other is not None and one.shape != other.shape
            own = name.removeprefix(BUFFER)
            raise buffer_assigned(graph, own, f"{mode}: {text}", resized=resized)
        if outputs or not name.startswith("output"):
            yield f"{mode}: {text}"


def refuse_late_checkpoints(graph: Graph, subject: Subject, entry: Entry, batch: int) -> None:
    """Raises a ModelError where a checkpoint recomputes another thing than it ran.

    On meta nothing tells.
    """
    checkpointed = any(op.checkpoint for op in graph.ops)
    if not checkpointed or not entry.has_loss or entry.states.on_meta:
        return
    around = ambient(lower_dtype(graph.traced_in), kind_of(entry))
    with torch.random.fork_rng(), around, EvenDraws():
        refuse_other_recomputation(
            lambda keeping: run_model(graph, subject, entry, batch, keeping=keeping).results
        )


def _refuse_remembered(subject: Subject, entry: Entry, batch: int) -> None:
    """Raises a ModelError where what forward leaves in attributes decides what it computes."""

    def fresh() -> torch.nn.Module:
        entry.model = isolated(subject.model).train(entry.training)
        return entry.model

    def call(times: float) -> Sequence[Any]:
        torch.manual_seed(SEED)
        _, inputs = inputs_of(entry, batch, double=False)
        given = [x * times if x.is_floating_point() else x for x in inputs]
        with torch.set_grad_enabled(entry.has_loss), activations_kept():
            return tuple(entry(*given))

    refuse_remembered(fresh, entry.loss_fn, subject.began, call)


def _first_run(
    graph: Graph,
    subject: Subject,
    entry: Entry,
    batches: Sequence[int],
    examples: Sequence[Signature],
) -> tuple[int, ComparedRun] | None:
    """The first batch size that the model takes, and what it gives; None where it takes none.

    The entry is left with the example of which it took that.

    A model that does not take inputs that are leaves, or have gradients, is given others.

    Raises:
        ModelError: when there is but one size to try, and the model raises.
    """
    tried = itertools.product(examples, batches, _INPUTS)
    for entry.signature, batch, (entry.input_gradients, entry.leaf_inputs) in tried:
        try:
            return batch, run_model(graph, subject, entry, batch)
        except GPipeCompilerError:
            raise
        except Exception as error:  # whatever the user's code raises
            last_one = entry.signature is examples[-1] and not entry.input_gradients
            if len(batches) == 1 and last_one:
                entry.run_example()  # raises what is wrong with that
                on = "in a training step " if entry.has_loss and entry.training else ""
                on += f"with a batch of {batch} samples made from the example inputs"
                raise raised("the model", error, on, RUNS_ON_FEWER) from error
            last = summary(error)
    problem = (
        f"the model takes no batch of {' or '.join(map(str, batches))} samples ({last}), so that "
        "its graph was compared with it at one batch size only"
    )
    warnings.warn(Notice(problem), stacklevel=2)
    return None


def _in_double(graph: Graph, subject: Subject, entry: Entry, batch: int) -> dict[str, str] | None:
    """What differs in double precision: throughout, or but for the casts to fewer bits, where model
    and graph do not run so; None where they do not run in that either."""
    for around in (widening(_FEWER_BITS), contextlib.nullcontext()):
        try:
            with around:
                expected = run_model(graph, subject, entry, batch, double=True).results
                actual = run_graph(graph, entry, batch, double=True).results
        except Exception:  # what is written for fp32 may do anything in another type
            continue
        found = dict(different(expected, actual))
        return {} if may_be_rounding(found, expected, actual) else found
    return None
