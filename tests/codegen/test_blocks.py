"""Blocks of a stage as classes: as long for any number of layers, and open to what people do."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loading import load_package
from stage_text import module_of, text_of, trains_as
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.stage import write_stages
from gpipe_compiler.ir import ModuleCall
from gpipe_compiler.ir.contents import is_under
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.spec import Remat
from gpipe_compiler.targets.torch_stages import emit


class Feed(nn.Module):
    def __init__(self, dim: int, hidden: int, slope: float) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.leaky_relu(self.up(x), self.slope))


class Layer(nn.Module):
    """Reads a buffer, its own sizes, and a mask that all layers are given."""

    def __init__(self, dim: int, hidden: int, slope: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.feed = Feed(dim, hidden, slope)
        self.register_buffer("shift", torch.linspace(0, 1, dim))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, dim = x.shape
        mixed = self.norm(x).view(batch, length * dim)
        x = x + mixed.view(batch, length, dim) * mask + self.shift
        return x + self.feed(x)


class Layers(nn.Module):
    """Layers whose hidden sizes and slopes may differ; the last reads what the first holds."""

    def __init__(self, count: int, *, differ: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(4, 4 + index * differ, 0.1 + index * differ) for index in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).to(x.dtype)
        for layer in self.layers:
            x = layer(x, mask)
        return x * self.layers[0].shift


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and the gradients of a module, by the names of its parameters."""
    output = module(x)
    output.square().sum().backward()
    return [output, *(p.grad for _, p in sorted(module.named_parameters()) if p.grad is not None)]


def test_a_stage_is_as_long_for_two_layers_as_for_eight(planned: Callable[..., Plan]) -> None:
    texts = [text_of(planned(Layers(count), torch.rand(2, 3, 4), count=1)) for count in (2, 8)]

    assert len({len(text.splitlines()) for text in texts}) == 1
    plain = [re.sub(r"range\(\d+\)|\d+ lines", "", text) for text in texts]
    assert [text.count("class Layer(nn.Module)") for text in plain] == [1, 1]
    assert "for layer in self.layers.values():" in plain[1]


def test_what_several_stages_have_is_written_once(planned: Callable[..., Plan]) -> None:
    """Layers that differ in numbers included; a stage that is written alone imports nothing."""
    plan = planned(Layers(4, differ=True), torch.rand(2, 3, 4), count=2)
    assert plan.graph is not None
    facts = CodeFacts.of(plan.graph)

    sources = write_stages(plan, facts)
    (alone,) = write_stages(plan, facts, plan.stages[1:]).stages

    assert sources.layers.count("class Layer(nn.Module)") == 1
    assert not any("class Layer(nn.Module)" in stage.text for stage in sources.stages)
    assert "from .layers" not in alone.text
    assert "class Layer(nn.Module)" in alone.text


class Scale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


class Chains(nn.Module):
    """Chains under another name than their own module's, each too long for a line."""

    def __init__(self) -> None:
        super().__init__()
        self.several_chains_of_modules = nn.ModuleList(
            nn.Sequential(Scale(128), nn.Linear(128, 128, bias=False), Scale(128), nn.GELU("tanh"))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for chain in self.several_chains_of_modules:
            total = total + chain(x)
        return total


def test_modules_of_a_chain_stand_in_its_order(planned: Callable[..., Plan]) -> None:
    """Whether they are of torch.nn or of the user's own; equal chains are one comprehension."""
    torch.manual_seed(0)
    model, x = Chains(), torch.rand(2, 128)

    text = text_of(planned(copy.deepcopy(model), x, count=1))

    stage = module_of(text)
    stage.load_state_dict(model.state_dict())
    torch.testing.assert_close(gradients(stage, x), gradients(model, x))
    assert re.search(r"\n +for i in range\(3\)\n", text), text


@pytest.mark.parametrize("differ", [False, True])
def test_layers_are_exact(planned: Callable[..., Plan], differ: bool) -> None:
    """Whether they are equal or differ in sizes and numbers, which their constructors are given."""
    torch.manual_seed(0)
    model, x = Layers(3, differ=differ), torch.rand(2, 3, 4)

    text = text_of(planned(copy.deepcopy(model), x, count=1))

    stage = module_of(text)
    stage.load_state_dict(model.state_dict())
    assert text.count("(nn.Module)") == 3
    for found, expected in zip(gradients(stage, x), gradients(model, x), strict=True):
        assert torch.equal(found, expected), text


class Bottle(nn.Module):
    def __init__(self, hidden: int, scale: float) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(4, hidden), nn.Linear(hidden, 4), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x * self.scale))


