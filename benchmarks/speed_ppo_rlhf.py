"""Time ppo_rlhf.py against TRL's PPOTrainer: seconds a step and peak memory, interleaved, on one core.

    python -m venv TRL && TRL/bin/pip install torch==2.13.0 transformers==5.24.0 trl==1.12.0 datasets
    python ppo_rlhf.py --total-steps 1 --run-name w --num-eval 32  # leaves the models of the small world
    python benchmarks/speed_ppo_rlhf.py runs/w --trl-python TRL/bin/python

trl 1.12.0 is the last release with a PPOTrainer. Both sides load the same policy and reward model, make 128
responses of 20 tokens at most and 8 optimiser updates of 32 responses a step. "world" is the small world,
"fixed" the same with a policy whose stop token never comes, so that both sides see equally many tokens.
A round runs each side once, in a process of its own with the round as seed; its number is the median over
steps, from end to end, the first two dropped; nothing is evaluated or saved in them. Ratios are of CPU
seconds, paired by round. TRL's generation runs until every row has ended; it scores and learns all columns,
after the stop token too, computes entropies for the log at each update, clips no gradient, has one learning
rate for both models, adds the score after the last token, and draws prompts in an order of its own. "rollout"
is sampling and scoring on our side, generation only on TRL's; TRL's score has the penalty for no stop token.
Writes results/speed/ppo_rlhf.json after each round and prints a table.
"""

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
OURS = """
import json, resource, sys, time
import torch
import ppo_rlhf as ppo
out, *flags = sys.argv[1:]
torch.set_num_threads(1)
log, ends, lines, peak = ppo.Run.log, [], [], []
def noted(run, metrics, shown=None):
    if "charts/TPS" in metrics:  # not an evaluation
        ends.append((time.perf_counter(), time.process_time()))
        lines.append(metrics)
        peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    log(run, metrics, shown)
ppo.Run.log = noted
ppo.main(ppo.command_line(flags))
seconds, cpu = ([b - a for a, b in zip(x, x[1:])] for x in zip(*ends))
names = {"length": "charts/response_length", "rollout": "time/rollout", "update": "time/update",
         "score": "charts/score", "updates": "charts/updates"}
result = {"seconds": seconds, "cpu": cpu, "peak_mb": peak[-1]}
result |= {key: [line[name] for line in lines][1:] for key, name in names.items()}
result["versions"] = {name: sys.modules[name].__version__ for name in ("torch", "transformers")}
open(out, "w").write(json.dumps(result))
"""
WORLD = """
import json, sys
import numpy as np, torch
import ppo_rlhf as ppo
world, scratch = sys.argv[1:]
rows, _ = ppo.prompts_of(ppo.Args(), np.random.default_rng(1))
rows = [rows[i] for i in np.random.default_rng(2).permutation(len(rows))[:4000]]
open(scratch + "/prompts.jsonl", "w").writelines(json.dumps(row) + "\\n" for row in rows)
tokenizer, model = ppo.load_model(world + "/start")
ids = torch.tensor([tokenizer(row["prompt"]).input_ids for row in rows[:500]])
with torch.no_grad():  # rows of stop and padding token such that their logits are about -20 everywhere
    texts = model.generate(ids, max_new_tokens=20, do_sample=True, top_k=0, suppress_tokens=[0, 1])
    hidden = model.model(texts).last_hidden_state.flatten(0, 1)
    away = torch.linalg.lstsq(hidden, -20 * torch.ones(len(hidden), 1))[0].T
    model.get_input_embeddings().weight[:2] = away
for part in (model, tokenizer):
    part.save_pretrained(scratch + "/fixed")
"""


