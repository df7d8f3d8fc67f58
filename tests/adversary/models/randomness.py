"""What draws random numbers, what only could, and draws in eval mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case, Refused
from adversary.inputs import classes, rows, steps
from torch import Tensor, nn


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)


class Dropped(Two):
    """Dropout that draws in training only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.first(x).tanh(), 0.3, self.training))


class ZeroDropout(Two):
    """Dropout that draws nothing: its probability is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(F.dropout(self.first(x).tanh(), 0.0, True)))


class OwnGenerator(Two):
    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            x = x + torch.randn(x.shape, generator=self.own)  # refused: own_generator
        return self.last(x)


class GeneratorOfTheCall(Two):
    def forward(self, x: Tensor) -> Tensor:
        own = torch.Generator().manual_seed(3)
        noise = torch.randn(6, generator=own)  # refused: generator_of_the_call
        return self.last(self.first(x + noise))


class Seeds(Two):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)  # refused: seeds
        return self.last(self.first(x).tanh() + 0.1 * torch.randn(len(x), 8))


class DeadDropout(Two):
    """Dropout of everything, which leaves nothing to chance."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.last(x + F.dropout(x, 1.0, True))


class NoisyTraining(Two):
    """Noise in training, and what it was among the outputs."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        noise = torch.randn_like(x) if self.training else torch.zeros_like(x)
        return {"logits": self.last(self.first(x + noise).tanh()), "noise": noise}


class NoisyAlways(Two):
    """Noise of the batch in eval mode too."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        noise = torch.rand_like(x)
        return {"logits": self.last(self.first(x + noise).tanh()), "noise": noise}


class NoisySum(NoisyAlways):
    """The same, with a number of the whole batch besides."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {**super().forward(x), "total": x.sum()}


class SharedNoise(Two):
    """A draw without a batch dimension: one for a whole mini-batch."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        noise = torch.rand(6)
        logits = self.last(self.first(x + noise).tanh())
        return {"logits": logits, "seen": x + noise}


class Reparametrised(Two):
    """A variational encoder: mean, deviation, and a sample of them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.first(x).chunk(2, -1)
        drawn = mean + torch.exp(0.5 * spread) * torch.randn_like(spread)
        return drawn, mean, spread


class Bernoulli(Two):
    """Stochastic binary units in training, their chance in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        chance = self.first(x).sigmoid()
        kept = torch.bernoulli(chance).detach() if self.training else chance
        return self.last(kept)


class Mixed(Two):
    """Units weighed by shares that are drawn in training from a Dirichlet distribution.

    Attributes:
        by_gammas: whether they are drawn by the way out that a refusal names.
    """

    def __init__(self, by_gammas: bool) -> None:
        super().__init__()
        self.by_gammas = by_gammas

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first(x).exp()
        if self.by_gammas and self.training:
            drawn = torch.distributions.Gamma(weight, torch.ones_like(weight)).rsample()
            return self.last(drawn / drawn.sum(-1, keepdim=True))
        if self.training:
            return self.last(torch.distributions.Dirichlet(weight).rsample())  # refused: dirichlet
        return self.last(weight / weight.sum(-1, keepdim=True))


class StochasticDepth(Two):
    """Whole residual branches dropped sample by sample, as torchvision has it."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for branch in self.branches:
            found = branch(x).tanh()
            if self.training:
                keep = torch.empty((len(x), 1)).bernoulli_(0.8).div_(0.8)
                found = found * keep
            x = x + found
        return self.last(x)


class Gumbel(Two):
    """Hard choices in training; the best in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            chosen = F.gumbel_softmax(x, hard=True)
        else:
            chosen = F.one_hot(x.argmax(-1), 8).to(x.dtype)
        return self.last(chosen)