class Around(nn.Module):
    def __init__(self, hidden: int, scale: float) -> None:
        super().__init__()
        self.bottle, self.norm = Bottle(hidden, scale), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bottle(self.norm(x))


def test_what_a_constructor_passes_on_keeps_its_name(planned: Callable[..., Plan]) -> None:
    model = nn.Sequential(Around(5, 0.3), Around(7, 0.7))
    text = text_of(planned(copy.deepcopy(model), torch.rand(2, 3, 4), count=1))

    stage, x = module_of(text), torch.rand(2, 3, 4)
    stage.load_state_dict(model.state_dict())
    assert torch.equal(stage(x), model(x))
    heads = re.findall(r"def __init__\(self, (.*)\) -> None:", text)
    passed = re.search(r"self\.bottle = Bottle\((.*)\)", text)
    assert passed is not None
    assert len(set(heads)) == 1, "both classes are given the same numbers, in one order"
    assert [item.partition("=")[2] or item for item in passed[1].split(", ")] == [
        item.partition(":")[0] for item in heads[0].split(", ")
    ]


class Unit(nn.Module):
    """Holds an activation that all units have in common, as of a class or a constructor."""

    common = nn.SiLU()

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.inner, self.outer = self.common, act

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.down(self.inner(self.up(x))) + x)


def test_an_activation_that_many_hold_is_each_ones_own(planned: Callable[..., Plan]) -> None:
    torch.manual_seed(0)
    act = nn.Tanh()
    model, x = nn.Sequential(*(Unit(act) for _ in range(3))), torch.rand(4, 6)

    text = text_of(planned(copy.deepcopy(model), x, count=1))

    assert text.count("class Unit(nn.Module):") == 1, text
    assert text.count("self.inner = nn.SiLU()") == text.count("self.outer = nn.Tanh()") == 1, text
    trains_as(module_of(text), model, x)


class Gate(nn.Module):
    """Holds what holds nothing, as other modules do, too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * x


class Gated(nn.Module):
    def __init__(self, act: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.up, self.act, self.gate = nn.Linear(6, 6), act, gate

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.up(x)) + self.gate(x)


def test_what_many_hold_has_what_it_holds_itself_as_its_own(planned: Callable[..., Plan]) -> None:
    """The gate of the later blocks is no module of the first one's, nor is its activation."""
    torch.manual_seed(0)
    act = nn.Tanh()
    gate = Gate(act)
    model, x = nn.Sequential(*(Gated(act, gate) for _ in range(3))), torch.rand(4, 6)

    text = text_of(planned(copy.deepcopy(model), x, count=1))

    assert text.count("class Gated(nn.Module):") == 1, text
    assert "Gated2" not in text, text
    trains_as(module_of(text), model, x)


