"""One rank of the benchmark: a process of its own, started by `_ranks.py`."""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import _memory
import torch
import torch.distributed as dist
from _gpt import Text
from _plan import SIZES
from _ranks import Task
from _training import Training, build
from torch import Tensor

NUM_WARMUP_ROUNDS = 2
NUM_MEMORY_STEPS = 4
TIME_LIMIT = timedelta(seconds=180)


def time_steps(task: Task, text: Text, *, rank: int) -> dict[str, Any]:
    """Train all variants side by side: one step of each in turn, in random order.

    Returns:
        Of each variant the seconds of every round after the warm-up, the losses of all steps, and
        how far its parameters are from DDP's at the end.
    """
    size = SIZES[task.size]
    trainings = {key: build(key, size, seed=task.seed) for key in task.variants}
    shuffle = random.Random(task.seed)  # all ranks draw the same order
    step_s: dict[str, list[float]] = {key: [] for key in trainings}
    losses: dict[str, list[float]] = {key: [] for key in trainings}
    for step in range(NUM_WARMUP_ROUNDS + task.num_rounds):
        if step == NUM_WARMUP_ROUNDS:
            gc.collect()
            gc.freeze()  # no variant pays for a walk over the objects of all the others
            for times in step_s.values():
                times.clear()
        tokens = text.batch(step, rank=rank, num_ranks=task.num_ranks)
        for key in shuffle.sample(list(trainings), len(trainings)):
            seconds, loss = _timed_step(trainings[key], tokens)
            step_s[key].append(seconds)
            losses[key].append(loss)
        if rank == 0:
            _say_round(step, task.num_rounds, {key: times[-1] for key, times in step_s.items()})
    differences = _differences(trainings)
    return {
        key: {
            "step_s": step_s[key],
            "losses": losses[key],
            "parameters_difference": differences[key],
        }
        for key in trainings
    }


def measure_memory(task: Task, text: Text, *, rank: int) -> dict[str, Any]:
    """Train the one variant of the task for a few steps.

    Returns:
        The bytes it holds between backward and update, what the kernel counts at the end, losses.
    """
    (key,) = task.variants
    around = _memory.storages(num_ranks=task.num_ranks).keys()
    training = build(key, SIZES[task.size], seed=task.seed)
    losses, held = [], {}
    for step in range(NUM_MEMORY_STEPS):
        tokens = text.batch(step, rank=rank, num_ranks=task.num_ranks)
        losses.append(training.accumulate(tokens).item())
        del tokens
        if step == NUM_MEMORY_STEPS - 1:
            held = _memory.storages(num_ranks=task.num_ranks)
        training.update()
    dist.barrier()
    in_process = _memory.process_bytes()
    dist.barrier()  # shared pages are counted while all ranks have them
    measured = {
        "held_bytes": sum(held[address] for address in held.keys() - around),
        "losses": losses,
        **in_process,
    }
    if rank == 0:
        print(f"{key}: memory measured", flush=True)
    return {key: measured}


def _timed_step(training: Training, tokens: Tensor) -> tuple[float, float]:
    dist.barrier()
    start = time.perf_counter()
    loss = training.accumulate(tokens)
    training.update()
    seconds = time.perf_counter() - start
    return seconds, loss.item()


def _differences(trainings: Mapping[str, Training]) -> dict[str, float]:
    """Of each variant the greatest distance of a parameter's element from DDP's."""
    expected = trainings["ddp"].values()
    found = {}
    for key, training in trainings.items():
        values = training.values()
        if values.keys() != expected.keys():
            raise RuntimeError(f"{key} has other parameters than DDP")
        distances = [(values[name] - expected[name]).abs().max() for name in expected]
        found[key] = torch.stack(distances).max().item()  # NaN wins
    return found


def _say_round(step: int, num_rounds: int, seconds: Mapping[str, float]) -> None:
    done = step + 1 - NUM_WARMUP_ROUNDS
    place = f"round {done} of {num_rounds}" if done > 0 else "warm-up"
    told = "  ".join(f"{key} {time_s * 1e3:.0f}" for key, time_s in seconds.items())
    middle = statistics.median(seconds.values()) * 1e3
    print(f"{place}: {middle:.0f} ms a step ({told})", flush=True)


def main() -> None:
    """Do what the task on the command line says, and write what was measured."""
    task, rank = Task.from_json(sys.argv[1]), int(sys.argv[2])
    folder = Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=task.num_ranks,
        timeout=TIME_LIMIT,
    )
    text = Text(SIZES[task.size])
    measure = {"time": time_steps, "memory": measure_memory}[task.kind]
    measured = measure(task, text, rank=rank)
    (folder / f"rank{rank}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