class AttentionThatDrops(Two):
    """scaled_dot_product_attention with dropout in training."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        chance = 0.2 if self.training else 0.0
        return self.last(F.scaled_dot_product_attention(x, x, x, dropout_p=chance).mean(1))


def logits_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"], target)


def with_noise(model: nn.Module, inputs: Tensor, output: dict[str, Tensor]) -> dict[str, Tensor]:
    noise = output["noise"].detach().clone()
    logits = model.last(model.first(inputs + noise).tanh())
    return {"logits": logits, "noise": noise}


def with_noise_and_sum(
    model: nn.Module, inputs: Tensor, output: dict[str, Tensor]
) -> dict[str, Tensor]:
    return {**with_noise(model, inputs, output), "total": inputs.sum()}


def with_shared_noise(
    model: nn.Module, inputs: Tensor, output: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Every sample has seen the noise of the first one."""
    noise = output["seen"].detach()[0] - inputs[0]
    logits = model.last(model.first(inputs + noise).tanh())
    return {"logits": logits, "seen": inputs + noise}


def elbo(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    drawn, mean, spread = output
    apart = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(-1).mean()
    return F.mse_loss(drawn, target) + 0.1 * apart


def redrawn(
    model: nn.Module, inputs: Tensor, output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    given, was_mean, was_spread = (item.detach() for item in output)
    noise = (given - was_mean) / torch.exp(0.5 * was_spread)
    mean, spread = model.first(inputs).chunk(2, -1)
    return mean + torch.exp(0.5 * spread) * noise, mean, spread


CASES = (
    Case("dropout", Dropped, rows, F.cross_entropy, classes, random=True),
    Case("dropout_inference", Dropped, rows, options="--mode infer"),
    Case("dropout_of_nothing", ZeroDropout, rows, F.cross_entropy, classes),
    Case("dropout_of_everything", DeadDropout, rows, F.cross_entropy, classes),
    Case(
        "seeds",
        Seeds,
        rows,
        F.cross_entropy,
        classes,
        expect=Refused(
            ("forward seeds torch's generator",), ("into a buffer", "outside of forward")
        ),
    ),
    Case(
        "generator_of_the_call",
        GeneratorOfTheCall,
        rows,
        F.cross_entropy,
        classes,
        expect=Refused(("a torch.Generator of its own",), ("without generator=",)),
    ),
    Case(
        "own_generator",
        OwnGenerator,
        rows,
        F.cross_entropy,
        classes,
        expect=Refused(("a torch.Generator of its own",), ("without generator=",)),
    ),
    Case(
        "noise_in_training",
        NoisyTraining,
        rows,
        logits_loss,
        classes,
        replay=with_noise,
        manners=FP32_ONLY,
    ),
    Case(
        "noise_always",
        NoisyAlways,
        rows,
        logits_loss,
        classes,
        replay=with_noise,
        manners=FP32_ONLY,
    ),
    Case(
        "noise_in_inference",
        NoisyAlways,
        rows,
        replay=with_noise,
        options="--mode infer",
        manners=({}, {"microbatches": 3}),
        quick=True,
    ),
    Case(
        "noise_and_a_sum",
        NoisySum,
        rows,
        replay=with_noise_and_sum,
        options="--mode infer",
        manners=({}, {"microbatches": 3}),
    ),
    Case(
        "shared_noise",
        SharedNoise,
        rows,
        logits_loss,
        classes,
        replay=with_shared_noise,
        manners=FP32_ONLY,
        quick=True,
    ),
    Case(
        "shared_noise_inference",
        SharedNoise,
        rows,
        replay=with_shared_noise,
        options="--mode infer",
        manners=({}, {"microbatches": 3}),
    ),
    Case(
        "variational",
        Reparametrised,
        rows,
        elbo,
        lambda n: torch.randn(n, 4),
        replay=redrawn,
        manners=FP32_ONLY,
    ),
    Case("bernoulli", Bernoulli, rows, F.cross_entropy, classes, random=True),
    Case(
        "dirichlet",
        lambda: Mixed(by_gammas=False),
        rows,
        F.cross_entropy,
        classes,
        expect=Refused(("a Beta or a Dirichlet distribution",), ("Gamma(concentration, 1)",)),
    ),
    Case(
        "by_gammas",
        lambda: Mixed(by_gammas=True),
        rows,
        F.cross_entropy,
        classes,
        random=True,
        manners=FP32_ONLY,
    ),
    Case("stochastic_depth", StochasticDepth, rows, F.cross_entropy, classes, random=True),
    Case("gumbel", Gumbel, rows, F.cross_entropy, classes, random=True, manners=FP32_ONLY),
    Case("attention_that_drops", AttentionThatDrops, steps, F.cross_entropy, classes, random=True),
)
