"""Values and files that no option expects: an answer with its exit code, and never a traceback."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
from hostile import CODES, VALUES, files, options
from tiny_pipelines import SAMPLES, data_for, skip_spec

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.core.weights import save_file, save_weights
from gpipe_compiler.runtime.errors import UsageError
from gpipe_compiler.runtime.train.arguments import parser_for
from gpipe_compiler.runtime.train.command import main

COMMANDS = parser_for(skip_spec())._subparsers._group_actions[0].choices  # type: ignore[union-attr]
QUICK = {"train": ["--steps=1"], "bench": ["--steps=1"]}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with Pipeline(skip_spec(), None, seed=1) as pipe:
        save_weights(pipe.state_dict(), tmp_path / "weights")
    save_file(data_for("skip", 2 * SAMPLES)[2], tmp_path / "weights" / "example.safetensors")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def code_of(package: Path, words: list[str]) -> int:
    try:
        return main(skip_spec(), package, package / "weights", argv=words)
    except SystemExit as ended:  # of argparse
        return int(ended.code or 0)


@pytest.mark.parametrize(
    ("option", "command"),
    # Each with the first command that has it: clock, the last, takes long.
    {
        option: name
        for name in ("export", "bench", "check", "infer", "train")
        for option in options(COMMANDS[name])
    }.items(),
)
def test_values(option: str, command: str, package: Path) -> None:
    required = {"--checkpoint": "x", "--output": "y"} if command == "export" else {}
    required.pop(option, None)
    for value in VALUES:
        words = [command, *QUICK.get(command, []), f"{option}={value}"]
        words += [f"{name}={text}" for name, text in required.items()]
        assert code_of(package, words) in CODES, value


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--input"],
        ["train", "--load"],
        ["train", "--resume"],
        ["train", "--log-file"],
        ["train", "--tensorboard"],
        ["train", "--save"],
        ["check", "--reference"],
        ["check", "--report"],
        ["infer", "--output"],
        ["export", "--output=y", "--checkpoint"],
    ],
    ids=lambda words: words[-1],
)
def test_files(words: list[str], package: Path) -> None:
    """Each as what is read, and as what is to be written."""
    for file in files(package / "here"):
        asked = [*words[:-1], *QUICK.get(words[0], []), f"{words[-1]}={file}"]
        assert code_of(package, asked) in CODES, file


PLACES = {"FILE", "FILE.safetensors", "PATH", "DIR"}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_url_is_taken_for_a_folder(
    command: str, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ["--checkpoint=x", "--output=y"] if command == "export" else []
    places = [action for action in COMMANDS[command]._actions if action.metavar in PLACES]
    assert places
    for action in places:
        option = action.option_strings[-1]
        assert code_of(package, [command, *needed, f"{option}=s3://bucket/x"]) == 2, option
        assert "'s3://bucket/x' is a URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--checkpoint-dir"],
        ["train", "--resume"],
        ["train", "--load"],
        ["export", "--output=y", "--checkpoint"],
    ],
    ids=lambda words: words[-1],
)
def test_addresses_that_nothing_here_reads(
    words: list[str], package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused at once, with the line that installs what is missing."""
    fsspec.register_implementation("elsewhere", "no_such_package.FileSystem", clobber=True)
    asked = [*words[:-1], f"{words[-1]}=elsewhere://bucket/x"]
    assert code_of(package, asked) == 2
    assert "pip install no_such_package" in capsys.readouterr().err

    assert code_of(package, [*words[:-1], f"{words[-1]}=unknown://x"]) == 2
    assert "fsspec knows no addresses unknown://" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK in the environment: 'x' is no whole number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE in the environment: '' is no whole number"),
        ({"TORCHELASTIC_RESTART_COUNT": "1e40"}, "TORCHELASTIC_RESTART_COUNT in the environment"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "where the processes meet is not said"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "9999999"},
            "where the processes meet is not said",
        ),
    ],
    ids=str,
)
def test_an_environment_that_says_nothing(
    said: dict[str, str],
    told: str,
    package: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert code_of(package, ["train", "--steps=1", "--checkpoint-dir=here"]) in {1, 2}
    assert told in (printed := capsys.readouterr().err)
    assert "hint: " in printed


@pytest.mark.parametrize(
    "chosen",
    [
        {"seed": 10**20},
        {"microbatches": 10**11},
        {"microbatches": 0},
        {"timeout_s": float("nan")},
        {"timeout_s": -1.0},
        {"timeout_s": float("inf")},
        {"devices": "cuda:4096"},
        {"devices": "xla"},
        {"devices": "nonsense:0"},
    ],
    ids=str,
)
def test_what_a_program_chooses(chosen: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Pipeline(skip_spec(), None, **chosen)


def test_a_timeout_of_months_is_one_of_weeks() -> None:
    with Pipeline(skip_spec(), None, timeout_s=1e12) as pipe:
        assert len(pipe.stages) == 4


def test_more_samples_than_memory_holds(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(package, ["infer", "--batch-size", "2147483647"]) == 2
    assert "larger than" in capsys.readouterr().err


def test_an_index_that_is_none(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = package / "weights" / "index.json"
    for file in files(package / "here"):
        index.unlink(missing_ok=True)
        index.symlink_to(file)
        if file.name not in ("object", "private"):  # of no weights; of what root may read
            assert code_of(package, ["check"]) in {1, 2}, file
    assert "index.json" in capsys.readouterr().err


def test_a_plan_that_is_none(package: Path) -> None:
    plan = package / "plan.json"
    for file in files(package / "here"):
        plan.unlink(missing_ok=True)
        plan.symlink_to(file)
        assert code_of(package, ["bench", "--steps=1"]) == 0, file


@pytest.mark.parametrize("name", ["train_data", "make_optimizer", "file"])
def test_hooks_that_leave(
    name: str, package: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """They end in an error, whatever the exit code that they ask for: nothing was trained."""
    hooks = tmp_path / "hooks.py"
    body = "import sys\nsys.exit(0)\n" if name == "file" else ""
    hooks.write_text(body or f"import sys\ndef {name}(*_):\n    sys.exit(0)\n")

    assert (
        main(
            skip_spec(), package, package / "weights", hooks=str(hooks), argv=["train", "--steps=1"]
        )
        == 1
    )
    assert "SystemExit: 0" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu:7", "meta", "mkldnn"])
def test_a_device_that_holds_no_numbers(
    device: str, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(package, ["infer", "--devices", device]) == 2
    assert f"there is no device {device} here" in capsys.readouterr().err


def test_the_cpu_by_its_number(package: Path) -> None:
    assert code_of(package, ["infer", "--devices", "cpu:0"]) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")
@pytest.mark.parametrize(
    "words",
    [
        ["infer", "--output"],
        ["check", "--report"],
        ["train", "--steps=1", "--log-file"],
        ["train", "--steps=1", "--save"],
    ],
    ids=lambda words: words[-1],
)
def test_what_cannot_be_written_is_named(
    words: list[str], package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(package, [*words, "/dev/full"]) == 1
    assert "/dev/full: " in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file", "file/of/weights", "folder.safetensors"])
def test_nothing_is_trained_that_cannot_be_saved(
    place: str, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (package / "file").touch()
    (package / "folder.safetensors").mkdir()
    assert code_of(package, ["train", "--steps=1", "--save", str(package / place)]) == 1
    said = capsys.readouterr()
    assert f"error: {package / place}: " in said.err
    assert "step 1" not in said.out


def test_weights_from_elsewhere_in_place_of_a_folder_that_is_not_there(package: Path) -> None:
    """As of a package that was copied without its weights."""
    (package / "weights").rename(package / "moved")
    moved = package / "moved"
    example = ["--input", str(moved / "example.safetensors")]
    assert code_of(package, ["train", "--steps=1", "--weights", str(moved), *example]) == 0
