"""The weights of a package, from safetensors files under the model's own names, or made anew."""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import nn

from ..errors import WeightsError
from ..spec import StageSpec
from .replay import replay, seed_of
from .same_host import memory_of
from .storing import place, place_text

INDEX = "index.json"

_SUMS = "gpipe.checksums"
"""In the metadata of the safetensors files that `save_file` writes: by name, as JSON."""
_DAMAGED = "bring an undamaged copy of the file, or write it anew: compile, or save, once more"
_ALIGNMENT = 64
"""Bytes; what torch's CPU allocator gives."""
_LENGTH = struct.Struct("<Q")
"""What a safetensors file begins with: the bytes of its header."""


@dataclass(frozen=True)
class Weights:
    """A folder of safetensors files.

    Attributes:
        files: for every tensor, the file in `directory` that holds it.
    """

    directory: Path
    files: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: Path) -> Weights:
        """The folder with its index.json.

        Raises:
            WeightsError: when there is no such folder, or the index is broken.
        """
        index = directory / INDEX
        if not index.exists():
            raise WeightsError(f"{index} is missing", hint="compile the model again")
        try:
            content = json.loads(index.read_text(encoding="utf-8"))
            files = content.get("weight_map", content)
            return cls(directory, {str(name): str(file) for name, file in files.items()})
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise WeightsError(f"{index} is no index of weights: {error}") from error

    def load(self, names: Iterable[str], device: torch.device) -> dict[str, torch.Tensor]:
        """These tensors, on a device; names that the folder does not hold are left out.

        Raises:
            WeightsError: when a file is missing or broken.
        """
        by_file: dict[str, list[str]] = {}
        for name in filter(self.files.get, dict.fromkeys(names)):
            by_file.setdefault(self.files[name], []).append(name)
        return {
            name: _aligned(tensor.to(device))
            for file, wanted in by_file.items()
            for name, tensor in load_file(self.directory / file, wanted).items()
        }


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where torch would have put it.

    In a file it lies at any multiple of 8 bytes. Kernels then sum in another order than on memory
    of torch's own, and read more slowly.
    """
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def save_weights(
    tensors: Mapping[str, torch.Tensor], directory: Path, *, shard_bytes: int = 4 << 30
) -> None:
    """Write tensors into a folder, with an index; files hold up to `shard_bytes` each."""
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.detach().contiguous()
        size += tensor.nbytes
    files: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        )
        save_file(shard, directory / file)
        files.update(dict.fromkeys(shard, file))
    text = json.dumps({"weight_map": files}, indent=1) + "\n"
    place_text(directory / INDEX, text)


def save_file(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors into one safetensors file; those that share memory are written each.

    Raises:
        OSError, WeightsError: naming the file, when it cannot be written.
    """
    plain = apart(tensors)
    sums = json.dumps({name: checksum([(name, tensor)]) for name, tensor in plain.items()})
    try:
        place(path, lambda file: write_file(plain, file, {_SUMS: sums}))
    except safetensors.SafetensorError as error:
        raise WeightsError(f"cannot write {path}: {error}") from error


def write_file(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    metadata: Mapping[str, str] | None = None,
    read: Callable[[str], torch.Tensor] | None = None,
) -> None:
    """Write tensors as `apart` gives them into a safetensors file, out of the memory they lie in.

    The library copies each twice, which takes five times as long. As it does, wider types come
    first, so that all are aligned; here the first begins with a cache line, too.

    Args:
        read: gives the numbers of each in turn, where `tensors` have only types and shapes.

    Raises:
        OSError, SafetensorError: when it cannot be written.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
    kinds = {tensor.dtype for tensor in tensors.values()}
    names = {kind: _packed(torch.empty(0, dtype=kind))[0] for kind in kinds}
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered.items():
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + _LENGTH.size) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for name in (name for name, tensor in ordered.items() if tensor.numel()):
            tensor = ordered[name] if read is None else read(name).contiguous()
            if sys.byteorder == "little":
                file.write(memory_of(tensor.reshape(-1).view(torch.uint8)))
            else:
                file.write(_packed(tensor)[1])


def _packed(tensor: torch.Tensor) -> tuple[str, memoryview]:
    """The type and the bytes of a tensor, as the library writes them.

    Raises:
        SafetensorError: for a type that files do not have.
    """
    try:
        data = safetensors.torch.save({"": tensor})
    except (KeyError, ValueError) as error:
        raise safetensors.SafetensorError(f"there is no type for {tensor.dtype}") from error
    start = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    header = json.loads(data[_LENGTH.size : start])
    return str(header[""]["dtype"]), memoryview(data)[start:]


def apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as a file takes them: dense ones on the host, no two in the same memory."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        memory = plain.untyped_storage().data_ptr()
        found[name] = plain.clone() if memory in seen else plain
        seen.add(memory)
    return found


def load_file(path: Path, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file, on the CPU, held against the checksums of `save_file`, if any.

    Args:
        names: of those to read; None for all.

    Raises:
        WeightsError: when it cannot be read, or is damaged.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            sums = json.loads((opened.metadata() or {}).get(_SUMS, "{}"))
            wanted = {**dict.fromkeys(opened.keys()), **sums} if names is None else names
            tensors = {name: opened.get_tensor(name) for name in wanted}
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise WeightsError(f"cannot read {path}: {error}", hint=_DAMAGED) from error
    for name, tensor in tensors.items():
        if name in sums and checksum([(name, tensor)]) != sums[name]:
            raise WeightsError(f"{path} is damaged: {name} is not what was saved", hint=_DAMAGED)
    return tensors


def checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """64 bits of tensors' names, types, shapes and the CRC-32 of their bytes, wherever they lie."""
    told = hashlib.blake2b(digest_size=8)
    for name, tensor in tensors:
        whole = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
        row = whole.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
        crc = zlib.crc32(memory_of(row)) if row.numel() else 0
        told.update(repr((name, str(tensor.dtype), tuple(tensor.shape), crc)).encode())
    return int.from_bytes(told.digest(), "big")


