"""The modules of a stage as a tree, under the model's own names."""

from __future__ import annotations

import keyword
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from gpipe_compiler.codegen.constants import quote
from gpipe_compiler.codegen.names import RESERVED, Identifiers
from gpipe_compiler.ir import ModuleSpec, State, StateKind

_OF_MODULE = frozenset(dir(nn.Module()))

OF_STAGE = frozenset(dir(nn.ModuleDict())) | RESERVED
"""Names that no further method of a stage takes."""


@dataclass(eq=False)
class ModuleNode:
    """A module of a stage.

    Attributes:
        prefix: what the names of its members in the stage's `state_dict` begin with.
        methods: names of its own methods, beside those of its class.
        spec: how to construct it where it is a module of torch.nn that the stage calls whole; None
            where it only holds others.
        members: by name, the modules and tensors that it holds.
        place: the expression for it, such as `self.model.layers["2"].mlp`.
    """

    prefix: str = ""
    methods: frozenset[str] = frozenset()
    spec: ModuleSpec | None = None
    members: dict[str, ModuleNode | State] = field(default_factory=dict)
    place: str = "self"

    @cached_property
    def cls(self) -> type[nn.Module]:
        """The class of what holds the members."""
        if self.spec is not None:
            return self.spec.cls
        strange = [item for own, item in self.members.items() if not _is_attribute(own)]
        if any(isinstance(item, ModuleNode) for item in strange):
            return nn.ModuleDict
        parameters = (item for item in strange if isinstance(item, State))
        # A stage is called, which an nn.ParameterDict refuses.
        if self.prefix and any(item.kind is StateKind.PARAMETER for item in parameters):
            return nn.ParameterDict
        return nn.Module

    @property
    def keyed(self) -> Mapping[str, ModuleNode]:
        """The modules that it holds as an nn.ModuleDict does."""
        return {own: item for own, item in self.modules() if self.is_keyed(own)}

    def is_keyed(self, own: str) -> bool:
        """Whether it holds a member of this name as an nn.ModuleDict or nn.ParameterDict does."""
        item = self.members.get(own)
        if isinstance(item, ModuleNode):
            return self.cls is nn.ModuleDict and not _is_attribute(own)
        kept = item is not None and item.kind is StateKind.PARAMETER and not _is_attribute(own)
        return kept and self.cls is nn.ParameterDict and not self.means_something_else(own)

    def modules(self) -> Iterator[tuple[str, ModuleNode]]:
        for own, item in self.members.items():
            if isinstance(item, ModuleNode):
                yield own, item

    def tensors(self) -> Iterator[tuple[str, State]]:
        """The tensors among the members, by name."""
        for own, item in self.members.items():
            if isinstance(item, State):
                yield own, item

    def all(self) -> Iterator[ModuleNode]:
        """This module and those in it, each before its members."""
        yield self
        for _, item in self.modules():
            yield from item.all()

    def prune(self, kept: Collection[str]) -> None:
        """Takes out the modules that hold nothing, but for those at some paths."""
        for own, item in [*self.modules()]:
            item.prune(kept)
            if item.spec is None and not item.members and item.prefix[:-1] not in kept:
                del self.members[own]

    def means_something_else(self, own: str) -> bool:
        """Whether the class that holds a member has something else of this name."""
        return own in self.methods or own in _OF_MODULE or hasattr(self.cls, own)

    def place_of(self, own: str) -> str:
        """The expression for a member; of torch's own tables where no other reaches it."""
        item = self.members[own]
        if _is_attribute(own) and not self.means_something_else(own):
            return f"{self.place}.{own}"
        if isinstance(item, ModuleNode):
            table = "" if self.is_keyed(own) else "._modules"
        elif item.kind is StateKind.PARAMETER:
            keyed = self.cls is nn.ParameterDict and not self.means_something_else(own)
            table = "" if keyed else "._parameters"
        else:
            table = "._buffers"
        return f"{self.place}{table}[{quote(own)}]"

    def arrange(self, order: Mapping[str, int]) -> None:
        """Puts what it holds in the model's order: modules among modules, parameters among
        parameters, buffers among buffers, as torch goes through each by itself.

        Args:
            order: of the model's modules and tensors, by their paths; what is none of these stays.
        """
        kinds: dict[StateKind | None, list[str]] = {}
        for own, item in self.members.items():
            if _path(item) in order:
                kinds.setdefault(_kind(item), []).append(own)
            if isinstance(item, ModuleNode):
                item.arrange(order)
        in_turn = {
            kind: iter(sorted(names, key=lambda own: order[_path(self.members[own])]))
            for kind, names in kinds.items()
        }
        names = (
            next(in_turn[_kind(item)]) if _path(item) in order else own
            for own, item in self.members.items()
        )
        self.members = {own: self.members[own] for own in names}

    def find_places(self) -> None:
        """Sets `place` of all modules in this one."""
        for own, item in self.modules():
            item.place = self.place_of(own)
            item.find_places()


def _path(item: ModuleNode | State) -> str:
    """The model's path of a member."""
    if isinstance(item, State):
        return item.name
    return item.prefix[:-1] if item.spec is None else item.spec.path


def _kind(item: ModuleNode | State) -> StateKind | None:
    """The kind of a tensor; None for a module."""
    return item.kind if isinstance(item, State) else None


def nested(
    items: Iterable[tuple[str, ModuleSpec | State]],
    methods: frozenset[str],
    bare: Iterable[str] = (),
) -> ModuleNode:
    """What a stage holds, by the model's names, as nested modules.

    What cannot stand where the model has it (the model itself, where that is a module of torch.nn)
    gets a name of its own.

    Args:
        methods: names of the stage's own methods.
        bare: the paths of modules that hold nothing.
    """
    root = ModuleNode(methods=methods)
    refused = [(path, item) for path, item in items if not _enter(root, path, item)]
    for path in bare:
        _enter(root, path, None)
    names = Identifiers(OF_STAGE | methods | root.members.keys())
    for path, item in refused:
        _enter(root, names.take(path or "module"), item)
    root.find_places()
    return root


def _enter(root: ModuleNode, path: str, item: ModuleSpec | State | None) -> bool:
    """Puts an item in its place, None for a module as such; False where it cannot stand there."""
    *parents, last = path.split(".")
    if not all((*parents, last)):
        return False
    holder = root
    for own in parents:
        member = holder.members.setdefault(own, ModuleNode(f"{holder.prefix}{own}."))
        if not isinstance(member, ModuleNode):
            return False
        holder = member
    if isinstance(item, State):
        return holder.members.setdefault(last, item) is item
    member = holder.members.setdefault(last, ModuleNode(f"{holder.prefix}{last}."))
    if not isinstance(member, ModuleNode) or member.spec is not None:
        return False
    member.spec = item
    return True


def _is_attribute(own: str) -> bool:
    """Whether a name can be written after a dot, in a class too, where Python changes `__x`."""
    private = own.startswith("__") and not own.endswith("__")
    readable = own.isidentifier() and not keyword.iskeyword(own) and not private
    return readable and unicodedata.normalize("NFKC", own) == own
