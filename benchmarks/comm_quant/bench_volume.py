"""How many bytes cross between nodes in a step, over those of the 16-bit model.

2 nodes of 2 ranks each, all on this host. V is the payload that leaves a node in a step, over all
its ranks, times N / (N - 1) for N nodes, over the bytes of the model in 16 bits. Each variant comes
twice: "messages" gathers every unit for forward and for backward and reduces its gradients, once
each, which is what V is defined on; "training" is a step of `zero_partition` at stage 3, which
keeps two units from forward to backward and gathers them once.

    python benchmarks/comm_quant/bench_volume.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

import _report
from comm_quant import BlockQuant, QuantizedWire
from zero_partition import partition

NUM_NODES, NUM_LOCAL = 2, 2
NUM_RANKS = NUM_NODES * NUM_LOCAL
INT8, INT4 = BlockQuant(bits=8, block_numel=256), BlockQuant(bits=4, block_numel=128)
HALF = torch.float16
VOCABULARY = 256
WIDTHS = {"10M": 320, "1M": 96}  # of eight layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What travels how.

    Attributes:
        name: Its figure.
        codes: Whether parameters and gradients travel as codes.
        secondary: Whether backward gathers within the nodes.
        scale_dtype: Of the codes' scales.
    """

    name: str
    codes: bool = False
    secondary: bool = False
    scale_dtype: torch.dtype = torch.float32

    def wire(self) -> QuantizedWire:
        """A new wire."""
        if not self.codes:
            return QuantizedWire(num_local=NUM_LOCAL, round_node_sums=True)
        return QuantizedWire(
            weights=BlockQuant(bits=8, block_numel=256, scale_dtype=self.scale_dtype),
            grads=BlockQuant(bits=4, block_numel=128, scale_dtype=self.scale_dtype),
            num_local=NUM_LOCAL,
        )


VARIANTS = (
    Variant(name="plain"),
    Variant(name="plain_hpz", secondary=True),
    Variant(name="zeropp", codes=True, secondary=True),
    Variant(name="zeropp_float16_scales", codes=True, secondary=True, scale_dtype=HALF),
)


def build(size_name: str) -> tuple[nn.Sequential, list[nn.Module]]:
    """A transformer, and its layers."""
    width = WIDTHS[size_name]
    layers: list[nn.Module] = [
        nn.TransformerEncoderLayer(width, width // 32, 4 * width, dropout=0.0, batch_first=True)
        for _ in range(8)
    ]
    ends = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
    return nn.Sequential(ends[0], *layers, ends[1]), layers


def measure_as_rank(rank: int, size_name: str, folder: str) -> None:
    """Count what one rank sends across; rank 0 writes the sums over all."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS
    )
    found = []
    for variant in VARIANTS:
        crossed = {
            "messages": _messages(variant, size_name),
            "training": _training(variant, size_name, rank),
        }
        for kind, (crossed_bytes, model_bytes) in crossed.items():
            total = torch.tensor(crossed_bytes, dtype=torch.float64)
            dist.all_reduce(total)
            a_node = total.item() / NUM_NODES
            volume = a_node * NUM_NODES / (NUM_NODES - 1) / model_bytes
            found.append({"variant": variant.name, "kind": kind, "volume": volume})
        if rank == 0:
            print(f"{variant.name}: counted", file=sys.stderr, flush=True)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _messages(variant: Variant, size_name: str) -> tuple[int, int]:
    """Bytes across and bytes of the model, of every unit gathered twice and reduced once."""
    wire, group = variant.wire(), _world()
    model, layers = build(size_name)
    blocks = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    total = sum(p.numel() for p in model.parameters())
    numels = [-(-n // (NUM_RANKS * 16)) * 16 for n in (*blocks, total - sum(blocks))]
    for index, numel in enumerate(numels):
        whole = torch.zeros(NUM_RANKS * numel, dtype=torch.bfloat16)
        shard = torch.zeros(numel, dtype=torch.bfloat16)
        wire.all_gather(whole, shard, group=group, keep=index).wait()
        if variant.secondary:
            wire.all_gather_kept(whole, group=group, key=index).wait()
        else:
            wire.all_gather(whole, shard, group=group).wait()
        wire.reduce_scatter(shard.float(), whole, group=group, key=index).wait()
    return wire.payload.total_bytes("cross"), 2 * total


def _training(variant: Variant, size_name: str, rank: int) -> tuple[int, int]:
    """Bytes across and bytes of the model, of a step of stage 3 after the first."""
    torch.manual_seed(0)
    model = build(size_name)[0].to(torch.bfloat16)
    total = sum(p.numel() for p in model.parameters())
    wire = variant.wire()
    mesh = init_device_mesh("cpu", (NUM_NODES, NUM_LOCAL))
    zero = partition(
        model, stage=3, mesh=mesh, wire=wire, secondary="local" if variant.secondary else None
    )
    optimizer = zero.optimizer(torch.optim.SGD, lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        wire.payload.clear()
        tokens = torch.randint(VOCABULARY, (1, 33), generator=generator)
        logits = model(tokens[:, :-1]).float()
        F.cross_entropy(logits.flatten(0, 1), tokens[0, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return wire.payload.total_bytes("cross"), 2 * total


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None  # after init_process_group
    return world


def measure(size_name: str) -> list[dict[str, Any]]:
    """Count on all ranks."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure_as_rank, args=(size_name, folder), nprocs=NUM_RANKS)
        found: list[dict[str, Any]] = json.loads(Path(folder, "found.json").read_text())
    return found


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """V by variant; of the training with a suffix."""
    return {
        row["variant"] + ("" if row["kind"] == "messages" else "_training"): row["volume"]
        for row in rows
    }


def main() -> int:
    """Run the benchmark."""
    options = _report.options_of(__doc__, quick="a model of 1M parameters, not 10M")
    machine = _report.machine()
    rows = measure("1M" if options.quick else "10M")
    lines = [[row["variant"], row["kind"], f"{row['volume']:.4f}"] for row in rows]
    print(f"\n{_report.table(['variant', 'of', 'V'], lines)}\n")
    figures = figures_of(rows)
    _report.print_figures(figures)
    if options.json:
        _report.write_json(options.json, machine=machine, figures=figures, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
