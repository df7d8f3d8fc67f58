"""Recorded graphs, compared with eager models."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_compiler.errors import TraceError
from gpipe_compiler.frontend.recorded import trace_mode
from gpipe_compiler.frontend.subject import Subject, Wish
from gpipe_compiler.options import LossChoice


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2)
        self.blocks = nn.Sequential(Residual(4), Residual(4))
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.stem(x), 2)
        x = torch.flatten(self.pool(self.blocks(x)), 1)
        return self.fc(self.drop(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, dropout=0.2)
        self.gru = nn.GRU(5, 3, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor, hidden: object = None) -> dict[str, torch.Tensor]:
        out, (h, c) = self.lstm(x, hidden)
        last, _ = self.gru(out)
        return {"last": last[:, -1], "h": h, "c": c}


class Attention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.need_weights = need_weights

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y, _ = self.attention(x, x, x, key_padding_mask=mask, need_weights=self.need_weights)
        return self.norm(x + y)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


class Translator(nn.Module):
    def __init__(self, dropout: float = 0.1, causal: bool | None = True) -> None:
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=dropout, batch_first=True)
        self.causal = causal

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        return self.transformer(src, tgt, tgt_mask=mask, tgt_is_causal=self.causal)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(1, 4, 3, padding=1)
        self.down2 = nn.Conv2d(4, 8, 3, padding=1)
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.up2 = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.up1 = nn.Conv2d(8, 4, 3, padding=1)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = F.relu(self.down1(x))
        b = F.relu(self.down2(F.avg_pool2d(a, 2)))
        c = self.middle(F.max_pool2d(b, 2))
        c = self.up2(c)
        c = self.up1(torch.cat([c, b[:, :4]], dim=1))
        c = F.interpolate(c, scale_factor=2, mode="bilinear")
        return self.out(torch.cat([c, a], dim=1))


class Gpt(nn.Module):
    """Tied embeddings, a causal mask, functional dropout."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = nn.Embedding(11, width)
        self.positions = nn.Embedding(16, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        b, t = ids.shape
        x = self.tokens(ids) + self.positions(torch.arange(t, device=ids.device))
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in (q, k, v))
        rate = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(self.mask[:t, :t] == 0, float("-inf"))
        y = y + F.dropout(scores.softmax(dim=-1), 0.2, self.training) @ v
        x = x + self.proj(y.transpose(1, 2).contiguous().view(b, t, -1))
        return self.head(x)


class Regions(nn.Module):
    """Rotary-like tables without gradients, and matrix products in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.register_buffer("frequencies", torch.linspace(0, 1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            angle = torch.arange(x.shape[1])[:, None] * self.frequencies[None, :]
            table = torch.cat([angle.cos(), angle.sin()], dim=-1)
            scale = self.fc(x).abs().amax()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.fc(x) @ x.transpose(1, 2)
        return (y.float() @ x) * table / (1 + scale)


class InPlace(nn.Module):
    """Writes in place, views of what is written, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.fc = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        y = self.fc(x)
        y.mul_(2).add_(1)
        z = torch.zeros_like(y)
        z[:, 1:3] = y[:, :2]
        z[:, 0] += y.sum(1)
        F.relu_(z)
        y = F.leaky_relu(y, 0.1, inplace=True) + 1
        y[x > 1] = 0.5
        return y * z + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


