"""Models as plain picklable data: a spec says what is odd about a model, `build` makes it.

The same spec gives the same weights in every process. Shapes: tokens (batch, length), hidden
(batch, length, dim).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Moment:
    """Where a forward happens."""

    step: int
    micro: int
    rank: int


@dataclass(frozen=True)
class When:
    """The moments at which something is used; None means all of them."""

    ranks: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    micros: tuple[int, ...] | None = None

    def __contains__(self, moment: Moment) -> bool:
        return (
            (self.ranks is None or moment.rank in self.ranks)
            and (self.steps is None or moment.step in self.steps)
            and (self.micros is None or moment.micro in self.micros)
        )


ALWAYS = When()
NEVER = When(ranks=())


@dataclass(frozen=True)
class BlockSpec:
    """One block; `frozen` names frozen parts, `tied_to` an earlier block whose weight it shares."""

    hidden: int = 5
    dtype: str = "float32"
    frozen: frozenset[str] = frozenset()
    empty: tuple[tuple[int, ...], ...] = ()
    used: When = ALWAYS
    branch: When = NEVER
    num_uses: int = 1
    tied_to: int | None = None
    checkpoint: str | None = None  # "reentrant" | "non_reentrant" | "inner"
    output: str = "tensor"  # "tensor" | "dict" | "dataclass" | "object"
    dropout: float = 0.0


@dataclass(frozen=True)
class ModelSpec:
    """Token embedding, blocks, norm and head."""

    vocab: int = 7
    dim: int = 3
    blocks: tuple[BlockSpec, ...] = (BlockSpec(), BlockSpec())
    tied_head: bool = False
    frozen: frozenset[str] = frozenset()
    empty_first: tuple[int, ...] | None = None
    empty_last: tuple[int, ...] | None = None
    seed: int = 0
    units: str = "default"  # "default" | "blocks" | "inner" | "none"
    in_list: bool = field(default=True)  # blocks in a ModuleList, or as plain attributes


@dataclass
class Hidden:
    """What a block may return: tensors in a dataclass."""

    value: Tensor
    index: int


class Cache:
    """What a block may return: tensors in an object of the user's own."""

    def __init__(self, value: Tensor) -> None:
        self.states = {"value": value}


class Affine(nn.Module):
    """x W' + b in the weight's own type."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_out, num_in) / max(num_in, 1) ** 0.5)
        self.bias = nn.Parameter(torch.randn(num_out) * 0.1) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        return F.linear(x.to(self.weight.dtype), self.weight, bias)


class Norm(nn.Module):
    """Layer norm in the weight's own type."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(dim) * 0.1)
        self.bias = nn.Parameter(torch.randn(dim) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.weight.dtype
        return F.layer_norm(x.to(dtype), (x.shape[-1],), self.weight, self.bias.to(dtype))


class Block(nn.Module):
    """h + gain * outer(tanh(inner(norm(h)))), with a branch that only some moments take."""

    def __init__(self, spec: BlockSpec, dim: int, index: int) -> None:
        super().__init__()
        self.spec, self.index = spec, index
        self.empties = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in spec.empty)
        self.norm = Norm(dim)
        self.inner = Affine(dim, spec.hidden)
        if spec.branch != NEVER or "side" in spec.frozen:
            self.side = Affine(spec.hidden, spec.hidden)
        self.outer = Affine(spec.hidden, dim)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def feed(self, x: Tensor, moment: Moment) -> Tensor:
        y = torch.tanh(self.inner(x))
        if moment in self.spec.branch:
            y = y + self.side(y)
        return self.outer(F.dropout(y, self.spec.dropout, self.training))

    def forward(self, h: Tensor, moment: Moment) -> Any:
        x = self.norm(h)
        for empty in self.empties:
            x = x + empty.sum()
        if self.spec.checkpoint == "inner" and torch.is_grad_enabled():
            y = checkpoint(self.feed, x, moment, use_reentrant=False)
        else:
            y = self.feed(x, moment)
        out = h + (y * self.gain).to(h.dtype)
        match self.spec.output:
            case "dict":
                return {"value": out, "index": self.index}
            case "dataclass":
                return Hidden(out, self.index)
            case "object":
                return Cache(out)
            case _:
                return out


