"""Several processes under torchrun, on this machine: they make the run that one process makes."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import crew
import pytest
import torch

import conftest

pytestmark = pytest.mark.setting("ppo_atari")
LOAD = """
import os, pathlib, sys, torch, numpy as np, torch.distributed as dist
import conftest
script = conftest.Script(pathlib.Path(sys.argv[1])).module  # a copy, with our defaults
torch.set_num_threads(1)
rank, size = script.join_processes(torch.device("cpu"))
"""


@pytest.fixture(autouse=True)
def can_run_in_processes(script):
    for name in ("join_processes", "share_of", "sum_over_processes", "collect", "check_weights"):
        getattr(script, name)


def start(tmp_path, processes, file, *words, launch=None, out="out", **more):
    """torchrun, or one process without it; output goes to the file `out`."""
    launch = launch or [f"--nproc-per-node={processes}", f"--master-port={crew.free_port()}"]
    run = ["-m", "torch.distributed.run", *launch] if processes > 1 else []
    command = [sys.executable, *run, str(file), *map(str, words)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""} | more
    env["PYTHONPATH"] = str(conftest.ROOT)
    out = open(tmp_path / out, "w+")
    return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=out, stderr=subprocess.STDOUT), out


def finish(process, out, timeout=300):
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its processes
        process.wait(60)
        raise
    out.seek(0)
    return code, out.read()


def work(tmp_path, script, processes, text):
    """Run `text` in each process, with the script loaded; it writes what it found to rank<k>.pt."""
    file = tmp_path / "worker.py"
    file.write_text(LOAD + textwrap.dedent(text) + '\ntorch.save(found, f"rank{rank}.pt")\n')
    code, output = finish(*start(tmp_path, processes, file, script.path))
    assert code == 0, output[-3000:]
    return [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(processes)]


UPDATE = """
T, N = 12, 5
args = script.Args(num_envs=N, num_steps=T, num_minibatches=6 if {norm} else 60, update_epochs=2, norm_adv={norm})
torch.manual_seed(0)
agent, own = script.Agent(3, False), script.share_of(N, rank, size)
batch = dict(obs=torch.randint(256, (T, N, 4, 84, 84), dtype=torch.uint8), actions=torch.randint(3, (T, N)),
             logps=torch.randn(T, N) - 2, values=torch.randn(T, N), returns=torch.randn(T, N),
             advantages=torch.randn(T, N) * torch.arange(1.0, N + 1) + torch.arange(N))
batch = {{name: x[:, own] for name, x in batch.items()}}
for name in ("values", "returns", "advantages"):
    batch[name] = script.all_columns(batch[name], own, N)
