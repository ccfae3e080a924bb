"""TRL's GRPOTrainer with the settings, prompts and rewards of grpo_rlhf.py: a peer to measure, on the CPU.

    python -m venv TRL && TRL/bin/pip install torch==2.13.0 transformers==5.24.0 trl==1.16.0 datasets tyro
    TRL/bin/python benchmarks/peer_trl.py --model FOLDER/model --dataset FOLDER/train.jsonl --reward number \\
        --no-chat-template --stop-newline --steps 6 --num-prompts 16 --group-size 8 --max-new-tokens 8 \\
        --num-minibatches 1 --learning-rate 1e-5 --dtype bfloat16 --seed 1 --out trl.json

A step is a generation batch of prompts x group sequences and --num-minibatches optimiser updates on it. The
prompts are those of grpo_rlhf.py, step by step and token by token; the stop ids too (TRL stops at, and masks
after, all ids of the model's generation config). What differs in kind: TRL's samples are shuffled one by one,
ours by groups; TRL generates with the trained weights (under autocast), ours with a bfloat16 copy.
Writes the wall and CPU seconds between the ends of steps, rewards, lengths, peak memory and versions.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
try:
    import datasets
    import torch
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    import grpo_rlhf as grpo
except ImportError as error:
    sys.exit(f"peer_trl.py: {error}: see the first lines of this file")

PACKAGES = ("torch", "transformers", "trl", "accelerate")


class Clock(transformers.TrainerCallback):
    """The time at the end of each step, the metrics that TRL logs there, the largest memory so far."""

    def __init__(self, updates: int):
        self.updates, self.ends, self.logs, self.peak = updates, [], [], 0.0

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.updates == 0:
            self.ends.append((time.perf_counter(), time.process_time()))
            self.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            self.logs.append(logs)


def prompts(args, tokenizer) -> list[dict]:
    """The rows that grpo_rlhf.py draws, in its order, as texts that TRL turns into the same token ids."""
    ours = grpo.Args(
        model=args.model, dataset=args.dataset, num_eval=args.num_eval, total_steps=args.steps,
        num_prompts=args.num_prompts, seed=args.seed,
    )  # fmt: skip
    rows, _ = grpo.load_task(ours, None)
    order = grpo.prompt_indices(0, args.steps * args.num_prompts, len(rows), args.seed)
    found = []
    for row in (rows[i] for i in order):
        ids = grpo.encode(tokenizer, row["prompt"], args.chat_template)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if tokenizer(text).input_ids != ids:
            sys.exit(f"peer_trl.py: TRL would see other tokens of the prompt {row['prompt']!r}")
        found.append({"prompt": text, "answer": row["answer"]})
    return found


def config(args, folder: str) -> GRPOConfig:
    sequences = args.num_prompts * args.group_size
    update = sequences // args.num_minibatches
    micro = min(args.micro_batch, update)
    if sequences % args.num_minibatches or update % micro:
        sys.exit(
            f"peer_trl.py: {sequences} sequences do not divide into updates and micro-batches of {micro}"
        )
    return GRPOConfig(
        output_dir=folder, max_steps=args.steps * args.num_minibatches, seed=args.seed, use_cpu=True,
        per_device_train_batch_size=micro, gradient_accumulation_steps=update // micro,
        steps_per_generation=sequences // micro, num_generations=args.group_size, shuffle_dataset=False,
        max_completion_length=args.max_new_tokens, temperature=1.0, top_p=1.0, top_k=0,
        repetition_penalty=1.0, beta=0.0, loss_type="dapo", epsilon=0.2, epsilon_high=0.28,
        scale_rewards="group", num_iterations=1, learning_rate=args.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5 * args.num_minibatches, adam_beta1=0.9, adam_beta2=0.99, weight_decay=0.0,
        max_grad_norm=1.0, bf16=args.dtype == "bfloat16", gradient_checkpointing=False, save_strategy="no",
        eval_strategy="no", report_to="none", logging_steps=args.num_minibatches, disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--dataset", required=True, help=".jsonl of prompt and answer")
    parser.add_argument("--chat-template", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--reward", default="exact", help="as --reward of grpo_rlhf.py, one name")
    parser.add_argument(
        "--stop-newline", action="store_true", help="the newline token ends a response as well"
    )
    for name, default in dict(steps=6, num_prompts=16, group_size=8, max_new_tokens=8, num_minibatches=1,
                              micro_batch=32, num_eval=8, seed=1).items():  # fmt: skip
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--profile", type=Path, help="write here what cProfile finds; steps get slower")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer, model = grpo.load_model(args.model)  # float32 weights, sdpa
    stop = grpo.stop_ids(tokenizer, model, "\n" if args.stop_newline else None)
    model.generation_config.eos_token_id = stop
    function = grpo.load_rewards(args.reward)[args.reward]

    def reward(prompts, completions, answer, **kwargs):
        return function(prompts, completions, [{"answer": a} for a in answer])

    clock, rows = Clock(args.num_minibatches), datasets.Dataset.from_list(prompts(args, tokenizer))
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model, reward_funcs=reward, args=config(args, folder), train_dataset=rows,
            processing_class=tokenizer, callbacks=[clock],
        )  # fmt: skip
        assert sorted(trainer.eos_token_ids) == stop, "the stop ids differ from ours"
        if args.profile:
            import cProfile

            cProfile.runctx("trainer.train()", {}, {"trainer": trainer}, str(args.profile))
        else:
            trainer.train()
    seconds, cpu = ([b - a for a, b in zip(ends, ends[1:])] for ends in zip(*clock.ends))
    columns = {"reward": "reward", "length": "completions/mean_length", "flat": "frac_reward_zero_std"}
    result = {"seconds": seconds, "cpu": cpu, "peak_mb": round(clock.peak, 1)}
    result |= {key: [log[name] for log in clock.logs] for key, name in columns.items()}
    result["versions"] = {"python": platform.python_version()}
    result["versions"] |= {name: importlib.metadata.version(name) for name in PACKAGES}
    args.out.write_text(json.dumps(result) + "\n")
    for step, values in enumerate(zip(seconds, cpu, result["reward"][1:], result["length"][1:]), 2):
        print(
            "step {}: {:.2f} s (CPU {:.2f} s), reward {:.3f}, {:.2f} tokens a response".format(step, *values)
        )


if __name__ == "__main__":
    main()
