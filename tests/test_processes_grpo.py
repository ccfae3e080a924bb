"""grpo_rlhf.py under torchrun, on real processes: N of them make the update that one makes, and all end together."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import crew
import pytest
import torch
from test_loop_grpo import Gradients, arguments, checkpoint, equal_runs, lines, load, made_batch
from test_loop_grpo import world as world  # a fixture
from torch.testing import assert_close

from conftest import Script

pytestmark = pytest.mark.setting("grpo_rlhf")
SIZES = [2, 3]
LOSSES = {  # the flags of an update, and for each number of processes the groups that each of them holds
    "token": (dict(max_grad_norm=0.3), {2: (3, 1), 3: (1, 1, 2)}),
    "sequence": (dict(aggregation="sequence", kl_coef=0.3), {2: (0, 4), 3: (2, 0, 2)}),
    "constant": (dict(aggregation="constant", surrogate="gspo"), {2: (1, 3), 3: (3, 1, 0)}),
    "single": (dict(num_minibatches=4), {2: (2, 2), 3: (1, 1, 2)}),
}
WHOLE = dict(
    num_prompts=5, num_minibatches=5, sampling_rounds=3, num_eval=7, eval_every=2, eval_samples=3, kl_coef=0.1,
    total_steps=4, save_every=1, seed=5, dataset="train.jsonl", eval_dataset="held.jsonl",
)  # fmt: skip


def few(prompts, texts, rows):
    """Groups of most prompts are flat; one reward is missing now and then."""
    values = [sum(int(digit) for digit in text if digit.isdigit()) % 5 / 4 for text in texts]
    values = [None if v == 0.25 and p[0] == "3" else v for v, p in zip(values, prompts)]
    return [v if p[0] in "1359" else 0.7 for v, p in zip(values, prompts)]


# ---- what runs in each process ----


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def part_of(batch, held, rank):
    """The part of a batch that a process holds, as wide as its own longest response."""
    first, last = sum(held[:rank]), sum(held[: rank + 1])
    part = {name: x[4 * first : 4 * last] for name, x in batch.items() if name != "prompts"}
    width = max([1, *part["mask"].sum(1).tolist()])
    part = {name: x[:, :width] if x.dim() == 2 else x for name, x in part.items()}
    return part | {"prompts": batch["prompts"][first:last]}


def update(module, world, rank, size):
    """Each update of LOSSES: gradients of the steps, weights after them, metrics."""
    module.join_processes(torch.device("cpu"))
    found = {}
    for name, (flags, held) in LOSSES.items():
        args, model, batch, _ = made_batch(module, world, "llama", **flags)
        batch = part_of(batch, held[size], rank) if size > 1 else batch
        steps = Gradients(model)
        module.update_policy(model, steps, batch, torch.Generator().manual_seed(0), args, rank)
        args.update_epochs, args.max_grad_norm = 2, 0.3
        optimizer, shuffle = sgd(model), torch.Generator().manual_seed(1)
        metrics = module.update_policy(model, optimizer, batch, shuffle, args, rank)
        found[name] = steps.steps, [p.detach() for p in model.parameters()], metrics
    return found


def train(module, world, rank, size, reward=few, **flags):
    """`main`, with all that this process sampled for training and evaluation."""
    calls = []

    def keep(prompts, texts, rows):
        rewards = reward(prompts, texts, rows)
        calls.append((prompts, texts, [math.nan if r is None else r for r in rewards]))
        return rewards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_rewards", lambda names: {"few": keep})
        batches, inner = [], module.update_policy
        note = lambda *a: batches.append(list(a[2]["prompts"])) or inner(*a)
        patch.setattr(module, "update_policy", note)
        if "resume" in flags:
            args = module.command_line(["--device", "cpu", "--resume", flags["resume"]])
        else:
            args = arguments(module, world, **flags)
            args.reward = "exact"
        out = module.main(args)
    return dict(out=out, calls=calls, batches=batches)


def whole(module, world, rank, size):
    return train(module, world, rank, size, run_name="whole", **WHOLE)


def same_prompts(module, world, rank, size):
    """All training prompts are one: what differs between processes was drawn."""
    rows = [{"prompt": "3=" if i < 20 else f"9{i}=", "answer": i} for i in range(26)]
    Path(f"same{rank}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = dict(num_prompts=size, num_minibatches=1, total_steps=1, eval_samples=3)
    return train(module, world, rank, size, dataset=f"same{rank}.jsonl", **flags)


def broken_gradient(module, world, rank, size):
    """The loss of the last process is NaN in step 3."""
    aggregate, rollout, steps = module.aggregate, module.sample_groups, []
    with pytest.MonkeyPatch.context() as patch:
        bad = lambda: math.nan if len(steps) == 3 and rank == size - 1 else 1.0
        patch.setattr(module, "aggregate", lambda *a: aggregate(*a) * bad())
        patch.setattr(module, "sample_groups", lambda *a: steps.append(1) or rollout(*a))
        return train(module, world, rank, size, run_name="broken", **WHOLE | dict(sampling_rounds=1))


def after(calls, rank, size, action):
    """`few`, and `action` in the last process at the given one of its training calls."""

    def reward(prompts, texts, rows):
        reward.left -= prompts[0][0] != "9"
        if reward.left == 0 and rank == size - 1 and prompts[0][0] != "9":
            action()
        return few(prompts, texts, rows)

    reward.left = calls
    return reward


def stopped(module, world, rank, size):
    """The last process alone gets SIGTERM."""
    reward = after(3, rank, size, lambda: os.kill(os.getpid(), signal.SIGTERM))
    flags = WHOLE | dict(save_every=100)
    return train(module, world, rank, size, reward, run_name="cut", **flags)


def resumed(module, world, rank, size):
    if rank == 0:
        shutil.copytree("runs/cut", "runs/other")
    return train(module, world, rank, size, resume="runs/cut")


def too_few(module, world, rank, size):
    return train(module, world, rank, size, num_prompts=size - 1, num_minibatches=1)


def poisoned(module, world, rank, size):
    """The weights of the last process are no numbers from step 3 on."""
    rollout, steps = module.sample_groups, []

    def poison(sampler, *rest):
        steps.append(1)
        if len(steps) == 3 and rank == size - 1:
            next(sampler.model.parameters()).data.fill_(math.nan)
        return rollout(sampler, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "sample_groups", poison)
        return train(module, world, rank, size, run_name="poisoned", **WHOLE)


def killed(module, world, rank, size):
    reward = after(4, rank, size, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return train(module, world, rank, size, reward, run_name="killed", **WHOLE)


def go_on(module, world, rank, size):
    return train(module, world, rank, size, resume="runs/killed")


def other_start(module, world, rank, size):
    """Each process starts from other weights, reference included, until those of the first are sent round."""
    build = module.build

    def differs(*inputs):
        task, model = build(*inputs)
        for parameter in model.parameters():
            parameter.data.mul_(1 + rank)
        return task, model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "build", differs)
        flags = WHOLE | dict(total_steps=1, eval_every=0)
        return train(module, world, rank, size, run_name="start", **flags)


def drifted(module, world, rank, size):
    """The weights of the last process move away after the first step."""
    inner = module.update_policy

    def moves(model, *rest):
        found = inner(model, *rest)
        next(model.parameters()).data += rank
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "update_policy", moves)
        return train(module, world, rank, size, run_name="drifted", **WHOLE)


def process(rank, size, port, path, world, folder, jobs):
    """One process of torchrun: the jobs in turn; a result, or the name and text of an exception, of each."""
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    crew.become(rank, size, port)
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    copy = Script(path)  # with our defaults
    module = copy.module
    for name in ("flags", "new_terms_off"):  # what the fixtures of test_loop_grpo.py ask a script for
        setattr(module, name, getattr(copy, name))
    found = {}
    for job in jobs:
        try:
            found[job] = globals()[job](module, world, rank, size)
        except (Exception, SystemExit, pytest.skip.Exception) as error:
            found[job] = type(error).__name__, str(error)
        torch.save(found, f"{jobs[0]}{rank}.tmp")
        os.replace(f"{jobs[0]}{rank}.tmp", f"{jobs[0]}{rank}.pt")


# ---- what starts them ----


def launch(script, world, folder, size, *jobs, limit=150):
    """Run the jobs in `size` processes; the results of each by job, and how the processes ended."""
    for name, prompts in (
        ("train", [f"{n}=" for n in range(100, 900, 7)]),
        ("held", [f"9{n}=" for n in range(7)]),
    ):
        rows = [json.dumps({"prompt": prompt, "answer": prompt[0]}) + "\n" for prompt in prompts]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    late = crew.run(process, size, script.path, world, folder, jobs, limit=limit)
    read = lambda path: torch.load(path, weights_only=False) if path.exists() else {}
    found = [read(folder / f"{jobs[0]}{rank}.pt") for rank in range(size)]
    return {job: [one.get(job, ("nothing", "")) for one in found] for job in jobs}, late


@pytest.fixture(scope="module")
def crews(script, world, tmp_path_factory):
    """For two and for three processes, one after another: a folder and the results of all jobs."""
    script.join_processes, script.collect  # noqa: B018  a copy may have no processes
    jobs = ("update", "whole", "same_prompts", "broken_gradient", "stopped", "resumed", "too_few")
    crews = {}
    for size in SIZES:
        folder = tmp_path_factory.mktemp(f"crew{size}")
        found, _ = launch(script, world, folder, size, *jobs, *["other_start", "drifted"] * (size == 2))
        crews[size] = folder, found
    return crews


def good(results):
    """The results of a job, none of which may be an exception."""
    if ("Skipped",) in [result[:1] for result in results if isinstance(result, tuple)]:
        pytest.skip(next(text for name, text in results))
    assert all(isinstance(result, dict) for result in results), results
    return results


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", SIZES)
def test_processes_make_the_update_of_one(script, world, crews, size, name):
    """Gradients (clipped after the sum), weights after eight steps and metrics are those of one process on the whole
    batch, however groups and lengths are spread, also where a process has nothing to learn from or no group at all
    (B104, B107, huggingface/trl #2995, #3021)."""
    steps, weights, metrics = crew_steps = good(crews[size][1]["update"])[0][name]
    flags, _ = LOSSES[name]
    args, model, batch, _ = made_batch(script, world, "llama", **flags)
    expected = Gradients(model)
    script.update_policy(model, expected, batch, torch.Generator().manual_seed(0), args)
    assert len(steps) == len(expected.steps) == (3 if name == "single" else 2)
    for found, right in zip(steps, expected.steps):
        assert_close(found, right, atol=1e-6, rtol=1e-5)
        assert right.abs().max() > 1e-3
    args.update_epochs, args.max_grad_norm = 2, 0.3
    shuffle = torch.Generator().manual_seed(1)
    right = script.update_policy(model, sgd(model), batch, shuffle, args)
    for found, parameter in zip(weights, model.parameters(), strict=True):
        assert_close(found, parameter.detach(), atol=1e-6, rtol=1e-6)
    start = load(script, world, "llama")[1]
    assert max((a - b).abs().max() for a, b in zip(weights, start.parameters())) > 1e-3
    assert metrics == pytest.approx(right, rel=1e-4, abs=1e-6) and right["losses/policy_loss"]
    for other in crews[size][1]["update"][1:]:
        assert all(torch.equal(a, b) for a, b in zip(other[name][1], crew_steps[1]))
        assert other[name][2] == metrics


def without_clock(metrics):
    """The metrics that must be of all processes; one that a copy adds may be of each."""
    charts = "reward flat_groups response_length eos_share unscored tokens rounds learning_rate".split()
    kept = ("losses/", "eval/", "step", "folder", *(f"charts/{name}" for name in charts))
    return {name: value for name, value in metrics.items() if name.startswith(kept)}


@pytest.mark.parametrize("size", SIZES)
def test_rounds_and_metrics_are_of_all_processes(script, crews, size):
    """Rounds of dynamic sampling end when all processes together have enough groups, the first ones in their order are
    kept (uneven, also none), and all numbers are those of all samples, the same in each process."""
    folder, found = crews[size]
    runs = good(found["whole"])
    assert all(without_clock(run["out"]) == without_clock(runs[0]["out"]) for run in runs)
    training = [[call for call in run["calls"] if call[0][0][0] != "9"] for run in runs]
    spread, ends = set(), set()
    for step, row in enumerate(lines({"folder": folder / "runs/whole"})[1:]):
        kept, owners, rewards, texts, number, flat = [], [], [], [], 0, 0
        while len(kept) < 5 and number < 3:
            number += 1
            for rank, calls in enumerate(training):
                prompts, its_texts, its = calls.pop(0)
                assert len(prompts) == 4 * (5 * (rank + 1) // size - 5 * rank // size)
                rewards, texts = rewards + its, texts + its_texts
                for i in range(0, len(prompts), 4):
                    known = {r for r in its[i : i + 4] if r == r}
                    flat += len(known) < 2
                    kept += [prompts[i]] * (len(known) > 1)
                    owners += [rank] * (len(known) > 1)
        ends.add((number, len(kept) >= 5))
        tokenizer = script.digit_tokenizer()
        for rank, run in enumerate(runs):
            own = [tokenizer(p).input_ids for p, owner in zip(kept[:5], owners[:5]) if owner == rank]
            assert run["batches"][step] == own
            spread.add(len(own))
        known = [r for r in rewards if r == r]
        assert row["charts/rounds"] == number and row["charts/flat_groups"] == pytest.approx(
            flat / 5 / number
        )
        assert row["charts/unscored"] == pytest.approx(1 - len(known) / len(rewards))
        if row["charts/unscored"] == 0 or number == 1:
            assert row["charts/reward"] == pytest.approx(sum(known) / len(known))
        assert row["charts/response_length"] == pytest.approx(row["charts/tokens"] / len(rewards))
        assert row["charts/tokens"] >= sum(map(len, texts))
    assert not any(training) and len(spread) > 2 and len(ends) > 1, (spread, ends)
    assert size == 2 or 0 in spread


@pytest.mark.parametrize("size", SIZES)
def test_evaluation_is_divided_and_gathered(crews, size):
    """Each held-out prompt is answered by one process; the records are in the order of the rows, and the pass rates those
    of all answers."""
    folder, found = crews[size]
    runs = good(found["whole"])
    records = lines({"folder": folder / "runs/whole"}, "completions")
    assert [r["step"] for r in records] == [0] * 7 + [2] * 7 + [4] * 7
    most, calls = 5 * 4 // (3 * size), [[c for c in run["calls"] if c[0][0][0] == "9"] for run in runs]
    shares = [7 * (rank + 1) // size - 7 * rank // size for rank in range(size)]
    last = [its[-2 * math.ceil(share / most) :] for its, share in zip(calls, shares)]
    assert [len(its) for its in calls] == [3 * len(its) for its in last]
    greedy, sampled = ([call for its in last for call in its[kind::2]] for kind in (0, 1))
    assert [p for prompts, *_ in greedy for p in prompts] == [r["prompt"] for r in records[-7:]]
    assert [t for _, texts, _ in greedy for t in texts] == [r["completion"] for r in records[-7:]]
    passed = [r >= 1 for *_, rewards in sampled for r in rewards]
    groups = [passed[i : i + 3] for i in range(0, 21, 3)]
    out = runs[0]["out"]
    assert out["eval/greedy"] == pytest.approx(sum(r >= 1 for *_, rs in greedy for r in rs) / 7)
    assert out["eval/pass@1"] == pytest.approx(sum(passed) / 21)
    assert out["eval/pass@3"] == pytest.approx(sum(map(any, groups)) / 7)


@pytest.mark.parametrize("size", SIZES)
def test_processes_sample_different_tokens(crews, size):
    """The same prompt gets other responses in each process, in training and in evaluation; the states of all random
    streams are in the checkpoint."""
    folder, found = crews[size]
    runs = good(found["same_prompts"])
    texts = [tuple(t for prompts, ts, _ in run["calls"] if prompts[0] == "3=" for t in ts) for run in runs]
    assert all(len(set(its)) > 1 for its in texts) and len(set(texts)) == size
    states = checkpoint({"folder": folder / "runs/whole"})["parts"]["tokens"]
    assert len(states) == size and len({tuple(state.tolist()) for state in states}) == size


def test_only_the_first_process_speaks(crews):
    """One folder a run, one line a step, and nothing from the other processes on the terminal."""
    folder, found = crews[2]
    good(found["whole"])
    assert [row["step"] for row in lines({"folder": folder / "runs/whole"})] == [0, 1, 2, 3, 4]
    assert "the model is in runs/whole/model" in (folder / "out0").read_text()
    assert not (folder / "out1").read_text() and "steps" not in (folder / "err1").read_text()
    names = ("whole", "broken", "cut", "other", "start", "drifted")
    assert len(list((folder / "runs").iterdir())) == 1 + len(names)


@pytest.mark.parametrize("size", SIZES)
def test_a_broken_gradient_ends_all(crews, size):
    """NaN in the loss of one process is in the sum: all end at the same step, and the checkpoint is whole."""
    folder, found = crews[size]
    text = "stopped at step 3: the gradient is not finite; last good checkpoint: runs/broken/checkpoint.pt, step 2"
    assert found["broken_gradient"] == [("FloatingPointError", text)] * size
    state = checkpoint({"folder": folder / "runs/broken"})
    assert state["step"] == 2 and all(p.isfinite().all() for p in state["parts"]["model"].values())


@pytest.mark.parametrize("size", SIZES)
def test_a_signal_to_one_stops_all_and_the_run_goes_on(crews, size):
    """SIGTERM to one process stops all after the same step with a checkpoint, from which the run goes on to be the
    uninterrupted one to the bit."""
    folder, found = crews[size]
    assert found["stopped"] == [("SystemExit", "143")] * size
    said = re.findall(r"stopped at step (\d); .* --resume runs/cut goes on", (folder / "out0").read_text())
    assert said == [str(checkpoint({"folder": folder / "runs/other"})["step"])]
    assert 0 < checkpoint({"folder": folder / "runs/other"})["step"] < 4
    good(found["resumed"])
    equal_runs({"folder": folder / "runs/whole"}, {"folder": folder / "runs/cut"})


def test_wrong_numbers_of_processes_are_named(script, crews, tmp_path, monkeypatch):
    """Fewer prompts than processes, or a run of another number of them, is refused in one sentence."""
    folder, found = crews[3]
    assert found["too_few"] == [("UsageError", "--num-prompts 2 are fewer than the 3 processes")] * 3
    monkeypatch.chdir(folder)
    with pytest.raises(script.UsageError, match="^--resume goes on with a run of 3 processes, not of 1$"):
        script.main(script.command_line(["--resume", "runs/other", "--device", "cpu"]))


def test_all_start_from_the_weights_of_the_first(crews):
    """Other weights in other processes are replaced at the start, in the reference too; weights that drift apart are
    found at the next checkpoint, which is not written."""
    folder, found = crews[2]
    a, b = (run["out"] for run in good(found["other_start"]))
    assert without_clock(a) == without_clock(b)
    row = lines({"folder": folder / "runs/start"})[1]
    assert abs(row["losses/ref_kl"]) < 5  # a reference twice as large is far away
    text = "stopped at step 1: the weights of the processes differ; last good checkpoint: none yet"
    assert found["drifted"] == [("ConnectionError", text)] * 2


def test_logits_of_nan_in_one_process_end_all(script, world, tmp_path):
    """A process that raises ends the others at once, with a sentence that names the last good checkpoint."""
    found, late = launch(script, world, tmp_path, 2, "poisoned", limit=60)
    (first, said), (last, why) = found["poisoned"]
    assert (first, last) == ("ConnectionError", "FloatingPointError") and not late
    assert why.startswith("stopped at step 3: the model's logits are not numbers")
    for text in (said, why):
        assert text.startswith("stopped at step 3: ")
        assert text.endswith("last good checkpoint: runs/poisoned/checkpoint.pt, step 2")


def test_a_killed_process_ends_all(script, world, crews, tmp_path):
    """SIGKILL to one process ends the others within a minute; the last checkpoint goes on to be the whole run."""
    found, late = launch(script, world, tmp_path, 2, "killed", limit=60)
    (kind, said), nothing = found["killed"]
    assert kind == "ConnectionError" and nothing == ("nothing", "") and not late
    step = checkpoint({"folder": tmp_path / "runs/killed"})["step"]
    assert said.endswith(f"last good checkpoint: runs/killed/checkpoint.pt, step {step}") and 0 < step < 4
    found, _ = launch(script, world, tmp_path, 2, "go_on", limit=60)
    good(found["go_on"])
    equal_runs({"folder": crews[2][0] / "runs/whole"}, {"folder": tmp_path / "runs/killed"})


def test_torchrun(script, world, tmp_path):
    """The command itself: SIGTERM to torchrun stops both processes after the same step, with a checkpoint."""
    flags = (
        f"--model {world / 'llama'} --dataset {world / 'data.jsonl'} --reward {world / 'rewards.py'}:digits"
    )
    flags += (
        " --num-eval 6 --num-prompts 4 --group-size 4 --max-new-tokens 6 --total-steps 2000 --eval-samples 0"
    )
    flags += " --run-name x --device cpu --save-every 100000 --eval-every 0"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | dict(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1")
    log = tmp_path / "runs/x/metrics.jsonl"
    with open(tmp_path / "said", "w") as said:
        command = [*launcher, str(script.path), *flags.split()]
        run = subprocess.Popen(command, cwd=tmp_path, stdout=said, stderr=subprocess.STDOUT, env=env)
        ends = time.monotonic() + 120
        while time.monotonic() < ends and run.poll() is None:
            if log.exists() and len(log.read_text().splitlines()) > 2:
                break
            time.sleep(0.2)
        run.terminate()
        code = run.wait(60)
    said = (tmp_path / "said").read_text()
    assert code != 0 and (tmp_path / "runs/x/checkpoint.pt").exists(), said
    state = torch.load(tmp_path / "runs/x/checkpoint.pt", weights_only=True)
    rows = [json.loads(row) for row in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(state["step"] + 1)] and len(state["parts"]["tokens"]) == 2
    assert said.count(f"stopped at step {state['step']:,}; ") == 1
