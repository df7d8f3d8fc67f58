"""Idioms of research code: models as papers' repositories write them, by a few lines each."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from foreign import autograd_idioms
from foreign.model import Foreign


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation in between."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), act()]
    return nn.Sequential(*layers[:-1])


class NanoGPT(nn.Module):
    """(logits, loss), tied, with a registered mask."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(50, 32),
                "wpe": nn.Embedding(16, 32),
                "h": nn.ModuleList(nn.Linear(32, 96) for _ in range(3)),
                "proj": nn.ModuleList(mlp(32, 64, 32, act=nn.GELU) for _ in range(3)),
            }
        )
        self.head = nn.Linear(32, 50, bias=False)
        self.transformer["wte"].weight = self.head.weight
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits, and the loss where there are targets."""
        b, t = idx.size()
        t_ = self.transformer
        x = t_["wte"](idx) + t_["wpe"](torch.arange(t, device=idx.device))
        for attend, proj in zip(t_["h"], t_["proj"], strict=True):
            q, k, v = (
                u.view(b, t, 4, 8).transpose(1, 2)
                for u in attend(F.layer_norm(x, (32,))).split(32, 2)
            )
            att = (q @ k.transpose(-2, -1)) / math.sqrt(8)
            att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf")).softmax(-1)
            x = x + proj((att @ v).transpose(1, 2).contiguous().view(b, t, 32))
        logits = self.head(x)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, 50), targets.view(-1), ignore_index=-1)


class NeRF(nn.Module):
    """Rays, positional encoding, volume rendering."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(39, 32), nn.Linear(32, 32), nn.Linear(71, 32)])
        self.out = nn.Linear(32, 4)

    def forward(self, origins: Tensor, directions: Tensor) -> dict[str, Tensor]:
        """Colours and depths of rays."""
        z = torch.linspace(2.0, 6.0, 8).expand(origins.shape[0], 8)
        points = origins[:, None] + directions[:, None] * z[..., None]
        powers = 2.0 ** torch.arange(6)
        x = (points[..., None, :] * powers[:, None]).flatten(-2)
        x = torch.cat([points, x.sin(), x.cos()], -1)
        h = x
        for i, layer in enumerate(self.layers):
            h = F.relu(layer(torch.cat([x, h], -1) if i == 2 else h))
        raw = self.out(h)
        distances = torch.cat([z[:, 1:] - z[:, :-1], torch.full_like(z[:, :1], 1e10)], -1)
        alpha = 1 - torch.exp(-F.relu(raw[..., 3]) * distances)
        passed = torch.cumprod(
            torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1
        )[:, :-1]
        weights = alpha * passed
        return {
            "rgb": (weights[..., None] * raw[..., :3].sigmoid()).sum(1),
            "depth": (weights * z).sum(1),
        }


class VQVAE(nn.Module):
    """Straight-through codes, a commitment loss, and a perplexity in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(3, 8, 4, 2, 1), nn.ConvTranspose2d(8, 3, 4, 2, 1)
        self.codes = nn.Embedding(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The picture again, and what the codes are off by, for each sample."""
        z = self.encoder(x).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, 8)
        distance = (
            flat.pow(2).sum(1, keepdim=True)
            - 2 * flat @ self.codes.weight.t()
            + self.codes.weight.pow(2).sum(1)
        )
        one_hot = torch.zeros_like(distance).scatter_(1, distance.argmin(1, keepdim=True), 1)
        q = (one_hot @ self.codes.weight).view(z.shape)
        off = (q.detach() - z).pow(2) * 0.25 + (q - z.detach()).pow(2)
        q = z + (q - z).detach()
        return self.decoder(q.permute(0, 3, 1, 2)), off.mean((1, 2, 3))


