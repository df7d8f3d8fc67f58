"""Long runs of equal layers are traced as short ones: the graph is that of the whole model.

Truth is the same frontend on the whole model, and for models that only look as if their layers were
equal, the eager model. That the short way was taken is seen by what the tracer was given.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.errors import TraceError
from gpipe_compiler.frontend import tracing
from gpipe_compiler.frontend.expand_repeats import expand_repeats
from gpipe_compiler.frontend.kernels import same_kernels
from gpipe_compiler.frontend.own_functions import own_functions_met
from gpipe_compiler.frontend.shorten import EqualRun, LayerPlace, shortened
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.tracing import trace, trace_whole, unchecked
from gpipe_compiler.ir import FunctionCall, Graph, MethodCall, ModuleCall, StateRef
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.ir.own_functions import OwnFunction
from gpipe_compiler.ir.stretches import ShortStretch, Stretch
from gpipe_compiler.runtime.core.precision import autocast
from gpipe_compiler.runtime.spec import Precision

WIDTH = 4
MANY = 13


class Layer(nn.Module):
    """A residual layer with a norm, a mode-dependent dropout and a branch on a number."""

    def __init__(self, width: int = WIDTH, scale: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.gain = nn.Parameter(torch.ones(width))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.narrow(torch.relu(self.wide(self.norm(x))))
        if self.scale != 1.0:
            hidden = hidden * self.scale
        return x + self.dropout(hidden * self.gain)


class Stack(nn.Module):
    """Layers in a list, between others."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Wary(Stack):
    """Looks at its numbers, unless it is exported."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        unused = torch.arange(x.shape[0])
        if torch.compiler.is_exporting() or not (x == 0).all():
            x = x.t().contiguous().t() + unused.new_zeros(())
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Averaged(Stack):
    """Divides by the number of layers: a short model is another one."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x) / math.sqrt(len(self.layers))
        return self.last(x)


class Collecting(Stack):
    """Reads what every layer gives at the end."""

    def forward(self, x: Tensor) -> Tensor:
        x, seen = self.first(x), []
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return self.last(sum(seen))


class Skipping(Stack):
    """Runs every third layer only in the second half."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place, layer in enumerate(self.layers):
            if place < 9 or place % 3 == 0:
                x = layer(x)
        return self.last(x)


class Numbered(Stack):
    """Counts as far as it was told when it was built."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.depth = len(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place in range(self.depth):
            x = self.layers[place](x)
        return self.last(x)


class Pair(nn.Module):
    """An encoder in a list and a decoder in a Sequential, which alternates two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Layer() for _ in range(MANY))
        steps = [step for _ in range(MANY) for step in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.decoder = nn.Sequential(nn.ReLU(), *steps, nn.Linear(WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.encoder:
            x = layer(x)
        return self.decoder(x)


class Normed(nn.Module):
    """BatchNorm, whose buffers are written, and a built-in function as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.activation = nn.functional.gelu

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.linear(x)))


class Attending(nn.Module):
    """Attention, of which the memory that a result has depends on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.apart = nn.Linear(WIDTH, 3 * 32)
        self.together = nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.apart(x).view(-1, 4, 3, 2, 4).unbind(2)
        query, key, value = (head.transpose(1, 2) for head in heads)
        found = F.scaled_dot_product_attention(query, key, value)
        joined: Tensor = found.transpose(1, 2).contiguous()
        return x + self.together(joined.reshape(len(x), -1).contiguous())


class Zipped(nn.Module):
    """Goes through a list of layers and one of parameters at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MANY))
        self.biases = nn.ParameterList(torch.randn(WIDTH) for _ in range(MANY))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer, bias in zip(self.layers, self.biases, strict=True):
            x = torch.relu(layer(x) * 1.5 + bias)
        return self.last(x)


