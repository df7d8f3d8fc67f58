"""What users ask of the stages, compared with every assignment there is, and against the plans.

`_brute` tries all assignments of a small problem; a contradiction is one exactly where none of
them keeps to everything. Of plans, the stage of every op is read off what they emit.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gpipe_compiler as gpc
from gpipe_compiler.cluster import IN_PROCESS, Cluster, Device
from gpipe_compiler.errors import PlanError, UsageError
from gpipe_compiler.options import Constraints
from gpipe_compiler.passes.cut.constraints import ConstraintWords, StageRanges
from gpipe_compiler.passes.cut.problem import CutProblem, Node
from gpipe_compiler.plan import Plan
from gpipe_compiler.planner.constrain import check_names
from gpipe_compiler.report.text import format_plan

CLUSTER = Cluster.of(Device("toy", 1e9, 1e9, 10**9, 1e-6), IN_PROCESS)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(x)))


class Model(nn.Module):
    """Twelve blocks, so that names begin alike, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(12))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def graph() -> gpc.Graph:
    target = torch.ones(8, 2)
    loss = nn.functional.mse_loss
    return gpc.trace(Model(), torch.ones(8, 8), target=target, loss_fn=loss)


def planned(graph: gpc.Graph, constraints: Constraints, stages: int = 3) -> Plan:
    return gpc.plan(graph, stages=stages, microbatches=4, cluster=CLUSTER, constraints=constraints)


def stage_of(plan: Plan) -> dict[str, int]:
    return {op: stage.index for stage in plan.stages for op in stage.ops}


def block_ops(index: int) -> list[str]:
    suffix = f"_{index}" if index else ""
    return [f"blocks_{index}_inner", f"relu{suffix}", f"blocks_{index}_outer", f"add{suffix}"]


class TestPlans:
    def test_a_module_is_pinned_to_its_stage_and_to_the_last_but_one(
        self, graph: gpc.Graph
    ) -> None:
        plan = planned(graph, Constraints(pins=(("blocks.1", 1), ("blocks.10", -2))))

        found = stage_of(plan)
        assert {found[op] for op in (*block_ops(1), *block_ops(10))} == {1}
        assert {found[op] for op in block_ops(0)} == {0}

    def test_an_op_and_a_value_are_pinned_by_name(self, graph: gpc.Graph) -> None:
        found = stage_of(planned(graph, Constraints(pins=(("relu_3", 2), ("add_1", 0)))))

        assert (found["add_1"], found["relu_3"]) == (0, 2)

    def test_a_module_is_kept_together_where_it_would_not_be(self, graph: gpc.Graph) -> None:
        free = stage_of(planned(graph, Constraints()))
        cut_through = [i for i in range(12) if len({free[op] for op in block_ops(i)}) > 1]
        half = Constraints(pins=(("blocks.4.inner", 0),), together=("blocks.4",))

        assert len({stage_of(planned(graph, half))[op] for op in block_ops(4)}) == 1
        for index in cut_through:
            kept = stage_of(planned(graph, Constraints(together=(f"blocks.{index}",))))
            assert len({kept[op] for op in block_ops(index)}) == 1

    def test_a_stage_begins_where_it_is_split(self, graph: gpc.Graph) -> None:
        found = stage_of(planned(graph, Constraints(split_at=("blocks.1", "blocks.11"))))

        assert found["add"] == 0
        assert found["blocks_1_inner"] == 1
        assert found["add_10"] == 1
        assert found["blocks_11_inner"] == 2

    def test_a_split_counts_what_is_read_through_ops_that_every_stage_repeats(self) -> None:
        class Masked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.one = nn.Linear(8, 8)
                self.two = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.one(x)
                return self.two(x) + torch.arange(x.shape[1])

        traced = gpc.trace(Masked(), torch.ones(8, 8), training=False)
        plan = gpc.plan(
            traced,
            stages=2,
            microbatches=2,
            cluster=CLUSTER,
            constraints=Constraints(split_at=("two",)),
        )
        assert stage_of(plan)["one"] < stage_of(plan)["two"]

    def test_the_plan_tells_what_was_asked(self, graph: gpc.Graph) -> None:
        asked = Constraints((("head", -1),), ("blocks.3",), ("blocks.5",))
        plan = planned(graph, asked)

        assert Plan.from_json(plan.to_json()).constraints == asked
        assert "--pin head=-1, --keep-together blocks.3, --split-at blocks.5" in format_plan(plan)

    @settings(max_examples=15, deadline=None)
    @given(st.data())
    def test_what_is_planned_keeps_to_it(self, graph: gpc.Graph, data: st.DataObject) -> None:
        module = st.sampled_from([f"blocks.{i}" for i in range(12)])
        stages = data.draw(st.integers(2, 4))
        asked = Constraints(
            tuple(
                data.draw(st.lists(st.tuples(module, st.integers(-stages, stages - 1)), max_size=2))
            ),
            tuple(data.draw(st.lists(module, max_size=2))),
            tuple(data.draw(st.lists(module.filter(lambda n: n != "blocks.0"), max_size=2))),
        )
        try:
            found = stage_of(planned(graph, asked, stages))
        except UsageError as error:
            if "nothing is left for" not in error.problem:
                assert not _possible(asked, stages)
            return
        except PlanError:  # what is pinned leaves a stage empty
            assert asked.pins
            return
        assert _kept(found, asked, stages)