class PointNet(nn.Module):
    """A T-Net that adds an identity, maxima over points."""

    def __init__(self) -> None:
        super().__init__()
        self.tnet, self.fc = nn.Conv1d(3, 16, 1), nn.Linear(16, 9)
        self.conv, self.bn, self.head = nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.Linear(16, 10)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and transformations."""
        t = self.fc(torch.max(F.relu(self.tnet(points)), 2, keepdim=True)[0].view(-1, 16))
        t = t.view(-1, 3, 3) + torch.eye(3).flatten().view(1, 3, 3).repeat(points.shape[0], 1, 1)
        x = torch.bmm(points.transpose(2, 1), t).transpose(2, 1)
        return self.head(F.relu(self.bn(self.conv(x))).max(2).values), t


class Graphs(nn.Module):
    """Message passing over dense batches of graphs, with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 16)
        self.layers = nn.ModuleList(nn.GRUCell(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor, adjacency: Tensor, mask: Tensor) -> Tensor:
        """A number for each graph."""
        b, n, _ = x.shape
        h = torch.tanh(self.embed(x))
        degree = adjacency.sum(-1, keepdim=True).clamp(min=1)
        for cell in self.layers:
            h = cell((adjacency @ h / degree).reshape(b * n, -1), h.reshape(b * n, -1)).view(
                b, n, -1
            )
            h = h * mask[..., None]
        return self.head(h.sum(1) / mask.sum(1, keepdim=True)).squeeze(-1)


class StateSpace(nn.Module):
    """Mamba's selective scan as its minimal versions write it."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out, self.x = nn.Linear(8, 32), nn.Linear(16, 8), nn.Linear(16, 9)
        self.conv = nn.Conv1d(16, 16, 4, groups=16, padding=3)
        self.dt, self.norm = nn.Linear(1, 16), nn.LayerNorm(8)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, 5.0).repeat(16, 1)))
        self.D = nn.Parameter(torch.ones(16))

    def forward(self, u: Tensor) -> Tensor:
        """The same shape."""
        b, length, _ = u.shape
        x, gate = self.inp(self.norm(u)).split(16, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., :length].transpose(1, 2))
        delta, b_, c_ = self.x(x).split([1, 4, 4], -1)
        delta = F.softplus(self.dt(delta))
        decay = torch.exp(torch.einsum("bld,dn->bldn", delta, -torch.exp(self.A_log)))
        driven = torch.einsum("bld,bln,bld->bldn", delta, b_, x)
        state, ys = torch.zeros(b, 16, 4, device=u.device), []
        for i in range(length):
            state = decay[:, i] * state + driven[:, i]
            ys.append(torch.einsum("bdn,bn->bd", state, c_[:, i]))
        return u + self.out((torch.stack(ys, 1) + x * self.D) * F.silu(gate))


class WaveNet(nn.Module):
    """Dilated causal convolutions, gates, skips that are summed, weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, 8, 1)
        self.dilated = nn.ModuleList(
            parametrizations.weight_norm(nn.Conv1d(8, 16, 2, dilation=2**i)) for i in range(4)
        )
        self.mix = nn.ModuleList(nn.Conv1d(8, 16, 1) for _ in range(4))
        self.end = nn.Conv1d(8, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of 32 levels."""
        x, skips = self.start(x), 0
        for conv, mix in zip(self.dilated, self.mix, strict=True):
            a, b = conv(F.pad(x, (conv.dilation[0], 0))).chunk(2, 1)
            residual, skip = mix(a.tanh() * b.sigmoid()).chunk(2, 1)
            x, skips = (x + residual) * 0.5**0.5, skips + skip
        return self.end(F.relu(skips))


class OdeNet(nn.Module):
    """Runge-Kutta of four steps through one vector field."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.head = mlp(9, 32, 8, act=nn.Tanh), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""

        def f(t: float, y: Tensor) -> Tensor:
            return self.field(torch.cat([y, torch.full_like(y[:, :1], t)], 1))

        h = 0.25
        for i in range(4):
            t = i * h
            k1 = f(t, x)
            k2 = f(t + h / 2, x + h / 2 * k1)
            k3 = f(t + h / 2, x + h / 2 * k2)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + f(t + h, x + h * k3))
        return self.head(x)