class Placed(Layer):
    """Knows its place among the others, and hands it on to nobody who asks."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.same(x, self.place))

    def same(self, x: Tensor, place: int | None) -> Tensor:
        return x if place is not None and isinstance(place, int) else x.neg()


class Branching(Placed):
    """Every second layer does something that no number shows."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x.clamp(-1e6, 1e6) if self.place % 2 else x


class Single(Placed):
    """One layer in the middle does something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.place == MANY // 2 else 1.0)


class Sloped(Placed):
    """A constant for each layer, as an ALiBi slope."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2.0**-self.place


class Looking(Placed):
    """Looks a constant up by its place."""

    rates = tuple(0.1 * place for place in range(MANY))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.rates[self.place]


class Kept(Placed):
    """Catches what its place raises, and writes it down as text."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x) * len(f"{self.place:04}")
        except ValueError:
            return x


class Dropping(Layer):
    """Stochastic depth: a rate for each layer."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.dropout.p = 0.01 * place


class Windowed(Layer):
    """Every second layer sees half of its input, and knows that as a number."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.window = WIDTH if place % 2 else WIDTH // 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tril(x, self.window - WIDTH))


class Clamping(Stack):
    """One layer in the middle is followed by what no number shows."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if place == 7:
                x = x.clamp(-1e6, 1e6)
        return self.last(x)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def subject_of(model: nn.Module, device: str = "cpu") -> Subject:
    given = torch.randn(4, WIDTH, device=device), torch.randn(4, 3, device=device)
    return Subject("stack", model.to(device), given[:1], {}, given[1], loss_fn)


def layers(count: int = MANY) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layer() for _ in range(count)]


@pytest.fixture
def lengths() -> Iterator[list[int]]:
    """How many modules each model had that was traced."""
    seen: list[int] = []

    def traced(subject: Subject, precision: Precision) -> Graph:
        seen.append(sum(1 for _ in subject.model.modules()))
        return unchecked(subject, precision)

    with mock.patch.object(tracing, "unchecked", traced):
        yield seen


def text_of(graph: Graph) -> str:
    """All that a graph says, its state and how the modules that it calls are made included."""
    called = {op.call.module for op in graph.ops if isinstance(op.call, ModuleCall)}
    modules = {path: spec for path, spec in graph.modules.items() if path in called}
    return "\n".join([str(graph), repr(dict(graph.state)), repr(modules)])


def placed() -> nn.Module:
    torch.manual_seed(0)
    return Stack([Placed(place) for place in range(MANY)])


def windowed() -> nn.Module:
    """Two equal layers alternate."""
    torch.manual_seed(0)
    return Stack([Windowed(place) for place in range(2 * MANY)])


def stack() -> nn.Module:
    return Stack(layers())


def wary() -> nn.Module:
    return Wary(layers())


