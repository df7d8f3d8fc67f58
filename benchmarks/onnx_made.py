"""ONNX models made here, by the ways that people make them; for `onnx_files.py --made`.

Torch's two exporters at several opsets, four ways to quantise, 16 bits, ONNX Runtime's optimiser of
transformers, and pipelines of scikit-learn. Weights are random.
Needs skl2onnx and onnxconverter-common, which the compiler does not.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import torch
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from torch import nn

Made = dict[str, tuple[Path, tuple[str, ...]]]
"""By name, a file and what `--input` is given."""


class Images(nn.Module):
    """Convolutions, with a pooling and an interpolation whose sizes follow from the picture's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU())
        self.second = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.GELU(), nn.Conv2d(16, 8, 1))
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores, (batch, 10)."""
        early = self.first(x)
        late = nn.functional.interpolate(self.second(early), size=early.shape[-2:])
        return self.head(nn.functional.adaptive_avg_pool2d(early + late, 1).flatten(1))


class Words(nn.Module):
    """A transformer of tokens, whose mask follows from their number."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(64, 32), nn.Embedding(128, 32)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        wide = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.after = nn.Sequential(nn.LayerNorm(32), wide)
        self.head = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the next token, (batch, length, 64)."""
        batch, length = x.shape
        hidden = self.table(x) + self.places(torch.arange(length))
        heads = [
            layer(hidden).view(batch, length, 4, 8).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + mixed.transpose(1, 2).reshape(batch, length, 32)
        return self.head(hidden + self.after(hidden))


class Steps(nn.Module):
    """A GRU over steps, and a layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(12, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores, (batch, 4)."""
        return self.head(self.layers(x)[0][:, -1])


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, dict[int, str], str]] = {
    "images": (
        Images,
        torch.randn(2, 3, 16, 16),
        {0: "batch", 2: "height", 3: "width"},
        "8x3x16x16",
    ),
    "words": (Words, torch.randint(0, 64, (2, 6)), {0: "batch", 1: "length"}, "8x6"),
    "steps": (Steps, torch.randn(2, 5, 12), {0: "batch"}, "8x5x12"),
}

SCRIPT_OPSETS, EXPORT_OPSETS = (13, 15, 17, 18, 20), (18, 20, 23)


def made(folder: Path) -> Made:
    """All of them; files that are there already stand."""
    folder.mkdir(parents=True, exist_ok=True)
    logging.getLogger().setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    found: Made = {}
    for name, path, make, specs in _all(folder):
        if not path.exists():
            torch.manual_seed(0)
            try:
                make(path)
            except Exception as error:  # noqa: BLE001  # whatever an exporter cannot do
                print(f"{name} is not made: {type(error).__name__}: {str(error)[:200]}")
                continue
        found[name] = path, specs
    return found


Case = tuple[str, Path, Callable[[Path], object], tuple[str, ...]]


def _all(folder: Path) -> Iterator[Case]:
    for model, (_, _, _, spec) in MODELS.items():
        for dynamo, opsets in ((False, SCRIPT_OPSETS), (True, EXPORT_OPSETS)):
            for opset in opsets:
                name = f"{model}, {'torch.export' if dynamo else 'TorchScript'}, opset {opset}"
                path = folder / f"{model}_{'export' if dynamo else 'script'}_{opset}.onnx"
                yield name, path, _exporter(model, opset, dynamo=dynamo), (spec,)
        plain = folder / f"{model}_export_20.onnx"
        for way, change in CHANGES.items():
            path = folder / f"{model}_{way}.onnx"
            yield f"{model}, {way}", path, _changer(change, plain, model), (spec,)
    for name, make in pipelines().items():
        yield f"scikit-learn, {name}", folder / f"sklearn_{name}.onnx", make, ()


def _exporter(model: str, opset: int, *, dynamo: bool) -> Callable[[Path], None]:
    build, example, sizes, _ = MODELS[model]

    def make(path: Path) -> None:
        options: dict[str, object] = {"dynamic_axes": {"x": sizes}}
        if dynamo:
            options = {"dynamic_shapes": (dict.fromkeys(sizes, torch.export.Dim.DYNAMIC),)}
        with torch.no_grad():
            torch.onnx.export(
                build().eval(),
                (example,),
                path,
                input_names=["x"],
                output_names=["y"],
                opset_version=opset,
                dynamo=dynamo,
                external_data=False,
                verbose=False,
                **options,
            )

    return make


Change = Callable[[Path, Path, str], object]


def _changer(change: Change, plain: Path, model: str) -> Callable[[Path], object]:
    return lambda path: change(plain, path, model)


class Batches(CalibrationDataReader):
    """A few batches like the example."""

    def __init__(self, model: str) -> None:
        example = MODELS[model][1].numpy()
        generator = np.random.default_rng(0)
        self._batches = iter([{"x": generator.permuted(example)} for _ in range(2)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next one."""
        return next(self._batches, None)


def _static(layout: QuantFormat) -> Change:
    def change(plain: Path, path: Path, model: str) -> None:
        quantize_static(
            str(plain), str(path), Batches(model), quant_format=layout, weight_type=QuantType.QInt8
        )

    return change


def _dynamic(plain: Path, path: Path, _: str) -> None:
    quantize_dynamic(str(plain), str(path), weight_type=QuantType.QInt8)


def _int4(plain: Path, path: Path, _: str) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(plain), block_size=32, is_symmetric=True)
    quantizer.process()
    onnx.save(quantizer.model.model, path)


