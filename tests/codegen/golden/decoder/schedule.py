"""The schedule of decoder: 3 stages, 2 micro-batches, gpipe.

Time runs to the right, forward and backward drawn equally long; F0 and B0 are the forward and the
backward of micro-batch 0.

    device 0 | F0 F1 .  .  .  .  B1 B0
    device 1 | .  F0 F1 .  .  B1 B0
    device 2 | .  .  F0 F1 B1 B0
"""

import torch

from . import loss_weight, stage_0, stage_1, stage_2
from .runtime.spec import (
    Crossing,
    Input,
    Leaf,
    LossSpec,
    LossTerm,
    PipelineSpec,
    Reduction,
    Relation,
    Requirement,
    ScheduleKind,
    Size,
    StageSpec,
)

# Each device's work in order: 2F0 is stage 2, forward, micro-batch 0.
ORDERS = (
    "0F0 0F1 0B1 0B0",
    "1F0 1F1 1B1 1B0",
    "2F0 2F1 2B1 2B0",
)

ids_1 = Size(name="ids.1", of=("ids", 1), example=6)

SPEC = PipelineSpec(
    name="decoder",
    stages=(
        StageSpec(
            module=stage_0.Stage0,
            inputs=("ids",),
            outputs=("add", "transpose_2", "softmax"),
        ),
        StageSpec(
            module=stage_1.Stage1,
            inputs=("softmax", "transpose_2", "add"),
            outputs=("add_1", "transpose_5", "transpose_7", "transpose_8"),
        ),
        StageSpec(
            module=stage_2.Stage2,
            inputs=("transpose_5", "transpose_8", "transpose_7", "add_1"),
            outputs=("lm_head",),
            loss_inputs=("lm_head", "target"),
        ),
    ),
    inputs=(
        Input("ids", ("args", 0), shape=(4, ids_1), dtype=torch.int64),
        Input("target", ("target",), shape=(4, ids_1), dtype=torch.int64),
    ),
    crossings=(
        Crossing("target", 0, (2,), (2, ids_1), torch.int64, gradient=False),
        Crossing("add", 0, (1,), (2, ids_1, 8), torch.float32),
        Crossing("transpose_2", 0, (1,), (2, 2, ids_1, 4), torch.float32),
        Crossing("softmax", 0, (1,), (2, 2, ids_1, ids_1), torch.float32),
        Crossing("add_1", 1, (2,), (2, ids_1, 8), torch.float32),
        Crossing("transpose_5", 1, (2,), (2, 2, ids_1, 4), torch.float32),
        Crossing("transpose_7", 1, (2,), (2, 2, ids_1, 4), torch.float32),
        Crossing("transpose_8", 1, (2,), (2, 2, 4, ids_1), torch.float32),
    ),
    outputs=Leaf("lm_head"),
    loss=LossSpec(
        "loss",
        (LossTerm(Reduction.MEAN, counted=True),),
        separate=True,
        weight=StageSpec(
            module=loss_weight.LossWeight,
            inputs=("target",),
            outputs=("weight",),
        ),
    ),
    schedule=ScheduleKind.GPIPE,
    microbatches=2,
    microbatch_size=2,
    orders=ORDERS,
    aliases={
        "lm_head.weight": "wte.weight",
    },
    requires=(
        Requirement(
            2,
            Relation.AT_MOST,
            ids_1,
            "torch takes a dimension of one element for a constant, which is broadcast",
        ),
        Requirement(
            ids_1,
            Relation.AT_MOST,
            6,
            "models.py:66: return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))",
        ),
    ),
)
