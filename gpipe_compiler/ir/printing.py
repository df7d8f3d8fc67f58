"""How ops print: a line each, as close to Python as names allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpipe_compiler.ir.arguments import Argument, ByMode, Ref, StateRef
from gpipe_compiler.ir.ops import (
    Call,
    FunctionCall,
    MethodCall,
    Mode,
    ModuleCall,
    Op,
    Result,
)


def format_argument(argument: Argument) -> str:
    """An argument as one would type it; state names stand in angle brackets."""
    match argument:
        case Ref(name=name):
            return str(name)
        case StateRef(name=name):
            return f"<{name}>"
        case ByMode(train=True, evaluation=False):
            return "training"
        case ByMode(train=train, evaluation=evaluation):
            return f"{format_argument(train)} if training else {format_argument(evaluation)}"
        case tuple():
            items = ", ".join(map(format_argument, argument))
            return f"({items},)" if len(argument) == 1 else f"({items})"
        case list():
            return f"[{', '.join(map(format_argument, argument))}]"
        case dict():
            return (
                "{"
                + ", ".join(f"{key!r}: {format_argument(item)}" for key, item in argument.items())
                + "}"
            )
        case slice(start=start, stop=stop, step=step):
            parts = ", ".join(map(format_argument, (start, stop, step)))
            return f"slice({parts})"
        case _:
            return repr(argument)


def format_arguments(args: tuple[Argument, ...], kwargs: Mapping[str, Argument]) -> str:
    """The inside of a call's parentheses."""
    return ", ".join(
        [*map(format_argument, args), *(f"{key}={format_argument(v)}" for key, v in kwargs.items())]
    )


def function_label(function: Callable[..., object]) -> str:
    """A short name for a function: `torch.relu`, `operator.add`, `aten.relu.default`, `Conv`."""
    label = getattr(function, "label", None)
    if isinstance(label, str):
        return label
    module = getattr(function, "__module__", "") or ""
    name = getattr(function, "__name__", None) or str(function)
    if module.startswith(("torch._ops", "torch._C")) or not module:
        return name if "." in name else str(function)
    return f"{module.removeprefix('_')}.{name}"


def format_call(call: Call) -> str:
    """A call without its result."""
    match call:
        case FunctionCall():
            return f"{function_label(call.function)}({format_arguments(call.args, call.kwargs)})"
        case MethodCall():
            receiver, *rest = call.args
            inside = format_arguments(tuple(rest), call.kwargs)
            return f"{format_argument(receiver)}.{call.method}({inside})"
        case ModuleCall():
            return f"self.{call.module}({format_arguments(call.args, call.kwargs)})"


def format_result(result: Result) -> str:
    """The left-hand side of an assignment."""
    if result is None:
        return "_"
    if isinstance(result, str):
        return result
    items = ", ".join(format_result(item) for item in result)
    return f"({items},)" if len(result) == 1 else f"({items})"


def format_op(op: Op) -> str:
    """An op on one line, without types."""
    guard = "" if op.mode is Mode.ALWAYS else f"[{op.mode.value}] "
    around = "".join(f"[{region.context}] " for region in op.regions)
    return f"{guard}{around}{format_result(op.result)} = {format_call(op.call)}"
