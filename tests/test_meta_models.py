"""Packages of models on the meta device: they begin as the model would, and train."""

from __future__ import annotations

import functools
import re
import runpy
import textwrap
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
import torch
from loading import load_package
from safetensors.torch import load_file
from torch import nn

from gpipe_compiler.cluster import DEFAULT_HOST, IN_PROCESS, Cluster
from gpipe_compiler.compile import Compiled, CompileOptions
from gpipe_compiler.compile import compile as compile_subject
from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.source import load

MODEL = Path(__file__).with_name("meta_decoder.py")
GOLDEN = Path(__file__).parent / "codegen" / "golden" / "on_meta"
EXACT = re.compile(r".*(norm\.|mask|cos|sin|scale|shift|qkv\.bias|batch_norm)")

Compile = Callable[..., Compiled]
Weights = dict[str, torch.Tensor]


def compiled(model: Path, directory: Path, stages: int = 2, **options: object) -> Compiled:
    chosen = CompileOptions(
        stages=stages,
        microbatches=2,
        cluster=Cluster.of(DEFAULT_HOST, IN_PROCESS),
        **options,  # type: ignore[arg-type]  # a test's own options
    )
    return compile_subject(load(str(model)), chosen, directory)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Compiled]:
    """The decoder in so many stages."""
    folder = tmp_path_factory.mktemp("packages")

    @functools.cache
    def package(stages: int) -> Compiled:
        return compiled(MODEL, folder / f"decoder_x{stages}", stages)

    return package


def run(directory: Path, *words: object, processes: int = 1) -> str:
    finished = forked.run([directory / "run.py", *words], ranks=processes if processes > 1 else 0)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def first_weights(directory: Path, seed: int = 0) -> Weights:
    """What a package begins with."""
    with load_package(directory).Pipeline(seed=seed) as pipe:
        return {key: tensor.detach().clone() for key, tensor in pipe.state_dict().items()}


def saved_weights(directory: Path, file: Path, processes: int) -> Weights:
    """What processes begin with: saved after one step, whose rate rounds to nothing in fp32."""
    words = ("train", "--steps", 1, "--lr", 1e-46, "--optimizer", "sgd", "--save", file)
    run(directory, *words, processes=processes)
    return load_file(file)


def eager(model: Path) -> Weights:
    torch.manual_seed(3)
    built = runpy.run_path(str(model))["build_model"]("cpu")
    return {name: tensor.detach() for name, tensor in built.state_dict().items()}


def same_distribution(made: torch.Tensor, expected: torch.Tensor) -> None:
    """Mean within five standard errors, standard deviation within eight."""
    count, spread = made.numel(), float(expected.std())
    assert abs(float(made.mean() - expected.mean())) < 5 * spread * (2 / count) ** 0.5 + 1e-9
    assert float(made.std()) == pytest.approx(spread, rel=8 / count**0.5, abs=1e-9)


def test_the_package_is_proved_equal_to_the_model(
    packages: Callable[[int], Compiled],
) -> None:
    """Its own first weights are compared, too: nothing was loaded."""
    for stages in (1, 2, 4):
        made = packages(stages)
        assert made.validation is not None
        assert made.validation.passed
        assert made.not_validated == ""
        assert made.directory is not None
        assert {path.name for path in (made.directory / "weights").iterdir()} == {
            "example.safetensors"
        }


def test_a_package_begins_as_the_model_on_the_cpu(
    packages: Callable[[int], Compiled], tmp_path: Path
) -> None:
    directory = packages(2).directory
    assert directory is not None
    made, expected = first_weights(directory), eager(MODEL)

    assert made.keys() == expected.keys()
    for name, tensor in expected.items():
        if EXACT.match(name):
            assert torch.equal(made[name], tensor), name
        else:
            same_distribution(made[name], tensor)
    assert not made["tokens.weight"][0].any()
    assert torch.equal(made["head.weight"], made["tokens.weight"])
    torch.testing.assert_close(
        made["blocks.0.attention.qkv.weight"].T @ made["blocks.0.attention.qkv.weight"],
        torch.eye(32),
    )
    assert torch.equal(made["blocks.0.narrow.weight"], made["blocks.2.narrow.weight"])
    assert not torch.equal(made["blocks.0.narrow.weight"], made["blocks.0.attention.out.weight"])


def test_the_first_weights_are_the_same_for_all_stages_and_transports(
    packages: Callable[[int], Compiled], tmp_path: Path
) -> None:
    folders = {stages: packages(stages).directory for stages in (1, 2, 4)}
    assert folders[1] is not None
    assert folders[4] is not None
    found = [first_weights(folder) for folder in folders.values() if folder is not None]
    launched = saved_weights(folders[4], tmp_path / "w.safetensors", processes=2)
    for name, tensor in found[0].items():
        assert all(torch.equal(other[name], tensor) for other in found), name
        if "running" not in name and "tracked" not in name:  # that one step moves them
            assert torch.equal(launched[name], tensor), name
    other = first_weights(folders[1], seed=1)
    assert not torch.equal(other["tokens.weight"], found[0]["tokens.weight"])


