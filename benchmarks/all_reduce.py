"""What summing gradients over processes costs on this machine, at the sizes of the scripts.

torchrun --nproc-per-node 2 benchmarks/all_reduce.py    # writes results/all_reduce.json: medians of 15
"""

import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

SIZES = {"ppo_continuous": 9_029, "ppo_atari": 1_686_693, "an eighth of SmolLM2-135M": 16_814_376}  # float32


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {"processes": dist.get_world_size(), "backend": dist.get_backend()}
    for name, size in SIZES.items():
        gradient, seconds = torch.ones(size), []
        for _ in range(18):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(gradient)
            seconds.append(time.perf_counter() - start)
        milliseconds = round(1e3 * statistics.median(seconds[3:]), 2)
        found[name] = {"mb": round(4e-6 * size, 2), "milliseconds": milliseconds}
    if dist.get_rank() == 0:
        path = Path(__file__).parent / "results" / "all_reduce.json"
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(path.read_text())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