class Tower(nn.Module):
    """The model of a `ModelSpec`; returns logits (batch, length, vocab)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.empty_first is not None:
            self.first = nn.Parameter(torch.empty(spec.empty_first))
        self.embed = nn.Embedding(spec.vocab, spec.dim)
        # A plain list registers nothing.
        self.order = [Block(b, spec.dim, i) for i, b in enumerate(spec.blocks)]
        if spec.in_list:
            self.blocks = nn.ModuleList(self.order)
        else:
            for i, block in enumerate(self.order):
                self.add_module(f"block{i}", block)
        self.norm = Norm(spec.dim)
        self.head = Affine(spec.dim, spec.vocab, bias=False)
        self.shift = nn.Parameter(torch.zeros(spec.vocab))
        if spec.empty_last is not None:
            self.last = nn.Parameter(torch.empty(spec.empty_last))

    def forward(self, tokens: Tensor, moment: Moment, backwards: bool = False) -> Tensor:
        h = self.embed(tokens)
        if any(b.spec.checkpoint == "reentrant" for b in self.order) and not h.requires_grad:
            h.requires_grad_(torch.is_grad_enabled())
        if self.spec.empty_first is not None:
            h = h + self.first.sum()
        for block in reversed(self.order) if backwards else self.order:
            if moment not in block.spec.used:
                continue
            for _ in range(block.spec.num_uses):
                h = take(run_block(block, h, moment))
        if self.spec.empty_last is not None:
            h = h + self.last.sum()
        return self.head(self.norm(h)) + self.shift


def run_block(block: Block, h: Tensor, moment: Moment) -> Any:
    """Call a block, recomputing it in backward where its spec says so."""
    if block.spec.checkpoint in ("reentrant", "non_reentrant") and torch.is_grad_enabled():
        return checkpoint(block, h, moment, use_reentrant=block.spec.checkpoint == "reentrant")
    return block(h, moment)


def take(out: Any) -> Tensor:
    """The hidden tensor inside a block's output."""
    match out:
        case Tensor():
            return out
        case dict():
            return out["value"]
        case Hidden():
            return out.value
        case Cache():
            return out.states["value"]
    raise TypeError(type(out).__name__)


def build(spec: ModelSpec) -> Tower:
    """The same weights for the same spec, in any process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = Tower(spec)
    for block in model.order:
        block.to(getattr(torch, block.spec.dtype))
        for part in block.spec.frozen:
            freeze(getattr(block, part))
    for block in model.order:
        if block.spec.tied_to is not None:
            block.inner.weight = model.order[block.spec.tied_to].inner.weight
    if spec.tied_head:
        model.head.weight = model.embed.weight
    for part in spec.frozen:
        freeze(getattr(model, part))
    return model


def freeze(part: nn.Module | nn.Parameter) -> None:
    """No gradients for a parameter or for all of a module."""
    part.requires_grad_(False)


def units_of(model: Tower) -> list[nn.Module] | None:
    """The `units` argument that a spec asks for."""
    match model.spec.units:
        case "blocks":
            return list(model.order)
        case "inner":
            return [part for block in model.order for part in (block.inner, block.outer)]
        case "none":
            return []
        case _:
            return None


def batch(spec: ModelSpec, moment: Moment, *, shape: tuple[int, int] = (2, 3)) -> Tensor:
    """Tokens of one rank's micro-batch, with the targets as one more column."""
    seed = 1000 * moment.step + 100 * moment.micro + moment.rank + 17 * spec.seed
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(spec.vocab, (shape[0], shape[1] + 1), generator=generator)


def loss(
    model: nn.Module, spec: ModelSpec, moment: Moment, *, shape: tuple[int, int] = (2, 3)
) -> Tensor:
    """Mean cross entropy of the next token; dropout drawn from a seed of the moment's own."""
    tokens = batch(spec, moment, shape=shape)
    torch.manual_seed(31 * moment.step + 7 * moment.micro + moment.rank)
    logits = model(tokens[:, :-1].contiguous(), moment)
    targets = tokens[:, 1:].reshape(-1)
    return F.cross_entropy(logits.float().reshape(-1, spec.vocab), targets)
