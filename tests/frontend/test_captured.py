"""The dynamo frontend, compared with eager models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_compiler.errors import TraceError
from gpipe_compiler.frontend.captured import trace_dynamo
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Autocast, NoGrad, RegionCall
from gpipe_compiler.options import LossChoice


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)])
        self.norms = nn.ModuleDict({"a": nn.BatchNorm2d(4), "b": nn.BatchNorm2d(4)})
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, norm in zip(self.blocks, self.norms.values(), strict=True):
            x = F.relu(norm(block(x)), inplace=True)
        return self.fc(F.dropout(x.mean((2, 3)), 0.3, self.training))


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            mean = self.fc(x).mean(0) * self.scale
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.fc(x)
        positions = torch.arange(x.shape[1], device=x.device)
        return {"y": y.float() - mean, "positions": x + positions, "x": x}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, (h, _) = self.lstm(x)
        return out.chunk(2, dim=1)[0], h


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids).relu_())


class InputsFirst(nn.Module):
    """Reads two inputs before any parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.fc(x * y)


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


IDS = torch.randint(0, 7, (4, 5))

SUBJECTS = {
    "convolutional": lambda: Subject(
        "m",
        Convolutional(),
        (torch.randn(4, 3, 9, 9),),
        loss_fn=nn.CrossEntropyLoss(label_smoothing=0.1),
        target=torch.randint(0, 3, (4,)),
    ),
    "regions": lambda: Subject(
        "m", Regions(), (torch.randn(4, 6), torch.randn(4, 2)), loss=LossChoice.SUM_OF_SQUARES
    ),
    "inputs first": lambda: Subject(
        "m", InputsFirst(), (torch.randn(4, 6), torch.randn(4, 6)), loss=LossChoice.SUM_OF_SQUARES
    ),
    "recurrent": lambda: Subject(
        "m", Recurrent(), (torch.randn(4, 7, 6),), loss=LossChoice.SUM_OF_SQUARES
    ),
    "tied": lambda: Subject("m", Tied(), (IDS,), loss_fn=cross_entropy, target=IDS),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_graph_computes_what_the_model_computes(name, training, same_as_eager):
    subject = SUBJECTS[name]()
    graph = trace_dynamo(subject, training)

    same_as_eager(graph, subject, training)


def test_regions_stay_whole():
    graph = trace_dynamo(SUBJECTS["regions"](), True)

    contexts = [op.call.context for op in graph.ops if isinstance(op.call, RegionCall)]
    assert contexts == [NoGrad(False), Autocast("cpu", torch.bfloat16, True)]


def test_state_keeps_its_canonical_names():
    graph = trace_dynamo(SUBJECTS["tied"](), True)

    assert graph.state["embedding.weight"].aliases == ("head.weight",)
    assert {name for op in graph.ops for name in op.states(graph.modules)} == {"embedding.weight"}


class ByValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + 1
        return x


def test_branch_on_data_is_explained_with_its_line():
    with pytest.raises(TraceError, match=r"if x\.sum\(\) > 0") as caught:
        trace_dynamo(
            Subject("m", ByValue(), (torch.randn(4, 3),), loss=LossChoice.SUM_OF_SQUARES), False
        )

    assert caught.value.location.file == __file__
    assert caught.value.hint


def test_missing_capture_is_explained(monkeypatch):
    import torch._dynamo.functional_export as capture

    monkeypatch.delattr(capture, "dynamo_graph_capture_for_export")
    with pytest.raises(TraceError, match="has no dynamo_graph_capture_for_export"):
        trace_dynamo(SUBJECTS["tied"](), True)
