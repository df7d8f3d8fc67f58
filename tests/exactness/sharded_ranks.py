"""What a rank measures of the memory that it keeps: divided among replicas, and not."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from pathlib import Path

import sharded_model
import torch
from torch.distributed.tensor import DTensor


def bytes_of(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage().nbytes()


def kept(package, sharding):
    """Bytes of trained weights, and of what Adam remembers of them, after a step; by name."""
    largest = []
    with package.Pipeline(data_parallel=2, sharding=sharding) as pipe, watched(largest):
        trained = {n: p for n, p in pipe.named_parameters() if p.requires_grad}
        optimizer = sharded_model.make_optimizer(pipe.parameters())
        pipe.step(*pipe.shard(*sharded_model.batch(1)))
        optimizer.step()
        held = sum(p.untyped_storage().nbytes() for m in pipe.stages.values() for p in _plain(m))
        return {
            "shapes": {name: list(p.shape) for name, p in trained.items()},
            "weights": {name: bytes_of(p) for name, p in trained.items()},
            "gradients": {name: bytes_of(p.grad) for name, p in trained.items()},
            "remembered": {
                name: sum(bytes_of(optimizer.state[p][slot]) for slot in ("exp_avg", "exp_avg_sq"))
                for name, p in trained.items()
            },
            "whole": held,
            "largest": max(largest, default=0),
        }


@contextlib.contextmanager
def watched(largest):
    """Notes the bytes of whole weights of blocks, and of their gradients, at every gathering."""
    shards = sys.modules["sharded.runtime.core.shards"]
    gather, groups = shards.Group.gather, set()

    def noted(group):
        gather(group)
        groups.update([group] if group.is_block else [])
        wholes = [shard.whole for known in groups for shard in known.shards]
        gradients = [whole.grad.nbytes for whole in wholes if whole.grad is not None]
        largest.append(sum(w.untyped_storage().nbytes() for w in wholes) + sum(gradients))

    shards.Group.gather = noted
    try:
        yield
    finally:
        shards.Group.gather = gather


def _plain(module):
    return (p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor))


def main(folder, output):
    spec = importlib.util.spec_from_file_location(
        "sharded", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["sharded"] = package
    spec.loader.exec_module(package)
    torch.distributed.init_process_group("gloo")
    found = {kind: kept(package, kind) for kind in ("none", *sys.argv[3:])}
    rank = torch.distributed.get_rank()
    Path(f"{output}.{rank}").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