class HyperNet(nn.Module):
    """Weights that another network makes, for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.hyper, self.base = mlp(4, 16, 6 * 5 + 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        """Two numbers."""
        w, b = self.hyper(task).split([30, 5], -1)
        return self.base(torch.baddbmm(b[:, None], x[:, None], w.view(-1, 6, 5)).squeeze(1).relu())


class Dlrm(nn.Module):
    """Embedding bags, and the products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, 8, mode="sum") for _ in range(3))
        self.bottom, self.top = mlp(4, 16, 8), mlp(8 + 6, 16, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Click logits; sparse (n, 3, 5)."""
        x = self.bottom(dense)
        embedded = [bag(sparse[:, i]) for i, bag in enumerate(self.bags)]
        t = torch.stack([x, *embedded], 1)
        z = torch.bmm(t, t.transpose(1, 2))
        li, lj = torch.tril_indices(4, 4, offset=-1)
        return self.top(torch.cat([x, z[:, li, lj]], 1)).squeeze(1)


class Capsules(nn.Module):
    """Dynamic routing in three rounds, logits without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 5, 2)
        self.W = nn.Parameter(torch.randn(1, 3, 50, 6, 8) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Lengths of three capsules."""

        def squash(s: Tensor) -> Tensor:
            n = s.norm(dim=-1, keepdim=True)
            return n / (1 + n**2) * s

        u = squash(self.conv(x).view(x.size(0), -1, 8))
        hat = (self.W @ u[:, None, :, :, None]).squeeze(-1)
        detached, b = hat.detach(), torch.zeros(x.size(0), 3, 50, 1)
        for _ in range(2):
            v = squash((b.softmax(1) * detached).sum(2))
            b += (detached * v.unsqueeze(2)).sum(-1, keepdim=True)
        return squash((b.softmax(1) * hat).sum(2)).norm(dim=-1)


class Fourier(nn.Module):
    """A Fourier neural operator with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.drop = nn.Conv1d(2, 8, 1), nn.Conv1d(8, 1, 1)
        self.spectral = nn.ParameterList(
            torch.randn(8, 8, 5, dtype=torch.cfloat) / 8 for _ in range(2)
        )
        self.local = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(n, 1, 16)."""
        x = self.lift(x)
        for weight, local in zip(self.spectral, self.local, strict=True):
            modes = torch.fft.rfft(x)
            out = torch.zeros_like(modes)
            out[..., :5] = torch.einsum("bix,iox->box", modes[..., :5], weight)
            x = F.gelu(torch.fft.irfft(out, n=x.size(-1)) + local(x))
        return self.drop(x)


class SpatialTransformer(nn.Module):
    """grid_sample by a predicted affine."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.conv, self.head = nn.Linear(64, 6), nn.Conv2d(1, 4, 3), nn.Linear(4, 10)
        nn.init.zeros_(self.where.weight)
        self.where.bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))

    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities."""
        theta = self.where(x.flatten(1)).view(-1, 2, 3)
        x = F.grid_sample(
            x, F.affine_grid(theta, x.size(), align_corners=False), align_corners=False
        )
        return F.log_softmax(self.head(F.relu(self.conv(x)).mean((2, 3))), dim=1)


class Distilled(nn.Module):
    """A frozen teacher run without gradients, and a student."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(6, 16, 4), mlp(6, 32, 32, 4)
        self.teacher.requires_grad_(False).eval()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of both."""
        with torch.no_grad():
            soft = self.teacher(x).softmax(-1)
        return self.student(x), soft


class Byol(nn.Module):
    """A target network of moving averages, updated in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predict = mlp(6, 16, 8), mlp(8, 16, 8)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        """The loss of each sample."""
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.data = slow.data * 0.99 + fast.data * 0.01
            goal = F.normalize(self.target(two), dim=-1)
        return 2 - 2 * (F.normalize(self.predict(self.online(one)), dim=-1) * goal).sum(-1)


class Uncertain(nn.Module):
    """Two tasks weighed by parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = mlp(6, 16, 16), nn.Linear(16, 1), nn.Linear(16, 4)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Both outputs and the weights' logarithms."""
        h = F.relu(self.trunk(x))
        return self.one(h).squeeze(-1), self.two(h), self.log_vars