def test_a_class_that_the_user_puts_into_torch_nn_is_the_users(
    planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(nn, "Gated", Gated, raising=False)
    model = nn.Sequential(*(Gated(nn.Tanh(), nn.SiLU()) for _ in range(3)))
    x = torch.rand(4, 6)

    text = text_of(planned(copy.deepcopy(model), x, count=1))

    forward = text[text.index("class Gated(nn.Module):") :].partition("def forward(")[2]
    assert forward.splitlines()[1].strip().startswith("# test_blocks.py:"), text
    trains_as(module_of(text), model, x)


class Named(nn.Module):
    """Hands its numbers on in all the ways that people write down."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        inner_width = width + 1
        self.bottle: nn.Module = Bottle(inner_width, scale=0.5)
        self.lift, self.drop = nn.Linear(4, 2 * width), nn.Linear(2 * width, 4)
        self.chain = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4))
        self.rows = nn.ParameterList()
        self.gain = nn.Parameter(0.5 * torch.ones(1, steps, 1))
        self.register_buffer("shift", torch.zeros((steps, 4)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.bottle(x) + self.drop(self.lift(x)) + self.chain(x)
        x = x.repeat_interleave(self.gain.shape[1], 1)
        return (x * self.gain + self.shift).mean(1, keepdim=True)


def test_numbers_are_called_what_the_users_constructor_calls_them(
    planned: Callable[..., Plan],
) -> None:
    """Where it has a name for them; else what they are to torch's modules."""
    model, x = nn.Sequential(Named(3, 2), Named(5, 4)), torch.rand(2, 1, 4)
    text = text_of(planned(copy.deepcopy(model), x, count=1))

    stage = module_of(text)
    stage.load_state_dict(model.state_dict())
    torch.testing.assert_close(stage(x), model(x))
    written = text.partition("class Named(")[2].partition("def forward")[0]
    head = re.search(r"def __init__\(\s*self, (.*?)\s*\) -> None", written, re.DOTALL)
    assert head is not None, text
    names = {item.partition(":")[0].strip() for item in head[1].split(",")}
    assert names == {"inner_width", "out_features", "width", "steps"}, text
    made = re.findall(r"self\.(\w+) = ", written)
    assert [own for own in made if own not in names] == [
        "bottle", "lift", "drop", "chain", "gain",
    ], text  # fmt: skip


def test_torchs_own_layers_read_as_they_are_known(planned: Callable[..., Plan]) -> None:
    """Their lines are none of the user's, so that no name of hers stands for what they make."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.rand(2, 3, 4)
    text = text_of(planned(copy.deepcopy(model), x, count=1))

    stage = module_of(text)
    stage.load_state_dict(model.state_dict())
    torch.testing.assert_close(stage(x), model(x))
    assert "self.self_attn(src, src, src, need_weights=False)" in re.sub(r"\bx\b", "src", text)
    assert "self.dropout1(self_attn_out)" in text
    assert not re.search(r"_2\b", text)


class Shrinking(nn.Module):
    """Makes pictures of tokens; those of the first one are as many as their channels."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.conv, self.side = nn.Conv2d(16, 16, 2, 2), side

    def forward(self, x: Tensor) -> Tensor:
        batch, _, channels = x.shape
        picture = x.permute(0, 2, 1).reshape(batch, channels, self.side, self.side)
        return self.conv(picture).reshape(batch, channels, -1).permute(0, 2, 1)


def test_sizes_that_are_equal_in_one_layer_alone(planned: Callable[..., Plan]) -> None:
    """One that is a number of the block is read off no argument that has it in one call only."""
    model, x = nn.Sequential(Shrinking(4), Shrinking(2)), torch.rand(2, 16, 16)

    text = text_of(planned(copy.deepcopy(model), x, count=1))

    stage = module_of(text)
    stage.load_state_dict(model.state_dict())
    assert text.count("class Shrinking(nn.Module)") == 1
    torch.testing.assert_close(stage(x), model(x))


def recompute(layer: nn.Module) -> None:
    layer.forward = functools.partial(  # type: ignore[method-assign]
        checkpoint, layer.forward, use_reentrant=False
    )


def compile_in_place(layer: nn.Module) -> None:
    layer.compile(backend="aot_eager")


def shard(layer: nn.Module) -> None:
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("apply", [recompute, compile_in_place, shard])
@pytest.mark.usefixtures("alone")
def test_what_people_apply_to_layers_applies_to_those_of_a_stage(
    planned: Callable[..., Plan], apply: Callable[[nn.Module], None]
) -> None:
    """As they do with their own models: by class, from outside."""
    torch.manual_seed(0)
    model, x = Layers(3), torch.rand(2, 3, 4)
    stage = module_of(text_of(planned(copy.deepcopy(model), x, count=1)))
    stage.load_state_dict(model.state_dict())
    layers = [module for module in stage.modules() if type(module).__name__ == "Layer"]
    for layer in layers:
        apply(layer)

    assert len(layers) == 3
    for found, expected in zip(gradients(stage, x), gradients(model, x), strict=True):
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        assert torch.equal(whole, expected)


class Noisy(nn.Module):
    """Draws random numbers and counts statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.feed = Feed(4, 8, 0.1)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.feed(self.norm(x)))


def again(plan: Plan, layers: range) -> Plan:
    """The plan of one stage in which some layers of an nn.Sequential run again."""
    (stage,) = plan.stages
    assert plan.graph is not None
    ops = [op for op in plan.graph.ops if op.name in stage.ops]
    paths = [op.call.module if isinstance(op.call, ModuleCall) else op.module for op in ops]
    segments = tuple(
        tuple(op.name for op, path in zip(ops, paths, strict=True) if is_under(f"{path}.", own))
        for own in (f"layers.{index}" for index in layers)
    )
    kept = dataclasses.replace(stage, remat=Remat.SEGMENTS, segments=segments)
    return dataclasses.replace(plan, stages=(kept,))


@pytest.mark.parametrize("layers", [range(4), range(1, 3)])
def test_the_loop_says_which_layers_run_again(
    planned: Callable[..., Plan], layers: range, tmp_path: Path
) -> None:
    """And they do it with the same masks, their statistics updated once."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(OrderedDict(layers=nn.Sequential(*(Noisy() for _ in range(4))))),
        torch.rand(4, 4),
    )
    plan = planned(model, x, count=1)
    package = load_package(emit(again(plan, layers), tmp_path / "package"))
    found: dict[str, list[Tensor]] = {}
    for remat in ("segments", "none"):
        with package.Pipeline(remat=remat, seed=3) as pipe:
            loss = pipe.step(x)
            state = [*pipe.state_dict().values()]
            found[remat] = [torch.as_tensor(loss), *state]
    text = (tmp_path / "package" / "stage_0.py").read_text()

    assert all(map(torch.equal, found["segments"], found["none"]))
    loop = r"for \w+ in .*:\n +(\w+) = checkpoint\([^,]*, \1, use_reentrant=False\)"
    assert re.search(loop, text), text
    span = f"{layers.stop}" if layers.start == 0 else f"{layers.start}, {layers.stop}"
    assert f'**{{f"layers.{{i}}": (f"layers.{{i}}",) for i in range({span})}}' in text


