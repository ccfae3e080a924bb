"""What sampling more often reaches without training: the best of n responses of the starting policy.

    python benchmarks/best_of_n.py benchmarks/smollm2/model benchmarks/smollm2/prompts.jsonl

The held-out prompts, reward and sampling of the sentiment run of ppo_rlhf.py (see README.md here): 16
responses to each, scored by VADER; the best of 4 is the mean over the four quarters. The divergence from the
starting policy is at most log n - (n - 1) / n nats (Beirami et al. 2024).
Writes results/ppo_rlhf/sentiment/best_of_n.json.
"""

import json
import math
import sys
from pathlib import Path

import sentiment
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import ppo_rlhf as ppo

OUT = Path(__file__).parent / "results/ppo_rlhf/sentiment/best_of_n.json"


def main(policy: str, prompts: str):
    args = ppo.Args(
        policy=policy, prompts=prompts, reward="sentiment", num_eval=128, num_prompts=32,
        max_new_tokens=12, temperature=1.0, chat_template=False, dtype="bfloat16", seed=1,
    )  # fmt: skip
    tokenizer, model = ppo.load_model(policy)
    held_out = ppo.encode_rows(ppo.prompts_of(args, None)[1], tokenizer, model, args)
    rewards = {"compound": sentiment.compound}
    task = ppo.Task(tokenizer, ppo.stop_ids(tokenizer, model, None), [], held_out, rewards)
    sampler = ppo.Sampler(model.eval(), task, args, torch.Generator().manual_seed(0))
    scores = [
        sampler.respond(part, 16, 1.0)[0]["rewards"]
        for part in (held_out[first : first + 8] for first in range(0, len(held_out), 8))
    ]
    scores = torch.cat(scores).view(-1, 16)
    found = {"prompts": len(scores)}
    for n in (1, 4, 16):
        best = scores.view(len(scores), -1, n).amax(-1).mean(1)  # of each prompt
        error = (best.std() / math.sqrt(len(best))).item()
        found[f"best of {n}"] = {"score": best.mean().item(), "se": error, "kl": math.log(n) - (n - 1) / n}
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(OUT.read_text())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
