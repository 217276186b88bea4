"""The embedded training task of `plait train` in a loop of its own, with 1-bit Adam or Adam."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from comm_quant import OneBitAdam
from plait import read_config
from plait._batches import Batches
from plait._model import ByteGPT
from plait._text import load_text

NUM_RANKS = 4
CPU = torch.device("cpu")


def train(
    options: dict[str, Any], *, seed: int, num_steps: int, freeze_step: int
) -> dict[str, Any]:
    """Train on four ranks.

    Args:
        options: The optimizer's.
        seed: Of the parameters and the order of the text.
        num_steps: Steps.
        freeze_step: Steps of warm-up; with `num_steps`, all of it is Adam.

    Returns:
        The held-out loss at the end, in nats a byte, and the bytes that all ranks have sent.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, options, seed, num_steps, freeze_step)
        spawn(_train_as_rank, args=arguments, nprocs=NUM_RANKS)
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
    return found


def _train_as_rank(  # noqa: PLR0917  spawn passes them by place
    rank: int, folder: str, options: dict[str, Any], seed: int, num_steps: int, freeze_step: int
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS
    )
    config = read_config(num_ranks=NUM_RANKS)
    length = config.model.context_length
    text = load_text(None, context_length=length)
    sizes = config.training.batch
    batches = Batches(text, sizes, context_length=length, seed=seed, rank=rank, device=CPU)
    torch.manual_seed(seed)
    model = ByteGPT(config.model)
    optimizer = OneBitAdam(
        model.parameters(), **options, freeze_step=freeze_step, warmup_dtype=torch.bfloat16
    )
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, num_steps))
    for step in range(num_steps):
        optimizer.zero_grad()
        for tokens, targets in batches.micro_batches(step):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            (loss / sizes.accumulation_steps).backward()
        clip_grad_norm_(model.parameters(), config.training.gradient_clipping)  # each rank its own
        optimizer.step()
        rate.step()
    val_loss = _evaluate(model, batches, config.run.eval_windows)
    sent = torch.tensor(optimizer.payload.total_bytes())
    dist.all_reduce(sent)
    if rank == 0:
        found = {"val_loss": val_loss, "sent_bytes": int(sent)}
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _rate(step: int, num_steps: int) -> float:
    """A share of the learning rate: up over a tenth of the steps, then down along a cosine."""
    num_warm = num_steps // 10
    if step < num_warm:
        return (step + 1) / num_warm
    return 0.5 * (1 + math.cos(math.pi * (step - num_warm) / (num_steps - num_warm)))


@torch.no_grad()
def _evaluate(model: ByteGPT, batches: Batches, num_windows: int) -> float:
    """Mean loss over the held-out windows of all ranks."""
    sums = torch.zeros(2, dtype=torch.float64)
    for tokens, targets, count in batches.held_out(num_windows):
        losses = F.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="none")[:count]
        sums += torch.tensor([losses.double().sum(), losses.numel()])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])
