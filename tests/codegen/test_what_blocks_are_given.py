"""What the methods of blocks are given: what it is called, and what they read off its shape."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import torch
from stage_text import module_of, text_of
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpipe_compiler.plan import Plan


class Encoding(nn.Module):
    """One line calls layers of torch on what another module in it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(2, 4)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, points: Tensor) -> Tensor:
        encoded: Tensor = self.encoder(self.lift(points))
        return encoded


def test_what_torchs_own_layers_are_given_is_none_of_the_callers_parameters(
    planned: Callable[..., Plan],
) -> None:
    model, x = Encoding(), torch.rand(2, 3, 2)
    text = text_of(planned(copy.deepcopy(model), x, count=1))

    stage = module_of(text)
    stage.load_state_dict(model.state_dict())
    torch.testing.assert_close(stage(x), model(x))
    written = text.partition("class TransformerEncoderLayer(")[2]
    head = re.search(r"def forward\(self, (\w+): ", written)
    assert head is not None, text
    assert head[1] == "src", text


class Heads(nn.Module):
    """Attention whose heads are put together by a view, as many write it."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.drop = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 2, 4).transpose(1, 2) for y in self.lift(x).split(8, dim=2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(b, t, c)
        dropped: Tensor = self.drop(y)
        return dropped


def test_another_kernel_may_lay_out_otherwise_what_it_makes(planned: Callable[..., Plan]) -> None:
    """Which strides attention gives its result is the kernel's business, which another device, or
    the user, chooses otherwise than the machine that compiles."""
    model, x = nn.Sequential(Heads(), Heads()), torch.rand(2, 3, 8)
    stage = module_of(text_of(planned(copy.deepcopy(model), x, count=1)))
    stage.load_state_dict(model.state_dict())
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend):
            torch.testing.assert_close(stage(x), model(x))


class Pooled(nn.Module):
    """Attends over the points of an image, as U-Nets do at several resolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, 3 * width, 1)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        b, c, h, w = image.shape
        q, k, v = (y.reshape(b, c, h * w) for y in self.mix(image).chunk(3, dim=1))
        mixed = q.softmax(1) @ (k.softmax(2).transpose(1, 2) @ v)
        lowered: Tensor = self.down(image + mixed.reshape(b, c, h, w))
        return lowered


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise = nn.Conv2d(2, 4, 1)
        self.levels = nn.ModuleList(Pooled(4) for _ in range(3))

    def forward(self, image: Tensor) -> Tensor:
        image = self.rise(image)
        for level in self.levels:
            image = level(image)
        raised = nn.functional.interpolate(image, scale_factor=2.0)
        last: Tensor = self.levels[0](raised)
        return last


def test_a_block_is_one_at_all_the_sizes_that_it_is_called_at(
    planned: Callable[..., Plan],
) -> None:
    """It asks what it is given for its sizes, by the user's names."""
    model, x = Pyramid(), torch.rand(2, 2, 16, 24)
    text = text_of(planned(copy.deepcopy(model), x, count=1))

    stage = module_of(text)
    stage.load_state_dict(model.state_dict())
    for image in (x, torch.rand(3, 2, 32, 16)):
        torch.testing.assert_close(stage(image), model(image))
    assert len(re.findall("class Pooled", text)) == 1, text
    written = text.partition("class Pooled(")[2].partition("return ")[0]
    assert {"h", "w"} <= set(re.findall(r"(\w+) = image\.shape\[\d\]", written)), text


class Step(nn.Module):
    """Puts what it makes back in rows; the call that stands for all keeps their number."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.slide = nn.Conv1d(4, 4, 3, stride, 1)
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.slide(x.transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = self.mix(y).reshape(y.shape[0], y.shape[1], 2, 2).flip(2).flatten(2) + y
        return mixed


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise = nn.Conv1d(2, 4, 3, stride=2, padding=1)
        self.steps = nn.ModuleList(Step(stride) for stride in (1, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.rise(x).transpose(1, 2)
        for step in self.steps:
            x = step(x)
        return x


def test_a_size_that_one_call_keeps_and_another_halves_is_none_of_what_they_are_given(
    planned: Callable[..., Plan],
) -> None:
    model, x = Steps(), torch.rand(2, 2, 16)
    text = text_of(planned(copy.deepcopy(model), x, count=1))

    stage = module_of(text)
    stage.load_state_dict(model.state_dict())
    for rows in (x, torch.rand(3, 2, 22)):
        torch.testing.assert_close(stage(rows), model(rows))
    assert len(re.findall("class Step", text)) == 1, text


class Spread(nn.Module):
    """Makes as many rows as it is told, which nothing that it is given has."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        spread: Tensor = self.after(self.before(x).mean(1, keepdim=True).expand(-1, rows, -1))
        return spread


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.spread = nn.Linear(4, 4), Spread()

    def forward(self, x: Tensor, rows: int) -> Tensor:
        made: Tensor = self.spread(self.lift(x).relu(), rows).tanh()
        return made


