"""What this compiler uses of torch that torch does not promise to keep, looked for at the start."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import types
from collections.abc import Mapping

from gpipe_compiler.errors import GPipeCompilerError

USED: Mapping[str, tuple[str, ...]] = {
    "torch": (
        "_higher_order_ops",
        *("_VF", "_assert_async", "_check", "_foreach_copy_", "_foreach_norm", "_lazy_clone"),
        "_safe_softmax",
    ),
    "torch._C._profiler": ("_ExperimentalConfig",),
    "torch.Tensor": ("_make_subclass", "_use_count"),
    "torch.UntypedStorage": ("_cdata",),
    "torch._C": (
        "DisableTorchFunction",
        "DispatchKey",
        "DispatchKeySet",
        "_ExcludeDispatchKeyGuard",
        "_dispatch_get_all_op_names",
        "_dispatch_has_kernel_for_dispatch_key",
        "_DisableAutocast",
        "_DisableTorchDispatch",
        "_current_autograd_node",
        "_current_graph_task_id",
        "_get_dispatch_mode",
        "_functorch",
        "_is_torch_function_mode_enabled",
        "_jit_resolve_packet",
        "_set_grad_enabled",
        "_jit_get_schemas_for_operator",
        "_nn",
        "_set_throw_on_mutable_data_ptr",
        "_storage_Use_Count",
    ),
    "torch._C._TorchDispatchModeKey": ("FAKE",),
    "torch._C._autograd": ("CreationMeta", "_get_creation_meta", "_get_sequence_nr"),
    "torch._dispatch.python": ("enable_python_dispatcher",),
    "torch._functorch.apis": ("vmap_impl",),
    "torch._guards": ("Source",),
    "torch._higher_order_ops": ("cond", "map", "scan", "while_loop"),
    "torch._library.custom_ops": ("CustomOpDef", "OPDEFS"),
    "torch._ops": ("HigherOrderOperator", "OpOverload", "OpOverloadPacket"),
    "torch._prims_common": ("is_non_overlapping_and_dense_or_false",),
    "torch._subclasses": ("FakeTensor",),
    "torch._subclasses.fake_tensor": (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "FakeTensor",
        "FakeTensorMode",
        "in_kernel_invocation_manager",
        "unset_fake_temporarily",
    ),
    "torch._subclasses.meta_utils": ("MetaConverter",),
    "torch.ops.aten": (
        *("_ctc_loss", "_cudnn_rnn", "_embedding_bag_backward", "_to_copy", "_unsafe_view"),
    ),
    "torch.autograd.forward_ad": ("_current_level",),
    "torch.autograd.function": ("_SingleLevelFunction",),
    "torch.fx.experimental": ("_config",),
    "torch.fx.experimental.sym_node.SymNode": ("_ceil", "_floor"),
    "torch.overrides": ("_get_current_function_mode_stack", "_pop_mode_temporarily"),
    "torch.fx.experimental.symbolic_shapes.ShapeEnv": (
        *("_log_guard", "_set_replacement", "evaluate_expr"),
    ),
    "torch.library.Library": ("_destroy",),
    "torch.nn.modules.module": ("BackwardHook", "_IncompatibleKeys"),
    "torch.nn.modules.batchnorm": ("_BatchNorm",),
    "torch.nn.modules.dropout": ("_DropoutNd",),
    "torch.nn.modules.transformer": ("_detect_is_causal_mask",),
    "torch.utils": ("_device",),
    "torch.utils.checkpoint": ("CheckpointFunction",),
    "torch.utils._python_dispatch": ("TorchDispatchMode", "_disable_current_modes"),
    "torch.utils._pytree": (
        "TreeSpec",
        "tree_flatten",
        "tree_leaves",
        "tree_map",
        "tree_map_only",
        "tree_unflatten",
    ),
    "torch.utils._sympy.functions": (
        *("CleanDiv", "FloatTrueDiv", "FloorDiv", "IntTrueDiv", "Max", "Min", "Mod", "PythonMod"),
        *("CeilToInt", "FloorToInt", "ToFloat", "TruncToInt"),
    ),
    "torch.utils._sympy.value_ranges": ("ValueRanges", "bound_sympy"),
}
"""Names by what holds them."""


def check_torch(used: Mapping[str, tuple[str, ...]] = USED) -> None:
    """Holds the torch that is installed to this.

    Raises:
        GPipeCompilerError: with its version and what it lacks.
    """
    missing = [
        f"{home}.{name}" for home, names in used.items() for name in names if not _has(home, name)
    ]
    if missing:
        raise GPipeCompilerError(
            f"torch {importlib.metadata.version('torch')} has no {', '.join(missing)}, which this "
            "compiler uses",
            hint="install a version that it is tested with; its README names them",
        )


def _has(home: str, name: str) -> bool:
    found: object = importlib.import_module("torch")
    for part in [*home.split(".")[1:], name]:
        if not hasattr(found, part) and isinstance(found, types.ModuleType):
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{found.__name__}.{part}")
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True
