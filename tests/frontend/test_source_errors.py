"""What is told of a model file that is no good, word by word: by line and with a hint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpipe_compiler.errors import ExitCode, GPipeCompilerError
from gpipe_compiler.frontend.source import load
from gpipe_compiler.frontend.subject import Subject

Loader = Callable[..., Subject]


def message(error: GPipeCompilerError, workplace: Path) -> str:
    return str(error).replace(f"{workplace}/", "").replace(sys.executable, "python")


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
        "  hint: return tuple(...) of it, or (it,) where forward takes it as one argument",
    ),
    "example without tensors": (
        "def example_inputs():\n    return 3, None\n",
        "model.py:6: example_inputs() holds no tensor\n"
        "  hint: a pipeline splits tensors into samples, so there has to be one",
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
        "  hint: define example_target(), or train_data() that yields (inputs, target) batches; or "
        "loss_fn(output), for a loss of the output alone",
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
        "  hint: name the file that builds the model, such as folder/model.py; a folder of "
        "Hugging Face's has a config.json"
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
