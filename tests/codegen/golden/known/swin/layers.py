"""What several stages of SwinForImageClassification have."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SwinMLP(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, out_features)
        self.fc2 = nn.Linear(out_features, in_features)

    def forward(self, hidden_states: Tensor) -> Tensor:
        # modeling_swin.py:479-481, activations.py:89
        hidden_states = self.fc1(hidden_states)
        activation_fn_out = F.gelu(hidden_states)
        hidden_states = self.fc2(activation_fn_out)
        return hidden_states


class SwinPatchMerging(nn.Module):
    def __init__(
        self, normalized_shape: int, out_features: int, view_number: int, view_number_2: int
    ) -> None:
        super().__init__()
        self.normalized_shape = normalized_shape
        self.view_number = view_number
        self.view_number_2 = view_number_2
        self.norm = nn.LayerNorm(normalized_shape)
        self.reduction = nn.Linear(normalized_shape, out_features, bias=False)

    def forward(self, input_feature: Tensor) -> Tensor:
        # modeling_swin.py:314-543
        batch = input_feature.shape[0]
        input_feature = input_feature.view(
            batch, self.view_number, self.view_number, self.view_number_2
        )
        item = input_feature[:, ::2, ::2]
        item_2 = input_feature[:, 1::2, ::2]
        item_3 = input_feature[:, ::2, 1::2]
        item_4 = input_feature[:, 1::2, 1::2]
        input_feature = torch.cat([item, item_2, item_3, item_4], -1)
        input_feature = input_feature.view(batch, -1, self.normalized_shape)
        input_feature = self.norm(input_feature)
        input_feature = self.reduction(input_feature)
        return input_feature