def build_stage(
    spec: StageSpec, weights: Weights | None, device: torch.device, seed: int
) -> nn.Module:
    """A stage's module on its device, with its weights.

    Without weights, a tensor begins on the device as `spec.initial` says. What that leaves out is
    initialised by the rule of its module, and a parameter of no such module is drawn from
    normal(0, 0.02); a vector is ones when its name ends in `weight`, zeros otherwise. What is
    drawn depends on `seed` and on names in the model: the same for any number of stages.

    Raises:
        WeightsError: when weights are given and do not hold a parameter of the stage, or hold one
            of another shape.
    """
    if weights is None:
        return _initialised(spec, device, seed)
    stored = weights.load(spec.state.values(), device)
    with torch.device("meta"):
        module = spec.module()
    own_names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if any(spec.named(own) not in stored for own in own_names):
        # Something is computed by the constructor: let it.
        with torch.random.fork_rng(devices=_generators(device)), torch.device(device):
            module = spec.module()
    new: dict[str, torch.Tensor] = {}  # what two modules of a stage share is one tensor again
    for own, parameter in list(module.named_parameters(remove_duplicate=False)):
        name = spec.named(own)
        if name not in stored:
            raise WeightsError(f"the weights in {weights.directory} do not hold {name}")
        if name not in new:
            new[name] = nn.Parameter(stored[name], requires_grad=parameter.requires_grad)
        _replace(module, own, name, parameter, new[name])
    for own, buffer in list(module.named_buffers(remove_duplicate=False)):
        name = spec.named(own)
        if name in stored:
            _replace(module, own, name, buffer, stored[name])
    return module


def _replace(
    module: nn.Module, own: str, name: str, old: torch.Tensor, tensor: torch.Tensor
) -> None:
    if old.shape != tensor.shape:
        raise WeightsError(
            f"{name} has shape {tuple(tensor.shape)} in the weights, {tuple(old.shape)} in the "
            "stage"
        )
    put(module, own, tensor)


def put(module: nn.Module, own: str, tensor: torch.Tensor) -> None:
    """Let a tensor take the place of the module's parameter or buffer of this name."""
    path, _, attribute = own.rpartition(".")
    holder = submodule(module, path)
    if isinstance(tensor, nn.Parameter):
        setattr(holder, attribute, tensor)  # a recurrent module takes note of it, too
    else:
        holder._buffers[attribute] = tensor


def submodule(module: nn.Module, path: str) -> nn.Module:
    """The module at a path, also where a method of the one around it has the same name."""
    for name in path.split(".") if path else ():
        module = module._modules[name]  # type: ignore[assignment]  # there is one
    return module


def _initialised(spec: StageSpec, device: torch.device, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=_generators(device)):
        module = _unfilled(spec, device, seed)
        seen: set[int] = set()
        for own, tensor in (*module.named_parameters(), *module.named_buffers()):
            name = spec.named(own)
            steps = spec.beginning(name)
            if steps is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                replay(tensor, name, steps, seed)
    first_of: dict[str, nn.Parameter] = {}  # what the stage names twice is one tensor
    for own, parameter in list(module.named_parameters(remove_duplicate=False)):
        name = spec.named(own)
        _replace(module, own, name, parameter, first_of.setdefault(name, parameter))
    return module


def _unfilled(spec: StageSpec, device: torch.device, seed: int) -> nn.Module:
    """The stage on its device; what `spec.initial` leaves out has its first numbers already."""
    with torch.device("meta"):
        module = spec.module()
    parameters = list(module.named_parameters(remove_duplicate=False))
    buffers = list(module.named_buffers(remove_duplicate=False))
    names = [spec.named(own) for own, _ in (*parameters, *buffers)]
    if all(spec.beginning(name) is not None for name in names):
        # Nothing is computed by the constructor: memory is all that is missing.
        new: dict[int, torch.Tensor] = {}
        for own, tensor in (*parameters, *buffers):
            if id(tensor) not in new:
                memory = torch.empty_like(tensor, device=device, requires_grad=False)
                if isinstance(tensor, nn.Parameter):
                    memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
                new[id(tensor)] = memory
            _replace(module, own, own, tensor, new[id(tensor)])
        return module
    with torch.device(device):
        module = spec.module()
    # Children first: a parent such as MultiheadAttention has the last word on their biases.
    for path, holder in reversed(list(module.named_modules())):
        own_names = [
            name
            for name, tensor in (*holder._parameters.items(), *holder._buffers.items())
            if tensor is not None
        ]
        if own_names:
            first = f"{path}.{own_names[0]}" if path else own_names[0]
            torch.manual_seed(seed_of(spec.named(first), seed))
            _reset(holder, path, spec, seed)
    return module


def _reset(holder: nn.Module, path: str, spec: StageSpec, seed: int) -> None:
    for rule in ("reset_parameters", "_reset_parameters"):
        reset = getattr(holder, rule, None)
        if callable(reset):
            reset()
            return
    for own, parameter in holder._parameters.items():
        if parameter is None or not parameter.is_floating_point():
            continue
        name = spec.named(f"{path}.{own}" if path else own)
        torch.manual_seed(seed_of(name, seed))
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)


def _generators(device: torch.device) -> list[int]:
    if device.type != "cuda":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]