def _int4_qdq(plain: Path, path: Path, _: str) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    model = onnx.version_converter.convert_version(onnx.load(plain), 21)
    quantizer = MatMulNBitsQuantizer(
        model, block_size=32, is_symmetric=True, quant_format=QuantFormat.QDQ
    )
    quantizer.process()
    onnx.save(quantizer.model.model, path)


def _half(keep: bool) -> Change:
    def change(plain: Path, path: Path, _: str) -> None:
        from onnxruntime.transformers.float16 import convert_float_to_float16

        onnx.save(convert_float_to_float16(onnx.load(plain), keep_io_types=keep), path)

    return change


def _optimised(plain: Path, path: Path, _: str) -> None:
    from onnxruntime.transformers.optimizer import optimize_model

    optimize_model(str(plain), "bert", num_heads=4, hidden_size=32).save_model_to_file(str(path))


def _by_runtime(plain: Path, path: Path, _: str) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    onnxruntime.InferenceSession(str(plain), options, ["CPUExecutionProvider"])


CHANGES: dict[str, Change] = {
    "QDQ": _static(QuantFormat.QDQ),
    "QOperator": _static(QuantFormat.QOperator),
    "dynamic int8": _dynamic,
    "int4 MatMulNBits": _int4,
    "int4 QDQ": _int4_qdq,
    "float16": _half(False),
    "float16 inside": _half(True),
    "transformers' optimiser": _optimised,
    "optimised by ONNX Runtime": _by_runtime,
}


def pipelines() -> dict[str, Callable[[Path], object]]:
    """Pipelines of scikit-learn, trained on random numbers."""
    from sklearn.ensemble import (
        GradientBoostingRegressor,
        HistGradientBoostingClassifier,
        IsolationForest,
        RandomForestClassifier,
    )
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures, StandardScaler
    from sklearn.svm import SVC

    models = {
        "logistic": make_pipeline(StandardScaler(), PolynomialFeatures(), LogisticRegression()),
        "forest": make_pipeline(
            StandardScaler(), RandomForestClassifier(n_estimators=10, max_depth=4)
        ),
        "boosting": make_pipeline(StandardScaler(), GradientBoostingRegressor(n_estimators=10)),
        "histograms": make_pipeline(StandardScaler(), HistGradientBoostingClassifier(max_iter=5)),
        "neighbours": make_pipeline(StandardScaler(), KNeighborsClassifier(3)),
        "perceptron": make_pipeline(StandardScaler(), MLPClassifier((8,), max_iter=50)),
        "vectors": make_pipeline(StandardScaler(), SVC(probability=False)),
        "isolation": make_pipeline(StandardScaler(), IsolationForest(n_estimators=10)),
        "logistic, maps": make_pipeline(StandardScaler(), LogisticRegression()),
    }

    def maker(name: str) -> Callable[[Path], object]:
        def make(path: Path) -> None:
            from skl2onnx import to_onnx

            generator = np.random.default_rng(0)
            rows = generator.standard_normal((100, 6)).astype(np.float32)
            labels = (rows[:, 0] + rows[:, 1] > 0).astype(np.int64)
            model = models[name].fit(rows, labels)
            last = model.steps[-1][1]
            options = {id(last): {"zipmap": False}} if hasattr(last, "classes_") else {}
            if "maps" in name:
                options = {}
            onnx.save(to_onnx(model, rows[:1], options=options, target_opset=17), path)

        return make

    return {name: maker(name) for name in models}