class Diffusion(nn.Module):
    """DDPM: noise and times are drawn in forward, the model returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(9, 32, 32, 8, act=nn.SiLU)
        self.register_buffer("abar", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """{"loss": ...}."""
        t = torch.randint(0, 100, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        a = self.abar[t][:, None]
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise
        return {"loss": F.mse_loss(self.net(torch.cat([noisy, t[:, None] / 100], 1)), noise)}


class LinearAttention(nn.Module):
    """Causal by cumulative sums, with a decay, rotary pairs and an RMS norm in doubles' place."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.g = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.g
        q, k, v = self.qkv(h).view(*x.shape[:2], 3, 4, 4).unbind(2)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("nthd,nthe->nthde", k, v).cumsum(1)
        z = 1 / (torch.einsum("nthd,nthd->nth", q, k.cumsum(1)) + 1e-6)
        out = torch.einsum("nthd,nthde,nth->nthe", q, kv, z)
        return x + self.out(out.flatten(2))


class Recurrent(nn.Module):
    """Pointer-like attention over an encoder, teacher forcing, a loop over steps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True)
        self.cell, self.attend, self.head = nn.LSTMCell(16, 8), nn.Linear(8, 8), nn.Linear(16, 20)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits of each step."""
        memory, hidden = self.encoder(self.embed(source))
        h, c = hidden[-1], torch.zeros_like(hidden[-1])
        context, steps = memory.mean(1), []
        for word in self.embed(target).unbind(1):
            h, c = self.cell(torch.cat([word, context], -1), (h, c))
            weights = (
                (memory @ self.attend(h).unsqueeze(-1)).squeeze(-1).masked_fill(source == 0, -1e9)
            )
            context = (weights.softmax(-1).unsqueeze(1) @ memory).squeeze(1)
            steps.append(self.head(torch.cat([h, context], -1)))
        return torch.stack(steps, 1)


class Kan(nn.Module):
    """B-splines on a grid that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 9).expand(6, -1).contiguous())
        self.base, self.spline = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 6, 5) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Four numbers."""
        y, grid = x.unsqueeze(-1), self.grid
        bases = ((y >= grid[:, :-1]) & (y < grid[:, 1:])).to(x.dtype)
        for k in range(1, 4):
            left = (y - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)])
            right = (grid[:, k + 1 :] - y) / (grid[:, k + 1 :] - grid[:, 1:-k])
            bases = left * bases[..., :-1] + right * bases[..., 1:]
        return self.base(F.silu(x)) + F.linear(bases.flatten(1), self.spline.flatten(1))


