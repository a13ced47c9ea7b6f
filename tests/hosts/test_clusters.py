"""The recipes of `docs/clusters.md` start what they say: an agent on each of two hosts, and one training.

Both hosts are this one. What a scheduler would do is played by the smallest program that does it: `srun` runs its
command once for each node, `scontrol` names the nodes, and Kubeflow's controller sets the variables that
`pkg/runtime/framework/plugins/torch/torch.go` of kubeflow/trainer sets.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ports import free_port

PAGE = Path(__file__).parents[2] / "docs/clusters.md"
TRAIN = """
import json, os, sys
import torch
import ridgeline as rl
from ridgeline.probe.host.fingerprint import num_hosts

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss_fn = lambda model, batch: model(batch).square().mean()
size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
plan = rl.Plan(workers=size)
with rl.TrainStep(model, loss_fn, optimizer, plan, device="cpu") as step:
    losses = [float(step(torch.full((3, 4), rank + 1.0))) for _ in range(3)]
found = {"rank": rank, "size": size, "hosts": num_hosts(), "losses": losses,
         "node": int(os.environ["GROUP_RANK"]), "weight": model.weight.tolist()}
with open(f"rank{rank}.json", "w") as file:
    json.dump(found, file)
"""
SRUN = """#!/bin/bash
# Takes its own options, then runs the rest once for each node.
while [[ $1 == -* ]]; do shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task"; done
"""
SCONTROL = """#!/bin/bash
[[ $1 == show && $2 == hostnames ]] && tr , '\\n' <<<"$3"
"""
TORCHRUN = f"""#!/bin/bash
exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a training script, and programs that stand for the scheduler's."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", TORCHRUN)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def recipe(language: str, heading: str) -> str:
    """The first block of a language below a heading of the page."""
    below = PAGE.read_text().split(f"\n## {heading}\n")[1]
    found = re.search(rf"^```{language}\n(.*?)^```$", below, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def environment(place: Path, **more: str) -> dict[str, str]:
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


def expect_one_training(place: Path, *, nodes: int, each: int) -> None:
    """All ranks are there once, on as many hosts, and have trained together."""
    found = [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(nodes * each)]
    assert {(one["size"], one["hosts"]) for one in found} == {(nodes * each, nodes)}
    assert [one["node"] for one in found] == [node for node in range(nodes) for _ in range(each)]
    assert all(one["weight"] == found[0]["weight"] for one in found)
    assert len({one["losses"][0] for one in found}) == len(found), "each had data of its own"


def test_the_batch_script_of_slurm(place: Path) -> None:
    """As `sbatch` runs it on the first of two nodes; each has room for one worker."""
    script = place / "job.sh"
    script.write_text(recipe("bash", "Slurm").replace(":29500", f":{free_port()}"))
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "localhost,elsewhere",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_CPUS_PER_TASK": "1",
    }
    done = subprocess.run(
        ["bash", str(script)],
        cwd=place,
        env=environment(place, **variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expect_one_training(place, nodes=2, each=1)


def test_the_job_of_kubernetes(place: Path) -> None:
    """Its command in two pods, with the variables that the controller gives each of them."""
    (command,) = re.findall(r"^ *command: \[(.*)\]$", recipe("yaml", "Kubernetes"), re.MULTILINE)
    (num_nodes,) = re.findall(r"^ *numNodes: (\d+)$", recipe("yaml", "Kubernetes"), re.MULTILINE)
    port = str(free_port())
    pods = [
        subprocess.Popen(
            [str(place / "bin" / "torchrun"), *command.split(", ")[1:]],
            cwd=place,
            env=environment(
                place,
                PET_NNODES=num_nodes,
                PET_NPROC_PER_NODE="1",
                PET_NODE_RANK=str(node),
                PET_MASTER_ADDR="127.0.0.1",
                PET_MASTER_PORT=port,
            ),
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(int(num_nodes))
    ]
    try:
        errors = [pod.communicate()[1] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
    assert [pod.returncode for pod in pods] == [0] * len(pods), errors[0][-3000:]
    expect_one_training(place, nodes=2, each=1)
