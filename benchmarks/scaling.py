"""What a sample costs as environments, groups, responses and models grow, on one core.

    python benchmarks/scaling.py    # some minutes; writes results/scaling.json

Robots and games: steps a second of training, the batch as large as ever, divided over more environments.
Language: a random Llama of several sizes, whose responses never stop by themselves, in groups and lengths.
Numbers are medians over the second half of a run's iterations.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from run import metrics_of

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
MODELS = {"1M": (128, 2), "6M": (256, 4), "37M": (512, 10)}  # hidden size, layers
REWARD = "def mixed(prompts, texts, rows): return [float(i % 2) for i in range(len(texts))]\n"


def robots(scratch: str):
    """(script, setting, flags) of the robots and games: the same samples an iteration."""
    for envs in (1, 8, 64):
        flags = ["--num-envs", envs, "--num-steps", 2048 // envs, "--total-timesteps", 2048 * 12]
        setting = f"{envs} environment{'s' * (envs > 1)}"
        yield "ppo_continuous", setting, [*flags, "--eval-episodes", 0]
    for games in (4, 8, 32):
        flags = ["--num-envs", games, "--num-steps", 1024 // games, "--total-timesteps", 1024 * 6]
        yield "ppo_atari", f"{games} games", [*flags, "--eval-episodes", 0]


def language(scratch: str):
    """(script, setting, flags) of the language models: 32 responses a step."""
    common = (
        f"--dataset {scratch}/prompts.jsonl --reward {scratch}/reward.py:mixed --num-eval 1 --eval-samples 0"
    )
    common += " --eval-every 0 --total-steps 4 --learning-rate 1e-9"
    for model, group, length, row in (
        ("1M", 8, 32, 256), ("1M", 8, 128, 256), ("1M", 8, 512, 256), ("1M", 2, 128, 256),
        ("1M", 32, 128, 256), ("6M", 8, 32, 256), ("6M", 8, 32, 0), ("6M", 8, 128, 256),
        ("37M", 8, 128, 256), ("37M", 8, 128, 960),
    ):  # fmt: skip
        flags = ["--model", f"{scratch}/{model}", "--group-size", group, "--num-prompts", 32 // group]
        setting = f"{model} parameters, groups of {group}, {length} tokens"
        setting += f", --row-tokens {row}" if row != 256 else ""
        flags += ["--max-new-tokens", length, "--row-tokens", row, *common.split()]
        yield "grpo_rlhf", setting, flags


def prepare(scratch: str) -> None:
    from grpo_rlhf import digit_tokenizer

    rows = [json.dumps({"prompt": f"{i:064d}=", "answer": ""}) + "\n" for i in range(200)]
    Path(scratch, "prompts.jsonl").write_text("".join(rows))
    Path(scratch, "reward.py").write_text(REWARD)
    for name, (width, layers) in MODELS.items():
        config = transformers.LlamaConfig(
            vocab_size=4000, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=width // 64, max_position_embeddings=1024, eos_token_id=1, bos_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(f"{scratch}/{name}")
        digit_tokenizer().save_pretrained(f"{scratch}/{name}")


def measure(script: str, flags: list, scratch: str) -> dict:
    """Medians over the second half of one run."""
    name = f"run{time.time_ns()}"
    command = [sys.executable, str(HERE.parent / f"{script}.py"), *map(str, flags), "--run-name", name]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1"}
    done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"scaling.py: {script} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    rows = metrics_of(Path(scratch, "runs", name))
    if script in ("ppo_continuous", "ppo_atari"):
        middle, last = rows[len(rows) // 2 - 1], rows[-1]
        seconds = last["step"] / last["charts/SPS"] - middle["step"] / middle["charts/SPS"]
        return {"steps_per_second": round((last["step"] - middle["step"]) / seconds)}
    rows = rows[1 + len(rows) // 2 :]
    median = lambda key: statistics.median(row[key] for row in rows)
    tokens = median("charts/tokens")
    return {"tokens": tokens, "rollout_tokens_per_second": round(tokens / median("time/rollout")),
            "update_tokens_per_second": round(tokens / median("time/update"))}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the results")
    args, found = parser.parse_args(), []
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # inherited by every run
    with tempfile.TemporaryDirectory() as scratch:
        prepare(scratch)
        for script, setting, flags in (*robots(scratch), *language(scratch)):
            found.append({"script": script, "setting": setting} | measure(script, flags, scratch))
            print(found[-1], flush=True)
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / "scaling.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