class Keywords(nn.Module):
    """Dict inputs, None, keyword arguments, a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(
        self, batch: dict[str, torch.Tensor], bias: torch.Tensor | None = None, *, scale: float = 1
    ) -> tuple[torch.Tensor, dict[str, object]]:
        y = self.fc(batch["x"]) * batch["mask"].unsqueeze(-1) * scale
        if bias is not None:
            y = y + bias
        return y, {"mean": y.mean(dim=(1, 2)), "none": None}


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


IMAGE = torch.randn(4, 3, 20, 20)
SERIES = torch.randn(4, 7, 6)
TOKENS = torch.randint(0, 11, (4, 9))
CLASSES = torch.randint(0, 3, (4,))

SUBJECTS = {
    "mlp": lambda: Subject("m", Mlp(), (torch.randn(4, 6),), loss_fn=cross_entropy, target=CLASSES),
    "resnet": lambda: Subject(
        "m", ResNet(), (IMAGE,), loss_fn=nn.CrossEntropyLoss(), target=CLASSES
    ),
    "recurrent": lambda: Subject("m", Recurrent(), (SERIES,), loss=LossChoice.SUM_OF_SQUARES),
    "attention": lambda: Subject(
        "m", Attention(False), (torch.randn(4, 5, 8),), loss=LossChoice.SUM_OF_SQUARES
    ),
    "attention weights": lambda: Subject(
        "m",
        Attention(True),
        (torch.randn(4, 5, 8), torch.arange(5).expand(4, 5) > 3),
        loss=LossChoice.SUM_OF_SQUARES,
    ),
    "encoder": lambda: Subject(
        "m", Encoder(), (torch.randn(4, 5, 8),), loss=LossChoice.SUM_OF_SQUARES
    ),
    "translator": lambda: Subject(
        "m",
        Translator(),
        (torch.randn(4, 5, 8), torch.randn(4, 6, 8)),
        loss=LossChoice.SUM_OF_SQUARES,
    ),
    "unet": lambda: Subject(
        "m", UNet(), (torch.randn(4, 1, 8, 8),), loss=LossChoice.SUM_OF_SQUARES
    ),
    "gpt": lambda: Subject("m", Gpt(), (TOKENS,), loss_fn=cross_entropy, target=TOKENS),
    "regions": lambda: Subject("m", Regions(), (SERIES,), loss=LossChoice.SUM_OF_SQUARES),
    "in place": lambda: Subject(
        "m", InPlace(), (torch.randn(4, 6),), loss=LossChoice.SUM_OF_SQUARES
    ),
    "keywords": lambda: Subject(
        "m",
        Keywords(),
        ({"x": torch.randn(4, 3, 4), "mask": torch.ones(4, 3)}, None),
        {"scale": 0.5},
        loss=LossChoice.SUM_OF_SQUARES,
    ),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_graph_computes_what_the_model_computes(name, training, same_as_eager):
    """And no operator is left as it was exported."""
    subject = SUBJECTS[name]()
    graph = trace_mode(subject, training)

    same_as_eager(graph, subject, training)
    assert "aten" not in str(graph)


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 31, "hidden_size": 16, "num_attention_heads": 2}
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=31, n_embd=16, n_head=2, n_layer=2, n_positions=32
        )
        model = transformers.GPT2LMHeadModel(config)
    elif name == "llama":
        config = transformers.LlamaConfig(
            **small, intermediate_size=32, num_hidden_layers=2, num_key_value_heads=1
        )
        model = transformers.LlamaForCausalLM(config)
    elif name == "bert":
        config = transformers.BertConfig(**small, intermediate_size=32, num_hidden_layers=2)
        model = transformers.BertForMaskedLM(config)
    else:
        config = transformers.MixtralConfig(
            **small,
            intermediate_size=32,
            num_hidden_layers=1,
            num_key_value_heads=1,
            num_local_experts=2,
        )
        model = transformers.MixtralForCausalLM(config)
    ids = torch.randint(0, 31, (4, 7))
    mask = torch.ones(4, 7, dtype=torch.long)
    return Subject("m", model, (), {"input_ids": ids, "attention_mask": mask, "labels": ids})


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "mixtral"])
def test_hugging_face_model_computes_the_same(name, training, same_as_eager):
    subject = hugging_face(name)
    graph = trace_mode(subject, training)

    # While it is traced, Llama keeps a mask of ones that it leaves out otherwise.
    same_as_eager(graph, subject, training, tolerance=1e-6 if name in ("llama", "mixtral") else 0)


# --- what cannot be traced ------------------------------------------------------------------------


class ByItem(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.ones(int(x[0, 0].item())).sum() if x.max().item() > 2 else x


class FixedBatch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y.view(4, 3, 2)


class Leaves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_numpy(x.detach().numpy()).sum()


REFUSED = {
    "item": (ByItem, "values of a tensor", "x.max().item()", "torch.where"),
    "fixed batch": (FixedBatch, "batch of 4 only", "view(4, 3, 2)", "x.shape[0]"),
    "leaves torch": (Leaves, "leaves torch", "numpy()", "torch operators"),
}


@pytest.mark.parametrize("free", [Wish(everything=False), Wish()], ids=["fixed", "free"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_is_named_with_line_and_advice(name, free):
    make, problem, code, hint = REFUSED[name]
    with pytest.raises(TraceError) as caught:
        trace_mode(Subject("m", make(), (torch.randn(4, 6),), training=False, free=free), False)

    assert problem in caught.value.problem
    assert code in caught.value.location.code
    assert caught.value.location.file == __file__
    assert hint in caught.value.hint


def test_a_refused_trace_leaves_nothing_on_other_modules():
    before = dict(nn.modules.module._global_buffer_registration_hooks)
    with pytest.raises(TraceError):
        trace_mode(Subject("m", ByItem(), (torch.randn(4, 6),), training=False), False)

    assert dict(nn.modules.module._global_buffer_registration_hooks) == before


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_masks_whose_values_choose_a_kernel_are_applied(training, same_as_eager):
    """nn.Transformer looks whether its mask is causal; it rounds otherwise if so, no more."""
    subject = Subject(
        "m",
        Translator(dropout=0.0, causal=None),
        (torch.randn(4, 5, 8), torch.randn(4, 6, 8)),
        loss=LossChoice.SUM_OF_SQUARES,
    )

    same_as_eager(trace_mode(subject, training), subject, training, tolerance=1e-5)


# --- what stands in the graph ---------------------------------------------------------------------


def test_every_op_knows_the_users_line():
    for name in ("resnet", "gpt", "regions", "unet"):
        graph = trace_mode(SUBJECTS[name](), True)
        own = [op for op in graph.ops if op.name not in graph.loss_only]

        assert {op.source.file for op in own} == {__file__}


def test_batch_of_one_is_traced_as_any_other(same_as_eager):
    subject = Subject("m", Mlp(), (torch.randn(1, 6),), loss_fn=cross_entropy, target=CLASSES[:1])
    graph = trace_mode(subject, True)

    same_as_eager(graph, subject, True)


class Contracts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 4, 5))

    def forward(self, x):
        return torch.einsum("bi,eij,be->bj", x, self.experts, x[:, :3])


def test_contractions_are_ordered_when_they_run(same_as_eager, monkeypatch):
    """As opt_einsum does where it is installed, by sizes that are numbers; here last ones first."""
    ordered = []

    def contract_path(equation, *operands, optimize):
        del equation, optimize
        ordered.append([int(size) for operand in operands for size in operand.shape])
        return ([(1, 2), (0, 1)],)

    installed = SimpleNamespace(contract_path=contract_path)
    monkeypatch.setattr(
        torch.backends,
        "opt_einsum",
        SimpleNamespace(
            enabled=True,
            strategy="auto",
            is_available=lambda: True,
            get_opt_einsum=lambda: installed,
        ),
    )
    torch.manual_seed(0)
    subject = Subject(
        "m", Contracts(), (torch.randn(6, 4),), {}, torch.randint(0, 5, (6,)), F.cross_entropy
    )

    same_as_eager(trace_mode(subject, True), subject, True)

    assert ordered


def test_meta_model_is_traced_without_memory():
    with torch.device("meta"):
        model = Gpt(width=4096, heads=32)
        ids = torch.zeros(4, 9, dtype=torch.long)
    graph = trace_mode(Subject("m", model, (ids,), loss_fn=cross_entropy, target=ids), True)

    assert all(tensor.is_meta for tensor in graph.tensors.values())
    assert graph.parameter_count == sum(p.numel() for p in model.parameters())
