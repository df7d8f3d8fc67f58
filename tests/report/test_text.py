"""Plans as text."""

from __future__ import annotations

import dataclasses

import pytest
from rich.console import Console

from gpipe_compiler.plan import Plan
from gpipe_compiler.report.terminal import Spinner
from gpipe_compiler.report.text import format_plan, plain_text, show_plan, summary_table
from gpipe_compiler.runtime.spec import BatchNorm, Precision, Remat
from gpipe_compiler.runtime.train.comparison import Row
from gpipe_compiler.runtime.wording import counted
from gpipe_compiler.text.units import (
    format_bytes,
    format_rate,
    format_seconds,
    format_share,
    format_source,
    short_path,
    short_source,
)
from gpipe_compiler.validate.package import Validation

EXPECTED = """\
little trains in 3 stages on 3 x toy, links 1 MB/s: gpipe, a batch of 8 in 2 micro-batches of 4
stages (times and bytes of one micro-batch, memory at its peak)

 stage  holds             ops  parameters  forward  backward  receives  saved       peak
 ───────────────────────────────────────────────────────────────────────────────────────
     0  embed               1          80      1 s       2 s       0 B  100 B   1.95 KiB
     1  body.conv … body    2          24      2 s       4 s     128 B  100 B   2.93 KiB
     2  head                2          18      1 s       2 s     288 B  100 B  0.977 KiB

boundaries (of one micro-batch)

 value    stages         type  bytes  gradient  made by             line
 ───────────────────────────────────────────────────────────────────────────────────
 ids       0 → 2      4 int64   32 B        no  input of the model
 embed  0 → 1, 2  4x8 float32  128 B       yes  Embedding embed     …/user/model.py:10
 relu      1 → 2  4x8 float32  128 B       yes  torch.relu body     …/user/model.py:21

prediction

 training step    18 s (0.444 samples/s)
 busiest device   6 s a micro-batch
 lower bound      15 s (gap at most 20.0%)
 bubble           55.6%
 boundaries       800 B a micro-batch, gradients included
 peak memory      2.93 KiB on a device of 977 KiB
 op times         estimated for toy"""


def without_rules(text: str) -> list[str]:
    """The lines but for the rules under headers, whose length is the table library's affair."""
    return [line for line in text.splitlines() if set(line) - set(" ─")]


def test_a_table_of_very_many_stages_shows_both_ends(plan: Plan) -> None:
    """The rows shown are those that a plan of few stages has, and the others are counted."""
    count = 512
    stages = tuple(dataclasses.replace(plan.stages[1], index=stage) for stage in range(count))
    sent = tuple(
        dataclasses.replace(plan.crossings[0], source=stage, targets=tuple(range(stage + 1, count)))
        for stage in range(count - 1)
    )
    many = dataclasses.replace(
        plan,
        stages=stages,
        crossings=sent,
        orders=((),) * count,
        prediction=dataclasses.replace(plan.prediction, peak_bytes=(10**9,) * count),
    )

    lines = without_rules(format_plan(many))

    shown = [line.split()[0] for line in lines if "body.conv … body" in line]
    assert shown == [str(stage) for stage in (*range(32), *range(480, 512))]
    assert "448 stages in between; --json lists them all" in lines
    assert "447 boundary values in between; --json lists them all" in lines
    assert any("0 → 1 … 511 (511 in all)" in line for line in lines)
    assert any("510 → 511 " in line for line in lines)
    assert any("too much for stages 0 … 511 (512 in all), by 953 MiB at most" in x for x in lines)


@pytest.mark.parametrize(
    ("places", "seconds", "rate"), [(1, "24 s", "0.333"), (2, "18 s", ""), (3, "18 s", "")]
)
def test_devices_that_share_one_take_turns(
    plan: Plan, places: int, seconds: str, rate: str
) -> None:
    """Two micro-batches of 1 + 2, 2 + 4 and 1 + 2 seconds are 24 on one device, 18 on three."""
    shared = dataclasses.replace(
        plan, cluster=dataclasses.replace(plan.cluster, endless=True, places=places)
    )

    lines = [line.strip() for line in format_plan(shared).splitlines()]

    (step,) = [line for line in lines if line.startswith("training step")]
    assert f" {seconds} (" in step
    if rate:
        assert step.endswith(f"({rate} samples/s): this machine runs 1 of 3 devices at a time")
        assert "on 3 devices     18 s (0.444 samples/s)" in lines
    assert Plan.from_json(shared.to_json()).here_s == shared.here_s


