"""The files that start a package on many hosts: their commands run here, on hosts that are one."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpipe_compiler.cli.main import compile_command

FOLDER = Path(__file__).parents[2] / "examples" / "clusters"
BIN = Path(sys.executable).parent

MODEL = """
import torch
from torch import nn

def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

def example_inputs():
    return torch.rand(8, 6, generator=torch.Generator().manual_seed(2))

def loss_fn(output, target):
    return nn.functional.cross_entropy(output, target)

def example_target():
    return torch.arange(8) % 3

def train_data():
    for _ in range(3):
        yield torch.randn(8, 6), torch.randint(3, (8,))
"""

SLURMS_SRUN = """#!/bin/bash
# Runs a command as the tasks of a job of two hosts.
while [[ $1 == --* ]]; do shift; done
"$@" & first=$!
"$@"; second=$?
wait $first && exit $second
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clusters")
    (folder / "model.py").write_text(MODEL)
    words = [str(folder / "model.py"), "--stages=4", "--no-validate", "-o", str(folder / "package")]
    assert compile_command(words) == 0
    return folder / "package"


@pytest.fixture(scope="module")
def expected(package: Path) -> dict[str, torch.Tensor]:
    """The weights after 10 passes in one process."""
    words = ["train", "--epochs=10", "--save", package.with_name("plain.safetensors")]
    subprocess.run([sys.executable, package / "run.py", *words], check=True, capture_output=True)
    return load_file(package.with_name("plain.safetensors"))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run(commands: Sequence[Sequence[str]], folder: Path, **variables: str) -> None:
    """Runs commands side by side, each as on a host of its own; all have to end well."""
    path = os.pathsep.join([str(folder / "bin"), str(BIN), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
    started = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
        assert [process.returncode for process in started] == [0] * len(started), "\n".join(said)
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def here(words: Sequence[str], folder: Path, package: Path, port: int) -> list[str]:
    """A command of a container, for two processes on each of two hosts that are this one."""
    changed = []
    for word in words:
        option, equals, _ = word.partition("=")
        places = {
            "--rdzv-endpoint": f"localhost:{port}",
            "--nproc-per-node": "2",
            "--checkpoint-dir": str(folder / "checkpoints"),
        }
        changed.append(f"{option}={places[option]}" if option in places and equals else word)
    changed = [str(package / "run.py") if w == "/package/run.py" else w for w in changed]
    return [*changed, "--save", str(folder / "w.safetensors")]


def assert_trained(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "w.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=lambda text, name=name: name + text)


def documents(file: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((FOLDER / file).read_text()))


def test_the_parts_of_a_job_of_kubernetes_name_each_other() -> None:
    service, job = documents("kubernetes.yaml")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = container["command"]

    # The first pod of an indexed job is called so within a service without an address.
    name = job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    port = service["spec"]["ports"][0]["port"]
    assert f"--rdzv-endpoint={name}-0.{pod['subdomain']}:{port}" in words
    assert job["spec"]["completionMode"] == "Indexed"
    assert f"--nnodes={job['spec']['completions']}" in words
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in words
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert f"--checkpoint-dir={mounts['checkpoints']}" in words


@pytest.mark.slow
def test_a_job_of_kubernetes(package: Path, expected: Any, tmp_path: Path) -> None:
    _, job = documents("kubernetes.yaml")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    changed = here(container["command"], tmp_path, package, free_port())
    variables = {item["name"]: item["value"] for item in container["env"]}
    run([changed, changed], tmp_path, **variables)
    assert_trained(tmp_path, expected)


@pytest.mark.slow
def test_containers_of_docker(package: Path, expected: Any, tmp_path: Path) -> None:
    (found,) = documents("compose.yaml")
    hosts = found["services"].values()
    image = (FOLDER / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["torchrun"]' in image
    assert "COPY ${PACKAGE} /package\n" in image
    assert [host["hostname"] for host in hosts] == list(found["services"])

    port = free_port()
    commands = [here(["torchrun", *host["command"]], tmp_path, package, port) for host in hosts]
    run(commands, tmp_path)
    assert_trained(tmp_path, expected)


@pytest.mark.slow
def test_a_job_of_slurm(package: Path, expected: Any, tmp_path: Path) -> None:
    """The script itself, with an srun that starts both tasks here."""
    script = FOLDER / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SLURMS_SRUN), ("scontrol", "#!/bin/sh\necho localhost\necho b\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    text = script.read_text().replace(":29400", f":{free_port()}")
    (tmp_path / "job.sh").write_text(text)
    words = ["--epochs", "10", "--save", str(tmp_path / "w.safetensors")]

    run(
        [["bash", "job.sh", str(package), *words]],
        tmp_path,
        SLURM_JOB_NODELIST="localhost,b",
        SLURM_JOB_NUM_NODES="2",
        SLURM_GPUS_ON_NODE="2",
        SLURM_JOB_ID="7",
        SLURM_JOB_NAME="small",
    )
    assert_trained(tmp_path, expected)
    assert (tmp_path / "checkpoints_small").is_dir()


def test_shells_read_the_scripts() -> None:
    """Also the commands that stand in comments."""
    subprocess.run(["bash", "-n", FOLDER / "slurm.sh"], check=True)
    for file in ("Dockerfile", "compose.yaml", "kubernetes.yaml", "slurm.sh"):
        lines = [
            line[6:] for line in (FOLDER / file).read_text().splitlines() if line[:6] == "#     "
        ]
        said = "\n".join(lines).replace("\\\n", " ")
        assert said, file
        words = [shlex.split(line) for line in said.splitlines()]
        assert {line[0] for line in words} <= {"docker", "kubectl", "sbatch"}
        named = {word for line in words for word in line if word.startswith("examples/")}
        assert all((FOLDER.parents[1] / name).is_file() for name in named)
