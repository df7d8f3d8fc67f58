"""Idioms of research code that reach beyond layers: hooks, gradients of their own, control flow."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from foreign.model import Foreign


def body(*sizes: int) -> nn.Sequential:
    """Linear layers, each with an activation."""
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairs))


class Reverse(torch.autograd.Function):
    """The gradient turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        """The same numbers."""
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The opposite."""
        return -ctx.weight * grads[0], None


class Domains(nn.Module):
    """Classes, and domains behind a gradient reversal."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.label, self.domain = body(6, 16, 16), nn.Linear(16, 4), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of both."""
        h = self.body(x)
        return self.label(h), self.domain(Reverse.apply(h, 0.3))


class Sign(torch.autograd.Function):
    """The sign, with the gradient of a clipped identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """One or minus one."""
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Nothing beyond one."""
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() <= 1)


class Binary(nn.Module):
    """Weights of one bit, by a straight-through estimator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        for layer in (self.first, self.second):
            scale = layer.weight.abs().mean(1, keepdim=True)
            x = F.hardtanh(F.linear(x, Sign.apply(layer.weight) * scale, layer.bias))
        return self.head(x)


class Detached(nn.Module):
    """Straight through by `detach`, rounding to levels, a stop by `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(6, 16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.body(x).sigmoid()
        h = h + ((h * 7).round() / 7 - h).detach()
        return self.head(h * (1 + h.data.mean(-1, keepdim=True)))


class Clipped(nn.Module):
    """The gradient of an activation is clipped by a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(6, 16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.body(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return self.head(h)


class Frozen(nn.Module):
    """A hook of a parameter keeps some of its rows as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(20, 8), body(8, 16), nn.Linear(16, 4)
        rows = torch.ones(20, 1)
        rows[:5] = 0
        self.embed.weight.register_hook(lambda grad: grad * rows)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.body(self.embed(ids).mean(1)))


def halved(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What goes into a layer, halved."""
    return (given[0] / 2, *given[1:])


def doubled(module: nn.Module, into: Any, out: Any) -> Any:
    """What comes back from a layer, doubled."""
    return tuple(None if grad is None else grad * 2 for grad in into)


class Hooked(nn.Module):
    """Hooks of modules: before the forward, and of the whole backward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = body(6, 16), body(16, 16), nn.Linear(16, 4)
        self.two.register_forward_pre_hook(halved)
        self.two.register_full_backward_hook(doubled)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.two(self.one(x)))


class Normed(nn.Module):
    """Weights by parametrizations: a norm apart, and an orthogonal matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.one = parametrizations.weight_norm(nn.Linear(6, 16))
        self.two = parametrizations.orthogonal(nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(F.relu(self.two(F.relu(self.one(x)))))


class Quantized(nn.Module):
    """Quantisation-aware: weights and activations rounded to eight bits, on fixed scales."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.tensor([0.05]))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        weight = torch.fake_quantize_per_tensor_affine(self.one.weight, 0.01, 0, -128, 127)
        h = F.relu(F.linear(x, weight, self.one.bias))
        zero = torch.zeros(1)
        h = torch._fake_quantize_learnable_per_tensor_affine(h, self.scale, zero, 0, 255, 1.0)
        return self.two(h)


class Observed(nn.Module):
    """Quantisation-aware by torch.ao: observers that follow the range."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

        self.one, self.two = nn.Linear(6, 16), nn.Linear(16, 4)
        self.fake = FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.two(self.fake(F.relu(self.one(x))))


class Either(nn.Module):
    """`torch.cond` by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(6, 16, 16), nn.Linear(16, 4)
        self.register_buffer("warm", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.body(x)
        h = torch.cond(self.warm > 0.5, lambda y: y.sin(), lambda y: y.cos(), (h,))
        return self.head(h)


class Recomputed(nn.Module):
    """Blocks under `checkpoint`, without reentry."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(body(16, 32, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.stem(x)
        for block in self.blocks:
            h = h + checkpoint(block, h, use_reentrant=self.reentrant)
        return self.head(h)


class Reentrant(Recomputed):
    """The older kind."""

    reentrant = True


class LayerDrop(nn.Module):
    """Blocks left out at random on the host, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(body(16, 32, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.stem(x)
        for block in self.blocks:
            if self.training and torch.rand(()) < 0.2:
                continue
            h = h + block(h)
        return self.head(h)


class Shuffled(nn.Module):
    """Blocks in an order that Python draws."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(body(16, 32, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.stem(x)
        for place in random.sample(range(3), 3) if self.training else range(3):
            h = h + self.blocks[place](h)
        return self.head(h)


class EarlyExit(nn.Module):
    """Deeper where the first head is in doubt: a branch by values."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.more = body(6, 16), body(16, 16)
        self.first, self.second = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.stem(x)
        logits = self.first(h)
        if logits.softmax(-1).amax() > 0.99:
            return logits
        return self.second(self.more(h))


class Routed(nn.Module):
    """A mixture of experts, each on the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.head = nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(16, 4)
        self.experts = nn.ModuleList(body(16, 32, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.stem(x)
        weight, chosen = self.gate(h).softmax(-1).topk(2, -1)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            out = out.index_add(0, rows, weight[rows, place, None] * expert(h[rows]))
        return self.head(h + out)


class Packed(nn.Module):
    """A bidirectional LSTM over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(16, 4)
        self.rnn = nn.LSTM(8, 8, batch_first=True, bidirectional=True)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Logits of a sequence."""
        packed = pack_padded_sequence(
            self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=7)
        return self.head(out.sum(1) / lengths[:, None])


class Penalised(nn.Module):
    """A gradient penalty within forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(6, 16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, and how far their slope is from one."""
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            score = self.head(self.body(x)).squeeze(-1)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score, (slope.norm(dim=-1) - 1) ** 2


class Ensemble(nn.Module):
    """Members under `vmap`, their weights stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.body = body(6, 16)
        self.weight = nn.Parameter(torch.randn(3, 4, 16) / 4)
        self.bias = nn.Parameter(torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        """The members' mean logits."""
        h = self.body(x)
        return torch.vmap(lambda w, b: F.linear(h, w, b))(self.weight, self.bias).mean(0)


class Equilibrium(nn.Module):
    """A fixed point found without gradients, and one step with them."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.cell, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        u = self.into(x)
        z = torch.zeros_like(u)
        with torch.no_grad():
            for _ in range(8):
                z = torch.tanh(0.5 * self.cell(z) + u)
        return self.head(torch.tanh(0.5 * self.cell(z) + u))


class Contrast(nn.Module):
    """Two views, embedded; the loss compares all samples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.project = body(6, 16, 16), nn.Linear(16, 8)
        self.heat = nn.Parameter(torch.tensor(2.0))

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Both embeddings, and a temperature."""
        first, second = self.project(self.body(one)), self.project(self.body(two))
        return F.normalize(first, dim=-1), F.normalize(second, dim=-1), self.heat


class Crnn(nn.Module):
    """Convolutions, a recurrent net, and labels without alignment (CTC)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn = nn.Conv1d(4, 8, 3, padding=1), nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 12, 6) log-probabilities."""
        h, _ = self.rnn(F.relu(self.conv(x)).mT)
        return self.head(h).log_softmax(-1)


class Masked(nn.Module):
    """A masked autoencoder: patches left out by the order of drawn numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 16), nn.Linear(16, 6)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each patch again, and which were left out."""
        n, length, _ = x.shape
        order = torch.rand(n, length, device=x.device).argsort(1)
        back = order.argsort(1)
        kept = order[:, : length // 2]
        h = self.embed(x).gather(1, kept[..., None].expand(-1, -1, 16))
        h = self.encoder(h)
        h = torch.cat([h, self.token.expand(n, length - h.shape[1], 16)], 1)
        h = h.gather(1, back[..., None].expand(-1, -1, 16))
        return self.head(h), (back >= length // 2).float()


class Variational(nn.Module):
    """A VAE: the reparametrisation trick, and a divergence."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = (
            nn.Linear(6, 8),
            nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 6)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x again, means and logarithms of variances."""
        mu, log_var = self.encode(x).chunk(2, -1)
        z = mu + torch.randn_like(mu) * (0.5 * log_var).exp() if self.training else mu
        return self.decode(z), mu, log_var


class Flow(nn.Module):
    """Coupling layers, with the logarithm of the determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6)) for _ in range(4)
        )
        self.mix = nn.Parameter(torch.eye(6) + 0.1 * torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        """Of each sample the likelihood's logarithm."""
        log = torch.zeros(x.shape[0])
        for layer in self.layers:
            left, right = x.chunk(2, -1)
            scale, shift = layer(left).chunk(2, -1)
            right = right * scale.tanh().exp() + shift
            log = log + scale.tanh().sum(-1)
            x = torch.cat([right, left], -1) @ self.mix
            log = log + torch.linalg.slogdet(self.mix).logabsdet
        return log - 0.5 * x.square().sum(-1)


class Edges(nn.Module):
    """Messages along a list of edges, gathered by `index_add_` and a scattered softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.message, self.head = nn.Linear(5, 16), nn.Linear(32, 16), nn.Linear(16, 1)
        ring = torch.arange(6)
        self.register_buffer("edges", torch.stack([ring, (ring + 1) % 6]))

    def forward(self, x: Tensor) -> Tensor:
        """A number a graph; x is (n, 6, 5)."""
        h = self.embed(x)
        source, goal = self.edges
        for _ in range(2):
            m = F.relu(self.message(torch.cat([h[:, source], h[:, goal]], -1)))
            h = torch.zeros_like(h).index_add_(1, goal, m) + h
        return self.head(h.mean(1)).squeeze(-1)


def _domains(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(output[0], target[0]) + F.cross_entropy(output[1], target[1])


def _penalised(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target) + output[1].mean()


def _contrast(output: tuple[Tensor, Tensor, Tensor], target: object) -> Tensor:
    one, two, heat = output
    logits = one @ two.mT * heat.exp()
    same = torch.arange(len(one))
    return (F.cross_entropy(logits, same) + F.cross_entropy(logits.mT, same)) / 2


def _ctc(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    frames = torch.full((len(output),), output.shape[1])
    return F.ctc_loss(output.transpose(0, 1), target[0], frames, target[1])


def _masked(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    again, out = output
    return ((again - target).square().mean(-1) * out).sum() / out.sum()


def _variational(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    again, mu, log_var = output
    divergence = -0.5 * (1 + log_var - mu.square() - log_var.exp()).sum(-1).mean()
    return F.mse_loss(again, target) + 0.1 * divergence


def _likely(output: Tensor, target: object) -> Tensor:
    return -output.mean()


def _randn(*shape: int) -> Any:
    return lambda n: torch.randn(n, *shape)


def _ints(high: int, *shape: int) -> Any:
    return lambda n: torch.randint(high, (n, *shape))


def _classified(model: type[nn.Module]) -> Foreign:
    return Foreign(model, _randn(6), F.cross_entropy, _ints(4))


def _sequences(n: int) -> tuple[Tensor, Tensor]:
    return torch.randint(20, (n, 7)), torch.randint(2, 8, (n,))


MODELS: dict[str, Foreign] = {
    "gradient-reversal": Foreign(
        Domains, _randn(6), _domains, lambda n: (torch.randint(4, (n,)), torch.randint(2, (n,)))
    ),
    "binary-weights": _classified(Binary),
    "straight-through": _classified(Detached),
    "activation-hook": _classified(Clipped),
    "parameter-hook": Foreign(Frozen, _ints(20, 7), F.cross_entropy, _ints(4)),
    "module-hooks": _classified(Hooked),
    "parametrized": _classified(Normed),
    "fake-quantized": _classified(Quantized),
    "observers": _classified(Observed),
    "cond": _classified(Either),
    "checkpointed": _classified(Recomputed),
    "checkpointed-reentrant": _classified(Reentrant),
    "layerdrop": _classified(LayerDrop),
    "shuffled-layers": _classified(Shuffled),
    "early-exit": _classified(EarlyExit),
    "routed-experts": _classified(Routed),
    "packed-sequences": Foreign(Packed, _sequences, F.cross_entropy, _ints(4)),
    "gradient-penalty": Foreign(Penalised, _randn(6), _penalised, _randn()),
    "vmapped-ensemble": _classified(Ensemble),
    "deep-equilibrium": _classified(Equilibrium),
    "contrastive": Foreign(
        Contrast, lambda n: (torch.randn(n, 6), torch.randn(n, 6)), _contrast, None,
        options="--loss-over batch",
    ),
    "ctc": Foreign(
        Crnn, _randn(4, 12), _ctc,
        lambda n: (torch.randint(1, 6, (n, 4)), torch.randint(2, 5, (n,))),
    ),
    "masked-autoencoder": Foreign(Masked, _randn(8, 6), _masked, _randn(8, 6)),
    "variational": Foreign(Variational, _randn(6), _variational, _randn(6)),
    "normalizing-flow": Foreign(Flow, _randn(6), _likely, None),
    "edge-lists": Foreign(Edges, _randn(6, 5), F.l1_loss, _randn()),
}  # fmt: skip
