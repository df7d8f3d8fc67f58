"""The schedule of conv_net: 3 stages, 2 micro-batches, gpipe.

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
    Remat,
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

images_2 = Size(name="images.2", of=("images", 2), example=8)
images_3 = Size(name="images.3", of=("images", 3), example=8)

SPEC = PipelineSpec(
    name="conv_net",
    stages=(
        StageSpec(
            module=stage_0.Stage0,
            inputs=("images",),
            outputs=("stem_2", "blocks_0_conv2"),
            writes=stage_0.WRITES,
            mixes=True,
            remat=Remat.SEGMENTS,
            segments=stage_0.SEGMENTS,
        ),
        StageSpec(
            module=stage_1.Stage1,
            inputs=("blocks_0_conv2", "stem_2"),
            outputs=("blocks_0_relu_1", "blocks_1_conv2"),
            writes=stage_1.WRITES,
            mixes=True,
            remat=Remat.SEGMENTS,
            segments=stage_1.SEGMENTS,
        ),
        StageSpec(
            module=stage_2.Stage2,
            inputs=("blocks_1_conv2", "blocks_0_relu_1"),
            outputs=("head",),
            loss_inputs=("head", "target"),
            writes=stage_2.WRITES,
            mixes=True,
            remat=Remat.SEGMENTS,
            segments=stage_2.SEGMENTS,
        ),
    ),
    inputs=(
        Input("images", ("args", 0), shape=(4, 3, images_2, images_3), dtype=torch.float32),
        Input("target", ("target",), shape=(4,), dtype=torch.int64),
    ),
    crossings=(
        Crossing("target", 0, (2,), (2,), torch.int64, gradient=False),
        Crossing("stem_2", 0, (1,), (2, 4, images_2, images_3), torch.float32),
        Crossing("blocks_0_conv2", 0, (1,), (2, 4, images_2, images_3), torch.float32),
        Crossing("blocks_0_relu_1", 1, (2,), (2, 4, images_2, images_3), torch.float32),
        Crossing("blocks_1_conv2", 1, (2,), (2, 4, images_2, images_3), torch.float32),
    ),
    outputs=Leaf("head"),
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
    requires=(
        Requirement(
            2,
            Relation.AT_MOST,
            images_2,
            "torch takes a dimension of one element for a constant, which is broadcast",
        ),
        Requirement(
            2,
            Relation.AT_MOST,
            images_3,
            "torch takes a dimension of one element for a constant, which is broadcast",
        ),
    ),
)
