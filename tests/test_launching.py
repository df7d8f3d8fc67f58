"""A forked process and a new one tell the same of a script, and neither knows the compiler."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
import torch
try:
    import gpipe_compiler
except ImportError:
    print("no compiler", file=sys.stderr)
print(torch.get_num_threads(), sys.argv[1:], __name__, file=sys.stderr)
print("PYTHONPATH" in os.environ, os.environ["COLOUR"], os.getcwd(), file=sys.stderr)
print([path for path in sys.path if "added" in path or not path], file=sys.stderr)
{ending}
"""

CALLER = """
import os, sys
from gpipe_compiler.validate.launching import fresh, spare

def told(launch, words):
    ended = launch(words, threads=1)
    print(ended.code, ended.errors.splitlines())

with spare() as launch:
    os.environ["COLOUR"] = "blue"
    assert (launch is fresh) == {never}
    for _ in range(2):  # the second time a new process
        told(launch, sys.argv[1:])
with spare() as launch:
    assert launch is fresh, "torch was imported before"
"""


ODD = """
import os, signal, sys, time
from gpipe_compiler.validate import launching

signal.alarm(500)  # where it hangs
if sys.argv[2] == "background":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
killed = []
fork = os.fork
os.fork = lambda: killed.append(fork()) or killed[-1]
with launching.spare() as launch:
    os.fork = fork
    if sys.argv[2] == "killed" and launch is not launching.fresh:
        os.kill(killed[0], signal.SIGKILL)
        os.waitid(os.P_PID, killed[0], os.WEXITED | os.WNOWAIT)
    if sys.argv[2] == "forked" and (left := os.fork()) == 0:
        time.sleep(600)
        os._exit(0)
    for _ in range(int(sys.argv[3])):
        print(launch([sys.argv[1]], threads=1))
if sys.argv[2] == "forked":
    os.kill(left, signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("case", "runs"), [("killed", 1), ("forked", 0), ("forked", 1), ("background", 1)]
)
def test_process_ends_whatever_comes_between(tmp_path, case, runs):
    """It is killed as it waits; a process that the user's file forks holds its pipe open; Ctrl-C.

    Shells let programs in the background ignore that.
    """
    script = tmp_path / "script.py"
    interrupted = "os.kill(os.getpid(), signal.SIGINT)" if case == "background" else "pass"
    script.write_text(f"import os, signal, sys; {interrupted}; sys.exit(3)")
    ended = subprocess.run(
        [sys.executable, "-c", ODD, str(script), case, str(runs)],
        env={"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "Ended(code=3, errors='')\n" * runs


def told(tmp_path: Path, ending: str) -> list[str]:
    """What the forked process and a new one tell of a script that ends so."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(ending=ending))
    added = tmp_path / "added"
    added.mkdir()
    repository = str(Path(__file__).parents[1])
    caller = textwrap.dedent(CALLER.format(never=sys.platform != "linux"))
    ended = subprocess.run(
        [sys.executable, "-c", caller, str(script), "one", "two words"],
        env={"PYTHONPATH": f"{repository}:{added}", "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return ended.stdout.splitlines()


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit(3)", 3), ("raise ValueError('odd')", 1)],
)
def test_forked_process_is_like_a_new_one(tmp_path, ending, code):
    forked, new = told(tmp_path, ending)

    assert forked.startswith(f"{code} ['no compiler', \"1 ['one', 'two words'] __main__\"")
    assert "'False blue" in forked
    assert "added" not in forked.replace("ValueError", "")
    if "raise" in ending:
        assert "ValueError: odd" in forked
        return  # tracebacks tell different frames
    assert forked == new
