"""How tensors of a model are made of those that a Hugging Face folder stores, and the other way.

What transformers does when it loads and saves is run on tensors without memory and traced: it
stacks experts, splits what was fused, transposes. All of it moves elements and computes nothing, so
it is written down as steps that a package can do again (`runtime/core/assembly.py`).
"""

from __future__ import annotations

import copy
import functools
import importlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from gpipe_compiler.errors import ModelError, summary
from gpipe_compiler.frontend.growing_graph import sources_of
from gpipe_compiler.runtime.core.assembly import Assembly
from gpipe_compiler.runtime.wording import counted

_MOVES: Mapping[str, str] = {
    **{op: op for op in ("cat", "expand", "permute", "reshape", "select", "slice", "split")},
    **{op: op for op in ("split_with_sizes", "squeeze", "stack", "t", "transpose", "unsqueeze")},
    "view": "reshape",
    "_unsafe_view": "reshape",
}
"""Ops of aten that only move elements, and how they are written: there is no stride to rely on."""

_SAME = frozenset({"alias", "clone", "contiguous", "detach", "lift_fresh"})
"""Those that leave every element in its place."""


class Conversions:
    """What transformers does to the tensors of a folder when it loads a model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._loading = importlib.import_module("transformers.core_model_loading")
        mapping = importlib.import_module("transformers.conversion_mapping")
        transforms = mapping.get_model_conversion_mapping(model)
        self._converters = self._of(transforms, "WeightConverter")
        self._renamings = self._of(transforms, "WeightRenaming")
        self._by_pattern = {p: each for each in self._converters for p in each.source_patterns}

    def _of(self, transforms: Iterable[Any], kind: str) -> list[Any]:
        return [each for each in transforms if isinstance(each, getattr(self._loading, kind))]

    def loaded(
        self, there: Mapping[str, tuple[int, ...]], state: Mapping[str, torch.Tensor]
    ) -> list[tuple[str, Assembly]]:
        """The tensors of a model, and how each is made of those of a folder.

        Args:
            there: the shapes of what the folder holds, by key.
            state: the model's; what the folder holds besides is left out.

        Raises:
            ModelError: where that is more than moving elements.
        """
        found: list[tuple[str, Assembly]] = []
        pieces: dict[str, list[tuple[str, str]]] = {}
        for key in sorted(there, key=self._loading.dot_natural_key):
            name, pattern = self._named(key, state)
            if name in state and pattern is None:
                found.append((name, Assembly((key,), ())))
            elif name in state and pattern is not None:
                pieces.setdefault(name, []).append((pattern, key))
        for first, own in pieces.items():
            keys = [key for _, key in own]
            empty = [torch.empty(there[key], device="meta") for key in keys]
            try:
                made = traced(functools.partial(self._converted, first, own), keys, empty)
            except (RuntimeError, ValueError, IndexError) as error:  # of torch, on other shapes
                raise ModelError(
                    f"{first} cannot be put together of {keys[0]} and its like "
                    f"({counted(len(keys), 'tensor')}): {summary(error)}",
                    hint="bring all files of the folder, with the configuration they are of",
                ) from error
            found += [(name, how) for name, how in made.items() if name in state]
        return found

    def _named(self, key: str, state: Mapping[str, torch.Tensor]) -> tuple[str, str | None]:
        """What the model calls a tensor of the folder, and the pattern of what converts it."""
        prefix = self._model.base_model_prefix
        rename = self._loading.rename_source_key
        name, pattern = rename(key, self._renamings, self._converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename(key, [], [], prefix, state)
        return name, pattern

    def _converted(
        self, first: str, own: Sequence[tuple[str, str]], tensors: Sequence[torch.Tensor]
    ) -> Mapping[str, Any]:
        converter = copy.deepcopy(self._by_pattern[own[0][0]])
        for (pattern, key), tensor in zip(own, tensors, strict=True):
            converter.add_tensor(first, key, pattern, tensor)
        made: Mapping[str, Any] = converter.convert(
            first, model=self._model, config=self._model.config
        )
        return made

    def saved(self, state: Mapping[str, torch.Tensor]) -> dict[str, Assembly]:
        """By the keys of what save_pretrained writes, how each is made of the model's tensors."""
        model, revert = self._model, self._loading.revert_weight_conversion
        names = list(state)
        empty = [torch.empty_like(state[name], device="meta") for name in names]
        return traced(
            lambda tensors: revert(model, dict(zip(names, tensors, strict=True))), names, empty
        )


def traced(
    run: Callable[[Sequence[torch.Tensor]], Mapping[str, Any]],
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
) -> dict[str, Assembly]:
    """How what a function returns by key is made of these tensors, by their names.

    Raises:
        ModelError: where that is more than moving elements.
    """
    keys: list[str] = []

    def listed(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        made = run(given)
        keys.extend(made)
        return [each[0] if isinstance(each, list) else each for each in made.values()]

    graph = make_fx(listed)(list(tensors)).graph
    order = {node: place for place, node in enumerate(graph.nodes)}
    called = dict(zip((n for n in order if n.op == "placeholder"), names, strict=True))
    outputs: Any = graph.output_node().args[0]
    return {key: _assembly(node, order, called) for key, node in zip(keys, outputs, strict=True)}


def _assembly(
    made: fx.Node, place: Mapping[fx.Node, int], called: Mapping[fx.Node, str]
) -> Assembly:
    """How a node's tensor is made of the named ones; `place` orders all nodes."""
    order = sorted((made, *sources_of(made)), key=place.__getitem__)
    of = [node for node in order if node in called]
    names = {node: f"%{place}" for place, node in enumerate(of)}
    steps: list[tuple[Any, ...]] = []
    for node in (node for node in order if node not in called):
        source = names.get(node.args[0]) if isinstance(node.args[0], fx.Node) else None
        if node.target is operator.getitem:
            names[node] = f"{source}.{node.args[1]}"
            continue
        op = str(getattr(node.target, "overloadpacket", node.target)).rpartition(".")[2]
        if op in _SAME and source is not None:
            names[node] = source
            continue
        if op not in _MOVES or node.kwargs:
            raise ModelError(
                f"transformers computes {op} of {called[of[0]]} when it loads or saves it, and a "
                "package only moves its elements",
                hint="write a model.py that builds the model and loads its weights",
            )
        steps.append((_MOVES[op], *(_argument(each, names) for each in node.args)))
        names[node] = f"%{len(of) + len(steps) - 1}"
    if names[made] != f"%{len(of) + len(steps) - 1}":  # of several results, or one of several
        steps.append(("alias", names[made]))
    return Assembly(tuple(called[node] for node in of), tuple(steps))


def _argument(argument: object, names: Mapping[fx.Node, str]) -> object:
    """An argument of a node, with names for nodes."""
    if isinstance(argument, (list, tuple)):
        return tuple(_argument(item, names) for item in argument)
    return names[argument] if isinstance(argument, fx.Node) else argument
