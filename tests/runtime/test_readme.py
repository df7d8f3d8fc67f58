"""The page of the runtime that every package gets, and the names in a package's own README."""

from __future__ import annotations

import re
from pathlib import Path

from gpipe_compiler.runtime.core.calls import Calls
from gpipe_compiler.runtime.core.pipeline import Pipeline

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "gpipe_compiler" / "runtime"


def test_the_page_has_every_file_once() -> None:
    named, folder = [], ""
    for line in (RUNTIME / "README.md").read_text().splitlines():
        if line.startswith("### "):
            folder = line.removeprefix("### ")
        if line.startswith("| `"):
            named += [folder + name for name in re.findall(r"`(\w+\.py)`", line.split("|")[1])]
    files = {
        file.relative_to(RUNTIME).as_posix()
        for file in RUNTIME.rglob("*.py")
        if file.name != "__init__.py"
    }

    assert sorted(named) == sorted(files)


def test_the_way_of_a_step_leads_through_files_that_are_there() -> None:
    told = re.findall(r"`(\w+/\w+\.py)`", (RUNTIME / "README.md").read_text())

    assert len(told) > 10
    assert [name for name in told if not (RUNTIME / name).exists()] == []


def test_a_packages_readme_has_every_public_name_of_a_pipeline() -> None:
    page = (ROOT / "templates" / "readme.md.jinja").read_text()
    told = page.partition("| of a `Pipeline` |")[2].partition("`help(Pipeline)`")[0]

    own = {name for name in {**vars(Calls), **vars(Pipeline)} if not name.startswith("_")}
    names = own | {"scaler", "pipe", "execution"}
    of_modules = {"parameters", "named_parameters", "named_buffers", "state_dict"}
    of_modules |= {"eval", "training", "zero_grad"}
    assert set(re.findall(r"`(\w+)(?:\(inputs\))?`", told)) == names | of_modules