def test_a_plan_says_how_it_computes(plan: Plan) -> None:
    """Only where it is not as the model does it, and which stages are too large for a device."""
    stages = (*plan.stages[:2], dataclasses.replace(plan.stages[2], remat=Remat.FULL))
    device = dataclasses.replace(plan.devices[0], memory=1500)
    changed = dataclasses.replace(
        plan,
        stages=stages,
        batchnorm=BatchNorm.DEFERRED,
        precision=Precision.BF16,
        prediction=dataclasses.replace(plan.prediction, recompute=0.125),
        cluster=dataclasses.replace(plan.cluster, devices=(device,)),
    )

    text = format_plan(changed)

    assert text.splitlines()[0].endswith("of 4; BatchNorm deferred, bf16")
    assert [line.split()[-3] for line in text.splitlines()[5:8]] == ["none", "none", "full"]
    assert "recomputing      12.5% of the devices' time" in text
    assert "too much for stages 0, 1, by 1.46 KiB at most" in text


def test_a_plan_prints_as_tables(plan: Plan) -> None:
    assert without_rules(format_plan(plan)) == without_rules(EXPECTED)


def test_an_inference_plan_has_no_backward(plan: Plan) -> None:
    text = format_plan(dataclasses.replace(plan, training=False))

    assert "little infers in 3 stages" in text
    assert "mini-batch" in text
    for word in ("backward", "saved", "gradient"):
        assert word not in text


def test_a_plan_without_notes_prints_too(plan: Plan) -> None:
    text = format_plan(dataclasses.replace(plan, noted=()))

    assert "embed  0 → 1, 2  4x8 float32  128 B       yes" in text


def test_too_much_memory_is_said(plan: Plan) -> None:
    prediction = dataclasses.replace(plan.prediction, peak_bytes=(1, 2_000_000, 3))

    assert "1.91 MiB on a device of 977 KiB: too much" in format_plan(
        dataclasses.replace(plan, prediction=prediction)
    )


def test_a_plan_fits_a_small_terminal(plan: Plan) -> None:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(show_plan(plan))

    text = capture.get()
    for header in ("parameters", "receives", "peak", "gradient"):
        assert header in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_summary_tells_what_was_validated(plan: Plan) -> None:
    rows = (
        Row("output", 1, 1.25e-7, 2e-7, 1e-3, "y", ()),
        Row("gradient", 161, 0.0, 0.0, 1e-3, "fc.weight", ()),
    )

    text = plain_text(summary_table(plan, Validation(rows, ("it mixes",))))

    assert "output: 1 tensor, largest difference 1.2e-07 (2e-07 of its size, 1e-03 allowed)" in text
    assert "gradient: 161 tensors, largest difference 0 (0 of its size, 1e-03 allowed)" in text
    assert "it mixes" in text
    assert "validated        no" in plain_text(summary_table(plan, None))
    without = summary_table(plan, None, unread=["input mask"])
    assert "without effect   input mask" in plain_text(without)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1048575, "1 MiB"),
        (25557032 * 4, "97.5 MiB"),
        (2**31, "2 GiB"),
        (5 * 2**50, "5,120 TiB"),
    ],
)
def test_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1, "1 s"),
        (1234.5, "1,234 s"),
        (0.9996, "1 s"),
        (0.25, "250 ms"),
        (3.14159e-5, "31.4 µs"),
        (2e-9, "2 ns"),
        (2e-10, "0.2 ns"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_other_figures(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))

    assert format_share(0.125) == "12.5%"
    assert counted(1, "op") == "1 op"
    assert counted(2048, "op") == "2,048 ops"
    assert counted(2, "micro-batch", "es") == "2 micro-batches"
    assert format_source(f"{tmp_path}/deep/model.py:7") == "deep/model.py:7"
    assert format_source("/elsewhere/model.py:7") == "/elsewhere/model.py:7"
    assert short_source("/far/away/model.py:7") == "…/away/model.py:7"
    assert short_source("/model.py:7") == "/model.py:7"
    assert short_source(f"{tmp_path}/model.py:7") == "model.py:7"
    assert short_path("layer1.0.conv1") == "layer1.0.conv1"
    assert short_path("encoder.layers.11.self_attn.out_proj") == "…11.self_attn.out_proj"
    assert short_path("a" * 40) == "a" * 40
    assert [format_rate(rate) for rate in (0.00612, 5.31, 23162.4)] == ["0.00612", "5.31", "23,162"]


def test_progress_tells_only_of_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.5, 0.5, 3.0, 3.0, 3.1])  # begins and ends of three steps
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture, Spinner(console) as progress:
        progress("quick [step]")
        progress("slow [step]")
        progress("quick again")

    assert capture.get() == "slow [step] (2.5 s)\n"