def rooted() -> nn.Module:
    """The list is the model itself, and other modules stand beside the layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers(), nn.Linear(WIDTH, 3))


def normed() -> nn.Module:
    return Stack([Normed() for _ in range(MANY)])


def attending() -> nn.Module:
    torch.manual_seed(0)
    return Stack([Attending() for _ in range(MANY)])


@pytest.mark.parametrize(
    ("make", "device"),
    [
        (stack, "meta"),
        (attending, "cpu"),
        (Pair, "meta"),
        (Zipped, "cpu"),
        (windowed, "cpu"),
        (rooted, "cpu"),
        *(
            pytest.param(make, device, marks=pytest.mark.slow)
            for make, device in (
                (stack, "cpu"),
                (normed, "cpu"),
                (placed, "cpu"),
                (wary, "cpu"),
                (rooted, "meta"),
            )
        ),
    ],
)
def test_the_graph_is_that_of_the_whole_model(
    make: Callable[[], nn.Module], device: str, lengths: list[int]
) -> None:
    subject = subject_of(make(), device)

    graph = trace(subject)

    whole = sum(1 for _ in subject.model.modules())
    assert len(lengths) == 1
    assert lengths[0] < whole / 2
    plain = trace_whole(subject)
    assert sorted(graph.state) == sorted(plain.state)
    assert dict(graph.state) == dict(plain.state)
    assert str(graph) == str(plain)
    assert {k: repr(v) for k, v in graph.modules.items()} == {
        k: repr(v) for k, v in plain.modules.items()
    }
    assert all(graph.tensors[name] is tensor for name, tensor in plain.tensors.items())


@pytest.mark.parametrize(
    ("cls", "device"),
    [(Averaged, "cpu"), (Averaged, "meta"), (Collecting, "meta"), (Skipping, "meta"),
     (Numbered, "meta")],
)  # fmt: skip
def test_what_only_looks_like_equal_layers_is_traced_plainly(
    cls: type[Stack], device: str, lengths: list[int]
) -> None:
    subject = subject_of(cls(layers()), device)

    graph = trace(subject)

    assert len(lengths) == 2
    assert text_of(graph) == text_of(trace_whole(subject))


@pytest.mark.parametrize("cls", [Branching, Single, Sloped, Looking, Kept, Dropping])
def test_layers_whose_place_tells_are_traced_plainly(cls: type[Layer], lengths: list[int]) -> None:
    torch.manual_seed(0)
    subject = subject_of(Stack([cls(place) for place in range(MANY)]))

    graph = trace(subject)

    assert lengths[-1] == sum(1 for _ in subject.model.modules())
    assert text_of(graph) == text_of(trace_whole(subject))


def test_what_no_number_shows_is_seen(lengths: list[int]) -> None:
    subject = subject_of(Clamping(layers()))

    graph = trace(subject)

    assert lengths[-1] == sum(1 for _ in subject.model.modules())
    assert str(graph).count(".clamp(-") == 1
    assert text_of(graph) == text_of(trace_whole(subject))


class Remembering(Stack):
    """Assigns what nothing reads to a buffer."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.first(x).detach().mean(0)
        return super().forward(x)


def test_a_buffer_that_is_assigned_is_written() -> None:
    graph = trace(subject_of(Remembering(layers())))

    calls = [op.call for op in graph.ops if StateRef("mean") in op.call.args]
    assert [call.method for call in calls if isinstance(call, MethodCall)] == ["copy_"]


class Reversal(torch.autograd.Function):
    """Turns gradients around."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # torch's own
        return x * 1

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # torch's own
        return -gradient


class Adversarial(Stack):
    """Has a backward that no kernel of its forward shows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Reversal.apply(self.first(x)))


def test_functions_with_a_backward_of_their_own_are_met_where_they_are_called() -> None:
    x = torch.ones(2, requires_grad=True)
    with own_functions_met() as met:
        made = Reversal.apply(x)
        Reversal.apply(x.detach())

    assert met == [Reversal]
    made.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, -torch.ones(2))


def test_a_backward_of_its_own_is_kept() -> None:
    graph = trace(subject_of(Adversarial(layers())))

    called = [op.call.function for op in graph.ops if isinstance(op.call, FunctionCall)]
    assert [own.cls for own in called if isinstance(own, OwnFunction)] == [Reversal]


class Cast(Stack):
    """Casts in one layer among many."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place, layer in enumerate(self.layers):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=place == 7):
                x = layer(x)
        return self.last(x)


def test_a_cast_around_one_layer_is_seen(lengths: list[int]) -> None:
    subject = subject_of(Cast(layers()))

    graph = trace(subject)

    assert lengths[-1] == sum(1 for _ in subject.model.modules())
    assert text_of(graph) == text_of(trace_whole(subject))


class Differing(Stack):
    """One layer in the middle differs from the others in other precisions than fp32 alone."""

    where: int | None = 7
    """None for all."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place, layer in enumerate(self.layers):
            x = self.call(layer, x, self.where in (place, None))
        return self.last(x)

    def call(self, layer: nn.Module, x: Tensor, other: bool) -> Tensor:
        """A layer, called as the others are or as one is."""
        raise NotImplementedError


