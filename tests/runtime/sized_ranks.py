"""What every rank of the tests of free sizes runs; each leaves its findings in a file."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from sized_pipelines import MOST_TOKENS, Plain, sized_batch, sized_spec, split_in

from gpipe_compiler.runtime.core.distributed import Network
from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.errors import PipelineError

RATE = 0.1
CALLS = (
    sized_batch(3, 8, 4, seed=1),
    sized_batch(4, 600, 2, seed=2),  # longer than what goes over a socket at once
    tuple(map(list, zip(*(sized_batch(2, t, 4, seed=t) for t in (3, 90, 41)), strict=True))),
    sized_batch(2, 1, 6, seed=3),
)


def trained():
    """Steps of changing sizes and evaluation after each, against the plain model; a refusal."""
    pairs, refused = {}, ""
    with Pipeline(sized_spec(), None, schedule="1f1b") as pipe:
        plain = Plain(pipe.spec, state) if (state := pipe.gather_state_dict()) else None
        optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
        for step, (inputs, target) in enumerate(CALLS):
            mine = (inputs, target) if pipe.rank == 0 else (None, None)
            if step == 2:
                try:
                    pipe.step(*(sized_batch(2, MOST_TOKENS + 1, 2) if pipe.rank == 0 else mine))
                except PipelineError as error:
                    refused = str(error)
            optimizer.zero_grad()
            loss, outputs = pipe.train().step_with_outputs(*mine)
            optimizer.step()
            evaluated = pipe.eval().evaluate(*mine)
            if plain is None:
                continue
            listed = isinstance(inputs, list)
            parts = list(zip(inputs, target)) if listed else split_in(2, inputs, target)  # noqa: B905
            expected, _, logits = plain.step(parts, step=step)
            found = [one["logits"] for one in (outputs if listed else [outputs])]
            pairs[f"loss {step}"] = loss, expected
            for number, pair in enumerate(
                zip(found, logits if listed else [torch.cat(logits)], strict=True)
            ):
                pairs[f"logits {step} {number}"] = pair
            plain.descend(RATE)
            pairs[f"evaluated {step}"] = evaluated, plain.step(parts, training=False)[0]
        state = pipe.gather_state_dict()
        if plain is not None:
            pairs |= {name: (state[name], p.detach()) for name, p in plain.named.items()}
    return {"pairs": pairs, "refused": refused}


def counted():
    """The messages of a step at the sizes of the step before, at others, and of a list."""
    sent = Network.send
    count = 0

    def counting(*args):
        nonlocal count
        count += 1
        return sent(*args)

    Network.send = counting
    found = []
    with Pipeline(sized_spec(placement=(0, 0, 1)), None) as pipe:
        listed = tuple(map(list, zip(sized_batch(2, 3, 4), sized_batch(2, 5, 2), strict=True)))
        for call in (sized_batch(4, 8, 4), sized_batch(4, 8, 4), sized_batch(4, 9, 2), listed):
            count = 0
            pipe.step(*(call if pipe.rank == 0 else ()))
            found.append(count)
    return {"messages": found[1:]}


def replicas():
    """Two replicas with batches of their own, then with shares of one list."""
    own = [sized_batch(4, 8, 4, seed=1), sized_batch(2, 50, 2, seed=2)]
    lists = [sized_batch(2, tokens, 4, seed=tokens) for tokens in (3, 9, 14, 2, 5)]
    pairs = {}
    with Pipeline(sized_spec(placement=(0, 0, 0), microbatches=2), None, data_parallel=2) as pipe:
        plain = Plain(pipe.spec, pipe.state_dict())
        every = [part for batch in own for part in split_in(2, *batch)]
        whole = tuple(map(list, zip(*lists, strict=True)))
        for step, (call, parts) in enumerate(
            [(own[pipe.replica], every), (pipe.shard(*whole), lists)]
        ):
            pipe.zero_grad()
            loss = pipe.step(*call)
            expected, gradients, _ = plain.step(parts, step=step)
            pairs[f"loss {step}"] = loss, expected
            pairs |= {f"{n}' {step}": (p.grad, gradients[n]) for n, p in pipe.named_parameters()}
    return {"pairs": pairs}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    what, directory = sys.argv[1:]
    done = {"trained": trained, "counted": counted, "replicas": replicas}[what]()
    torch.save(done, Path(directory, f"{what}-{torch.distributed.get_rank()}.pt"))
    torch.distributed.destroy_process_group()
