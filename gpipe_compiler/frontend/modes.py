"""One graph out of the traces of train and eval mode.

The two lists of ops are aligned. Where aligned ops differ in an argument, it becomes a `ByMode`;
an op of one trace alone runs in that mode alone. Any alignment that keeps the order gives a right
graph, a better one a shorter graph.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from gpipe_compiler.errors import Notice
from gpipe_compiler.frontend.alignment import aligned, key_of, passed
from gpipe_compiler.frontend.naming import UniqueNames
from gpipe_compiler.frontend.state import same_constant
from gpipe_compiler.ir import (
    Argument,
    ByMode,
    Call,
    FunctionCall,
    Graph,
    Mode,
    Op,
    Ref,
    Result,
    State,
    StateRef,
)
from gpipe_compiler.ir.arguments import map_argument, value_names
from gpipe_compiler.ir.left_out import may_leave_out
from gpipe_compiler.ir.legality import check
from gpipe_compiler.ir.ops import map_result, with_arguments
from gpipe_compiler.ir.sizes import in_order
from gpipe_compiler.runtime.spec import Unreturned
from gpipe_compiler.runtime.wording import listed


def merge(train: Graph, evaluation: Graph) -> Graph:
    """The graph that does what `train` does in train mode and `evaluation` in eval mode.

    Functional dropout, drop-path and the like follow the mode; what is on in both modes stays as
    it is. When both graphs are the same, that is the train graph itself.
    """
    merging = _Merging(train, evaluation)
    ops = tuple(merging.ops())
    outputs = merging.outputs(train.outputs, evaluation.outputs)
    loss = train.loss
    if loss is not None and evaluation.loss is not None:
        value = merging.one_value(Ref(loss.value), Ref(evaluation.loss.value), "loss")
        loss = dataclasses.replace(loss, value=value.name)
    unlike = {**evaluation.unlike, **train.unlike}
    requires = tuple(dict.fromkeys((*train.requires, *evaluation.requires)))
    rules = in_order((*train.sample_rules, *evaluation.sample_rules))
    if not merging.different:
        same = (unlike, requires, rules) == (train.unlike, train.requires, train.sample_rules)
        if same:
            return train
        return train.replace(unlike=unlike, requires=requires, sample_rules=rules)
    merged = train.replace(
        ops=(*ops, *merging.selections),
        outputs=outputs,
        loss=loss,
        modules={**evaluation.modules, **train.modules},
        state={**train.state, **merging.new_state},
        tensors={**train.tensors, **merging.new_tensors},
        unlike=unlike,
        requires=requires,
        sample_rules=rules,
        left_out=merging.left_out,
    )
    return check(merged, after="merging train and eval mode")


class _Merging:
    """The state of one merge."""

    def __init__(self, train: Graph, evaluation: Graph) -> None:
        self._train, self._evaluation = train, evaluation
        self.different = False
        self.left_out = ""
        self.selections: list[Op] = []
        self.new_state: dict[str, State] = {}
        self.new_tensors: dict[str, torch.Tensor] = {}
        self._names = UniqueNames()
        self._used = {*(source.name for source in train.inputs), *_all_names(train)}
        for name in self._used:
            self._names.unique(name)
        self._values = {
            theirs.name: ours.name
            for theirs, ours in zip(evaluation.inputs, train.inputs, strict=True)
        }
        self._constants = dict(self._match_constants())

    def ops(self) -> Iterator[Op]:
        """The merged ops, in an order that is right for both modes."""
        ours, theirs = self._train.ops, self._evaluation.ops
        i = j = 0
        for block in aligned(ours, theirs):
            yield from self._unaligned(ours[i : block.a], theirs[j : block.b])
            i, j = block.a + block.size, block.b + block.size
            for one, other in zip(ours[block.a : i], theirs[block.b : j], strict=True):
                yield from self._both(one, other)

    def _unaligned(self, ours: Sequence[Op], theirs: Sequence[Op]) -> Iterator[Op]:
        """Ops of other lines in each mode; one for two that do the same of the same."""
        places: dict[Hashable, list[int]] = {}
        for number, op in enumerate(ours if theirs else ()):
            places.setdefault(key_of(op, line=False), []).append(number)
        start, evaluation = 0, list[Op]()
        for other in theirs:
            call, same = with_arguments(other.call, self._ours), key_of(other, line=False)
            later = (place for place in places.get(same, ()) if place >= start)
            alike = (n for n in later if self._merged_call(ours[n].call, call) is ours[n].call)
            for place in alike:
                yield from (self._one_sided(op, Mode.TRAIN) for op in ours[start:place])
                yield from evaluation
                yield from self._both(ours[place], other)
                start, evaluation = place + 1, []
                break
            else:
                evaluation.append(self._one_sided(other, Mode.EVAL))
        yield from (self._one_sided(op, Mode.TRAIN) for op in ours[start:])
        yield from evaluation

    def _one_sided(self, op: Op, mode: Mode) -> Op:
        self.different = True
        if mode is Mode.TRAIN:
            return self._in_both(op) or dataclasses.replace(op, mode=mode)
        result = self._renamed(op.result)
        name = result if isinstance(result, str) else self._free(op.name)
        call = with_arguments(op.call, self._ours)
        return dataclasses.replace(op, name=name, call=call, result=result, mode=mode)

    def _in_both(self, op: Op) -> Op | None:
        """What may leave a layer out in training alone, as an op that in eval mode never does.

        So readers of what the layer makes read one value in both modes. None for any other op.
        """
        if not may_leave_out(op.call):
            return None
        left_out, *read = op.call.args
        known = {*self._values.values()}
        if not all(isinstance(value, Ref) and value.name in known for value in read):
            return None
        made, _ = value_names(read)
        for theirs, ours in self._values.items():
            if ours == made:
                self._values[theirs] = op.outputs[0]
        call = dataclasses.replace(op.call, args=(ByMode(left_out, False), *read))
        return dataclasses.replace(op, call=call)

    def _free(self, name: str) -> str:
        """A name for something of eval mode alone."""
        if name in self._used:
            name = f"{name}_eval"
        name = self._names.unique(name)
        self._used.add(name)
        return name

    def _renamed(self, result: Result) -> Result:
        def free(old: str) -> str:
            self._values[old] = self._free(old)
            return self._values[old]

        return map_result(free, result)

    def _both(self, one: Op, other: Op) -> Iterator[Op]:
        """Aligned ops as one, or as two where their arguments cannot be told apart by mode."""
        call = self._merged_call(one.call, with_arguments(other.call, self._ours))
        if call is None:
            yield self._one_sided(one, Mode.TRAIN)
            yield self._one_sided(other, Mode.EVAL)
            return
        result = self._merged_result(one.result, other.result)
        if call is one.call and result == one.result:
            yield one
            return
        self.different = True
        yield dataclasses.replace(one, call=call, result=result)

    def _merged_result(self, ours: Result, theirs: Result) -> Result:
        if isinstance(ours, tuple) and isinstance(theirs, tuple):
            return tuple(self._merged_result(a, b) for a, b in zip(ours, theirs, strict=True))
        if isinstance(theirs, str):
            if isinstance(ours, str):
                self._values[theirs] = ours
                return ours
            return self._renamed(theirs)
        return ours

    def _merged_call(self, ours: Call, theirs: Call) -> Call | None:
        args = tuple(combine(a, b) for a, b in zip(ours.args, theirs.args, strict=True))
        kwargs: dict[str, Argument] = {}
        for key in dict.fromkeys((*ours.kwargs, *theirs.kwargs)):
            sides = [passed(call, key) for call in (ours, theirs)]
            if inspect.Parameter.empty in sides:
                return None
            kwargs[key] = combine(*sides)
        if _identical(args, ours.args) and _identical(kwargs, dict(ours.kwargs)):
            return ours
        return dataclasses.replace(ours, args=args, kwargs=kwargs)

    def _ours(self, argument: Argument) -> Argument:
        """An argument of the eval graph in the names of the merged one."""

        def new(leaf: Any) -> Argument:
            if isinstance(leaf, Ref):
                return Ref(self._values[leaf.name])
            if isinstance(leaf, StateRef):
                return StateRef(self._constants.get(leaf.name, leaf.name))
            return leaf

        return map_argument(new, argument)

    def _match_constants(self) -> Iterator[tuple[str, str]]:
        """Constants of the eval graph that have another name in the merged one."""
        state, tensors = self._train.state, self._train.tensors
        for name, theirs in self._evaluation.state.items():
            merged = name
            if name in state and not same_constant(tensors[name], self._evaluation.tensors[name]):
                number = 1
                while (merged := f"{name}_{number}") in state or merged in self._evaluation.state:
                    number += 1
            if merged not in state:
                self.new_state[merged] = dataclasses.replace(theirs, name=merged)
                self.new_tensors[merged] = self._evaluation.tensors[name]
            if merged != name:
                yield name, merged

    def outputs(self, train: Argument, evaluation: Argument) -> Argument:
        """What the merged graph returns: a value for every tensor that eval mode returns."""
        ours, theirs = _with_objects(train, self._ours(evaluation))
        if _structure(ours) == _structure(theirs):
            both = combine(ours, theirs, self._one_output)
            self.different = self.different or repr(both) != repr(train)
            return both
        self.different = True
        self.left_out = self._left_out(ours, theirs)
        problem = (
            f"the model does not return in eval mode what it returns in training, "
            f"{self.left_out}: the loss is computed of that, but step_with_outputs refuses to "
            "return it"
        )
        warnings.warn(Notice(problem), stacklevel=2)
        return theirs

    def _left_out(self, train: Argument, evaluation: Argument) -> str:
        """What is returned in train mode alone (auxiliary heads), with its line."""
        kept = {*value_names(evaluation)}
        names = [name for name in dict.fromkeys(value_names(train)) if name not in kept]
        lines = (op.source for op in self._train.ops if not {*names}.isdisjoint(op.outputs))
        where = next((f", {line.brief}" for line in lines if line is not None), "")
        more = [name for name in value_names(evaluation) if name not in {*value_names(train)}]
        told = (names and listed(names)) or (f"which is without {listed(more)}" if more else "")
        return f"{told or 'another structure'}{where}"

    def _one_output(self, ours: Argument, theirs: Argument) -> Argument:
        """What is returned in both modes in the place of what each returns."""
        if isinstance(ours, Ref) and isinstance(theirs, Ref):
            return self.one_value(ours, theirs, "output", renamed=True)
        return ours

    def one_value(self, ours: Ref, theirs: Ref, wish: str, *, renamed: bool = False) -> Ref:
        """One name for a value of train mode and one of eval mode."""
        other = theirs if renamed else self._ours(theirs)
        if other == ours:
            return ours
        self.different = True
        name = self._names.unique(wish)
        self.selections.append(Op(name, FunctionCall(operator.pos, (ByMode(ours, other),)), name))
        return Ref(name)


def _with_objects(train: Argument, evaluation: Argument) -> tuple[Argument, Argument]:
    """What both modes return, with objects in both places that one mode alone returns."""
    match train, evaluation:
        case (Unreturned(), None) | (None, Unreturned()):
            known = evaluation if train is None else train
            mark = dataclasses.replace(known, training=train is not None)
            return mark, mark
        case dict(), dict():
            pairs = {
                key: _with_objects(train.get(key), evaluation.get(key))
                for key in dict.fromkeys((*train, *evaluation))
            }
            for key in train.keys() ^ evaluation.keys():
                if isinstance(mark := pairs[key][0], Unreturned):
                    pairs[key] = (dataclasses.replace(mark, keyed=False),) * 2
            ours, theirs = (
                {
                    key: pair[side]
                    for key, pair in pairs.items()
                    if key in own or isinstance(pair[side], Unreturned)
                }
                for side, own in enumerate((train, evaluation))
            )
            return ours, theirs
        case (tuple() | list(), tuple() | list()) if len(train) == len(evaluation):
            items = [_with_objects(a, b) for a, b in zip(train, evaluation, strict=True)]
            return type(train)(a for a, _ in items), type(evaluation)(b for _, b in items)
    return train, evaluation


def _choice(train: Argument, evaluation: Argument) -> Argument:
    return train if _identical(train, evaluation) else ByMode(train, evaluation)


def combine(
    train: Argument,
    evaluation: Argument,
    join: Callable[[Argument, Argument], Argument] = _choice,
) -> Argument:
    """An argument for both modes, by default a `ByMode` at every leaf that differs.

    Args:
        join: makes one of two leaves, or of containers that are no pair.
    """
    if type(train) is type(evaluation):
        if isinstance(train, tuple | list) and len(train) == len(evaluation):
            items = [combine(a, b, join) for a, b in zip(train, evaluation, strict=True)]
            return items if isinstance(train, list) else tuple(items)
        if isinstance(train, dict) and train.keys() == evaluation.keys():
            return {key: combine(item, evaluation[key], join) for key, item in train.items()}
        if isinstance(train, slice):
            parts = [(getattr(train, a), getattr(evaluation, a)) for a in ("start", "stop", "step")]
            return slice(*(combine(a, b, join) for a, b in parts))
    return join(train, evaluation)


def _identical(one: Argument, other: Argument) -> bool:
    """Equality in which True is not 1 and 1 is not 1.0."""
    return repr(one) == repr(other)


def _all_names(graph: Graph) -> Iterator[str]:
    """Every name an op or value has."""
    for op in graph.ops:
        yield from {op.name, *op.outputs}


def _structure(outputs: Argument) -> str:
    """The outputs with every value alike, as text."""

    def blank(leaf: Any) -> Any:
        return Ref("_") if isinstance(leaf, Ref) else leaf

    return repr(map_argument(blank, outputs))