def test_it_trains_at_once(packages: Callable[[int], Compiled]) -> None:
    directory = packages(2).directory
    assert directory is not None
    printed = run(directory, "train", "--steps", 12, "--lr", 0.3)
    losses = [float(found) for found in re.findall(r"loss (\S+)", printed)]

    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="its torch.nn.init does on meta what it does elsewhere"
)
def test_the_text_of_the_stages(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Every stage is, word for word, the one in the golden folder."""
    directory = compiled(MODEL, tmp_path / "p", validate=False).directory
    assert directory is not None
    files = (*directory.glob("stage_*.py"), directory / "layers.py")
    texts = {path.name: path.read_text() for path in files}
    if request.config.getoption("--rewrite-golden", default=False) or not GOLDEN.exists():
        GOLDEN.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (GOLDEN / name).write_text(text)

    assert {path.name: path.read_text() for path in GOLDEN.iterdir()} == texts


def test_a_hugging_face_model_begins_as_its_library_says(tmp_path: Path) -> None:
    """Which leaves that out for models on meta."""
    pytest.importorskip("transformers")
    model = tmp_path / "gpt2.py"
    model.write_text(
        textwrap.dedent(
            """
            import torch
            from transformers import GPT2Config, GPT2LMHeadModel

            def build_model(device="meta"):
                with torch.device(device):
                    return GPT2LMHeadModel(GPT2Config(
                        n_layer=2, n_embd=32, n_head=2, vocab_size=500, n_positions=16,
                        bos_token_id=0, eos_token_id=0,
                    ))

            def example_inputs():
                tokens = torch.arange(32).view(4, 8)
                return {"input_ids": tokens, "labels": tokens}
            """
        )
    )
    made = compiled(model, tmp_path / "p")

    assert made.validation is not None
    assert made.validation.passed
    assert made.directory is not None
    weights, expected = first_weights(made.directory), eager(model)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        same_distribution(weights[name], tensor)


LOSS = """
def loss_fn(output, target):
    return output.square().sum()

def example_target():
    return example_inputs()
"""


def write(folder: Path, text: str) -> Path:
    head = "import numpy, torch\nfrom torch import nn\n"
    (folder / "model.py").write_text(head + textwrap.dedent(text) + LOSS)
    return folder / "model.py"


ADDED = """
class Model(nn.Module):
    def __init__(self, count):
        super().__init__()
        with torch.device("meta"):
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        numbers = numpy.arange(count, dtype="float32").reshape(4, -1)
        self.register_buffer("table", torch.from_numpy(numbers))

    def forward(self, x):
        return self.two(self.one(x).relu() + self.table[:, 0])

def build_model():
    return Model({count})

def example_inputs():
    return torch.ones(4, 4, device="meta")
"""


def test_a_small_real_table_is_written_down_and_a_made_up_example_is_enough(
    tmp_path: Path,
) -> None:
    made = compiled(write(tmp_path, ADDED.replace("{count}", "8")), tmp_path / "p")

    assert made.validation is not None
    assert made.validation.passed
    assert made.directory is not None
    run(made.directory, "train", "--steps", 1)


def test_a_large_real_table_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not known how table begins"):
        compiled(write(tmp_path, ADDED.replace("{count}", "8000")), tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_parameters_that_nobody_fills_are_validated_with_given_weights(tmp_path: Path) -> None:
    model = write(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.one = nn.Linear(4, 4)
                self.bare = nn.Parameter(torch.empty(4, 4))

            def forward(self, x):
                return self.one(x).relu() @ self.bare

        def build_model():
            with torch.device("meta"):
                return Model()

        def example_inputs():
            return torch.randn(4, 4)
        """,
    )
    made = compiled(model, tmp_path / "p")

    assert made.validation is not None
    assert made.validation.passed


def test_a_model_too_large_to_be_filled_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpipe_compiler.validate.large_models.LARGEST_MATERIALISED", 1000)

    made = compiled(MODEL, tmp_path / "p")

    assert made.validation is None
    assert "on the meta device" in made.not_validated


DEEP = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(20))
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build_model():
    with torch.device("meta"):
        return Deep()

def example_inputs():
    return torch.randint(11, (16, 5))

def example_target():
    return torch.randint(11, (16, 5))