class Critic(nn.Module):
    """Spectral norm, minibatch-free, a twin head under one ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            parametrizations.spectral_norm(nn.Conv2d(3, 8, 4, 2, 1)),
            nn.LeakyReLU(0.2, inplace=True),
            parametrizations.spectral_norm(nn.Conv2d(8, 8, 4, 2, 1)),
        )
        self.heads = nn.ModuleDict({"real": nn.Linear(8, 1), "class": nn.Linear(8, 4)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """By the names of the heads."""
        h = self.body(x).sum((2, 3))
        return {name: head(h) for name, head in self.heads.items()}


def randn(*shape: int) -> Callable[[int], Tensor]:
    """Batches of so shaped samples."""
    return lambda samples: torch.randn(samples, *shape)


def both(*parts: Callable[[int], Tensor]) -> Callable[[int], Any]:
    """Batches of several tensors."""
    return lambda samples: tuple(part(samples) for part in parts)


def words(high: int, *shape: int, low: int = 0) -> Callable[[int], Tensor]:
    """Batches of integers."""
    return lambda samples: torch.randint(low, high, (samples, *shape))


def _graphs(samples: int) -> tuple[Tensor, Tensor, Tensor]:
    adjacency = (torch.rand(samples, 6, 6) < 0.4).float()
    mask = (torch.arange(6) < torch.randint(2, 7, (samples, 1))).float()
    return torch.randn(samples, 6, 5), ((adjacency + adjacency.mT) > 0).float(), mask


def _tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def _levels(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def _pointnet(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    logits, t = output
    off = torch.norm(torch.bmm(t, t.transpose(2, 1)) - torch.eye(3)[None], dim=(1, 2))
    return F.nll_loss(F.log_softmax(logits, -1), target) + 0.001 * off.mean()


def _vq(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target) + output[1].mean()


def _capsules(lengths: Tensor, target: Tensor) -> Tensor:
    one_hot = torch.eye(3).index_select(0, target)
    left, right = F.relu(0.9 - lengths) ** 2, F.relu(lengths - 0.1) ** 2
    return (one_hot * left + 0.5 * (1 - one_hot) * right).sum(1).mean()


def _distilled(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    student, soft = output
    kl = F.kl_div((student / 2).log_softmax(-1), soft, reduction="batchmean") * 4
    return 0.5 * kl + 0.5 * F.cross_entropy(student, target)


def _uncertain(output: tuple[Tensor, ...], target: tuple[Tensor, Tensor]) -> Tensor:
    one, two, log_vars = output
    first, second = F.mse_loss(one, target[0]), F.cross_entropy(two, target[1])
    return (-log_vars[0]).exp() * first + (-log_vars[1]).exp() * second + log_vars.sum()


def _hinge(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.relu(1 - output["real"]).mean() + F.cross_entropy(output["class"], target)


def _nerf(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output["rgb"], target)


def _focal(output: Tensor, target: Tensor) -> Tensor:
    bce = F.binary_cross_entropy_with_logits(output, target, reduction="none")
    p = torch.exp(-bce)
    return ((1 - p) ** 2 * bce).mean()


MODELS: dict[str, Foreign] = {
    "nanogpt": Foreign(NanoGPT, both(words(50, 12), words(50, 12)), lambda out, _: out[1]),
    "nerf": Foreign(NeRF, both(randn(3), randn(3)), _nerf, randn(3)),
    "vqvae": Foreign(VQVAE, randn(3, 8, 8), _vq, randn(3, 8, 8)),
    "pointnet": Foreign(PointNet, randn(3, 12), _pointnet, words(10)),
    "graphs": Foreign(Graphs, _graphs, F.l1_loss, randn()),
    "state-space": Foreign(StateSpace, randn(10, 8), F.mse_loss, randn(10, 8)),
    "wavenet": Foreign(WaveNet, randn(1, 24), _levels, words(32, 24)),
    "ode": Foreign(OdeNet, randn(8), F.cross_entropy, words(3)),
    "hypernet": Foreign(HyperNet, both(randn(6), randn(4)), F.smooth_l1_loss, randn(2)),
    "dlrm": Foreign(Dlrm, both(randn(4), words(20, 3, 5)), _focal, lambda n: torch.rand(n).round()),
    "capsules": Foreign(Capsules, randn(1, 14, 14), _capsules, words(3)),
    "fourier": Foreign(Fourier, randn(2, 16), F.mse_loss, randn(1, 16)),
    "spatial-transformer": Foreign(SpatialTransformer, randn(1, 8, 8), F.nll_loss, words(10)),
    "distilled": Foreign(Distilled, randn(6), _distilled, words(4)),
    "byol": Foreign(Byol, both(randn(6), randn(6)), lambda out, _: out.mean()),
    "uncertain": Foreign(Uncertain, randn(6), _uncertain, both(randn(), words(4))),
    "diffusion": Foreign(Diffusion, randn(8)),
    "linear-attention": Foreign(LinearAttention, randn(10, 16), F.mse_loss, randn(10, 16)),
    "seq2seq": Foreign(Recurrent, both(words(20, 7), words(20, 5)), _tokens, words(20, 5)),
    "kan": Foreign(Kan, randn(6), F.mse_loss, randn(4)),
    "critic": Foreign(Critic, randn(3, 16, 16), _hinge, words(4)),
    **autograd_idioms.MODELS,
}


def names() -> list[str]:
    """All of them."""
    return list(MODELS)


def foreign(name: str) -> Foreign:
    """The model of a name."""
    return MODELS[name]