gradient = script.pixel_gradient if size == 1 else script.gradient_of_all(script.pixel_gradient, own)
optimizer = script.Adam(agent)
losses = script.update(agent, optimizer, 1e-4, gradient, batch, torch.Generator().manual_seed(3), args)
found = optimizer.weights, losses
"""


@pytest.mark.parametrize(
    "norm, processes", [(True, 2), (False, 3)], ids=["minibatches of 10", "of 1, most processes idle"]
)
def test_the_update_is_that_of_one_process(script, tmp_path, norm, processes):
    """Unequal shares of a rollout give, to rounding, the weights and metrics of one process that has it all: losses
    over the whole minibatch, advantages whitened over all processes, one clipping of the whole gradient, and no
    waiting for a process that has no sample of a minibatch (B28, THUDM/slime #2235)."""
    for name in ("Adam", "Agent", "all_columns", "gradient_of_all", "pixel_gradient", "update"):
        getattr(script, name)
    text = UPDATE.format(norm=norm)
    alone = {"script": script.module, "torch": torch, "rank": 0, "size": 1}
    exec(text, alone)
    right, losses = alone["found"]
    for flat, found in work(tmp_path, script, processes, text):
        if script.own:
            torch.testing.assert_close(flat, right, atol=1e-6, rtol=1e-5)
        error = (flat - right).abs()  # Adam turns the rounding of gradients near 0 into small steps
        assert (error > 1e-6 + 1e-5 * right.abs()).float().mean() < 1e-3 and error.max() < 2e-5
        assert found == pytest.approx(losses, rel=1e-4, abs=1e-6)


def test_processes_whose_weights_differ_are_noticed(script, tmp_path):
    """A replica that has drifted ends the run instead of averaging two models."""
    found = work(tmp_path, script, 2, """
        found = []
        for weights in (torch.ones(3), torch.ones(3) + rank * 1e-6):
            try:
                script.check_weights([weights])
                found.append("equal")
            except RuntimeError as error:
                found.append(str(error))
        """)  # fmt: skip
    assert found == [["equal", "the weights of the processes differ"]] * 2


ATARI = "--num-envs 4 --num-steps 32 --num-minibatches 4 --update-epochs 2 --max-frames 300 --eval-episodes 2"
ATARI += " --save-every 2 --no-compile --device cpu"


def rows(folder):
    """Of each step, its lines joined, without the clock."""
    found = {}
    for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        found[row["step"]] = found.get(row["step"], {}) | row
    return [{k: v for k, v in row.items() if k not in ("charts/SPS", "time/cpu")} for row in found.values()]


def same(one, other, own):
    tolerance = dict(rel=2e-3, abs=1e-4) if own else dict(rel=2e-2, abs=5e-3)  # a copy may round more
    assert [row["step"] for row in one] == [row["step"] for row in other]
    for a, b in zip(one, other):
        assert a.keys() == b.keys()
        assert a == pytest.approx(b, **tolerance)


def test_any_number_of_processes_plays_the_same_run(script, tmp_path):
    """Games, actions and minibatches do not depend on the number of processes: other games, each once (B29); the
    first process alone writes and prints; a run stopped with three goes on with two."""
    flags = [*ATARI.split(), "--total-timesteps", 768]
    code, output = finish(*start(tmp_path, 1, script.path, *flags, "--run-name", "one"))
    assert code == 0, output[-3000:]
    code, output = finish(*start(tmp_path, 3, script.path, *flags, "--run-name", "three"))
    assert code == 0 and output.count("writing runs/three") == 1, output[-3000:]
    same(rows(tmp_path / "runs/three"), rows(tmp_path / "runs/one"), script.own)
    state = torch.load(tmp_path / "runs/three/checkpoint.pt", weights_only=True)
    assert len({game["seed"] for game in state["parts"]["games"]}) == 4
    process, out = start(tmp_path, 3, script.path, *flags, "--run-name", "cut")
    stop_one(process, tmp_path / "runs/cut/metrics.jsonl", signal.SIGTERM)
    code, output = finish(process, out)
    assert code != 0 and output.count("--resume runs/cut goes on") == 1, output[-3000:]
    assert len(rows(tmp_path / "runs/cut")) < 6
    code, output = finish(*start(tmp_path, 2, script.path, "--resume", "runs/cut", "--no-compile"))
    assert code == 0, output[-3000:]
    same(rows(tmp_path / "runs/cut"), rows(tmp_path / "runs/one"), script.own)


def test_two_machines_make_the_run_of_one(script, tmp_path):
    """Two launchers with one process each, as `torchrun --nnodes 2` starts them on two machines, are one run: its rows
    are those of two processes of one launcher, written once, and a signal to one machine stops both, with the words that
    go on."""
    flags = [*ATARI.split(), "--num-envs", "3", "--save-every", "1"]

    def two_machines(*words):
        meet = ["--rdzv-backend=c10d", "--rdzv-id=x", f"--rdzv-endpoint=localhost:{crew.free_port()}"]
        launch = ["--nnodes=2", "--nproc-per-node=1", *meet]
        return [start(tmp_path, 2, script.path, *flags, *words, launch=launch, out=f"out{i}") for i in (0, 1)]

    code, output = finish(
        *start(tmp_path, 2, script.path, *flags, "--total-timesteps", 384, "--run-name", "one")
    )
    assert code == 0, output[-3000:]
    ended = [finish(*machine) for machine in two_machines("--total-timesteps", 384, "--run-name", "two")]
    assert [code for code, _ in ended] == [0, 0], ended
    assert "".join(output for _, output in ended).count("writing runs/two") == 1
    assert json.loads((tmp_path / "runs/two/config.json").read_text())["processes"] == 2
    same(rows(tmp_path / "runs/two"), rows(tmp_path / "runs/one"), script.own)
    machines = two_machines("--total-timesteps", 10**6, "--run-name", "cut")
    stop_one(machines[1][0], tmp_path / "runs/cut/checkpoint.pt", signal.SIGTERM)
    ended = [finish(*machine, timeout=60) for machine in machines]
    assert all(code != 0 for code, _ in ended)
    assert "".join(output for _, output in ended).count("--resume runs/cut goes on") == 1
    assert torch.load(tmp_path / "runs/cut/checkpoint.pt", weights_only=True)["step"] >= 96


def stop_one(torchrun, file, number):
    """Send the signal to the last process as soon as the file is there, with something in it."""
    wait_for(torchrun, file)
    children = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and parent_of(pid) == torchrun.pid]
    os.kill(max(children), number)


def wait_for(process, file):
    """Until the file is there, with something in it."""
    begun = time.time()
    while not (file.exists() and file.stat().st_size):
        assert time.time() - begun < 200 and process.poll() is None
        time.sleep(0.05)


def parent_of(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return None


def test_a_process_that_dies_ends_all(script, tmp_path):
    """Nobody waits for a dead process, also where no launcher ends the others, and the end is told in a sentence; the
    last checkpoint is whole, with the games of all."""
    words = [*ATARI.split(), "--total-timesteps", 10**6, "--save-every", 1, "--run-name", "x"]
    meet = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{crew.free_port()}", GLOO_SOCKET_IFNAME="lo")
    meet |= dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    (one, out), (other, _) = (
        start(tmp_path, 1, script.path, *words, out=f"out{k}", **meet, RANK=f"{k}", LOCAL_RANK=f"{k}")
        for k in (0, 1)
    )
    wait_for(one, tmp_path / "runs/x/checkpoint.pt")
    other.kill()
    code, output = finish(one, out, timeout=60)
    assert code == 1 and other.wait(60) == -signal.SIGKILL
    last = output.strip().splitlines()[-1]
    assert re.search(r"stopped at step [\d,]+: .*; last good checkpoint: runs/x/checkpoint.pt, step", last), (
        output
    )
    state = torch.load(tmp_path / "runs/x/checkpoint.pt", weights_only=True)
    assert state["step"] >= 128 and len({game["seed"] for game in state["parts"]["games"]}) == 4


def test_more_processes_than_environments(script, tmp_path):
    """Impossible shares are refused in one sentence, before there is a folder."""
    code, output = finish(*start(tmp_path, 2, script.path, "--num-envs", "1", "--device", "cpu"))
    assert code != 0 and "--num-envs 1 is fewer than the 2 processes" in output
    assert not (tmp_path / "runs").exists()
