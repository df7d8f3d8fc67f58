"""What a package of one stage costs beside the model that it is made of.

    python benchmarks/one_stage.py [--rounds 9] [NAME ...]

One micro-batch, one thread for an op. Of a training step (forward and backward, without the
optimizer) and of inference, each by a package compiled for it, the table gives the model's
processor seconds, and what the package takes in shares of the model's: of processor time, of time
by the clock, and of the most bytes that the allocator has given out at a time. Model and package
take turns, round by round; the shares are medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from step_time import EXAMPLES
from tables import machine, markdown
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.compile import compile as compile_package
from gpipe_compiler.frontend.subject import Subject

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
from loading import load_package

WORDS = 1000


@dataclass(frozen=True)
class Example:
    """A file of examples/; keyword arguments of its functions."""

    file: str
    model: dict[str, int]
    inputs: dict[str, int]
    target: dict[str, int]

    def subject(self, name: str) -> Subject:
        """The network with its example call."""
        if str(EXAMPLES) not in sys.path:
            sys.path.insert(0, str(EXAMPLES))
        example: Any = importlib.import_module(self.file)
        inputs, target = (
            example.example_inputs(**self.inputs),
            example.example_target(**self.target),
        )
        model = example.build_model(**self.model)
        return Subject(name, model, (inputs,), target=target, loss_fn=example.loss_fn)


@dataclass(frozen=True)
class HuggingFace:
    """A model of transformers that reads words, or images."""

    family: str
    settings: dict[str, Any]
    batch: int = 6
    length: int = 256
    image: int = 0

    def subject(self, name: str) -> Subject:
        """The model from its configuration, with words or an image made up."""
        transformers = importlib.import_module("transformers")
        torch.manual_seed(0)
        config = getattr(transformers, self.settings["config"])(
            **{key: item for key, item in self.settings.items() if key != "config"}
        )
        model = getattr(transformers, self.family)(config)
        target = torch.randint(0, 10, (self.batch,))
        inputs: dict[str, object] = {}
        if self.image:
            inputs["pixel_values"] = torch.randn(self.batch, 3, self.image, self.image)
        else:
            inputs["input_ids"] = torch.randint(0, WORDS, (self.batch, self.length))
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.randint(0, WORDS, (self.batch, self.length // 2))
            target = torch.randint(0, WORDS, (self.batch, self.length // 2))
        elif not self.image:
            target = torch.randint(0, WORDS, (self.batch, self.length))
        return Subject(name, model, (), inputs, target, loss_of_logits)


def loss_of_logits(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy, over words or images."""
    logits = output.logits
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.flatten())


def _words(config: str, **settings: Any) -> dict[str, Any]:
    return {"config": config, "vocab_size": WORDS, "use_cache": False, **settings}


_DECODER = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
_GPT = {"n_embd": 256, "n_layer": 2, "n_head": 8}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_BERT = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
}  # fmt: skip

NETWORKS: dict[str, Example | HuggingFace] = {
    "resnet50": Example("resnet50", {"width": 16}, {"batch": 24, "image": 96}, {"batch": 24}),
    "alexnet": Example("alexnet", {"width": 32}, {"batch": 48, "image": 96}, {"batch": 48}),
    "unet": Example("unet", {"width": 8}, {"batch": 16, "image": 96}, {"batch": 16, "image": 96}),
    "inception": Example("inception", {}, {"batch": 48}, {"batch": 48}),
    "transformer": Example(
        "transformer", {"dim": 192, "heads": 6, "layers": 3, "sequence": 128, "vocabulary": 512},
        {"batch": 12, "sequence": 128}, {"batch": 12, "sequence": 128},
    ),
    "gpt2": HuggingFace("GPT2LMHeadModel", _words("GPT2Config", **_GPT, **_NO_DROPOUT)),
    "gpt2 with dropout": HuggingFace("GPT2LMHeadModel", _words("GPT2Config", **_GPT)),
    "llama": HuggingFace("LlamaForCausalLM", _words("LlamaConfig", **_DECODER)),
    "mistral": HuggingFace("MistralForCausalLM", _words("MistralConfig", **_DECODER,
                           sliding_window=64)),
    "qwen2": HuggingFace("Qwen2ForCausalLM", _words("Qwen2Config", **_DECODER)),
    "bert": HuggingFace("BertForMaskedLM", _words("BertConfig", **_BERT)),
    "t5": HuggingFace("T5ForConditionalGeneration", _words("T5Config", d_model=256, d_kv=32,
                      d_ff=512, num_layers=2, num_heads=8)),
    "vit": HuggingFace("ViTForImageClassification", {"config": "ViTConfig", **_BERT,
                       "image_size": 96, "patch_size": 8, "num_labels": 10}, batch=12, image=96),
    "roberta": HuggingFace("RobertaForMaskedLM", _words("RobertaConfig", **_BERT)),
    "distilbert": HuggingFace("DistilBertForMaskedLM", _words("DistilBertConfig", dim=256,
                              hidden_dim=512, n_layers=2, n_heads=8)),
    "opt": HuggingFace("OPTForCausalLM", _words("OPTConfig", ffn_dim=512, word_embed_proj_dim=256,
                       hidden_size=256, num_hidden_layers=2, num_attention_heads=8)),
    "phi": HuggingFace("PhiForCausalLM", _words("PhiConfig", **_DECODER)),
    "gemma": HuggingFace("GemmaForCausalLM", _words("GemmaConfig", **_DECODER, head_dim=32)),
    "gpt-neox": HuggingFace("GPTNeoXForCausalLM", _words("GPTNeoXConfig", **_BERT)),
    "convnext": HuggingFace("ConvNextForImageClassification", {"config": "ConvNextConfig",
                            "hidden_sizes": [24, 48, 96, 192], "depths": [2, 2, 2, 2],
                            "num_labels": 10}, batch=48, image=96),
}  # fmt: skip