def peer(folder: str, policy: str, out: str, steps: int, seed: int) -> None:
    """TRL's side; runs in its environment."""
    import datasets
    import torch
    import transformers
    import trl
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    torch.set_num_threads(1)
    ends, lengths, generation, peak, scores = [], [], [], [], []
    truncate, generate = ppo_trainer.truncate_response, ppo_trainer.batch_generation

    def truncated(stop, pad, responses):
        found = truncate(stop, pad, responses)
        lengths.append((found != pad).sum(1).float().mean().item())
        return found

    def generated(*args):
        begun, found = time.perf_counter(), generate(*args)
        generation.append(time.perf_counter() - begun)
        return found

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            ends.append((time.perf_counter(), time.process_time()))
            peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)

        def on_log(self, args, state, control, logs=None, **kwargs):
            scores.append(logs["objective/scores"])

    ppo_trainer.truncate_response, ppo_trainer.batch_generation = truncated, generated
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy, padding_side="left")
    load = dict(dtype=torch.float32, attn_implementation="sdpa")
    causal = transformers.AutoModelForCausalLM
    classifier = transformers.AutoModelForSequenceClassification
    rows = [json.loads(line) for line in open(f"{folder}/prompts.jsonl")]
    rows = datasets.Dataset.from_list([{"input_ids": tokenizer(r["prompt"]).input_ids} for r in rows])
    config = PPOConfig(
        output_dir=f"{folder}/trl", seed=seed, use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=128, gradient_accumulation_steps=1, num_mini_batches=4, num_ppo_epochs=2,
        total_episodes=128 * steps, local_rollout_forward_batch_size=128, num_sample_generations=0,
        response_length=20, stop_token="eos", temperature=1.0, missing_eos_penalty=3.0, kl_coef=0.05,
        kl_estimator="k1", gamma=1.0, lam=0.95, cliprange=0.2, cliprange_value=0.2, vf_coef=0.1,
        learning_rate=2e-4, lr_scheduler_type="constant_with_warmup", warmup_steps=5, weight_decay=0.0,
        adam_beta2=0.99, adam_epsilon=1e-5, save_strategy="no", eval_strategy="no", report_to="none",
        logging_steps=1, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = PPOTrainer(
        config, tokenizer, causal.from_pretrained(policy, **load), causal.from_pretrained(policy, **load),
        classifier.from_pretrained(f"{folder}/reward_model", num_labels=1, **load), rows,
        classifier.from_pretrained(f"{folder}/reward_model", num_labels=1, **load),
        eval_dataset=rows.select(range(8)), callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    seconds, cpu = ([b - a for a, b in zip(x, x[1:])] for x in zip(*ends))
    made = [int(state["step"]) for state in trainer.optimizer.state.values()][0]
    result = {"seconds": seconds, "cpu": cpu, "peak_mb": peak[-1], "length": lengths[1:], "score": scores[1:]}
    result |= {"rollout": generation[1:], "updates": [made / steps] * (steps - 1)}  # generation only
    result["versions"] = {module.__name__: module.__version__ for module in (torch, transformers, trl)}
    Path(out).write_text(json.dumps(result))


def call(command: list, scratch: Path) -> None:
    env = {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(scratch),
           "CUDA_VISIBLE_DEVICES": "", "TRL_EXPERIMENTAL_SILENCE": "1"}  # fmt: skip
    command = list(map(str, command))
    done = subprocess.run(command, cwd=scratch, env=os.environ | env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"speed_ppo_rlhf.py: {command[:2]} ended with {done.returncode}: {done.stderr[-900:]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("world", type=Path, help="folder of a run in the small world")
    parser.add_argument("--trl-python", default="python", help="of an environment with TRL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    runs, found = {}, {"steps": args.steps, "load_average": []}
    found["sha256"] = hashlib.sha256((HERE.parent / "ppo_rlhf.py").read_bytes()).hexdigest()
    with tempfile.TemporaryDirectory() as scratch:
        scratch, world = Path(scratch), args.world.resolve()
        (scratch / "ppo_rlhf.py").write_bytes((HERE.parent / "ppo_rlhf.py").read_bytes())
        for name, target in (("reward_model", "reward_model"), ("start", "world")):
            (scratch / target).symlink_to(world / name)
        call([sys.executable, "-c", WORLD, world, scratch], scratch)
        flags = "--prompts prompts.jsonl --reward-model reward_model --num-eval 8 --max-new-tokens 20 "
        flags += "--temperature 1 --missing-eos-penalty 3 --normalize-scores 0 --update-epochs 2 "
        flags += "--num-minibatches 4 --learning-rate 2e-4 --value-learning-rate 2e-4 --no-anneal-lr "
        flags += f"--eval-every 0 --save-every 1000000 --device cpu --total-steps {args.steps + 1}"
        for seed in range(1, args.rounds + 1):
            for setting in ("world", "fixed"):
                for side in ("ours", "TRL"):
                    out = scratch / "out.json"
                    command = [sys.executable, "-c", OURS, out, "--policy", setting, *flags.split()]
                    command += ["--seed", seed, "--run-name", f"{setting}{seed}"]
                    if side == "TRL":
                        command = [args.trl_python, __file__, "--peer", scratch, setting, out]
                        command += [args.steps, seed]
                    call(command, scratch)
                    runs.setdefault(f"{setting}, {side}", []).append(json.loads(out.read_text()))
            found["load_average"].append(os.getloadavg()[0])
            table = {}
            for name, rounds in runs.items():  # medians over rounds of medians over steps
                middle = lambda key, of: statistics.median(statistics.median(run[key][1:]) for run in of)
                keys = ("seconds", "cpu", "length", "score", "rollout", "update", "updates")
                table[name] = {key: middle(key, rounds) for key in keys if key in rounds[0]}
                table[name]["peak_mb"] = statistics.median(run["peak_mb"] for run in rounds)
                base = runs[name.partition(",")[0] + ", ours"]
                ratios = [middle("cpu", [run]) / middle("cpu", [b]) for run, b in zip(rounds, base)]
                table[name] |= {"over_ours": statistics.median(ratios), "range": [min(ratios), max(ratios)]}
            path = args.results / "speed" / "ppo_rlhf.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found | {"summary": table, "rounds": runs}, indent=1) + "\n")
            print(f"after round {seed}:", flush=True)
            for name, row in table.items():
                shown = {key: value if key == "range" else round(value, 3) for key, value in row.items()}
                print(f"{name:12}", shown, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        peer(*sys.argv[2:5], *map(int, sys.argv[5:7]))
    else:
        main()