def _index(module: str) -> int:
    return int(module.split(".")[1])


def _kept(found: dict[str, int], asked: Constraints, stages: int) -> bool:
    return (
        all(
            found[op] == stage % stages
            for module, stage in asked.pins
            for op in block_ops(_index(module))
        )
        and all(len({found[op] for op in block_ops(_index(m))}) == 1 for m in asked.together)
        and all(
            found[block_ops(_index(m) - 1)[-1]] < found[block_ops(_index(m))[0]]
            for m in asked.split_at
        )
    )


def _possible(asked: Constraints, stages: int) -> bool:
    """Whether stages that ascend along the chain of blocks can keep to it: by the last op's."""
    ops = [op for index in range(12) for op in block_ops(index)]

    def reach(position: int, stage: int) -> bool:
        """Whether the ops from here can be placed in stages from this one."""
        seen = {(position, stage)}
        pending = [(position, stage)]
        while pending:
            at, now = pending.pop()
            if at == len(ops):
                return True
            index, step = divmod(at, 4)
            name = f"blocks.{index}"
            for then in range(now, stages):
                if any(m == name and s % stages != then for m, s in asked.pins):
                    continue
                if step == 0 and name in asked.split_at and then == now:
                    continue
                if step > 0 and name in asked.together and then != now:
                    continue
                if (at + 1, then) not in seen:
                    seen.add((at + 1, then))
                    pending.append((at + 1, then))
        return False

    return reach(0, 0)


