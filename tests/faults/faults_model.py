"""The model that the tests of faults train."""

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
