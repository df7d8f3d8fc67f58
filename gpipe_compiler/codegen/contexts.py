"""The contexts of regions, as `with` statements have them."""

from __future__ import annotations

from gpipe_compiler.codegen.expressions import Writer
from gpipe_compiler.codegen.layout import Expression, call, name
from gpipe_compiler.ir import Autocast
from gpipe_compiler.ir.ops import Context


def context_of(context: Context, writer: Writer) -> Expression:
    """`torch.no_grad()` and the like; autocast on the device of the method's first tensor."""
    writer.imports.torch()
    if not isinstance(context, Autocast):
        return name("torch.enable_grad()" if context.enabled else "torch.no_grad()")
    device = context.device_type
    followed = device in ("cpu", "meta") and bool(writer.anchor)
    options = [name(f"{writer.anchor}.device.type" if followed else f'"{device}"')]
    if context.dtype is not None:
        options.append(name(f"dtype={context.dtype}"))
    if not context.enabled:
        options.append(name("enabled=False"))
    return call("torch.autocast", options)
