"""What went wrong in a trace, in the words of the user's program."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from gpipe_compiler.errors import SourceLocation, TraceError, at_code
from gpipe_compiler.frontend.comparable_runs import with_other_weights
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.locate import line_of
from gpipe_compiler.frontend.state import named_state
from gpipe_compiler.frontend.user_code import definition
from gpipe_compiler.runtime.wording import text_of


@dataclass(frozen=True)
class _Cause:
    """A known reason for a trace to fail: how its message reads, what it is, what helps."""

    pattern: str
    problem: str
    hint: str

    def at(self, where: SourceLocation | None) -> TraceError:
        """The error for a line of the user's."""
        return TraceError(f"{self.problem}{at_code(where)}", location=where, hint=self.hint)


SPARSE = _Cause(
    r"(?m:^aten\.\w*sparse\w*\.\w+$)",
    "the model computes with a sparse tensor, which no package carries",
    "keep it dense; or keep its indices and values, and add up by index_add what they select",
)

TRANSFORMED = _Cause(
    r"torch\.func\b|torch\.vmap|functorch",
    "the model applies a transform of torch.func, such as torch.vmap, and what is computed inside "
    "cannot be told apart from it, to be cut or to run elsewhere",
    "compute on the whole batch at once: torch's ops take batches; write derivatives with torch's "
    "operators",
)
OWN_GENERATOR = _Cause(
    r"\bgenerator\s*=",
    "the model draws from a torch.Generator of its own",
    "draw without generator=: a package draws from the seed of its pipeline",
)
PACKED = _Cause(
    r"pack(ed|_padded)_sequence|PackedSequence",
    "the model packs sequences, which no graph holds but between recurrent layers of torch",
    "pack by pack_padded_sequence with a tensor of lengths, call nn.LSTM, nn.GRU or nn.RNN, and "
    "pad by pad_packed_sequence(..., total_length=x.shape[1]); or pass padded sequences, and mask "
    "what lies behind their ends: how many rows a packed sequence has depends on the lengths",
)

_OF_LINES = (
    TRANSFORMED,
    PACKED,
    _Cause(
        r"nested_tensor|torch\.jagged",
        "the model makes nested tensors",
        "pad to one length, and pass a mask of what is padding: a plan is for known shapes",
    ),
)
"""Told by the line and the first words of an error: torch names all of these in others."""

_CAUSES = (
    _Cause(
        r"DynamicCache|EncoderDecoderCache|StaticCache",
        "the model returns or takes a cache object",
        "build the model with use_cache=False",
    ),
    _Cause(
        r"\.numpy\(\) is not supported|Tensor\.tolist|\.tolist",
        "the model leaves torch: it turns a tensor into a NumPy array or a list",
        "compute it with torch operators",
    ),
    _Cause(
        r"higher order operator doesn't work|no rule registered for HigherOrderOperator",
        "the model calls a higher-order operator of torch's, such as associative_scan, which no "
        "package carries",
        "use a Python loop of a fixed number of steps, or write it in other operators",
    ),
    _Cause(
        r"data_ptr|storage\(\)",
        "the model reads the memory of a tensor while it is traced",
        "compute it with torch operators",
    ),
    _Cause(
        r"(?<!self)\.__class__|fake_tensor\.FakeTensor'>|of type FakeTensor which",
        "the model asks for, or changes, the class of a tensor: while it is traced that is another",
        "ask by isinstance(x, torch.Tensor) or type(x), and compute with plain tensors",
    ),
    _Cause(
        r"aten\._sample_dirichlet",
        "the model draws from a Beta or a Dirichlet distribution, which torch does not do without "
        "numbers",
        "draw from Gamma(concentration, 1), and divide by the sum of these: that is the same "
        "distribution",
    ),
    SPARSE,
    _Cause(
        # Of an operator of torch's own the error has the name alone.
        r"no fake impl|no Meta kernel|(?m:^aten\.\w+\.\w+$)",
        "the model calls an operator of which nothing says what shape it returns",
        "register that for it and for its gradient, by torch.library.register_fake, before the "
        "model is built",
    ),
    _Cause(
        r"_compute_mask_indices",
        "the model masks spans of its input, as SpecAugment does, where NumPy draws it for the "
        "lengths of a batch",
        "build it with mask_time_prob=0.0 and mask_feature_prob=0.0, and mask in the data loader",
    ),
    OWN_GENERATOR,
)


_ONE_BY_ONE = re.compile(r"\bfor\b|\brange\(|\bunbind\(|\b(?:list|tuple|zip|enumerate)\(")
"""How a line reads that takes the samples of a batch one after the other."""


def explained(error: Exception) -> TraceError:
    """The error that says which construct cannot be traced, and where."""
    where = line_of(error)
    text = text_of(error)
    called = " ".join(frame.name for frame in traceback.extract_tb(error.__traceback__))
    code = where.code if where else ""
    first = text.strip().partition("\n")[0] or "no message"
    for cause in (*_CAUSES, *_OF_LINES):
        read = (code, first) if cause in _OF_LINES else (code, text, called)
        if re.search(cause.pattern, "\n".join(read)):
            return cause.at(where)
    if isinstance(error, GuardOnDataDependentSymNode):
        for pattern, refusal in _OF_SELECTIONS:
            if where is not None and pattern.search(where.code):
                return refusal(where)
        return by_values(where)
    return TraceError(
        f"the model cannot be run without numbers{at_code(where)}: {type(error).__name__}: {first}",
        location=where,
    )


