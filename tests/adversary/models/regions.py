"""Blocks under no_grad and autocast around much of a model, of which the parts are cut apart."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case
from adversary.inputs import classes, rows, steps, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(8, 3)


class Frozen(Headed):
    """A backbone that only looks, under a head that learns."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            found = self.backbone(x)
        return self.head(found)


class FrozenBelow(nn.Module):
    """Layers that learn below frozen ones, around which what is learnt is passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.adapter, self.head = Backbone(), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        learnt = self.adapter(x).tanh()
        with torch.no_grad():
            found = self.backbone(x) * learnt
            scale = learnt.abs().amax(-1, keepdim=True) + 1
        return self.head(found + learnt / scale)


class FrozenUntilWarm(Headed):
    """Frozen in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.training):
            found = self.backbone(x)
        return self.head(found)


class Reopened(nn.Module):
    """Gradients within a block without them, for one part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.side, self.head = Backbone(), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.backbone(x)
            with torch.enable_grad():
                side = self.side(x).tanh()
            x = x + side
        return self.head(x) + self.head(side)


class Looks(nn.Module):
    """Layers of which what comes after them only looks at what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)


class LooksByViews(Looks):
    """Views of what has gradients, as torch gives them none without."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).tanh()
        with torch.no_grad():
            whole, same, pairs = h[:, :], h.view(h.shape), h.view(-1, 2, 4)
            lent = h.contiguous()
        return self.head(self.mid(h).tanh() * whole + same + pairs.flatten(1) + lent)


class LooksOnce(Looks):
    """What could be written in place, were it not without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.mid(self.stem(x).tanh())
        with torch.no_grad():
            h = torch.relu(h)
        return self.head(h)


class Fills(Looks):
    """A tensor that is filled without gradients, and read with them."""

    def forward(self, x: Tensor) -> Tensor:
        h, found = self.stem(x).tanh(), torch.zeros(x.shape[0], 2, 8)
        with torch.no_grad():
            found[:, 0] = h
            found[:, 1] = h * 2
        return self.head(self.mid(found[:, 0]) * h + found[:, 1])


class LooksAtHeads(nn.Module):
    """Attention to keys and values that are repeated without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.head = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        q = self.q(x).view(samples, length, 4, 4).transpose(1, 2)
        k, v = self.kv(x).view(samples, length, 2, 8).transpose(1, 2).chunk(2, -1)
        with torch.no_grad():
            k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.head(y.transpose(1, 2).reshape(samples, length, 16).mean(1))


class Siamese(nn.Module):
    """Student and teacher, who has no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Backbone()
        self.teacher = copy.deepcopy(self.student)
        self.predictor = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    @torch.no_grad()
    def target(self, x: Tensor) -> Tensor:
        return F.normalize(self.teacher(x), dim=-1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, two = x, x.flip(1)
        guesses = [F.normalize(self.predictor(self.student(view)), dim=-1) for view in (one, two)]
        first, second = self.target(one), self.target(two)
        return 1 - (guesses[0] * second).sum(-1), 1 - (guesses[1] * first).sum(-1)


class Decorated(Headed):
    """The whole forward under autocast, as PyTorch's documents have it for several GPUs."""

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x)).float()


class NormIn32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(device_type=x.device.type, enabled=False):
            x = x.float()
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Islands(nn.Module):
    """Norms in fp32 inside of bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.norms = nn.ModuleList(NormIn32() for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            x = self.stem(x)
            for norm, layer in zip(self.norms, self.layers, strict=True):
                x = x + layer(norm(x)).tanh()
            return self.head(x).float()


class TiedInBlock(nn.Module):
    """An embedding that is the head, too, both under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.table(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x).float()


class AskedInBlock(nn.Module):
    """Sizes and values that a block without gradients asks for, of use after it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.places, self.head = Backbone(), nn.Embedding(32, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            length = x.shape[1]
            places = torch.arange(length, device=x.device)
            keep = x.abs().amax(-1, keepdim=True) > 0.1
            x = self.backbone(x)
        x = (x + self.places(places)) * keep
        return self.head(x[:, : length - 1].mean(1))


class Counting(Headed):
    """Buffers that are written without gradients, between layers that have them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.backbone(x)
        if self.training:
            with torch.no_grad():
                self.seen += 1
                self.mean.lerp_(self.backbone.stem.weight.mean(1), 0.5)
        return self.head(x - self.mean)


class DroppedLayers(Headed):
    """LayerDrop under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.backbone.stem(x)
            for block in self.backbone.blocks:
                if self.training and torch.rand(()) < 0.3:
                    continue
                x = block(x)
            return self.head(x).float()


class Checkpointed(Headed):
    """Layers that the model itself runs again in the backward, under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.backbone.stem(x)
            for block in self.backbone.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x).float()


class CheckpointedParts(nn.Module):
    """The same for a method of the model's, with a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def scaled(self, layer: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax(-1, keepdim=True) + 1
        return layer(x / scale).tanh() + x

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.stem(x)
            for layer in self.layers:
                x = checkpoint(self.scaled, layer, x, use_reentrant=False)
            return self.head(x).float()


def both(output: tuple[Tensor, Tensor], target: None = None) -> Tensor:
    return output[0].mean() + output[1].mean()


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def under_autocast(output: Tensor, target: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.cross_entropy(output.float(), target, label_smoothing=0.1)


def only_seen(output: Tensor, target: Tensor) -> Tensor:
    """With terms that have no gradients, or have them once."""
    size, sign = output.square().mean(), output.sigmoid().mean()
    with torch.no_grad():
        seen = (size + sign) * 0.5
    return F.cross_entropy(output, target) + seen + 0.1 * size


WHOLE = ({"microbatches": 1}, {"microbatches": 1, "schedule": "1f1b", "remat": "full"})
"""In bf16 the gradients of micro-batches are rounded before they are added up."""


def simple(name: str, model: object, inputs: object = rows, **options: object) -> Case:
    given = {"loss": F.cross_entropy, "target": classes, "options": "--stages 3", **options}
    return Case(name, model, inputs, **{"manners": FP32_ONLY, **given})


def in_bf16(name: str, model: object, inputs: object = rows, **options: object) -> Case:
    return simple(name, model, inputs, **{"manners": WHOLE, **options})


CASES = (
    simple("frozen", Frozen, quick=True),
    simple("frozen_inference", Frozen, options="--mode infer --stages 4", manners=None),
    simple("frozen_remat", Frozen, options="--stages 3 --remat full"),
    simple("frozen_below", FrozenBelow),
    simple("frozen_until_warm", FrozenUntilWarm),
    simple("reopened", Reopened),
    simple("looks_by_views", LooksByViews),
    simple("looks_once", LooksOnce),
    simple("fills", Fills),
    simple("looks_at_heads", LooksAtHeads, steps),
    simple("only_seen", Frozen, loss=only_seen),
    simple("siamese", Siamese, loss=both, target=None),
    in_bf16("decorated", Decorated),
    in_bf16("decorated_remat", Decorated, options="--stages 3 --remat full"),
    in_bf16("islands", Islands),
    in_bf16("loss_in_32", Decorated, loss=under_autocast),
    in_bf16("tied_in_block", TiedInBlock, tokens, loss=of_tokens, target=tokens),
    simple("asked_in_block", AskedInBlock, steps),
    simple("counting", Counting),
    in_bf16("checkpointed", Checkpointed),
    in_bf16("checkpointed_parts", CheckpointedParts, options="--stages 2"),
    in_bf16("dropped_layers", DroppedLayers, random=True),
)
