"""A pipeline in Hugging Face's Trainer: its accumulation, clipping, schedule and evaluation.

    pip install 'gpipe-compiler[huggingface]' accelerate
    gpipe-compile examples/gpt2_huggingface.py --stages 2
    python examples/loop_trainer.py gpt2_huggingface_x2 weights.pt

In one process, with a thread for every device. Trainer takes every process of torchrun for a
replica with data of its own: there, use the loop of loop_accelerate.py, or `run.py train`.
"""

import importlib
import os
import sys
import tempfile
from pathlib import Path

import torch
from gpt2_huggingface import BATCH, train_data
from transformers import Trainer, TrainingArguments

STEPS = 4
ACCUMULATED = 2
"""Mini-batches for a step of the optimizer."""
LARGEST_NORM = 0.5


class PipelineTrainer(Trainer):
    """Trainer, with the loss of a pipeline."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Of a mini-batch, whose gradients come with its `backward()`; in evaluation without."""
        loss = model.loss(dict(inputs))
        return (loss, {"loss": loss}) if return_outputs else loss


def make_optimizer(params):
    """Of one's own: Trainer tells by the classes of layers which weights decay, and a pipeline has
    the model's names, not its layers."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def rows(batches):
    """Samples of some batches, for Trainer's own loader to put together again."""
    found = []
    for _, (inputs, _) in zip(range(batches), train_data(), strict=False):
        found += [dict(zip(inputs, row, strict=True)) for row in zip(*inputs.values(), strict=True)]
    return found


def main(package: Path, weights: Path) -> None:
    """Train a package of the GPT-2 example, and write its weights."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.exit("Trainer takes every process for a replica: start this in one process")
    sys.path.insert(0, str(package.resolve().parent))
    pipe = importlib.import_module(package.name).Pipeline()  # from here on as from the package
    optimizer = make_optimizer(pipe.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATED,
            max_steps=STEPS,
            max_grad_norm=LARGEST_NORM,
            train_sampling_strategy="sequential",
            prediction_loss_only=True,
            remove_unused_columns=False,
            label_names=["labels"],
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = PipelineTrainer(
            pipe,
            arguments,
            train_dataset=rows(STEPS * ACCUMULATED),
            eval_dataset=rows(1),
            optimizers=(optimizer, schedule),
        )
        trainer.train()
        print(f"loss {trainer.evaluate()['eval_loss']:.4f}")
    torch.save(pipe.state_dict(), weights)  # the names of the original model
    pipe.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
