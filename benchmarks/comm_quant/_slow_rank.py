"""One rank of bench_slow_network: every variant's step, timed at every rate of the link.

Rank 0 speaks with the benchmark over its standard streams: it asks for a rate, and is answered with
the bytes that have crossed the link so far.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from comm_quant import BlockQuant, ErrorFeedback, QuantizedWire
from zero_partition import partition

NUM_NODES, NUM_LOCAL = 2, 2
NUM_RANKS = NUM_NODES * NUM_LOCAL
VOCABULARY = 256
LAYERS = 8
Step: TypeAlias = Callable[[Tensor], object]


def build(width: int) -> nn.Sequential:
    """A transformer of 16-bit parameters."""
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
        for _ in range(LAYERS)
    ]
    ends = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
    return nn.Sequential(ends[0], *layers, ends[1]).to(torch.bfloat16)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean over the tokens."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def alone(width: int) -> Step:
    """The same work without any other rank: what computing takes."""
    model = build(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(tokens: Tensor) -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_wire(width: int, wire: QuantizedWire, *, secondary: bool) -> Step:
    """Stage 3 over a wire."""
    model = build(width)
    mesh = init_device_mesh("cpu", (NUM_NODES, NUM_LOCAL))
    zero = partition(model, stage=3, mesh=mesh, wire=wire, secondary="local" if secondary else None)
    optimizer = zero.optimizer(torch.optim.AdamW, lr=1e-4)

    def step(tokens: Tensor) -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_deepspeed(width: int) -> Step:
    """DeepSpeed's ZeRO-3; its ZeRO++ has no implementation for CPUs."""
    deepspeed = importlib.import_module("deepspeed")  # a peer that need not be there
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=build(width), config=config)

    def step(tokens: Tensor) -> None:
        engine.backward(loss_of(engine, tokens))
        engine.step()

    return step


class Benchmark:
    """What the benchmark outside does for the ranks."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def ask(self, **wanted: object) -> dict[str, Any]:
        """Rank 0 asks, all get the answer once it is in force."""
        answer: list[Any] = [None]
        if self._rank == 0:
            print(json.dumps(wanted), flush=True)
            answer = [json.loads(sys.stdin.readline())]
        dist.broadcast_object_list(answer, src=0)
        found: dict[str, Any] = answer[0]
        return found


def main(rank: int, store: str, plan: dict[str, Any]) -> None:
    """Measure; rank 0 hands over the rows."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(minutes=5)
    )
    benchmark, width = Benchmark(rank), plan["width"]
    wires = {
        "plain": QuantizedWire(round_node_sums=True),
        "hpz": QuantizedWire(round_node_sums=True),
        "zeropp": QuantizedWire(
            weights=BlockQuant(bits=8, block_numel=256),
            grads=BlockQuant(bits=4, block_numel=128),
            feedback=ErrorFeedback() if plan["feedback"] else None,
        ),
    }
    steps = {"compute alone": alone(width)}
    for name, wire in wires.items():
        steps[name] = with_wire(width, wire, secondary=name != "plain")
    if importlib.util.find_spec("deepspeed"):
        steps["deepspeed3"] = with_deepspeed(width)
    rows: list[dict[str, Any]] = []
    for num_tokens, num_rounds in plan["rounds"].items():
        for mbit_s in plan["rates"]:
            benchmark.ask(mbit_s=mbit_s)
            found = _rounds(steps, wires, int(num_tokens), num_rounds, benchmark)
            rows += [{"tokens": int(num_tokens), "mbit_s": mbit_s, **row} for row in found]
    benchmark.ask(rows=rows)
    dist.destroy_process_group()


def _rounds(
    steps: dict[str, Step],
    wires: dict[str, QuantizedWire],
    num_tokens: int,
    num_rounds: int,
    benchmark: Benchmark,
) -> list[dict[str, Any]]:
    """Every variant once a round, after a round that is not counted."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    times: dict[str, list[float]] = {name: [] for name in steps}
    crossed: dict[str, list[int]] = {name: [] for name in steps}
    payload = dict.fromkeys(wires, 0)
    for number in range(num_rounds + 1):
        for name, step in steps.items():
            tokens = torch.randint(VOCABULARY, (1, num_tokens + 1), generator=generator)
            if name in wires:
                wires[name].payload.clear()
            before = benchmark.ask(count=True)["sent_bytes"]
            dist.barrier()
            start = time.perf_counter()
            step(tokens)
            dist.barrier()
            took = time.perf_counter() - start
            after = benchmark.ask(count=True)["sent_bytes"]
            if number:
                times[name].append(took)
                crossed[name].append(after - before)
        for name, wire in wires.items():
            total = torch.tensor(wire.payload.total_bytes("cross"), dtype=torch.float64)
            dist.all_reduce(total)
            payload[name] = int(total.item()) // NUM_NODES  # each node sends half
        if dist.get_rank() == 0:
            told = "  ".join(f"{name} {took[-1]:.2f} s" for name, took in times.items() if took)
            print(f"{num_tokens} tokens, round {number}: {told}", file=sys.stderr, flush=True)
    return [
        {
            "variant": name,
            "seconds": times[name],
            "interface_bytes": statistics.median(crossed[name]),
            "payload_bytes": payload.get(name),
        }
        for name in steps
    ]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