class Island(Differing):
    """Runs outside of autocast."""

    def call(self, layer: nn.Module, x: Tensor, other: bool) -> Tensor:
        if not other:
            return layer(x)
        with torch.autocast("cpu", enabled=False):
            return layer(x.float())


class Upcast(Differing):
    """Is given fp32."""

    def call(self, layer: nn.Module, x: Tensor, other: bool) -> Tensor:
        return layer(x.float() if other else x)


class CastAlike(Differing):
    """Is given the type of the weights, and the others that of the input."""

    def call(self, layer: nn.Module, x: Tensor, other: bool) -> Tensor:
        return layer(x).to(layer.gain.dtype if other else x.dtype)


class Asking(Differing):
    """Asks in which precision it runs; all of them do, and one does otherwise then."""

    def call(self, layer: nn.Module, x: Tensor, other: bool) -> Tensor:
        return layer(x) * 2 if torch.is_autocast_enabled("cpu") and other else layer(x)


class Overflowing(Differing):
    """Clamps in fp16."""

    def call(self, layer: nn.Module, x: Tensor, other: bool) -> Tensor:
        x = layer(x)
        return x.clamp(-1, 1) if self.wide(x).dtype == torch.float16 and other else x

    def wide(self, x: Tensor) -> Tensor:
        """In the type that is computed in."""
        return torch.nn.functional.linear(x, x)


@pytest.mark.parametrize(
    ("cls", "precision"),
    [
        (Island, Precision.FP32),
        (Upcast, Precision.FP32),
        (CastAlike, Precision.FP32),
        (Asking, Precision.BF16),
        (Overflowing, Precision.FP32),
    ],
)
def test_what_one_layer_does_in_another_precision_is_seen(
    cls: type[Differing], precision: Precision
) -> None:
    """The graph computes what the model does in every precision that it is for."""
    subject = subject_of(cls(layers()))
    inputs, target = subject.args[0], subject.target

    graph = trace(subject, precision)

    assert precision not in graph.unlike
    assert graph.loss is not None
    for other in [known for known in Precision if known not in graph.unlike]:
        with autocast(other, torch.device("cpu")):
            expected = loss_fn(copy.deepcopy(subject.model).eval()(inputs), target)
            values = Interpreter(graph, graph.tensors, training=False).run(
                {source.name: graph.example[source.name] for source in graph.inputs}
            )
        torch.testing.assert_close(values[graph.loss.value], expected, rtol=0, atol=0)


def test_layers_that_are_cast_alike_are_traced_as_few(lengths: list[int]) -> None:
    model = Island(layers())
    model.where = None

    trace(subject_of(model), Precision.BF16)

    assert len(lengths) == 1
    assert lengths[0] < sum(1 for _ in model.modules()) / 2


