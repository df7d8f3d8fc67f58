"""What no trace can hold: hooks on gradients, transforms of torch.func, a type of the process."""

from __future__ import annotations

import torch
from torch import nn

from gpipe_compiler.errors import SourceLocation, TraceError, at_code
from gpipe_compiler.frontend.comparable_runs import with_other_weights
from gpipe_compiler.frontend.state import named_state
from gpipe_compiler.frontend.user_code import definition


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Refuses hooks on the gradients of parameters: those of the stages are other tensors."""
    for name, parameter in model.named_parameters():
        after = getattr(parameter, "_post_accumulate_grad_hooks", None)
        for hook in (*(parameter._backward_hooks or {}).values(), *(after or {}).values()):
            raise TraceError(
                f"the parameter {name} has a hook on its gradient, which is in no trace",
                location=definition(hook),
                hint="leave it out here, and register it on the parameter of that name in "
                "Pipeline().named_parameters(), in a training loop of your own",
            )


def refuse_default_type() -> None:
    """Refuses a default type other than float32, which the text of a stage does not have.

    Modules and tensors are made of it where the model names none.
    """
    found = torch.get_default_dtype()
    if found is not torch.float32:
        raise TraceError(
            f"the default type is {found} when the model is traced: a package computes with "
            "torch.float32 where the model names no type",
            hint="set it back at the end of build_model(): torch.set_default_dtype(torch.float32); "
            f"and give what forward makes its type: torch.zeros(n, dtype={found})",
        )


def refuse_writing_switches(model: nn.Module, *, training: bool) -> None:
    """Refuses a model that writes to its weights when it is told to evaluate.

    Looked for with other weights: an adapter that `eval()` merges begins with one of zeros.

    Args:
        training: whether it is compiled for both modes.
    """
    switches = (
        own
        for module in model.modules()
        for own in (type(module).train, type(module).eval)
        if own not in (nn.Module.train, nn.Module.eval)
    )
    switch = next(switches, None)
    copied = None if switch is None else with_other_weights(model)
    if copied is None:
        return
    copied = copied.train() if training else copied
    before = {name: tensor.clone() for name, tensor in named_state(copied)}
    for name, tensor in named_state(copied.eval()):
        was = before.get(name, tensor)
        if was.shape == tensor.shape and not bool(((was == tensor) | was.isnan()).all()):
            raise TraceError(
                f"the model writes to {name} when it is switched to eval mode: a package has the "
                "same weights in both modes",
                location=definition(switch),
                hint="compute what eval mode needs in forward, and merge weights by a method of "
                "their own when training is over (merge_weights=False in loralib); for --mode "
                "infer, call eval() in build_model()",
            )


def transformed(where: SourceLocation | None) -> TraceError:
    """Of a model that applies torch.vmap or another transform of torch.func in forward."""
    return TraceError(
        "the model applies a transform of torch.func, such as torch.vmap: what is computed inside "
        "cannot be told apart from the transform, to be cut or to run elsewhere",
        location=where,
        hint="compute on the whole batch at once: torch's ops take batches",
    )


def own_gradients(where: SourceLocation | None) -> TraceError:
    """Of a model whose forward takes gradients."""
    return TraceError(
        f"forward differentiates by itself{at_code(where)}: a cut could lie in what it "
        "differentiates",
        location=where,
        hint="write the derivative with torch's operators; or as a torch.autograd.Function of "
        "your own, which a stage holds whole",
    )