class TestRefusals:
    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            (Constraints(pins=(("blok.2", 0),)), "'blok.2'; did you mean blocks.2"),
            (Constraints(together=("",)), "'' is the whole model"),
            (Constraints(pins=(("head", 3),)), "of 3 stages, 0 is the first, 2 or -1 the last"),
            (Constraints(pins=(("head", -4),)), "of 3 stages"),
            (
                Constraints(pins=(("blocks.1", 1), ("blocks.1.inner", 0))),
                "--pin blocks.1=1 and --pin blocks.1.inner=0: blocks_1_inner is in both",
            ),
            (
                Constraints((("blocks.1.inner", 0), ("blocks.1.outer", 1)), ("blocks.1",)),
                "blocks_1_inner and blocks_1_outer lie in one stage, by --keep-together blocks.1",
            ),
            (
                Constraints((("blocks.2", 1), ("blocks.4", 0))),
                "--pin blocks.4=0: some of it has to lie in stage 1 or later, by --pin blocks.2=1",
            ),
            (
                Constraints((("blocks.2", 1), ("blocks.4", 1)), (), ("blocks.3",)),
                "stage 2 or later, by --pin blocks.2=1, --split-at blocks.3",
            ),
            (Constraints(pins=(("loss", 0),)), "stage 2 or later, by the loss being made last"),
            (
                Constraints(pins=(("blocks.0", 1),)),
                "--pin blocks.0=1: nothing is left for stage 0",
            ),
            (
                Constraints(pins=(("blocks", 1), ("head", -1))),
                "--pin blocks=1, --pin head=-1: nothing is left for stage 0",
            ),
            (Constraints(split_at=("blocks.0",)), "it reads only inputs of the model"),
            (
                Constraints(split_at=("blocks.1", "blocks.2", "blocks.3")),
                "blocks_3_inner would lie in stage 3, but there are 3 stages",
            ),
            (
                Constraints(together=("blocks",), split_at=("blocks.5",)),
                "--split-at blocks.5: add_4 and blocks_5_inner lie in one stage, by "
                "--keep-together blocks",
            ),
        ],
    )
    def test_a_fault_is_named(self, graph: gpc.Graph, asked: Constraints, said: str) -> None:
        with pytest.raises(UsageError) as caught:
            planned(graph, asked)
        assert said in caught.value.problem

    def test_all_faults_are_told_at_once(self, graph: gpc.Graph) -> None:
        asked = Constraints((("hed", 0), ("blocks.7", 1)), ("block",), ("nothing",))
        with pytest.raises(UsageError) as caught:
            check_names(graph, asked)

        said = caught.value.problem
        assert all(name in said for name in ("'hed'", "'block'", "'nothing'"))
        assert "blocks.7" not in said.replace("did you mean", "")
        assert "the modules are blocks, head" in caught.value.hint

    def test_every_name_of_a_module_is_taken_or_its_fault_is_told(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
                self.same = nn.Identity()
                self.first = nn.ModuleList([nn.Linear(8, 8), nn.Identity()])
                self.again = self.first[0]
                self.weights = nn.Linear(8, 8)
                self.unused = nn.Sequential(nn.Identity())

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.same(self.again(self.attention(x)))
                return nn.functional.linear(x, self.weights.weight).relu()

        model = Tied()
        graph = gpc.trace(model, torch.ones(4, 3, 8), training=False)
        idle = {"", "same", "first.1", "unused", "unused.0"}

        for name, _ in model.named_modules(remove_duplicate=False):
            if name not in idle:
                stages = planned(graph, Constraints(pins=((name, 0),)), stages=2).stages
                assert len(stages) == 2, name
        with pytest.raises(UsageError) as caught:
            check_names(graph, Constraints(together=tuple(sorted(idle))))
        for name in idle - {""}:
            assert f"the module {name} computes nothing here: no op" in caught.value.problem
        assert "'' is the whole model" in caught.value.problem

    def test_what_every_stage_repeats_has_no_stage(self) -> None:
        class Positions(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                steps = torch.arange(8)
                return self.two(self.one(x) + steps) + steps

        traced = gpc.trace(Positions(), torch.ones(8, 8), training=False)
        with pytest.raises(UsageError, match="computed in every stage that needs it"):
            gpc.plan(
                traced, stages=2, cluster=CLUSTER, constraints=Constraints(pins=(("arange", 1),))
            )


@st.composite
def problems(draw: st.DrawFn) -> tuple[CutProblem, int]:
    """A graph of a few nodes with all that may be asked of it, and a number of stages."""
    size = draw(st.integers(1, 5))
    pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
    edges = [pair for pair in pairs if draw(st.booleans())]
    stages = draw(st.integers(1, 3))
    node = st.integers(0, size - 1)
    problem = CutProblem(
        tuple(Node(f"n{i}", 1.0) for i in range(size)),
        precedence=tuple(edges),
        groups=tuple(draw(st.lists(st.tuples(node, node), max_size=3))),
        last=frozenset(draw(st.lists(node, max_size=1))),
        pinned=tuple(
            draw(st.lists(st.tuples(node, st.integers(0, stages - 1)), max_size=3, unique=True))
        ),
        apart=tuple(draw(st.lists(st.sampled_from(edges), max_size=2))) if edges else (),
    )
    return problem, stages


def _brute(problem: CutProblem, stages: int) -> set[int]:
    """The stages with a node in some assignment that keeps to everything."""
    used: set[int] = set()
    for found in itertools.product(range(stages), repeat=len(problem.nodes)):
        if (
            all(found[a] <= found[b] for a, b in problem.precedence)
            and all(len({found[n] for n in group}) == 1 for group in problem.groups)
            and all(found[n] == stages - 1 for n in problem.last)
            and all(found[n] == stage for n, stage in problem.pinned)
            and all(found[a] < found[b] for a, b in problem.apart)
        ):
            used.update(found)
    return used


@settings(max_examples=400, deadline=None)
@given(problems())
def test_exactly_what_no_assignment_keeps_to_is_a_contradiction(
    case: tuple[CutProblem, int],
) -> None:
    faults = StageRanges.of(*case, ConstraintWords()).faults

    problem, stages = case
    used = _brute(problem, stages)
    assert bool(faults) is (not used or (bool(problem.pinned) and len(used) < stages))
    assert all(faults)


def test_a_plan_under_constraints_is_no_better_than_one_without(graph: gpc.Graph) -> None:
    free = planned(graph, Constraints())
    for asked in (Constraints(pins=(("blocks.6", 0),)), Constraints(split_at=("blocks.1",))):
        assert planned(graph, asked).prediction.step_s >= free.prediction.step_s * (1 - 1e-9)


def test_no_constraint_is_the_same_problem(graph: gpc.Graph) -> None:
    with_none = planned(graph, Constraints())
    without = gpc.plan(graph, stages=3, microbatches=4, cluster=CLUSTER)
    assert dataclasses.replace(with_none, graph=None) == dataclasses.replace(without, graph=None)