@dataclass(frozen=True)
class Share:
    """What the package takes, the model's being 1."""

    model_s: float
    time: float
    clock: float
    memory: float


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Processor seconds of a call, of all threads, and seconds by the clock."""
    start, begun = time.process_time(), time.perf_counter()
    run()
    return time.process_time() - start, time.perf_counter() - begun


def most_bytes(run: Callable[[], object]) -> int:
    """The most that a call holds at a time, beyond what there was before, kernels included."""
    run()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    found = sorted(_allocations(seen.profiler.kineto_results.experimental_event_tree()))
    now = most = 0
    for _, size in found:
        now += size
        most = max(most, now)
    return most


def _allocations(events: Any) -> Iterator[tuple[int, int]]:
    for event in events:
        if event.typed[0] == torch._C._profiler._EventType.Allocation:
            yield event.start_time_ns, event.typed[1].alloc_size
        yield from _allocations(event.children)


def compared(model: Callable[[], object], package: Callable[[], object], rounds: int) -> Share:
    """Both in turns, after a round that warms them up."""
    for run in (model, package, model, package):
        run()
    pairs = [(seconds(model), seconds(package)) for _ in range(rounds)]
    own_bytes, bytes_ = most_bytes(model), most_bytes(package)
    time_, clock = (
        statistics.median(other[kind] / own[kind] for own, other in pairs) for kind in (0, 1)
    )
    return Share(statistics.median(own[0] for own, _ in pairs), time_, clock, bytes_ / own_bytes)


def pipeline_of(subject: Subject, folder: Path, *, training: bool) -> Any:
    """The package of one stage."""
    options = CompileOptions(stages=1, microbatches=1, validate=False, training=training)
    if not training:
        subject = dataclasses.replace(subject, training=False, target=None, loss_fn=None)
    made = compile_package(subject, options, folder / f"{subject.name}_{training}")
    assert made.directory is not None
    return load_package(made.directory).Pipeline().train(training)


def shares(name: str, folder: Path, rounds: int) -> tuple[Share, Share]:
    """A training step, and inference."""
    subject = NETWORKS[name].subject(name.replace(" ", "_"))
    trains, infers = (pipeline_of(subject, folder, training=mode) for mode in (True, False))
    model, loss_fn = subject.model, subject.loss_fn
    assert loss_fn is not None
    args, kwargs = tuple(subject.args), dict(subject.kwargs)
    parameters = [p for stage in trains.stages.values() for p in stage.parameters()]

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss_fn(model(*args, **kwargs), subject.target).backward()

    def package_step() -> None:
        for parameter in parameters:
            parameter.grad = None
        trains.step((args, kwargs), subject.target)

    def infer() -> None:
        with torch.no_grad():
            model(*args, **kwargs)

    model.train()
    training = compared(step, package_step, rounds)
    model.eval()
    return training, compared(infer, lambda: infers((args, kwargs)), rounds)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shown = ("time", "clock", "memory")
    header = ("network", "step", *shown, "inference", *shown)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names:
            found = shares(name, Path(folder), options.rounds)
            cells = [
                cell
                for share in found
                for cell in (
                    f"{1000 * share.model_s:.0f} ms",
                    f"{share.time:.3f}",
                    f"{share.clock:.3f}",
                    f"{share.memory:.3f}",
                )
            ]
            rows.append((name, *cells))
            print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    print(f"{machine()}\n")
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