def loss_fn(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
"""


def test_a_model_too_large_to_be_filled_is_compared_with_fewer_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six of twenty blocks would be too many bytes; with four of them everything is compared."""
    most = 4 * 6 * (8 * 16 * 2 + 8 + 16 + 16)
    monkeypatch.setattr("gpipe_compiler.validate.large_models.LARGEST_MATERIALISED", most)

    model = tmp_path / "deep.py"
    model.write_text(DEEP)

    made = compiled(model, tmp_path / "p")

    assert made.not_validated == ""
    assert made.validation is not None
    assert made.validation.passed
    (note,) = (note for note in made.validation.notes if "repetitions" in note)
    assert "4 of the 20 repetitions in blocks" in note
    assert {row.what for row in made.validation.rows} == {"output", "loss", "gradient", "weight"}


def deep(model: str) -> str:
    """The same file with another model."""
    start, end = DEEP.index("class Deep"), DEEP.index("def build_model")
    return f"{DEEP[:start]}{model}\n{DEEP[end:]}"


SEQUENTIAL = """
def Deep():
    return nn.Sequential(nn.Embedding(11, 8), *(Block() for _ in range(20)), nn.Linear(8, 11))
"""

LIST = """
class Deep(nn.ModuleList):
    def __init__(self):
        super().__init__(Block() for _ in range(20))
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        x = self.embed(ids)
        for place in range(20):
            if str(place) in self._modules:
                x = self[place](x)
        return self.head(x)
"""

NESTED = """
def Deep():
    stages = (nn.Sequential(*(Block() for _ in range(6))) for _ in range(3))
    return nn.Sequential(nn.Embedding(11, 8), *stages, nn.Linear(8, 11))
"""


@pytest.mark.parametrize(
    ("model", "said"),
    [
        pytest.param(SEQUENTIAL, "4 of the 20 repetitions in it", marks=pytest.mark.slow),
        (LIST, "4 of the 20 repetitions in it"),
        pytest.param(
            NESTED,
            "2 of the 3 repetitions in it and 2 of the 6 repetitions in 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_model_that_is_a_list_itself_is_compared_with_fewer_of_its_layers(
    model: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 4 * 6 * (8 * 16 * 2 + 8 + 16 + 16)
    monkeypatch.setattr("gpipe_compiler.validate.large_models.LARGEST_MATERIALISED", most)
    file = tmp_path / "deep.py"
    file.write_text(deep(model))

    made = compiled(file, tmp_path / "p")

    assert made.not_validated == ""
    assert made.validation is not None
    assert made.validation.passed
    (note,) = (note for note in made.validation.notes if "repetitions" in note)
    assert said in note
    assert {row.what for row in made.validation.rows} == {"output", "loss", "gradient", "weight"}


def test_the_model_itself_stays_on_meta() -> None:
    subject = load(str(MODEL))

    assert all(tensor.is_meta for tensor in nn.Module.state_dict(subject.model).values())


EXPERTS = """
import torch
import torch.nn.functional as F
from torch import nn

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.up = nn.Parameter(torch.randn(4, 16, 24) / 4)
        self.steps = torch.arange(4)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        chosen, order = chosen.sort()
        # The kernels of a processor count floats, those of GPUs integers.
        counted = chosen.float() if x.device.type == "cpu" else chosen.int()
        counts = torch.histc(counted, bins=len(self.steps), min=0, max=3)
        rows = F.grouped_mm(x[order], self.up, offs=counts.cumsum(0, dtype=torch.int32))
        place = torch.arange(len(x), device=self.up.device)
        back = torch.empty_like(order).scatter(0, order, place)
        return rows[back] * weights[:, None]

def build_model():
    torch.manual_seed(0)
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(8, 16), Experts(), nn.Linear(24, 4))

def example_inputs():
    return (torch.randn(16, 8),)

def example_target():
    return torch.randn(16, 4)

def loss_fn(output, target):
    return F.mse_loss(output, target)
"""


def test_code_that_asks_for_the_device_is_told_of_the_host(tmp_path: Path) -> None:
    file = tmp_path / "experts.py"
    file.write_text(EXPERTS)

    made = compiled(file, tmp_path / "p")

    assert made.validation is not None
    assert made.validation.passed
    assert ".float()" in "".join(path.read_text() for path in (tmp_path / "p").glob("*.py"))


CHECKED = """
import torch
from torch import nn

class Checked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(10, 8), nn.Linear(8, 4)

    def forward(self, words):
        if words.max() >= self.table.num_embeddings:
            raise ValueError("no such word")
        return self.last(self.table(words).mean(1))

def build_model():
    torch.manual_seed(0)
    with torch.device("meta"):
        return Checked()

def example_inputs():
    return (torch.randint(10, (8, 5)),)

def example_target():
    return torch.randn(8, 4)

def loss_fn(output, target):
    return nn.functional.mse_loss(output, target)
"""


def test_a_small_model_whose_code_reads_numbers_is_filled_with_some(tmp_path: Path) -> None:
    file = tmp_path / "checked.py"
    file.write_text(CHECKED)

    made = compiled(file, tmp_path / "p")

    assert made.validation is not None
    assert made.validation.passed
    assert [path.name for path in (tmp_path / "p" / "weights").iterdir()] == ["example.safetensors"]
