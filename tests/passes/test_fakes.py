"""What fakes make of plain kernels, against what the kernels of the host return."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_compiler.passes import fakes
from gpipe_compiler.passes.fakes import HostFakes

aten = torch.ops.aten
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor | list[Tensor]]] = {
    "mm": aten.mm,
    "addmm": lambda x, y: aten.addmm(y[0], x, y),
    "bmm": lambda x, y: aten.bmm(x[None], y[None]),
    "add": lambda x, y: aten.add(x, y[:1]),
    "mul": aten.mul,
    "divided whole numbers": lambda x, y: aten.div(x.int(), y.int()),
    "sigmoid": lambda x, _: aten.sigmoid(x),
    "gelu": lambda x, _: aten.gelu(x),
    "silu": lambda x, _: aten.silu(x),
    "relu": lambda x, _: aten.relu(x),
    "threshold": lambda x, y: aten.threshold_backward(x, y, 0),
    "square": lambda x, _: aten.pow(x, 2),
    "sigmoid in place": lambda x, _: aten.sigmoid_(x),
    "a row added in place": lambda x, y: aten.add_(x, y[0]),
    "a row times a matrix": lambda x, y: aten.addmm(y[:1, :1], x[:1], y),
    "types that differ": lambda x, y: aten.mul(x, y.double()),
    "a number": lambda x, y: aten.mul(x, y[0, 0]),
    "copied": lambda x, _: aten.clone(x),
    "detached": lambda x, _: aten.detach(x[1:]),
    "sum": lambda x, _: aten.sum(x, [0], True),
    "mean": lambda x, _: aten.mean(x, [-1]),
    "t": lambda x, _: aten.t(x),
    "transpose": lambda x, _: aten.transpose(x[None], 0, 2),
    "view": lambda x, _: aten.view(x.contiguous(), [-1]),
    "expand": lambda x, _: aten.expand(x[:1], [3, 6]),
    "a column added": lambda x, y: aten.add(x, y[:, :1]),
    "added to a row": lambda x, y: aten.add(x[:1], y),
    "added in another layout": lambda x, y: aten.add(x, y.t().contiguous().t()),
    "every other column in place": lambda x, y: aten.mul_(x[:, ::2], y[:1, :3]),
    "flattened": lambda x, _: aten._unsafe_view(x.contiguous(), [36]),
    "slice": lambda x, _: aten.slice(x, 1, 1, 5, 2),
    "select": lambda x, _: aten.select(x, 1, -1),
    "squeeze": lambda x, _: [aten.squeeze(x[:1], 0), aten.squeeze(x[None], [0, 1])],
    "unbind": lambda x, _: aten.unbind(x, 1),
    "split": lambda x, _: [*aten.split(x, 4), *aten.unsafe_split(x, 2, 1)],
    "split by sizes": lambda x, _: aten.split_with_sizes(x, [1, 5], 1),
    "cat": lambda x, y: aten.cat([x, y, x[:1]]),
    "cat of types that differ": lambda x, y: aten.cat([x, y.double()], 1),
    "stack": lambda x, y: aten.stack([x, y], 1),
}


def layout(made: Tensor | list[Tensor]) -> object:
    if not isinstance(made, Tensor):
        return type(made), [*map(layout, made)]
    device, size = made.device.type, made.untyped_storage().nbytes()
    return made.shape, made.stride(), made.storage_offset(), made.dtype, device, size


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_kernels_return_what_those_of_the_host_do(name: str, dtype: torch.dtype) -> None:
    for change in (lambda x: x, Tensor.t, lambda x: x[:, ::2].repeat(1, 2)):
        x, y = (change(torch.rand(6, 6).to(dtype)) for _ in range(2))
        real = CALLS[name](x, y)
        mode = HostFakes()
        with mode:
            made = CALLS[name](mode.from_tensor(x), mode.from_tensor(y))
        assert layout(made) == layout(real)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_sparse_gradient_of_a_sum_of_bags_has_a_row_for_each_index(weighted: bool) -> None:
    table, bags, weights = torch.rand(20, 8), torch.randint(20, (4, 5)), torch.rand(4, 5)

    def gradient(given: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = given(table).requires_grad_()
        scales = given(weights) if weighted else None
        summed = nn.functional.embedding_bag(
            given(bags), leaf, mode="sum", sparse=True, per_sample_weights=scales
        )
        return torch.autograd.grad(summed, [leaf], torch.ones_like(summed))[0]

    mode = HostFakes()
    with mode:
        made = gradient(mode.from_tensor)
    real = gradient(torch.clone)
    assert made._indices().shape == real._indices().shape
    assert made._values().shape == real._values().shape


def test_a_view_shares_the_memory_of_what_it_views() -> None:
    mode = HostFakes()
    with mode:
        x = torch.rand(4, 6)
        seen = x.t().view(6, 4).unsqueeze(0).expand(2, 6, 4)
    assert seen.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_what_cannot_be_is_refused_in_torchs_own_words() -> None:
    messages = []
    for rules in ({}, fakes._RULES):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fakes, "_RULES", rules)
            with HostFakes(), pytest.raises(RuntimeError) as raised:
                torch.rand(2, 3) @ torch.rand(4, 5)
            messages.append(str(raised.value))
    assert messages[0] == messages[1]
