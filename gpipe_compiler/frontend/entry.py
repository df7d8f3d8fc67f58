"""The module that is traced in the model's place: flat tensors in, flat tensors and a loss out.

No trace sees nested arguments, optional outputs and loss functions: `Entry.forward` takes the
tensors of `Graph.inputs` in order and returns a list of tensors, first the loss where there is one,
then the tensors of the model's output.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpipe_compiler.errors import GPipeCompilerError, ModelError
from gpipe_compiler.frontend.batch_proof import row_dim
from gpipe_compiler.frontend.deciding import deciding
from gpipe_compiler.frontend.missing_loss import no_loss
from gpipe_compiler.frontend.modules import turned_into_batchnorm
from gpipe_compiler.frontend.noted_sizes import NotedSizes
from gpipe_compiler.frontend.probing import (
    Dims,
    check_scalar,
    has_numbers,
    on_meta,
    reduction_of,
    samples_of,
    settle_numbers,
    slot_of_loss,
    stand_ins,
    sum_of_squares,
    unwritten,
    user_call,
    with_numbers,
)
from gpipe_compiler.frontend.signature import read_signature
from gpipe_compiler.frontend.state import isolated, put_tensors, state_table
from gpipe_compiler.frontend.structure import (
    Template,
    classes_in,
    describe,
    fill,
    has_slots,
    map_tensors,
    pick,
)
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.trace_fakes import TraceFakes
from gpipe_compiler.frontend.types_of_python import plain_types
from gpipe_compiler.frontend.user_code import RUNS_ALONE, line_of_forward, raised
from gpipe_compiler.ir import Argument, Reduction
from gpipe_compiler.ir.interpret import recurrent_forms
from gpipe_compiler.options import LossChoice
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.core.nest import items_of
from gpipe_compiler.runtime.spec import OutputClass, Unreturned
from gpipe_compiler.runtime.wording import listed

_PROBE_SAMPLES = 4
"""Enough to hold the loss of a batch against those of its halves."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a run of a model in one mode shows of it.

    Attributes:
        structure: what the model returns; slots number its tensors.
        classes: of the model's own, in it.
        own_loss: the slot of the loss that the model itself returns.
        squares: the slots whose squares are the loss, where that is asked for.
        reduction: how the loss of a batch follows from those of its parts; None where that has not
            been looked for.
    """

    structure: Template
    classes: tuple[OutputClass, ...]
    own_loss: int | None = None
    squares: tuple[int, ...] = ()
    reduction: Reduction | None = Reduction.MEAN


class Entry(nn.Module):
    """The model with its loss, on a copy of the model.

    Attributes:
        model: a copy that shares the parameters, in train or eval mode as asked.
        loss_fn: the user's, where it is used.
        has_loss: whether the first tensor that `forward` returns is a loss.
        signature: the inputs.
        states: the original model's parameters and buffers; those of a loss module are not in it.
        training: as for every module, whether it is in train mode.
        input_gradients: whether the model takes floating inputs that require gradients.
        leaf_inputs: whether it takes them as leaves, to which nothing may be written.
        known: what a run of the model has told.
        must: dimensions of inputs that the model may not fix, such as `input_ids.1`.
        sizes: what is noted of sizes while it is traced with some of them free.
        keeps: as in the subject.
        left_out, notes: as for `deciding`.
    """

    sizes: NotedSizes | None = None
    notes: Callable[[torch.Tensor], None] | None = None
    left_out: Collection[int] = ()

    def __init__(self, subject: Subject, training: bool, *, reduces: bool = True) -> None:
        """The module to trace, in train or eval mode; the subject's model stays as it is.

        Args:
            reduces: whether to try the loss function, to know how losses combine. That takes
                seconds where there are many classes, and is known once a subject with that
                function is traced.

        Raises:
            ModelError: when the model or its loss function raises on the example inputs.
            TraceError: when the model cannot be copied.
        """
        super().__init__()
        states = state_table(subject.model, subject.initial)
        signature = read_signature(subject, on_meta=states.on_meta)
        self.model = isolated(subject.model, share_parameters=True).train(training)
        self.squared = subject.loss is LossChoice.SUM_OF_SQUARES
        self.loss_fn: Any = None if self.squared or not subject.training else subject.loss_fn
        if isinstance(self.loss_fn, nn.Module):
            _refuse_weights(self.loss_fn)
            self.loss_fn = isolated(self.loss_fn)
        self.training = training
        self.input_gradients, self.leaf_inputs = True, True
        self.has_loss = subject.training
        self.name = subject.name
        self.signature = signature
        self.must, self.keeps = subject.free.must, subject.keeps
        self.states = states
        known: Probe | None = subject.probes.get(training)
        if known is None or (reduces and known.reduction is None):
            with turned_into_batchnorm(self.model):
                known = subject.probes[training] = self._probe(subject, reduces)
        self.known = known

    @property
    def reduction(self) -> Reduction:
        """How the loss of a batch follows from those of its parts; the mean when in doubt."""
        if self.returns_loss and not self.states.on_meta:
            return self._own_reduction()
        return self.known.reduction or Reduction.MEAN

    @property
    def returns_loss(self) -> bool:
        """Whether the loss is one that the model itself returns."""
        return self.known.own_loss is not None and not self.squared

    def outputs(self, leaves: Sequence[Argument]) -> Argument:
        """What the model returns, the loss left out, given the list after the loss."""
        full = list(leaves)
        if self.known.own_loss is not None:
            full.insert(self.known.own_loss, None)
        return fill(self.structure, full)

    @property
    def structure(self) -> Template:
        """The structure of the outputs without the model's own loss."""
        if self.known.own_loss is None:
            return self.known.structure
        return {key: item for key, item in self.known.structure.items() if key != "loss"}

    def forward(self, *inputs: Any) -> list[Any]:
        """The loss, where there is one, then every tensor of the model's output."""
        if self.sizes is not None:
            self.sizes.begin(inputs, must=bool(self.must))
        args, kwargs, target = self.signature.rebuild(inputs)
        with deciding(self.keeps, self.left_out, self.notes):
            output = self.model(*args, **kwargs)
        if self.sizes is not None:
            pairs = zip(self.signature.inputs, inputs, strict=True)
            batched = (source.samples(tensor) for source, tensor in pairs if source.batched)
            settle_numbers(output, self.structure, next(batched, 1))
        leaves = pick(output, self.known.structure)
        if not self.has_loss:
            return leaves
        own = None if self.known.own_loss is None else leaves.pop(self.known.own_loss)
        if own is not None and not self.squared:
            return [own, *leaves]
        if self.loss_fn is not None:
            return [unwritten(leaves, self.loss_fn, output, target), *leaves]
        return [sum_of_squares([leaves[index] for index in self.known.squares]), *leaves]

    @contextlib.contextmanager
    def on_a_copy(self) -> Iterator[None]:
        """Calls inside run on a copy of the model, which they may change."""
        own = self.model
        self.model = isolated(own).train(self.training)
        try:
            yield
        finally:
            self.model = own

    def _probe(self, subject: Subject, reduces: bool) -> Probe:
        """Runs the model once, to know what it returns and how losses combine."""
        count = _PROBE_SAMPLES if self.signature.batch_size > 1 else 2
        output, target = self._probe_output(count)
        structure = self._with_numbers(describe(output, trains=self.has_loss), count)
        found = Probe(structure, tuple(classes_in(output)))
        if not self.has_loss:
            if not has_slots(structure):
                for _, item in items_of(structure, Unreturned):
                    raise self._no_container(item)
            return found
        leaves = pick(output, structure)
        if self.loss_fn is not None:
            reduction = self._loss_reduction(output, target, count, structure) if reduces else None
            return dataclasses.replace(found, reduction=reduction)
        own_loss = slot_of_loss(structure)
        if own_loss is not None:
            check_scalar(leaves.pop(own_loss), "the model returns as its loss")
        if not self.squared:
            if own_loss is None:
                raise no_loss(subject, output)
            return dataclasses.replace(found, own_loss=own_loss)
        squares = tuple(i for i, leaf in enumerate(leaves) if leaf.is_floating_point())
        if not squares:
            raise ModelError(
                "the model returns no floating-point tensor to square, so there is nothing to "
                "train",
                hint="offer loss_fn(output, target), or compile with --mode infer",
            )
        return dataclasses.replace(
            found, own_loss=own_loss, squares=squares, reduction=Reduction.SUM
        )

    def _with_numbers(self, structure: Template, count: int) -> Template:
        """The structure, its numbers that go with the samples told by other batches than that."""
        if not has_numbers(structure):
            return structure
        others = {}
        for samples in (count + 1, 2 * count):
            with contextlib.suppress(ModelError):
                output, _ = self._probe_output(samples)
                others[samples] = describe(output, trains=self.has_loss)
        return with_numbers(structure, count, others, line_of_forward(self.model))

    def _dims(self, output: object, count: int, structure: Template) -> tuple[Dims, Dims]:
        """The batch dimensions of the outputs for this number of samples, and of the targets.

        Where that of every input is 0, outputs with that many rows, and no other dimension of that
        size, have theirs there too.
        """
        inputs = self.signature.inputs
        of_target = [source.batch_dim for source in inputs if source.path[0] == "target"]
        leaves = pick(output, structure)
        first = [0 if x.ndim and x.shape[0] == count else None for x in leaves]
        elsewhere = any(source.batch_dim for source in inputs)
        sizes = [list(leaf.shape) for leaf in leaves if leaf.ndim]
        if not elsewhere and all(n[0] == count and count not in n[1:] for n in sizes):
            return first, of_target
        try:
            more = pick(self._probe_output(count + 1)[0], structure)
        except (ModelError, LookupError, AttributeError, TypeError):  # or another structure
            if elsewhere:
                raise
            return first, of_target
        pairs = zip(leaves, more, strict=True)
        return [row_dim(pair, (count, count + 1)) for pair in pairs], of_target

    def _probe_output(self, count: int) -> tuple[Any, Any]:
        """What the model returns for a batch, and the target: without arithmetic if possible.

        On fake tensors a large model takes no time; one that looks at its data runs for real.
        """
        samples = self.signature.samples(count)
        model = isolated(self.model)
        with torch.random.fork_rng(), torch.set_grad_enabled(self.has_loss):
            try:
                asked = plain_types(model.modules())
                with quiet(), recurrent_forms(), asked, TraceFakes() as mode:
                    if self.states.on_meta:
                        put_tensors(model, mode.from_tensor)
                    fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in samples]
                    args, kwargs, _ = self.signature.rebuild(fakes)
                    output = map_tensors(on_meta, model(*args, **kwargs))
                return output, self.signature.rebuild(samples)[2]
            except Exception:  # whatever the user's code raises; the run for real reports it
                args, kwargs, target = self.signature.rebuild(samples)
                try:
                    again = isolated(self.model)
                    output = user_call("the model", again, count, args, kwargs)
                except ModelError:
                    self.run_example()
                    raise
                return output, target

    def run_example(self) -> None:
        """Raises a ModelError when the model cannot even run on the example as it is."""
        args, kwargs, _ = self.signature.rebuild(self.signature.samples(self.signature.batch_size))
        try:
            isolated(self.model)(*args, **kwargs)
        except GPipeCompilerError:
            raise
        except Exception as error:  # whatever the user's code raises
            raise raised("the model", error, "on the example inputs", RUNS_ALONE) from error

    def _loss_reduction(
        self, output: object, target: object, count: int, structure: Template
    ) -> Reduction:
        """How the loss of an output follows from those of its halves."""
        dims = self._dims(output, count, structure)
        trees: tuple[object, object] = output, target
        if any(leaf.is_meta for leaf in pick(output, structure)):
            trees, count = stand_ins(trees, count, dims, structure)

        def loss(first: int, last: int) -> torch.Tensor:
            part, of_target = (
                samples_of(*pair, count, first, last) for pair in zip(trees, dims, strict=True)
            )
            with torch.random.fork_rng(), torch.no_grad():
                value = user_call(
                    "loss_fn", self.loss_fn, last - first, (part, of_target), {}, self._way_out()
                )
            check_scalar(value, "loss_fn returns")
            return value  # type: ignore[no-any-return]  # a scalar tensor, as just checked

        try:
            return reduction_of(loss, count)
        except ModelError as error:
            unknown = next((item for _, item in items_of(structure, Unreturned)), None)
            if unknown is None:
                raise
            loss(0, count)  # raises what is wrong with the whole, too
            raise self._no_container(unknown) from error

    def _no_container(self, output: Unreturned) -> ModelError:
        """The error for an output of a class that cannot be taken apart."""
        cls = output.cls
        return ModelError(
            f"the model returns {cls}, which is no tensor, tuple, dict or dataclass: "
            "what is in it cannot be taken apart into micro-batches",
            location=line_of_forward(self.model),
            hint=f"return the tensors that it is made of, in a dict; or make {cls} a dataclass "
            "(@dataclasses.dataclass), if it is your own class",
        )

    def _way_out(self) -> str:
        """For a target that numbers samples, or has them in one dimension with something else, and
        for inputs that are taken as those of all samples."""
        size = self.signature.batch_size
        for source, tensor in zip(self.signature.inputs, self.signature.samples(size), strict=True):
            numbers = torch.arange(size).to(tensor)
            if size > 1 and not tensor.is_meta and torch.equal(tensor, numbers):
                return (
                    f"{source.name} numbers the samples of a batch, which are others in a part of "
                    "it: make it in loss_fn, as torch.arange(len(output))"
                )
            rows = [n for n in source.example_shape or () if n > size and n % size == 0]
            if source.path[0] == "target" and source.batch_dim is None and rows:
                return (
                    f"give a target with a row for each of the {size} samples, and flatten it in "
                    f"loss_fn: {source.name} has {rows[0]} in one dimension"
                )
        given = [source for source in self.signature.inputs if source.path[0] != "target"]
        alike = [source for source in given if (source.example_shape or ())[:1] == (size,)]
        shared = listed([source.name for source in alike if source.batch_dim is None])
        if shared:
            said = " ".join(f"--batch-dim {source.name}=0" for source in alike)
            return f"{shared} is taken as the same for all samples; if it has them, say so: {said}"
        return ""

    def _own_reduction(self) -> Reduction:
        """Holds the model's loss of a batch against those of its halves, in eval mode."""
        model, count = isolated(self.model).eval(), _PROBE_SAMPLES

        def loss(first: int, last: int) -> torch.Tensor:
            samples = self.signature.samples(count)
            inputs = [
                source.part(tensor, first, last - first)
                for source, tensor in zip(self.signature.inputs, samples, strict=True)
            ]
            args, kwargs, _ = self.signature.rebuild(inputs)
            with torch.random.fork_rng(), torch.no_grad():
                output = user_call("the model", model, last - first, args, kwargs)
            return (  # type: ignore[no-any-return]  # a scalar tensor, as checked before
                output["loss"] if isinstance(output, Mapping) else output.loss
            )

        return reduction_of(loss, count)


def _refuse_weights(loss_fn: nn.Module) -> None:
    """Raises a ModelError for a loss that is to be trained itself."""
    trained = [name for name, item in loss_fn.named_parameters() if item.requires_grad]
    if trained:
        raise ModelError(
            f"loss_fn is a {type(loss_fn).__name__} with parameters of its own, {trained[0]}: they "
            "are none of the model, and no stage would hold and train them",
            location=line_of_forward(loss_fn),
            hint="make it part of the model, whose forward takes the target too and returns a dict "
            "with the loss under 'loss'",
        )
