"""Loading what is to be compiled: every form of MODEL and of its example, and every bad one."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_compiler.errors import ExitCode, GPipeCompilerError
from gpipe_compiler.frontend.source import load
from gpipe_compiler.frontend.subject import Subject

HEAD = """\
import torch
from torch import nn

def build_model():
    return nn.Linear(3, 2)
"""
"""Five lines, so that what a test adds begins at line 6."""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory, and a fresh interpreter's import state afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


Loader = Callable[..., Subject]


@pytest.fixture
def load_text(workplace: Path) -> Loader:
    """Loads HEAD and the given text as model.py."""

    def write_and_load(text: str, head: str = HEAD, **options: object) -> Subject:
        (workplace / "model.py").write_text(head + textwrap.dedent(text))
        return load("model.py", **options)  # type: ignore[arg-type]

    return write_and_load


def message(error: GPipeCompilerError, workplace: Path) -> str:
    return str(error).replace(f"{workplace}/", "").replace(sys.executable, "python")


class TestForms:
    def test_a_file_offers_a_model_and_a_tensor(self, load_text: Loader, workplace: Path) -> None:
        subject = load_text("def example_inputs():\n    return torch.ones(4, 3)")

        assert subject.name == "model"
        assert isinstance(subject.model, nn.Linear)
        assert subject.args[0].shape == (4, 3)  # type: ignore[attr-defined]
        assert subject.kwargs == {}
        assert subject.loss_fn is None
        assert subject.target is None
        assert subject.training
        assert subject.hooks is not None
        assert (subject.hooks.file, subject.hooks.module) == (workplace / "model.py", "")
        assert subject.hooks.names == frozenset()

    @pytest.mark.parametrize(
        ("returned", "args", "kwargs"),
        [
            ("x", 1, []),
            ("(x,)", 1, []),
            ("(x, x)", 2, []),
            ("{'input': x}", 0, ["input"]),
            ("((x,), {'mask': x})", 1, ["mask"]),
            ("((), {'input': x, 'mask': None})", 0, ["input", "mask"]),
            ("((x, {'mask': x}), {})", 2, []),
        ],
    )
    def test_every_form_of_example_inputs(
        self, load_text: Loader, returned: str, args: int, kwargs: list[str]
    ) -> None:
        subject = load_text(
            f"""
            class Model(nn.Linear):
                def forward(self, input, mask=None):
                    return super().forward(input)

            def small():
                return Model(3, 2)

            build_model = small

            def example_inputs():
                x = torch.ones(4, 3)
                return {returned}
            """
        )

        assert (len(subject.args), list(subject.kwargs)) == (args, kwargs)

    def test_a_named_factory_of_a_file(self, workplace: Path) -> None:
        (workplace / "model.py").write_text(
            "import torch\ndef tiny():\n    return torch.nn.ReLU()\n"
            "def example_inputs():\n    return torch.ones(2)\n"
        )

        assert isinstance(load("model.py:tiny").model, nn.ReLU)

    def test_a_module_of_the_current_directory(self, workplace: Path) -> None:
        (workplace / "networks").mkdir()
        (workplace / "networks" / "__init__.py").touch()
        (workplace / "networks" / "small.py").write_text(
            HEAD + "def example_inputs():\n    return torch.ones(2, 3)\n"
        )

        subject = load("networks.small:build_model")

        assert subject.hooks is not None
        assert (subject.hooks.file, subject.hooks.module) == (None, "networks.small")

    def test_an_installed_module_with_inputs_from_the_command_line(self, workplace: Path) -> None:
        subject = load("torch.nn:ReLU", input_specs=["4x3"])

        assert subject.name == "ReLU"
        assert isinstance(subject.model, nn.ReLU)

    def test_the_file_may_import_its_neighbours_when_called(self, workplace: Path) -> None:
        folder = workplace / "deep"
        folder.mkdir()
        (folder / "layers_nearby.py").write_text("from torch import nn\nlayer = nn.ReLU\n")
        (folder / "model.py").write_text(
            "def build_model():\n    import layers_nearby\n    return layers_nearby.layer()\n"
        )

        assert isinstance(load("deep/model.py", input_specs=["2x3"]).model, nn.ReLU)

    def test_loading_again_sees_the_new_text(self, load_text: Loader) -> None:
        first = load_text("def example_inputs():\n    return torch.ones(4, 3)")
        second = load_text("def example_inputs():\n    return torch.ones(5, 3)")

        assert (len(first.args[0]), len(second.args[0])) == (4, 5)  # type: ignore[arg-type]

    def test_a_file_named_as_a_known_module_leaves_that_alone(self, workplace: Path) -> None:
        (workplace / "json.py").write_text(HEAD)
        before = sys.modules["json"]

        subject = load("json.py", input_specs=["2x3"])

        assert subject.name == "json"
        assert sys.modules["json"] is before

    def test_hooks_that_the_file_offers(self, load_text: Loader) -> None:
        subject = load_text(
            """
            def example_inputs(): return torch.ones(4, 3)
            def make_optimizer(params): return torch.optim.SGD(params, 0.1)
            """
        )

        assert subject.hooks is not None
        assert subject.hooks.names == {"make_optimizer"}

    def test_loss_with_example_target(self, load_text: Loader) -> None:
        subject = load_text(
            """
            def example_inputs(): return torch.ones(4, 3)
            def example_target(): return torch.zeros(4, dtype=torch.int64)
            def loss_fn(output, target): return nn.functional.cross_entropy(output, target)
            """
        )

        assert subject.loss_fn is not None
        assert subject.target.shape == (4,)  # type: ignore[attr-defined]

    def test_loss_with_the_first_target_of_the_data(self, load_text: Loader) -> None:
        subject = load_text(
            """
            def example_inputs(): return torch.ones(4, 3)
            def train_data():
                while True:
                    yield torch.ones(4, 3), torch.full((4,), 7)
            def loss_fn(output, target): return output.sum()
            """
        )

        assert subject.target.tolist() == [7, 7, 7, 7]  # type: ignore[attr-defined]

    def test_inference_takes_no_loss(self, load_text: Loader) -> None:
        subject = load_text(
            """
            def example_inputs(): return torch.ones(4, 3)
            def loss_fn(output, target): return output.sum()
            """,
            training=False,
        )

        assert (subject.loss_fn, subject.training) == (None, False)


class TestInputSpecs:
    def test_positional_and_named(self, workplace: Path) -> None:
        (workplace / "model.py").write_text(
            "from torch import nn\n"
            "class Model(nn.Module):\n    def forward(self, x, y, mask=None): ...\n"
            "def build_model(): return Model()\n"
        )

        subject = load(
            "model.py", input_specs=["4x3:float32", "mask=4x8:bool", "4:int64"], training=False
        )

        x, y = subject.args
        mask = subject.kwargs["mask"]
        assert isinstance(x, torch.Tensor)
        assert isinstance(y, torch.Tensor)
        assert isinstance(mask, torch.Tensor)
        assert (x.shape, x.dtype) == ((4, 3), torch.float32)
        assert (y.shape, y.dtype) == ((4,), torch.int64)
        assert (mask.shape, mask.dtype) == ((4, 8), torch.bool)
        assert y.min() >= 0
        assert y.max() <= 1

    @pytest.mark.parametrize(
        "dtype", ["bfloat16", "float16", "float8_e4m3fn", "complex64", "uint8"]
    )
    def test_every_kind_of_dtype(self, dtype: str, workplace: Path) -> None:
        subject = load("torch.nn:Identity", input_specs=[f"4x3:{dtype}"])

        assert subject.args[0].dtype == getattr(torch, dtype)  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            (
                "32xx3",
                "--input '32xx3' gives no shape\n"
                "  hint: write sizes and a dtype: 32x3x224x224:float32, or mask=32x128:bool",
            ),
            (
                "32x3:float31",
                "--input '32x3:float31': torch has no dtype 'float31'\n"
                "  hint: such as float32, bfloat16, int64 or bool",
            ),
            (
                "0x3",
                "--input '0x3' is an empty batch\n  hint: every size is at least 1",
            ),
        ],
    )
    def test_bad_ones(self, spec: str, expected: str, workplace: Path) -> None:
        with pytest.raises(GPipeCompilerError) as caught:
            load("torch.nn:Identity", input_specs=[spec])

        assert str(caught.value) == expected
        assert caught.value.exit_code is ExitCode.USAGE

    def test_a_name_given_twice(self, workplace: Path) -> None:
        with pytest.raises(GPipeCompilerError, match="--input names 'input' twice"):
            load("torch.nn:Identity", input_specs=["input=2", "input=3"])


class TestMeta:
    MODEL = "def build_model():\n    with torch.device('meta'):\n        return nn.Linear(3, 2)\n"

    def test_the_example_follows_the_model_and_is_kept(self, load_text: Loader) -> None:
        subject = load_text(
            """
            def example_inputs(): return {"input": torch.ones(4, 3)}
            def example_target(): return [torch.ones(4)]
            def loss_fn(output, target): return output.sum()
            """,
            head="import torch\nfrom torch import nn\n" + self.MODEL,
        )

        assert subject.kwargs["input"].is_meta  # type: ignore[attr-defined]
        assert subject.target[0].is_meta  # type: ignore[index]
        assert subject.example is not None
        assert subject.example.kwargs["input"].sum() == 12  # type: ignore[attr-defined]
        assert subject.example.target[0].sum() == 4  # type: ignore[index]

    def test_a_meta_example_is_kept_as_it_is(self, load_text: Loader) -> None:
        subject = load_text(
            "def example_inputs(): return torch.ones(4, 3, device='meta')",
            head="import torch\nfrom torch import nn\n" + self.MODEL,
        )

        assert subject.args[0].is_meta  # type: ignore[attr-defined]
        assert subject.example is None

    def test_a_meta_example_of_a_real_model(self, load_text: Loader) -> None:
        with pytest.raises(GPipeCompilerError, match="the example is on the meta device"):
            load_text("def example_inputs(): return torch.ones(4, 3, device='meta')")


BAD_FILES = {
    "syntax error": (
        "def example_inputs(:\n    pass\n",
        "model.py:6: this is no valid Python: invalid syntax in `def example_inputs(:`\n"
        f"  hint: this is Python {sys.version_info.major}.{sys.version_info.minor}",
    ),
    "missing package": (
        "x = 1\nimport no_such_package.deep\n",
        "model.py:7: running model.py fails: No module named 'no_such_package'\n"
        "  hint: install it into this environment (python -m pip install no_such_package)",
    ),
    "missing name": (
        "from torch import no_such_name\n",
        "model.py:6: running model.py fails: cannot import name 'no_such_name' from 'torch' "
        "(TORCH)\n"
        "  hint: the module is there, but not that name in it; check its version",
    ),
    "raises when run": (
        "x = {}['key']\n",
        "model.py:6: running model.py raises KeyError: 'key'\n"
        "  hint: the line is the last of your own; run the file with Python to see all of it",
    ),
    "leaves when run": (
        "import sys\nsys.exit(3)\n",
        "model.py:7: running model.py ends the program with exit(3)\n"
        '  hint: put what only a script should do under `if __name__ == "__main__":`',
    ),
    "no factory": (
        "del build_model\nclass Net(nn.Module): ...\ndef make(): ...\n",
        "model.py:1: there is no build_model() in model.py\n"
        "  hint: it has Net, make; choose one that builds the model: model.py:Net",
    ),
    "nothing at all": (
        "del build_model\n",
        "model.py:1: there is no build_model() in model.py\n"
        "  hint: define build_model() in it, a function that returns the model",
    ),
    "factory is no function": (
        "build_model = 3\n",
        "build_model in model.py is int, not a function\n"
        "  hint: define it as a function that returns the model: def build_model()",
    ),
    "factory takes arguments": (
        "def build_model(width, depth=2): ...\n",
        "model.py:6: build_model() needs arguments that have no default: width\n"
        "  hint: give them defaults, or name a factory that takes no arguments",
    ),
    "factory raises": (
        "def build_model():\n    return grow()\ndef grow():\n    raise ValueError('too wide')\n",
        "model.py:9: build_model() raises ValueError: too wide\n"
        "  hint: the line is the last of your own; run the file with Python to see all of it",
    ),
    "factory returns nothing": (
        "def build_model():\n    nn.Linear(3, 2)\n",
        "model.py:6: build_model() returns None, not a torch.nn.Module\n"
        "  hint: does it end in `return model`?",
    ),
    "factory returns a function": (
        "def build_model():\n    return torch.relu\n",
        "model.py:6: build_model() returns builtin_function_or_method, not a torch.nn.Module\n"
        "  hint: return the model itself",
    ),
    "no example": (
        "",
        "model.py:1: there is no example_inputs() in model.py\n"
        "  hint: define it, or give the shape of a mini-batch: --input 32x3x224x224:float32",
    ),
    "example raises": (
        "def example_inputs():\n    return [][0]\n",
        "model.py:7: example_inputs() raises IndexError: list index out of range\n"
        "  hint: the line is the last of your own; run the file with Python to see all of it",
    ),
    "example of a wrong type": (
        "def example_inputs():\n    return [torch.ones(4, 3)]\n",
        "model.py:6: example_inputs() returns a list, not a tensor, a tuple of positional "
        "arguments, a dict of keyword arguments, or (args, kwargs)\n"
        "  hint: return tuple(...) of it",
    ),
    "example without tensors": (
        "def example_inputs():\n    return 3, None\n",
        "model.py:6: example_inputs() holds no tensor\n"
        "  hint: a pipeline splits tensors along dimension 0, so there has to be one",
    ),
    "example of an array": (
        "def example_inputs():\n    import numpy\n    return (numpy.ones(3),)\n",
        "model.py:6: example_inputs() holds a NumPy array at [0][0], not a tensor\n"
        "  hint: wrap it in torch.from_numpy(...)",
    ),
    "keys that are no names": (
        "def example_inputs():\n    return {0: torch.ones(4, 3)}\n",
        "model.py:6: example_inputs() returns a dict with the key 0, which names no argument\n"
        "  hint: keys are the names of the arguments of forward",
    ),
    "empty batch": (
        "def example_inputs():\n    return torch.ones(0, 3)\n",
        "model.py:6: example_inputs() is an empty batch: a tensor of shape (0, 3)\n"
        "  hint: give at least one sample, better as many as a mini-batch will have",
    ),
    "example does not fit": (
        "class Net(nn.Module):\n    def forward(self, x, mask): return x\n"
        "build_model = Net\ndef example_inputs():\n    return torch.ones(4, 3)\n",
        "model.py:7: example_inputs() does not fit Net.forward(x, mask): "
        "missing a required argument: 'mask'\n"
        "  hint: a tuple gives positional arguments, a dict keyword arguments",
    ),
    "loss without target": (
        "def example_inputs():\n    return torch.ones(4, 3)\n"
        "def loss_fn(output, target):\n    return output.sum()\n",
        "model.py:8: there is a loss_fn(output, target), but no example_target() to call it with\n"
        "  hint: define example_target(), or train_data() that yields (inputs, target) batches",
    ),
    "loss is no function": (
        "def example_inputs():\n    return torch.ones(4, 3)\nloss_fn = 'mse'\n",
        "loss_fn in model.py is str, not a function\n"
        "  hint: define it as a function: def loss_fn(...)",
    ),
    "data that is empty": (
        "def example_inputs():\n    return torch.ones(4, 3)\n"
        "def train_data():\n    return []\n"
        "def loss_fn(output, target): ...\n",
        "model.py:8: train_data() yields no batch, not pairs (inputs, target)\n"
        "  hint: yield (inputs, target), with inputs as in example_inputs()",
    ),
    "data of another batch size": (
        "def example_inputs():\n    return torch.ones(4, 3)\n"
        "def train_data():\n    return [(torch.ones(6, 3), torch.ones(6))]\n"
        "def loss_fn(output, target): ...\n",
        "model.py:8: train_data() has 6 targets, but the example has 4 samples\n"
        "  hint: give both the same batch size, or add example_target() to match",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_told_by_line_and_hint(case: str, load_text: Loader, workplace: Path) -> None:
    text, expected = BAD_FILES[case]

    with pytest.raises(GPipeCompilerError) as caught:
        load_text(text)

    assert message(caught.value, workplace).replace(torch.__file__, "TORCH") == expected
    assert caught.value.exit_code is ExitCode.MODEL


BAD_NAMES = {
    "missing.py": (
        "there is no file missing.py; HERE has a.py, b.py\n"
        "  hint: check the path, it is relative to here"
    ),
    "folder": (
        "folder is a directory, not a Python file\n"
        "  hint: name the file that builds the model, such as folder/model.py"
    ),
    "nowhere.at.all:f": (
        "there is no module nowhere\n"
        "  hint: the current directory and the installed packages were searched"
    ),
    "a.py:": (
        "'a.py:' names no model\n  hint: write model.py, model.py:factory or package.module:factory"
    ),
    "not-a-name:f": "'not-a-name' is neither a Python file nor the name of a module",
}


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_is_a_mistake_of_usage(name: str, workplace: Path) -> None:
    (workplace / "folder").mkdir()
    (workplace / "b.py").touch()
    (workplace / "a.py").write_text("")

    with pytest.raises(GPipeCompilerError) as caught:
        load(name)

    assert str(caught.value).replace(str(workplace), "HERE") == BAD_NAMES[name]
    assert caught.value.exit_code is ExitCode.USAGE


def test_an_error_deep_in_a_library_is_told_by_the_users_line(load_text: Loader) -> None:
    with pytest.raises(GPipeCompilerError) as caught:
        load_text("def example_inputs():\n    return torch.testing.assert_close(1, 2)\n")

    assert caught.value.location is not None
    assert caught.value.location.line == 7
    assert caught.value.location.code == "return torch.testing.assert_close(1, 2)"