def _by_count(where: SourceLocation) -> TraceError:
    """The refusal of a line that asks whether a selection has found anything."""
    return TraceError(
        f"the model {DECIDES_BY_VALUES} at `{where.code}`: how many elements are selected",
        location=where,
        hint="leave that question out where nothing is wrong without it: operators such as linear "
        "layers and index_add take parts without elements, and add nothing; or use torch.where",
    )


def by_found(where: SourceLocation) -> TraceError:
    """The refusal of a loop over what a selection has found, such as experts that have tokens."""
    return TraceError(
        f"the model {DECIDES_BY_VALUES} at `{where.code}`: how many rounds the loop has",
        location=where,
        hint="loop over all of them, `for number in range(self.num_experts)`: one for which "
        "torch.where(mask[number]) finds nothing adds nothing; its weights then have gradients of "
        "zeros, where they had none",
    )


_OF_SELECTIONS: Sequence[tuple[re.Pattern[str], Callable[[SourceLocation], TraceError]]] = (
    (re.compile(r"\bif\b.*(?:numel\(\)|\.shape\[0\]|\.size\(0\)|len\(|nelement\(\))"), _by_count),
    (re.compile(r"^for\b.*\bin\b.*:\s*(?:#.*)?$"), by_found),
)
"""How lines read that ask how many elements there are, and that go over them."""


DECIDES_BY_VALUES = "decides by the values of a tensor"
"""In what is said of a branch on the data."""


BOTH_WAYS = "it goes one way for the example and another for other batches"


def by_values(where: SourceLocation | None, more: str = "only shapes are followed") -> TraceError:
    """The refusal of a line that decides by the values of a tensor."""
    code = where.code if where else ""
    ways = (way for pattern, way in _WAYS_WITHOUT_VALUES if pattern.search(code))
    return TraceError(
        f"the model {DECIDES_BY_VALUES}{at_code(where)}: {more}",
        location=where,
        hint=next(ways, _NO_VALUES),
    )


_NO_VALUES = (
    "use torch.where instead of a branch on the data, and a fixed number instead of .item()"
)

_WAYS_WITHOUT_VALUES: Sequence[tuple[re.Pattern[str], str]] = (
    (
        re.compile(r"\bif\b.*\.any\(\)"),
        "leave that question out where nothing is wrong without it: out[mask] = f(x[mask]) takes a "
        "mask that selects nothing, and writes nothing then; or use torch.where",
    ),
    (
        re.compile(r"^(?!.*\bif\b).*\b(?:int|float)\("),
        "leave out int() and float(), which make a constant of it: keep the tensor, as in "
        "count.clamp(min=1), or compute with the number of .item(), as in max(count.item(), 1)",
    ),
)
"""How lines read that ask for values, each with what to write there."""


def refuse_fixed_batch(
    entry: Entry,
    placeholders: Sequence[fx.Node],
    line_of_size: Callable[[Any], SourceLocation | None],
) -> None:
    """Checks that the batch is free to vary in the traced graph.

    Args:
        line_of_size: the user's line that fixed a size, as far as it was noted.

    Raises:
        TraceError: when the model works for the traced batch size only; with the line that needs
            it, where that is known.
    """
    for node, source in zip(placeholders, entry.signature.inputs, strict=True):
        value = node.meta.get("val")
        if source.batch_dim is None or not isinstance(value, torch.Tensor):
            continue
        size: Any = value.shape[source.batch_dim]
        if isinstance(size, torch.SymInt) and size.node.expr.free_symbols:
            continue
        where = line_of_size(size)
        root, *way = source.path
        passed = "".join((str(root), *(f"[{key!r}]" for key in way)))
        one_by_one = where is not None and _ONE_BY_ONE.search(where.code)
        raise TraceError(
            f"the model works for a batch of {int(size)} only{at_code(where)}: dimension "
            f"{source.batch_dim} of {passed} cannot vary",
            location=where,
            hint="compute on all samples at once, as torch's ops do, and number them by "
            "torch.arange(len(x)): a trace has as many rounds of a loop as the example has samples"
            if one_by_one
            else "take the batch size from the input (x.shape[0]) and compute with it as it is: "
            "range(), math.sqrt(), torch.tensor() and numpy make a constant of it; compare it with "
            "nothing, and leave -1 for it in view and reshape",
        )


# --- what no trace can hold -----------------------------------------------------------------------


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


def own_gradients(where: SourceLocation | None) -> TraceError:
    """Of a model whose forward takes gradients."""
    return TraceError(
        f"forward differentiates by itself{at_code(where)}: a cut could lie in what it "
        "differentiates",
        location=where,
        hint="write the derivative with torch's operators; or as a torch.autograd.Function of "
        "your own, which a stage holds whole",
    )