class Doubling(Stack):
    """Has a hook between two layers, which doubles gradients."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if place == 7 and x.requires_grad:
                x.register_hook(lambda gradient: gradient * 2)
        return self.last(x)


class Prehooked(Stack):
    """Has a hook of the backward's graph before the layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.grad_fn is not None:
            x.grad_fn.register_prehook(lambda gradients: tuple(2 * one for one in gradients))
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Exported(Stack):
    """Is another program where it is exported, and looks at its numbers where it is not."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if not torch.compiler.is_exporting() and (x == 0).all():
            x = x * 1
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if place == 7 and not torch.compiler.is_exporting():
                x = x * 2
        return self.last(x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_hook_between_two_layers_is_held_where_it_is(device: str) -> None:
    graph = trace(subject_of(Doubling(layers()), device))
    (hooked,) = (op for op in graph.ops if "hooked" in op.name)

    (given,) = hooked.inputs
    assert graph.producer[given].module.startswith("layers.7")


@pytest.mark.parametrize("cls", [Prehooked, Exported])
def test_what_leaves_no_kernel_is_refused(cls: type[Stack]) -> None:
    with pytest.raises(TraceError):
        trace(subject_of(cls(layers())))


def test_a_place_is_no_number_that_could_be_used() -> None:
    place = LayerPlace()

    assert isinstance(place, int)
    assert copy.deepcopy([place])[0] is place
    for use in (str, hash, bool, float, range, lambda p: p == 0, lambda p: 1 - p, lambda p: p % 2,
                lambda p: [0][p], lambda p: f"{p}", {0: 1}.get, lambda p: p in (1, 2),
                lambda p: p.bit_length()):  # fmt: skip
        with pytest.raises(TraceError):
            use(place)
    with pytest.raises(IndexError):
        torch.ones(3)[place]


def test_a_layer_that_differs_stays_in_its_place(lengths: list[int]) -> None:
    """One layer in the middle scales: the longer run beside it is shortened."""
    stack = layers(20)
    stack[5] = Layer(scale=0.5)
    subject = subject_of(Stack(stack), "meta")

    short = shortened(subject)
    graph = trace(subject)

    assert short is not None
    assert short.runs == (EqualRun("layers", ShortStretch(Stretch(6, 1, 14))),)
    assert len(lengths) == 1
    assert text_of(graph) == text_of(trace_whole(subject))


def hooked(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda *_: None)


def tagged(layer: nn.Module) -> None:
    layer.place = torch.ones(1)


def frozen(layer: nn.Module) -> None:
    layer.gain.requires_grad_(False)


def in_eval(layer: nn.Module) -> None:
    layer.dropout.eval()


def replaced(layer: nn.Module) -> None:
    layer.forward = lambda x: x


@pytest.mark.parametrize("change", [hooked, tagged, frozen, in_eval, replaced])
def test_layers_with_something_of_their_own_are_not_equal(
    change: Callable[[nn.Module], None],
) -> None:
    stack = layers(24)
    for layer in stack[::2]:
        change(layer)
    stack[0], stack[23] = stack[23], stack[0]  # no alternating run either
    short = shortened(subject_of(Stack(stack)))

    period = None if short is None else short.runs[0].short.whole.period
    assert period in (None, 2)


def test_tied_weights_are_no_run_of_equal_layers() -> None:
    stack = layers(24)
    for layer in stack[1:]:
        layer.gain = stack[0].gain

    assert shortened(subject_of(Stack(stack))) is None


def test_few_layers_are_traced_as_they_are() -> None:
    assert shortened(subject_of(Stack(layers(11)))) is None


def test_the_model_stays_as_it_is() -> None:
    subject = subject_of(Stack(layers()))
    before = {name: id(tensor) for name, tensor in subject.model.state_dict(keep_vars=True).items()}

    trace(subject)

    after = {name: id(tensor) for name, tensor in subject.model.state_dict(keep_vars=True).items()}
    assert before == after
    assert len(subject.model.layers) == MANY


class Rescaled(Stack):
    """Every layer's result, times a number that nothing but the kernels' arguments show."""

    factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) * self.factor
        return self.last(x)


def changed_weights(model: Stack) -> None:
    """Two layers swap places: the same kernels on other parameters."""
    model.layers[7], model.layers[8] = model.layers[8], model.layers[7]


def changed_factor(model: Stack) -> None:
    model.factor = 3.0


def changed_branch(model: Stack) -> None:
    model.layers[9].scale = 0.5


def one_more(model: Stack) -> None:
    model.layers.append(model.layers[3])


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("change", [changed_weights, changed_factor, changed_branch, one_more])
def test_kernels_tell_models_apart_that_have_no_numbers(
    change: Callable[[Stack], None], exported: bool
) -> None:
    subject = subject_of(Rescaled(layers()), "meta")
    short = shortened(subject)
    assert short is not None
    graph = expand_repeats(trace_whole(short.subject), short, subject)
    assert graph is not None
    assert same_kernels(graph, subject, short.subject, exported=exported)

    names = {id(tensor): name for name, tensor in subject.model.named_parameters()}
    change(subject.model)

    # What is compared is known by the name that it has now.
    assert names
    assert not same_kernels(graph, subject, short.subject, exported=exported)
