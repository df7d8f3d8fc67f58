"""Loads what is to be compiled: a model file (or module) and what it offers.

A model file offers `build_model()` and `example_inputs()`, and where it is to be trained also
`loss_fn(output, target)` and `example_target()`, or `loss_fn(output)`; and for `run.py train`
`train_data()`, `eval_data()`, `make_optimizer(params)`, `make_scheduler(optimizer)`,
`make_state(pipe, optimizer)`, `metrics(output, target)` and `log(step, metrics)`. The file runs as
an ordinary module; nothing of it is changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import nn

from gpipe_compiler.errors import ModelError, SourceLocation
from gpipe_compiler.frontend.asked_autocast import autocast_as_asked
from gpipe_compiler.frontend.examples import (
    Call,
    check_batch,
    check_call,
    check_tensors,
    normal_form,
    parse_inputs,
    tensors,
)
from gpipe_compiler.frontend.initial import catch_up, on_meta_throughout, recording
from gpipe_compiler.frontend.missing_loss import HOOK, nearly_a_loss
from gpipe_compiler.frontend.subject import Example, Hooks, Subject, takes
from gpipe_compiler.frontend.user_code import (
    ModelSpec,
    definition,
    import_user_code,
    located,
)
from gpipe_compiler.no_gc import uncollected
from gpipe_compiler.options import LossChoice
from gpipe_compiler.runtime.spec import Steps
from gpipe_compiler.runtime.train.hooks import is_log

DEFAULT_FACTORY = "build_model"
_HOOKS = ("train_data", "eval_data", "make_optimizer", "make_scheduler", "make_state", "metrics")
_OFFERS = (DEFAULT_FACTORY, "example_inputs", "example_target", HOOK, *_HOOKS)


@uncollected()
def load(
    model: str,
    *,
    input_specs: Sequence[str] = (),
    training: bool = True,
    loss: LossChoice = LossChoice.MODEL,
) -> Subject:
    """The model that `model` names, built, with one example call.

    Args:
        model: `model.py`, `model.py:factory` or `package.module:factory`, where the current
            directory is importable; `build_model` where no factory is named.
        input_specs: `[NAME=]32x3x224x224:float32` each: random tensors that replace
            `example_inputs()`.
        training: whether the loss and its target are wanted.
        loss: which one; the file's `loss_fn` and target are looked at for `MODEL` alone.

    Raises:
        UsageError: when an argument makes no sense.
        ModelError: when the user's file is at fault, with its line.
    """
    spec = ModelSpec.parse(model)
    given = parse_inputs(input_specs) if input_specs else None
    with autocast_as_asked():
        module = import_user_code(spec)
        built, initial = _build_and_watch(spec, module)
        call = example_call(spec, module) if given is None else given
    check_call(built, call, "example_inputs()" if given is None else "--input")
    return described(spec, module, built, initial, call, training=training, loss=loss)


def described(
    spec: ModelSpec,
    module: ModuleType,
    built: nn.Module,
    initial: Mapping[str, Steps],
    call: Call,
    *,
    training: bool,
    loss: LossChoice,
) -> Subject:
    """A model that is built, with what the user's file offers besides."""
    wants_own = training and loss is LossChoice.MODEL
    loss_fn: Any = offered(module, HOOK) if wants_own else None
    target = _target(module, call) if _compares(loss_fn, module) else None
    subject = Subject(
        name=spec.stem,
        model=built,
        args=call[0],
        kwargs=call[1],
        target=target,
        loss_fn=loss_fn,
        training=training,
        loss=loss,
        nearly_a_loss=nearly_a_loss(module) if wants_own and loss_fn is None else None,
        hooks=Hooks(
            file=spec.file,
            module=spec.module,
            names=_hooks_in(module),
        ),
        initial=initial,
        make_optimizer=offered(module, "make_optimizer") if training else None,
    )
    return _same_device(subject)


def _hooks_in(module: ModuleType) -> frozenset[str]:
    """The names of the functions that a package calls at run time."""
    names = {name for name in _HOOKS if offered(module, name) is not None}
    return frozenset(names | ({"log"} if is_log(getattr(module, "log", None)) else set()))


def offered(module: ModuleType, name: str) -> Callable[..., object] | None:
    """The function of this name in the user's file, None where there is none.

    A module of this name, as after `from sklearn import metrics`, is none.

    Raises:
        ModelError: when the name is there but cannot be called.
    """
    function = getattr(module, name, None)
    if function is None or isinstance(function, ModuleType):
        return None
    if not callable(function):
        raise ModelError(
            f"{name} in {module.__file__} is {type(function).__name__}, not a function",
            hint=f"define it as a function: def {name}(...)",
        )
    return function  # type: ignore[no-any-return]  # what the user's file holds is untyped


def _build_and_watch(spec: ModelSpec, module: ModuleType) -> tuple[nn.Module, dict[str, Steps]]:
    """The model, and where it is on meta how its tensors would have got their numbers."""
    with recording() as seen:
        built = _build(spec, module)
        if not any(tensor.is_meta for tensor in (*built.parameters(), *built.buffers())):
            return built, {}
        catch_up(built)
    return on_meta_throughout(built, seen.steps_of(built))