class Spreading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.around = nn.ModuleList(Around() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.around[0](x, y.shape[1]), self.around[1](y, x.shape[1])


def test_a_size_of_what_a_call_makes_is_none_that_it_can_read(
    planned: Callable[..., Plan],
) -> None:
    model, given = Spreading(), (torch.rand(2, 3, 4), torch.rand(2, 5, 4))
    stage = module_of(text_of(planned(copy.deepcopy(model), *given, count=1)))
    stage.load_state_dict(model.state_dict())
    for x, y in (given, (torch.rand(3, 7, 4), torch.rand(3, 2, 4))):
        torch.testing.assert_close(stage(x, y), model(x, y))


class Fuse(nn.Module):
    """Takes a list and a dictionary, whose items it has other names for, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(4, 3), nn.Linear(6, 3)

    def forward(self, maps: list[Tensor], given: dict[str, Tensor]) -> Tensor:
        scale = given["scale"]
        return (self.narrow(maps[0]) + self.wide(maps[1])) * scale + given["shift"]


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([nn.Linear(5, 4), nn.Linear(5, 6)])
        self.fuse, self.head = Fuse(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        given = {"scale": x.mean(1, keepdim=True), "shift": x[:, :1]}
        y = self.fuse([down(x) for down in self.downs], given)
        return {"scores": y, "boxes": self.head(y.cos())}


def test_items_of_what_a_module_is_given_have_its_names(planned: Callable[..., Plan]) -> None:
    def loss_fn(found: dict[str, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
        labels, places = target
        near = nn.functional.mse_loss(found["boxes"], places)
        return nn.functional.cross_entropy(found["scores"], labels) + near

    x, target = torch.rand(4, 5), (torch.randint(3, (4,)), torch.rand(4, 3))
    text = text_of(planned(Fused(), x, count=1, target=target, loss_fn=loss_fn))

    heads = re.findall(r"def (?:forward|loss)\(\s*self, ([^)]+?),?\s*\)", text)
    names = [[given.split(":")[0].strip() for given in head.split(",")] for head in heads]
    assert {*names[0]} == {"maps_0", "maps_1", "scale", "given_shift"}, text
    assert {*names[-1]} == {"scores", "boxes", "labels", "places"}, text


class Table(nn.Module):
    """Gives as many of its rows as it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.rand(40, 4))
        self.scale = nn.Linear(4, 4)

    def forward(self, length: int) -> Tensor:
        scaled: Tensor = self.scale(self.rows[:length]).tanh()
        return scaled


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = Table(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        own = self.table(length).expand(samples, length, width)
        mixed: Tensor = self.mix(x * own) + x
        return mixed


class Subsampled(nn.Module):
    """Asks for sizes that follow from those of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(1, 2, 3, stride=2)
        self.out = nn.Linear(8, 4)
        self.layers = nn.ModuleList(Attending() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.narrow(x.unsqueeze(1))
        samples, channels, length, bands = x.size()
        x = self.out(x.permute(0, 2, 1, 3).reshape(samples, length, channels * bands)[..., :8])
        for layer in self.layers:
            x = layer(x)
        return x


def test_sizes_that_follow_from_the_input_are_read_where_the_user_asks_for_them(
    planned: Callable[..., Plan],
) -> None:
    model, x = Subsampled(), torch.rand(2, 13, 11)
    text = text_of(planned(copy.deepcopy(model), x, count=1))

    stage = module_of(text)
    stage.load_state_dict(model.state_dict())
    for rows in (x, torch.rand(3, 21, 15)):
        torch.testing.assert_close(stage(rows), model(rows))
    block = text.partition("class Attending(")[2].partition("\n\n\n")[0]
    assert "length = x.shape[1]" in block, text
    assert "def forward(self, x: Tensor) -> Tensor:" in block, text
    assert ".reshape(samples, length, bands * 2)" in text, text
