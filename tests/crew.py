"""Real processes for the tests, as torchrun starts them but from one import: quicker than torchrun itself."""

import multiprocessing
import os
import socket
import time


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def become(rank: int, size: int, port: int) -> None:
    """What torchrun tells a process."""
    os.environ |= dict(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{size}", LOCAL_WORLD_SIZE=f"{size}")
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}", GLOO_SOCKET_IFNAME="lo")


def run(work, size: int, *arguments, limit: float) -> list[int]:
    """`work(rank, size, port, *arguments)` in `size` processes; those that are not done in time, which are killed."""
    context = multiprocessing.get_context("forkserver")
    modeling = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2")]
    context.set_forkserver_preload(["torch.optim", "transformers", "pytest", *modeling])
    port, end = free_port(), time.monotonic() + limit
    crew = [
        context.Process(target=work, args=(rank, size, port, *arguments), daemon=True) for rank in range(size)
    ]
    for process in crew:
        process.start()
    for process in crew:
        process.join(max(0.0, end - time.monotonic()))
    late = [rank for rank, process in enumerate(crew) if process.exitcode is None]
    for process in crew:
        process.kill()
    return late
