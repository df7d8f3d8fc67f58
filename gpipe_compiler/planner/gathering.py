"""The time in which replicas that divide the weights of a model gather them block by block."""

from __future__ import annotations

from dataclasses import replace

from gpipe_compiler.cluster import Cluster, Link
from gpipe_compiler.options import Policy
from gpipe_compiler.passes.cut.problem import CutProblem
from gpipe_compiler.plan.pareto import Choice
from gpipe_compiler.planner.cut_problem import CutFacts
from gpipe_compiler.planner.planning import devices_there
from gpipe_compiler.runtime.core.shards import blocks_of


def peer_link(cluster: Cluster, choice: Choice, policy: Policy) -> Link:
    """The slowest link between a device and the one of the same rank in the next replica."""
    cluster = cluster.sized(choice.devices)
    if cluster.endless:
        return cluster.link
    there = devices_there(cluster, policy.data_parallel)
    links = [cluster.between(number, number + there) for number in range(there)]
    return max(links, key=lambda link: link.seconds(1 << 20))


def with_gathering(problem: CutProblem, facts: CutFacts, link: Link, policy: Policy) -> CutProblem:
    """The problem in which ops wait for their weights, and backwards for gradients too.

    A block is gathered in every forward and backward, and its gradients are reduced: each time
    every replica sends and receives all but its own part, around a ring. Nothing is computed in the
    meantime.
    """
    share = (policy.data_parallel - 1) / policy.data_parallel
    sizes = {state.name: state.bytes for state in facts.graph.state.values() if state.requires_grad}
    blocks = blocks_of(list(sizes))
    seen: set[str] = set()
    seconds = []
    for op in facts.kept:
        own = [name for name in facts.states[op.name] if name in sizes and name not in seen]
        begun = {blocks[name] for name in own} - seen
        seen.update(own, begun)
        waits = sum(sizes[name] for name in own) * share / link.bandwidth
        seconds.append(waits + len(begun) * link.latency_s)
    return replace(
        problem,
        nodes=tuple(
            replace(node, forward_s=node.forward_s + s, backward_s=node.backward_s + 2 * s)
            for node, s in zip(problem.nodes, seconds, strict=True)
        ),
        other_kinds=tuple(
            tuple(
                replace(one, forward_s=one.forward_s + s, backward_s=one.backward_s + 2 * s)
                for one, s in zip(kind, seconds, strict=True)
            )
            for kind in problem.other_kinds
        ),
    )