def _build(spec: ModelSpec, module: ModuleType) -> nn.Module:
    name = spec.factory or DEFAULT_FACTORY
    factory = getattr(module, name, None)
    if factory is None:
        raise _no_factory(spec, module, name)
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise ModelError(
            f"{name} in {spec.where} is {type(factory).__name__}, not a function",
            hint=f"define it as a function that returns the model: def {name}()",
        )
    built = _called(factory, name)
    if not isinstance(built, nn.Module):
        returned = "None" if built is None else f"{type(built).__name__}"
        raise ModelError(
            f"{name}() returns {returned}, not a torch.nn.Module",
            location=definition(factory),
            hint="does it end in `return model`?" if built is None else "return the model itself",
        )
    try:
        return built.apply(hash)  # type: ignore[arg-type]  # what that returns is not looked at
    except RecursionError as error:
        raise ModelError(
            f"modules of {name}() hold themselves, or are too deep in one another for torch",
            location=definition(factory),
            hint="keep a module that is no part of another in a tuple: `self.parent = (parent,)`",
        ) from error
    except TypeError as error:  # of a class with `__hash__ = None`
        raise ModelError(
            f"torch cannot tell the modules of {name}() apart: {error}",
            location=definition(factory),
            hint="a class that defines __eq__ has no hash by itself: write "
            "`__hash__ = torch.nn.Module.__hash__` in it",
        ) from error


def _called(
    function: Callable[..., object], name: str, then: Callable[[Any], object] | None = None
) -> object:
    """What a function of the user's file returns.

    Args:
        then: done to it while errors are still those of the user's code.

    Raises:
        ModelError: when it needs arguments, or raises.
    """
    with contextlib.suppress(TypeError, ValueError):  # not written in Python: the call can tell
        needed = [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if needed:
            raise ModelError(
                f"{name}() needs arguments that have no default: {', '.join(needed)}",
                location=definition(function),
                hint="give them defaults, or name a factory that takes no arguments",
            )
    with located(f"{name}()"):
        made = function()
        return then(made) if then else made


def _no_factory(spec: ModelSpec, module: ModuleType, name: str) -> ModelError:
    found = [
        key
        for key, item in vars(module).items()
        if callable(item)
        and not key.startswith("_")
        and key not in _OFFERS
        and getattr(item, "__module__", None) == module.__name__
    ]
    if not found:
        hint = f"define {name}() in it, a function that returns the model"
    else:
        example = f"{spec.where}:{found[0]}"
        hint = f"it has {', '.join(found)}; choose one that builds the model: {example}"
    location = SourceLocation(str(spec.file), 1) if spec.file else None
    return ModelError(f"there is no {name}() in {spec.where}", location=location, hint=hint)


def example_call(spec: ModelSpec, module: ModuleType) -> Call:
    function = offered(module, "example_inputs")
    if function is None:
        raise ModelError(
            f"there is no example_inputs() in {spec.where}",
            location=SourceLocation(str(spec.file), 1) if spec.file else None,
            hint="define it, or give the shape of a mini-batch: --input 32x3x224x224:float32",
        )
    return normal_form(_called(function, "example_inputs"), definition(function))


def _compares(loss_fn: object, module: ModuleType) -> bool:
    """Whether a loss needs a target, or takes the one that the file offers."""
    if not callable(loss_fn) or not takes(loss_fn, 1):
        return loss_fn is not None
    return takes(loss_fn, 2) and any(
        hasattr(module, name) for name in ("example_target", "train_data")
    )


def _target(module: ModuleType, call: Call) -> object:
    """What `loss_fn` compares the output with: `example_target()`, or the first batch's."""
    function = offered(module, "example_target")
    if function is not None:
        target, location = _called(function, "example_target"), definition(function)
        if target is None:  # a loss of the output alone
            return None
        origin = "example_target()"
    else:
        target, location = _first_target(module)
        origin = "train_data()"
    check_tensors(target, origin, location)
    check_batch(call, target, origin, location)
    return target


def _first_target(module: ModuleType) -> tuple[object, SourceLocation | None]:
    data = offered(module, "train_data")
    if data is None:
        raise ModelError(
            "there is a loss_fn(output, target), but no example_target() to call it with",
            location=definition(module.loss_fn),
            hint="define example_target(), or train_data() that yields (inputs, target) batches; "
            "or loss_fn(output), for a loss of the output alone",
        )
    location = definition(data)

    def first(batches: Any) -> object:
        return next(iter(batches), None)

    batch = _called(data, "train_data", first)
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        what = "no batch" if batch is None else f"a {type(batch).__name__}"
        raise ModelError(
            f"train_data() yields {what}, not pairs (inputs, target)",
            location=location,
            hint="yield (inputs, target), with inputs as in example_inputs()",
        )
    return batch[1], location


def _same_device(subject: Subject) -> Subject:
    """The subject with its example call on meta where the model stands there."""
    example = (subject.args, subject.kwargs, subject.target)
    meta_example = [tensor for tensor in tensors(example) if tensor.is_meta]
    if not any(parameter.is_meta for parameter in subject.model.parameters()):
        if meta_example and next(subject.model.parameters(), None) is not None:
            raise ModelError(
                "the example is on the meta device, but the model is not",
                hint="build the model under `with torch.device('meta')` too, or give real tensors",
            )
        return subject
    if len(meta_example) == len(tensors(example)):
        return subject
    moved = subject.with_example(lambda tensor: tensor.to("meta"))
    return moved if meta_example else dataclasses.replace(moved, example=Example(*example))
