"""The tests that `slow_tests.txt` names exist: one that was renamed would be quick again."""

from pathlib import Path

HERE = Path(__file__).parent


def test_every_named_test_exists() -> None:
    first, *names = (HERE / "slow_tests.txt").read_text("utf-8").splitlines()
    assert first.startswith("#")
    lost = []
    for name in names:
        file, _, test = name.partition("::")
        function = test.partition("[")[0].rpartition("::")[2]
        path = HERE.parent / file
        if not path.exists() or f"def {function}(" not in path.read_text("utf-8"):
            lost.append(name)
    assert names
    assert not lost
