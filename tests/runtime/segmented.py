"""Pipelines whose stages run a segment of theirs through torch's checkpoint."""

from __future__ import annotations

import dataclasses

from torch.utils.checkpoint import checkpoint


def segmented(spec):
    """The same pipeline; the whole forward of every stage is a segment."""
    stages = tuple(
        dataclasses.replace(
            stage,
            module=_in_a_segment(stage.module),
            segments={"body": stage.writes},
        )
        for stage in spec.stages
    )
    return dataclasses.replace(spec, stages=stages)


def _in_a_segment(module):
    class Segmented(module):
        def body(self, *arguments):
            return super().forward(*arguments)

        def forward(self, *arguments):
            return checkpoint(self.body, *arguments, use_reentrant=False)

    return Segmented
