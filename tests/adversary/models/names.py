"""Names that are code, keywords, or those of the generated code's own variables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import Case
from adversary.inputs import classes, rows
from torch import Tensor, nn


class Keyed(nn.Module):
    """Layers in a ModuleDict, whose keys may be anything without a dot."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(6, 6) for name in names})
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x).tanh()
        return self.head(x)


class Shadowing(nn.Module):
    """Attributes called like what generated code may use itself."""

    def __init__(self) -> None:
        super().__init__()
        for name in (
            "torch",
            "F",
            "nn",
            "Tensor",
            "self",
            "stage",
            "out",
            "loss",
            "math",
            "operator",
        ):
            self.add_module(name, nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.named_children():
            if name != "head":
                x = layer(x).tanh()
        return self.head(x)


class ArgumentNames(nn.Module):
    """Arguments called like generated variables."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, torch: Tensor, output: Tensor, self_: Tensor) -> Tensor:
        return self.last(self.first(torch + output + self_).tanh())


class OddParameters(nn.Module):
    """Parameters and buffers with odd names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("wéight", nn.Parameter(torch.randn(6, 8) * 0.3))
        self.register_parameter("class", nn.Parameter(torch.zeros(8)))
        self.register_parameter("a b", nn.Parameter(torch.ones(8)))
        self.register_buffer('quote"d', torch.ones(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.wéight + getattr(self, "class")
        return self.head((x * getattr(self, "a b") * getattr(self, 'quote"d')).tanh())


class OddKeys(nn.Module):
    """Returns a dict whose keys are no identifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[object, Tensor]:
        hidden = self.first(x).tanh()
        return {'it"s': self.last(hidden), "new\nline": hidden, "[/bold]": hidden * 2, 7: x}


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * torch.sigmoid(x)


class Shifts(nn.Module):
    """Shifts what it computes, or not; the name of what is shifted may stand for its input, too."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.layer, self.gate, self.shift = nn.Linear(6, 6), Gate(), shift

    def mixed(self, x: Tensor) -> Tensor:
        shifted = x
        if self.shift:
            shifted = x.roll(-self.shift, 1)
        shifted = self.layer(shifted).tanh()
        x = shifted
        if self.shift:
            x = shifted[:, :6].contiguous().roll(self.shift, 1)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gate(self.mixed(x))
        return x.sin()


class Shifted(nn.Module):
    """Layers that shift by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Shifts(0), Shifts(2), Shifts(0), Shifts(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


CODE = 'x\nimport os; raise SystemExit(3)\n"""'


def keyed(name: str, *keys: str, **options: object) -> Case:
    return Case(name, lambda: Keyed(*keys), rows, F.cross_entropy, classes, **options)


CASES = (
    keyed("newline", "a\nraise SystemExit(3)", "b\r\nimport os", "__doc", quick=True),
    keyed("code", CODE, "'''", '"""', "\\"),
    keyed("markup", "[/x]", "[bold]", "<b>", "</script><script>", "`rm`", "$(x)"),
    keyed("jinja", "{{ 7 * 7 }}", "{% raw %}", "{# no #}"),
    keyed("keywords", "class", "def", "None", "lambda", "import"),
    keyed("unicode", "größe", "名前", "😀", "é", "é"),  # the last two look alike
    keyed("alike", "a_b", "a b", "a-b", "a/b", "A_B"),
    keyed("dunder", "_0", "__doc", "__all__", "0", "1"),
    keyed("long", "x" * 300, "y" * 300),
    keyed("percent", "%s", "%(x)s", "{0}", "{}"),
    Case("shadowing", Shadowing, rows, F.cross_entropy, classes),
    Case(
        "arguments", ArgumentNames, lambda n: (rows(n), rows(n), rows(n)), F.cross_entropy, classes
    ),
    Case("shifted", Shifted, rows, F.cross_entropy, classes),
    Case("odd_parameters", OddParameters, rows, F.cross_entropy, classes),
    Case("odd_keys", OddKeys, rows, lambda y, t: F.cross_entropy(y['it"s'], t), classes),
    Case("odd_keys_inference", OddKeys, rows, options="--mode infer"),
)
