"""BatchNorm with a cumulative average against the eager model, buffers included."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_compiler.errors import TraceError
from gpipe_compiler.frontend.recorded import trace_mode
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.options import LossChoice
from gpipe_compiler.passes.shapes import annotate


class Doubled(nn.BatchNorm1d):
    """No class of torch.nn, so its calls are taken apart."""

    def forward(self, x):
        return super().forward(x) * 2


def subject_of(layer):
    model = nn.Sequential(nn.Linear(3, 4), layer, nn.Tanh())
    return Subject("model", model, (torch.randn(4, 3),), {}, loss=LossChoice.SUM_OF_SQUARES)


@pytest.mark.parametrize("training", [True, False])
def test_a_cumulative_average(training, same_as_eager):
    """Traced, run without numbers to learn its shapes, and still averaging by the count."""
    subject = subject_of(nn.BatchNorm1d(4, momentum=None))
    graph = trace_mode(subject, training)

    same_as_eager(annotate(graph, 2), subject, training)
    assert subject.model[1].momentum is None


def test_one_that_is_taken_apart_is_refused():
    """No number may stand for the average."""
    with pytest.raises(TraceError, match="momentum=None"):
        trace_mode(subject_of(Doubled(4, momentum=None)), True)
    trace_mode(subject_of(Doubled(4)), True)
