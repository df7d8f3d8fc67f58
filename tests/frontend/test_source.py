"""Loading what is to be compiled: every form of MODEL and of its example."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_compiler.errors import ExitCode, GPipeCompilerError, UsageError
from gpipe_compiler.frontend.batch_dims import find_batch_dims
from gpipe_compiler.frontend.source import load
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.tracing import trace

Loader = Callable[..., Subject]


class TestForms:
    def test_a_file_offers_a_model_and_a_tensor(self, load_text: Loader, workplace: Path) -> None:
        subject = load_text("def example_inputs():\n    return torch.ones(4, 3)")

        assert subject.name == "model"
        assert isinstance(subject.model, nn.Linear)
        assert subject.args[0].shape == (4, 3)
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

    @pytest.mark.parametrize(
        "offered", ["", "def example_target():\n    return torch.ones(4, 2)\n"]
    )
    @pytest.mark.parametrize("words", ["output", "output, target=None"])
    def test_a_loss_of_the_output_alone_needs_no_target(
        self, load_text: Loader, words: str, offered: str
    ) -> None:
        subject = load_text(
            "def example_inputs():\n    return torch.ones(4, 3)\n"
            f"def loss_fn({words}):\n    return output.mean() + 1\n" + offered
        )

        assert (subject.target is not None) == ("target" in words and offered != "")
        assert subject.loss_fn is not None
        again = dataclasses.replace(subject, name="another")
        assert again.loss_fn is not None
        output = torch.full((4, 2), 2.0)
        assert again.loss_fn(output, subject.target) == 3
        assert "mean" in str(trace(again))

    def test_a_named_factory_of_a_file(self, workplace: Path) -> None:
        (workplace / "model.py").write_text(
            "import torch\ndef tiny():\n    return torch.nn.ReLU()\n"
            "def example_inputs():\n    return torch.ones(2)\n"
        )

        assert isinstance(load("model.py:tiny").model, nn.ReLU)

    def test_a_module_of_the_current_directory(self, workplace: Path, plain_model: str) -> None:
        (workplace / "networks").mkdir()
        (workplace / "networks" / "__init__.py").touch()
        (workplace / "networks" / "small.py").write_text(
            plain_model + "def example_inputs():\n    return torch.ones(2, 3)\n"
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

        assert (len(first.args[0]), len(second.args[0])) == (4, 5)

    def test_a_file_named_as_a_known_module_leaves_that_alone(
        self, workplace: Path, plain_model: str
    ) -> None:
        (workplace / "json.py").write_text(plain_model)
        before = sys.modules["json"]

        subject = load("json.py", input_specs=["2x3"])

        assert subject.name == "json"
        assert sys.modules["json"] is before

    def test_hooks_that_the_file_offers(self, load_text: Loader) -> None:
        """A module that happens to have the name of a hook is none, nor is a library's `log`."""
        subject = load_text(
            """
            import math as metrics
            from math import log
            def example_inputs(): return torch.ones(4, 3)
            def make_optimizer(params): return torch.optim.SGD(params, 0.1)
            def make_scheduler(optimizer): return None
            def eval_data(): yield torch.ones(4, 3), None
            """
        )

        assert subject.hooks is not None
        assert subject.hooks.names == {"make_optimizer", "make_scheduler", "eval_data"}

    def test_loss_with_example_target(self, load_text: Loader) -> None:
        subject = load_text(
            """
            def example_inputs(): return torch.ones(4, 3)
            def example_target(): return torch.zeros(4, dtype=torch.int64)
            def loss_fn(output, target): return nn.functional.cross_entropy(output, target)
            """
        )

        assert subject.loss_fn is not None
        assert subject.target.shape == (4,)

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

        assert subject.target.tolist() == [7, 7, 7, 7]

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

        assert subject.args[0].dtype == getattr(torch, dtype)

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

    @pytest.mark.parametrize("spec", ["99999999999999999x3", f"{'9' * 40}", "4x3:bits8"])
    def test_what_torch_cannot_make(self, spec: str, workplace: Path) -> None:
        with pytest.raises(UsageError, match=f"--input '{spec}': torch cannot make it: "):
            load("torch.nn:Identity", input_specs=[spec])

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

        assert subject.kwargs["input"].is_meta
        assert subject.target[0].is_meta
        assert subject.example is not None
        assert subject.example.kwargs["input"].sum() == 12
        assert subject.example.target[0].sum() == 4

    def test_a_meta_example_is_kept_as_it_is(self, load_text: Loader) -> None:
        subject = load_text(
            "def example_inputs(): return torch.ones(4, 3, device='meta')",
            head="import torch\nfrom torch import nn\n" + self.MODEL,
        )

        assert subject.args[0].is_meta
        assert subject.example is None

    def test_a_meta_example_of_a_real_model(self, load_text: Loader) -> None:
        with pytest.raises(GPipeCompilerError, match="the example is on the meta device"):
            load_text("def example_inputs(): return torch.ones(4, 3, device='meta')")


@pytest.mark.parametrize("call", ["torch.cat([i.mean((1, 2)) for i in images])", "images[0]"])
def test_samples_in_a_list_are_refused_with_the_way_out(
    load_text: Loader, workplace: Path, call: str
) -> None:
    """As detection models take images of unlike sizes."""
    subject = load_text(
        f"""
        class Model(nn.Module):
            def forward(self, images):
                images = [nn.functional.conv2d(i[None], torch.ones(2, 3, 3, 3))[0] for i in images]
                return {call}

        build_model = Model

        def example_inputs():
            return ([torch.ones(3, 8, 9), torch.ones(3, 7, 6), torch.ones(3, 5, 5)],)
        """
    )
    with pytest.raises(GPipeCompilerError) as refused:
        trace(subject)

    assert refused.value.exit_code == ExitCode.MODEL
    assert refused.value.location.file == str(workplace / "model.py")
    assert "the 3 things in the list are the samples, pad them to one size" in refused.value.hint


def test_an_input_that_is_not_taken_as_samples_is_named_where_the_loss_fails(
    load_text: Loader,
) -> None:
    """CLIP's own forward holds every picture against every text, be these samples or classes."""
    subject = load_text(
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.pictures, self.texts = nn.Linear(4, 3), nn.Linear(5, 3)

            def forward(self, picture, text):
                return self.pictures(picture) @ self.texts(text).t()

        build_model = Model

        def example_inputs():
            return torch.rand(8, 4), torch.rand(8, 5)

        def loss_fn(output):
            places = torch.arange(len(output))
            return sum(nn.functional.cross_entropy(way, places) for way in (output, output.t()))
        """
    )
    with pytest.raises(GPipeCompilerError) as refused:
        trace(find_batch_dims(subject).subject)

    assert refused.value.exit_code == ExitCode.MODEL
    assert "--batch-dim picture=0 --batch-dim text=0" in refused.value.hint
