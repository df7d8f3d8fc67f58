"""Makes the helpers of these tests importable, and one package for all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gpipe_compiler.cli.main import compile_command

MODEL = '''
"""Layers with dropout, trained on data that is shuffled by the global generator."""

import torch
from torch import nn
from torch.nn import functional as F


def build_model():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)]
    return nn.Sequential(*layers, nn.BatchNorm1d(16), nn.Linear(16, 16))


def example_inputs():
    return torch.randn(16, 16, generator=torch.Generator().manual_seed(1))


def example_target():
    return example_inputs().flip(1)


def loss_fn(output, target):
    return F.mse_loss(output, target)


def make_optimizer(params):
    return torch.optim.AdamW(params, lr=1e-2)


def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)


def train_data():
    x = torch.randn(100, 16, generator=torch.Generator().manual_seed(2))
    for rows in torch.randperm(100).split(16):
        yield x[rows], x[rows].flip(1)
'''


@pytest.fixture(scope="session")
def package(tmp_path_factory):
    """Two stages of a model with dropout, BatchNorm, momentum, a schedule and shuffled data."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "model.py").write_text(MODEL)
    words = [str(folder / "model.py"), "--stages", "2", "-m", "4", "-o", str(folder / "package")]
    assert compile_command([*words, "--no-validate"]) == 0
    return folder / "package"
