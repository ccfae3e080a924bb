"""ppo_rlhf.py on several processes: the update, the numbers and the end of a run are those of one process."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import crew
import numpy as np
import pytest
import torch
from test_loop_ppo import CLOCK, STOPS, arguments, lines, responses_of, snapshot, text_of, world  # noqa: F401
from torch.testing import assert_close

from conftest import Script

pytestmark = pytest.mark.setting("ppo_rlhf")
KILLER = """
import os
def mortal(prompts, completions, rows):
    if os.environ["RANK"] == "1" and prompts[0][0] != "9":
        done = open("calls").read() if os.path.exists("calls") else ""
        open("calls", "w").write(done + ".")
        if len(done) == 3:  # the normalisation and two steps
            os.kill(os.getpid(), 9)
    return [float(len(text)) for text in completions]
"""


# ---- what runs in each process ----


def answers(sampler, prompts, *rest):
    """In the place of sampling: to each prompt always the same response, of 1 to 6 tokens."""
    tokens = torch.full((len(prompts), 6), 2)
    for row, prompt in zip(tokens, prompts):
        rng = np.random.default_rng(prompt)
        row[:] = torch.from_numpy(rng.choice([2, 3, 4, 5, 6, 7, 8, 10, 11, 12], size=6))
        length = int(rng.geometric(0.45))
        row[length - 1 : length] = int(rng.choice(STOPS))  # none if the length is beyond the end
    return tokens, -tokens / 5, tokens / 10


def run(script, rank, flags, fixed=False, fault=None):
    """`main`, and what this process saw: responses and rewards, batches, weights before each, calls of fit_reward_model;
    `fault(module, patch, batches)` breaks something first."""
    module, notes = script.module, {"responses": [], "batches": [], "weights": [], "fitted": 0}
    with pytest.MonkeyPatch.context() as patch:
        respond, sample, fit = module.Sampler.respond, module.sample_batch, module.fit_reward_model

        def note_response(*inputs):
            batch, texts = respond(*inputs)
            notes["responses"].append(([row["prompt"] for row in inputs[1]], texts, snapshot(batch)))
            return batch, texts

        def note_batch(learner, *inputs):
            models = learner.policy, learner.critic
            notes["weights"].append([p.detach().clone() for model in models for p in model.parameters()])
            batch, charts = sample(learner, *inputs)
            notes["batches"].append(snapshot(batch))
            return batch, charts

        def note_fit(*inputs):
            notes["fitted"] += 1
            return fit(*inputs)

        patch.setattr(module.Sampler, "respond", note_response)
        patch.setattr(module, "sample_batch", note_batch)
        patch.setattr(module, "fit_reward_model", note_fit)
        if fixed:
            patch.setattr(module.Sampler, "generate", answers)
        if fault:
            fault(module, patch, notes["batches"])
        try:
            words = [f"--{name}={value}" for name, value in flags.items()]
            out = module.main(module.parse_args(words) if flags.get("resume") else module.Args(**flags))
            notes["out"] = {name: value for name, value in out.items() if name not in CLOCK}
        except (Exception, SystemExit) as error:
            notes["error"] = [type(error).__name__, str(error)]
    return notes


def nan_gradient(module, patch, batches):
    """In the third batch."""
    loss = module.policy_loss
    patch.setattr(module, "policy_loss", lambda *a: loss(*a) * (1.0 if len(batches) < 3 else float("nan")))


def nan_weights(module, patch, batches):
    """In the third batch."""
    generate = module.Sampler.generate

    def poisoned(sampler, *inputs):
        if len(batches) == 2:
            next(sampler.source.parameters()).data.fill_(float("nan"))
        return generate(sampler, *inputs)

    patch.setattr(module.Sampler, "generate", poisoned)


def signalled(module, patch, batches):
    """SIGTERM in the second update."""
    update = module.update_models

    def interrupted(*inputs):
        if len(batches) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(*inputs)

    patch.setattr(module, "update_models", interrupted)


def other_weights(module, patch, batches):
    """Policy and value model start elsewhere."""
    classifier_of = module.classifier_of

    def moved(policy, classifier):
        critic = classifier_of(policy, classifier)
        for p in [*policy.parameters(), *critic.parameters()]:
            p.data += 0.1
        return critic

    patch.setattr(module, "classifier_of", moved)


def drifted_weights(module, patch, batches):
    """The policy moves on its own in the second update."""
    update = module.update_models

    def drift(learner, *inputs):
        if len(batches) == 2:
            next(learner.policy.parameters()).data[0] += 1e-3
        return update(learner, *inputs)

    patch.setattr(module, "update_models", drift)


def serve(rank, size, port, path, jobs):
    """One process of a crew: the jobs in a row, and what each gives in a file. `fault` is for the last process only."""
    crew.become(rank, size, port)
    torch.set_num_threads(1)
    script = Script(Path(path))
    for name, flags, fixed, fault in jobs:
        notes = run(script, rank, flags, fixed, globals()[fault] if fault and rank == size - 1 else None)
        torch.save(notes, f"{name}-{rank}.pt")


def together(script, folder, size, jobs):
    """Run the jobs (name, flags, fixed, fault) on `size` processes. Returns their notes: name -> one for each rank."""
    assert script.join_processes, "a copy without it is skipped"
    with contextlib.chdir(folder):
        stuck = crew.run(serve, size, script.path, jobs, limit=240)
    assert not stuck, f"the processes {stuck} hang"
    load = lambda name, rank: torch.load(folder / f"{name}-{rank}.pt", weights_only=False)
    return {name: [load(name, rank) for rank in range(size)] for name, *_ in jobs}


def flags_of(script, world, name, **flags):  # noqa: F811
    return vars(arguments(script, world, **flags)) | script.new_terms_off() | {"run_name": name}


def fixed_runs(script, world):  # noqa: F811
    """Runs whose responses do not depend on chance; of the second, two samples a minibatch."""
    flags = dict(
        reward_model="judge", kl_target=1.0, kl_horizon=40, learning_rate=2e-4, value_learning_rate=2e-4
    )
    flags |= dict(self_checks=False, eval_every=1)
    small = dict(num_minibatches=8, update_epochs=1, num_eval=2, normalize_scores=7, target_kl=0.1)
    return [
        ("fixed", flags_of(script, world, "fixed", **flags), True, None),
        ("small", flags_of(script, world, "small", **flags | small), True, None),
    ]


@pytest.fixture(scope="module")
def one(script, world, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("one")
    with contextlib.chdir(folder):
        return folder, {
            name: run(script, 0, flags, fixed) for name, flags, fixed, _ in fixed_runs(script, world)
        }


@pytest.fixture(scope="module")
def three(script, world, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("three")
    few = ("few", flags_of(script, world, "few", num_prompts=2, num_minibatches=1), False, None)
    return folder, together(script, folder, 3, [*fixed_runs(script, world), few])


@pytest.fixture(scope="module")
def two(script, world, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("two")
    row = lambda prompt: json.dumps({"prompt": prompt, "first": prompt[0]}) + "\n"
    (folder / "same.jsonl").write_text(row("5=") * 16)
    (folder / "held.jsonl").write_text(row("9=") * 6)
    make = lambda name, **flags: (name, flags_of(script, world, name, save_every=1, **flags), False, None)
    broken = lambda name, fault, **flags: (*make(name, total_steps=4, **flags)[:3], fault)
    stop = dict(total_steps=4, save_every=100, kl_target=0.3, kl_horizon=40)
    same = dict(prompts=str(folder / "same.jsonl"), eval_prompts=str(folder / "held.jsonl"), temperature=9.0)
    same |= dict(total_steps=1, max_new_tokens=5)
    trained = dict(train_reward_model=str(world / "pairs.jsonl"), reward_learning_rate=1e-2, total_steps=1)
    jobs = [
        *fixed_runs(script, world)[:1],
        ("whole", flags_of(script, world, "whole", **stop), False, None),
        ("stopped", flags_of(script, world, "stopped", **stop), False, "signalled"),
        ("resumed", dict(resume="runs/stopped", device="cpu"), False, None),
        make("same", **same),
        make("trained", **trained),
        broken("elsewhere", "other_weights", kl_coef=0.0),
        broken("drift", "drifted_weights"),
        broken("nan", "nan_gradient"),
        broken("gone", "nan_weights"),  # the last: that process leaves
    ]
    return folder, together(script, folder, 2, jobs)


def checkpoint(folder, name):
    return torch.load(folder / "runs" / name / "checkpoint.pt", weights_only=True)


# ---- the same update ----


@pytest.mark.parametrize("size, name", [(2, "fixed"), (3, "fixed"), (3, "small")])
def test_processes_make_the_update_of_one(script, one, request, size, name):
    """With the same responses 2 and 3 processes have the batch, advantages (B28, THUDM/slime #2235), weights, KL
    coefficient, score normalisation, evaluation and metrics of one process, uneven shares and lengths and a process
    without a sample in a minibatch included (B107, huggingface/trl #2995)."""
    (folder, notes), (base, right) = request.getfixturevalue({2: "two", 3: "three"}[size]), one
    right, width = right[name], lambda response: response[2]["mask"].sum(1).max().item()
    widths = [[width(response) for response in note["responses"]] for note in notes[name]]
    assert any(len(set(step)) > 1 for step in zip(*widths)), widths  # the longest response is on one of them
    assert len(right["batches"]) == 3 and right["out"]["losses/kl"] != 0
    for rank, mine in enumerate(notes[name]):
        assert "error" not in mine, mine["error"]
        for found, expected in zip(mine["batches"], right["batches"], strict=True):
            assert found["prompts"] == expected["prompts"] and set(found) == set(expected)
            keep = expected["mask"]
            assert torch.equal(found["mask"], keep) and torch.equal(
                found["tokens"][keep], expected["tokens"][keep]
            )
            for key in ("logps", "ref_logps", "values", "returns", "advantages", "rewards"):
                assert_close(found[key], expected[key], atol=2e-5, rtol=1e-5)
        for key, value in right["out"].items():
            assert key == "folder" or mine["out"][key] == pytest.approx(value, rel=1e-4, abs=2e-6), (
                rank,
                key,
            )
    found, expected = checkpoint(folder, name)["parts"], checkpoint(base, name)["parts"]
    for key, weight in expected["model"].items():
        assert_close(found["model"][key], weight, atol=1e-6, rtol=0.0, msg=key)
    assert found["kl_coef"] == pytest.approx(expected["kl_coef"], rel=1e-5) and expected["kl_coef"] != 0.3
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    for kind in ("metrics", "completions"):
        logs = [lines({"folder": where / "runs" / name}, kind) for where in (folder, base)]
        for mine, theirs in zip(*logs, strict=True):
            assert mine.keys() == theirs.keys()
            for key, value in theirs.items():
                good = (
                    value
                    if isinstance(value, str) or value is None
                    else pytest.approx(value, rel=1e-4, abs=2e-6)
                )
                assert mine[key] == good, key


def test_a_process_without_samples_takes_part(script, three):
    """The updates of `small` were made though in each minibatch of two samples one of three processes had none."""
    assert [script.share_of(2, rank, 3) for rank in range(3)] == [slice(0, 0), slice(0, 1), slice(1, 2)]
    assert all(notes["out"]["charts/updates"] == 8 for notes in three[1]["small"])


# ---- what is global ----


def test_samples_differ_between_processes(two):
    """To one and the same prompt the processes sample other responses, in training and in evaluation (B29)."""
    mine, other = ([texts for _, texts, _ in notes["responses"]] for notes in two[1]["same"])
    assert [len(texts) for texts in mine] == [len(texts) for texts in other] == [10, 3, 8, 3]
    assert all(a != b for a, b in zip(mine, other))
    prompts = {prompt for notes in two[1]["same"] for prompts, *_ in notes["responses"] for prompt in prompts}
    assert prompts == {"5=", "9="}


def test_metrics_are_of_all_processes_and_the_same_on_each(two):
    """Scores, lengths, stops, KL and its coefficient are those of all responses of all processes together; advantages
    have mean 0 and deviation 1 over all of them (B28), not on each process."""
    folder, notes = two[0], two[1]["whole"]
    assert notes[0]["out"] == notes[1]["out"]
    rows = lines({"folder": folder / "runs" / "whole"})
    training = [[r for r in note["responses"] if r[0][0][0] != "9"] for note in notes]
    raw = torch.cat([ranks[0][2]["rewards"] for ranks in training])
    norm = {"mean": raw.mean().item(), "std": raw.std().item()}
    state, coef = checkpoint(folder, "whole")["parts"], 0.3
    assert len(raw) == 20 and state["norm"] == pytest.approx(norm, rel=1e-5)
    for step in range(1, 5):
        parts = [ranks[step] for ranks in training]
        texts = [text for _, texts, _ in parts for text in texts]
        rewards = torch.cat([batch["rewards"] for *_, batch in parts])
        lengths = torch.cat([batch["mask"].sum(1) for *_, batch in parts])
        ended = torch.cat([batch["finished"] for *_, batch in parts]).float()
        batches = [note["batches"][step - 1] for note in notes]
        assert all(torch.equal(x, batches[1][key]) for key, x in batches[0].items() if key != "prompts")
        batch, row = batches[0], rows[step]
        said = [text_of(response) for response, _ in responses_of(batch)]
        assert said == texts and len(texts) == 16 and batch["rewards"].tolist() == rewards.tolist()
        kl = (batch["logps"] - batch["ref_logps"]).sum(1).mean().item()
        spread = (batch["logps"] - batch["sampled"]).abs().sum().item() / lengths.sum().item()
        for key, value in {
            "charts/score": rewards.mean(), "charts/response_length": lengths.float().mean(),
            "charts/eos_share": ended.mean(), "charts/tokens": lengths.sum(), "losses/kl": kl,
            "charts/distinct": len(set(texts)) / 16, "charts/kl_coef": coef, "losses/mismatch": spread,
        }.items():  # fmt: skip
            assert row[key] == pytest.approx(float(value), rel=1e-4, abs=1e-6), key
        coef *= 1 + min(max(kl / 0.3 - 1, -0.2), 0.2) * 16 / 40
        adv, keep = batch["advantages"], batch["mask"]
        raw = (batch["returns"] - batch["values"])[keep].double()
        right = (raw - raw.mean()) / (raw.var(correction=0) + 1e-8).sqrt()
        assert_close(adv[keep].double(), right, atol=1e-4, rtol=1e-4)
        assert max(abs(adv[part][keep[part]].mean().item()) for part in (slice(0, 8), slice(8, 16))) > 0.02
    assert state["kl_coef"] == pytest.approx(coef, rel=1e-4)


def test_one_process_writes(two):
    """Each line and completion is written once, all held-out prompts are answered once."""
    folder = two[0]
    assert [row["step"] for row in lines({"folder": folder / "runs" / "whole"})] == [0, 1, 2, 3, 4]
    records = lines({"folder": folder / "runs" / "whole"}, "completions")
    assert [(r["step"], r["prompt"]) for r in records] == [(s, f"9{i}=") for s in (0, 4) for i in range(6)]
    assert (folder / "runs" / "whole" / "model").is_dir()


def test_the_first_process_trains_the_reward_model_for_all(script, two):
    """--train-reward-model runs in the first process; the others wait and read its folder."""
    folder, notes = two[0], two[1]["trained"]
    assert [note["fitted"] for note in notes] == [1, 0] and notes[0]["out"] == notes[1]["out"]
    judge = script.load_classifier(str(folder / "runs" / "trained" / "reward_model"))[1]
    right = [p.detach() for p in judge.parameters()]
    for note in notes:
        assert all(torch.equal(p, q) for p, q in zip(note["weights"][0][-len(right) :], right, strict=True))


def test_all_start_from_the_weights_of_the_first_process(two):
    """Weights that differ at the start are replaced; weights that come apart later end the run at a checkpoint."""
    first, second = (
        [torch.cat([p.flatten() for p in ps]) for ps in n["weights"]] for n in two[1]["elsewhere"]
    )
    untouched = torch.cat([p.flatten() for p in two[1]["whole"][0]["weights"][0]])
    assert len(first) == 4 and all(torch.equal(a, b) for a, b in zip(first, second))
    assert torch.equal(first[0], untouched)
    for kind, text in (note["error"] for note in two[1]["drift"]):
        assert kind == "ConnectionError" and "stopped at step 2: the weights of the processes differ" in text
        assert text.endswith("runs/drift/checkpoint.pt, step 1")


# ---- the end of a run ----


def test_a_signal_to_one_process_stops_all_at_one_step(two):
    """SIGTERM to one process: all leave after the same step with a checkpoint, and the resumed run is the uninterrupted
    one to the bit, the random numbers of every process included."""
    folder, notes = two
    assert [note["error"] for note in notes["stopped"]] == [["SystemExit", f"{128 + signal.SIGTERM}"]] * 2
    assert [len(note["batches"]) for note in notes["stopped"] + notes["resumed"]] == [2] * 4
    for whole, stopped, resumed in zip(*(notes[name] for name in ("whole", "stopped", "resumed"))):
        for right, found in zip(whole["batches"], stopped["batches"] + resumed["batches"], strict=True):
            assert all(torch.equal(x, found[key]) for key, x in right.items() if key != "prompts")
    states = [checkpoint(folder, name)["parts"] for name in ("whole", "stopped")]
    assert all(torch.equal(p, states[1]["model"][name]) for name, p in states[0]["model"].items())
    assert all(map(torch.equal, *(state["tokens"] for state in states))) and len(states[0]["tokens"]) == 2
    assert not torch.equal(*states[0]["tokens"])
    for kind in ("metrics", "completions"):
        whole, resumed = (lines({"folder": folder / "runs" / name}, kind) for name in ("whole", "stopped"))
        assert whole == resumed


def test_another_number_of_processes_is_refused(script, two, three, monkeypatch):
    """At --resume; and fewer prompts than processes, on each of them in one sentence."""
    monkeypatch.chdir(two[0])
    with pytest.raises(script.UsageError, match="runs/whole is finished"):
        script.main(script.parse_args(["--resume", "runs/whole", "--device", "cpu"]))
    with pytest.raises(script.UsageError, match="--resume goes on with a run of 2 processes, not of 1"):
        script.main(script.parse_args(["--resume", "runs/nan", "--device", "cpu"]))
    text = "--num-prompts 2: that is less than one for each of the 3 processes"
    assert [note["error"] for note in three[1]["few"]] == [["UsageError", text]] * 3


def test_nan_on_one_process_ends_all(two):
    """A gradient of NaN on one process is one on all; if one cannot sample, it says why, and the others that it has gone;
    each names the last good checkpoint, which is whole (B85)."""
    folder, notes = two
    for kind, text in (note["error"] for note in notes["nan"]):
        assert kind == "FloatingPointError" and text.startswith(
            "stopped at step 3: the gradient is not finite"
        )
        assert text.endswith("runs/nan/checkpoint.pt, step 2")
    (kind, text), (cause, reason) = (note["error"] for note in notes["gone"])
    assert (kind, cause) == ("ConnectionError", "FloatingPointError") and "logits" in reason
    for name, message in (("nan", notes["nan"][0]["error"][1]), ("gone", text), ("gone", reason)):
        assert message.startswith("stopped at step 3: ") and message.endswith(
            f"runs/{name}/checkpoint.pt, step 2"
        )
        state = checkpoint(folder, name)
        assert state["step"] == 2 and all(p.isfinite().all() for p in state["parts"]["model"].values())


def test_a_killed_process_ends_all(script, world, tmp_path):  # noqa: F811
    """Under torchrun, with a process killed in its third step: all end within a minute, the first says so in a sentence
    that names the last checkpoint, which is good for --resume."""
    assert script.join_processes
    (tmp_path / "reward.py").write_text(KILLER)
    flags = flags_of(script, world, "x", save_every=1, total_steps=9)
    names = "policy prompts num_prompts max_new_tokens num_minibatches num_eval normalize_scores save_every device"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
    ]
    command += [
        "--rdzv-endpoint",
        "127.0.0.1:0",
        str(script.path),
        "--reward",
        "reward.py:mortal",
        "--run-name",
        "x",
    ]
    for name in [*names.split(), "total_steps", "eval_every", "warmup_steps"]:
        command += [f"--{name.replace('_', '-')}", str(flags[name])]
    begun = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode != 0 and (tmp_path / "calls").read_text() == "...."
    died = (tmp_path / "calls").stat().st_mtime
    assert time.time() - died < 60, f"{time.monotonic() - begun:.0f} s in all"
    assert "stopped at step 3: " in done.stderr and "runs/x/checkpoint.pt, step 2" in done.stderr, done.stderr
    state = checkpoint(tmp_path, "x")
    assert state["step"] == 2 and len(state["parts"]["tokens"]) == 2
    assert [row["step"] for row in lines({"folder": tmp_path / "runs" / "x"})] == [0, 1, 2]