def change_output(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda _, given, made: torch.tanh(made) * made + given[0])


def change_argument(layer: nn.Module) -> None:
    layer.register_forward_pre_hook(lambda _, given: (torch.tanh(given[0]) * given[0],))


def change_gradient(layer: nn.Module) -> None:
    layer.register_full_backward_pre_hook(lambda _, given: tuple(2 * each for each in given))


def compile_whole(layer: nn.Module) -> None:
    """Without a break in the graph; what the hook computes is in it."""
    change_output(layer)
    layer.compile(backend="eager", fullgraph=True)


@pytest.fixture(scope="module")
def feeds(
    planned: Callable[..., Plan], tmp_path_factory: pytest.TempPathFactory
) -> tuple[nn.Module, Tensor, Any]:
    """A model, its batch, and a package of it whose layers run again."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(Feed(4, 8, 0.1) for _ in range(3)))
    model, x = nn.Sequential(OrderedDict(layers=layers)), torch.rand(4, 4)
    plan = again(planned(copy.deepcopy(model), x, count=1), range(3))
    return model, x, load_package(emit(plan, tmp_path_factory.mktemp("feeds") / "package"))


@pytest.mark.parametrize("remat", ["segments", "none"])
@pytest.mark.parametrize("apply", [change_output, change_argument, change_gradient, compile_whole])
def test_what_people_apply_to_layers_that_run_again_is_run_again(
    feeds: tuple[nn.Module, Tensor, Any], apply: Callable[[nn.Module], None], remat: str
) -> None:
    given, x, package = feeds
    model = copy.deepcopy(given)
    with package.Pipeline(remat=remat) as pipe:
        pipe.load_state_dict(model.state_dict())
        (stage,) = pipe.stages.values()
        for layer in (*model.layers.children(), *stage.layers.children()):
            apply(layer)
        loss = pipe.step(x)

    _, *expected = gradients(model, x)
    found = [parameter.grad for _, parameter in sorted(stage.named_parameters())]
    torch.testing.assert_close(torch.as_tensor(loss), model(x).detach().square().sum())
    torch.testing.assert_close(found, expected)
    assert len(found) == 12
    # Between steps nothing of the engine is left in a layer.
    own = [set(vars(layer)) for layer in (*model.layers.children(), *stage.layers.children())]
    assert all("_call_impl" not in names and "forward" not in names for names in own)
