"""Whole values: where ranks start, edits, loading, and what is read or written at rest."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from models import BlockSpec, ModelSpec, build
from ranktest import RankPools
from training import check_same
from twin import STAGES, check_at_rest, numbers, seeded, square_loss, stack
from zero_partition import Precision, RestingError, partition

# C25


def draw(weight: Tensor) -> None:
    """Values of the caller's random state."""
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape))


def set_data(weight: Tensor) -> None:
    """The way around autograd."""
    weight.data.fill_(0.25)
    weight.data[0] = torch.rand(())


def replace_data(weight: Tensor) -> None:
    """Another tensor under the same parameter."""
    weight.data = torch.rand(weight.shape).to(weight.dtype)


INITS: dict[str, Callable[[Tensor], object]] = {
    "normal_": nn.init.normal_,
    "orthogonal_": nn.init.orthogonal_,
    "copy_": draw,
    "set data": set_data,
    "replace data": replace_data,
}


def edit_whole(rank: int, how: str) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            INITS[how](module.weight)

    for stage in STAGES:
        for param in (None, torch.bfloat16):
            if how == "orthogonal_" and param is not None:
                continue  # torch has no QR in 16 bits
            model, plain = stack(), stack()
            zero = partition(model, stage=stage, precision=Precision(param=param))
            optimizer = zero.optimizer(torch.optim.SGD, lr=0.0)
            torch.manual_seed(5 + rank)  # rank 0's values are everyone's
            with zero.gathered(modify=True):
                model.apply(init)
            torch.manual_seed(5)
            plain = plain if param is None else plain.to(param)
            plain.apply(init)
            check_same("parameter", plain.state_dict(), zero.state_dict())
            square_loss(0, 5)(model, rank).backward()
            optimizer.step()
            check_same("parameter", plain.state_dict(), zero.state_dict())


@pytest.mark.parametrize("how", sorted(INITS))
def test_weights_set_inside_gathered_modify_are_rank_0s_everywhere_and_stay(
    rank_pools: RankPools, how: str
) -> None:
    rank_pools(2).run(edit_whole, how)
    rank_pools(3).run(edit_whole, how)


def read_gathered(rank: int) -> None:
    for stage in STAGES:
        model = seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)))()
        plain = {n: p.detach().clone() for n, p in model.named_parameters()}
        zero = partition(model, stage=stage)
        with zero.gathered():
            check_same("parameter", plain, dict(model.state_dict()))
            assert model(torch.ones(3)).shape == (3,)
        if stage == 3:
            check_at_rest(model)


def test_gathered_makes_whole_parameters_readable_and_rests_them_again(
    rank_pools: RankPools,
) -> None:
    rank_pools(2).run(read_gathered)


# C27


class Buffered(nn.Module):
    """A batch norm and a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("scale", torch.rand(5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)) * self.scale


def unequal_starts(rank: int, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(rank)
    model = Buffered()
    model.norm.running_mean += rank
    zero = partition(model, stage=stage)
    start = {**zero.state_dict(), "scale": model.scale.clone()}
    model(numbers(4, 3, seed=rank)).sum().backward()
    assert not torch.equal(model.norm.running_mean, start["norm.running_mean"])
    zero.zero_grad()
    zero.broadcast_buffers()
    return start, {name: b.clone() for name, b in model.named_buffers()}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_rank_0s_parameters_and_buffers_are_everyones_from_the_start(
    rank_pools: RankPools, num_ranks: int, stage: int
) -> None:
    seen = rank_pools(num_ranks).run(unequal_starts, stage)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = Buffered()
    start = {**expected.state_dict(), "scale": expected.scale}
    for start_there, buffers in seen:
        check_same("start", start, start_there)
        check_same("buffer", seen[0][1], buffers)
    assert buffers["norm.num_batches_tracked"].item() == 1


# C28


def metadata(rank: int) -> None:
    spec = ModelSpec(blocks=(BlockSpec(frozen=frozenset({"norm"})), BlockSpec(tied_to=0)))
    plain, model = build(spec), build(spec)
    partition(model, stage=3)
    check_at_rest(model)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
    for (name, p), (other, q) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert name == other
        assert isinstance(p, nn.Parameter)
        for read in (
            lambda t: (t.shape, t.size(), t.size(-1) if t.ndim else 1, len(t) if t.ndim else 0),
            lambda t: (t.dtype, t.device, t.requires_grad, t.is_leaf, t.layout, t.ndim, t.dim()),
            lambda t: (t.numel(), t.stride(), t.element_size(), t.nbytes, t.is_floating_point()),
        ):
            assert read(p) == read(q)
        assert name in repr(p)
        assert {p: 1}[p] == 1
        assert p.grad is None
    assert model.blocks[1].inner.weight is model.blocks[0].inner.weight


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_metadata_at_rest_is_the_logical_tensors(rank_pools: RankPools, num_ranks: int) -> None:
    rank_pools(num_ranks).run(metadata)


# C30


def replace_all(rank: int, param: torch.dtype | None) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)))

    new = seeded(make, seed=9)().state_dict()
    for stage in STAGES:
        for cls in (torch.optim.SGD, torch.optim.AdamW):
            model = seeded(make)()
            zero = partition(model, stage=stage, precision=Precision(param=param))
            optimizer = zero.optimizer(cls, lr=0.0, weight_decay=0.1)
            model.load_state_dict(new)
            for _ in range(2):
                x = numbers(2, 5, seed=rank).to(param or torch.float32)
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            expected = {n: t.to(param or torch.float32) for n, t in new.items()}
            check_same("parameter", expected, zero.state_dict())
            with pytest.raises(RuntimeError, match=r"Unexpected key.*strange"):
                model.load_state_dict({**new, "strange": torch.ones(1)})


@pytest.mark.parametrize("param", [None, torch.bfloat16])
def test_loaded_weights_survive_a_step_with_lr_0(
    rank_pools: RankPools, param: torch.dtype | None
) -> None:
    rank_pools(2).run(replace_all, param)


# Values at rest.


EDITS: dict[str, Callable[[nn.Module], object]] = {
    "add": lambda m: m.weight + 1,
    "in place": lambda m: m.weight.add_(1),
    "copy_": lambda m: m.weight.copy_(torch.zeros(2, 3)),
    "fill_": lambda m: m.weight.fill_(0.0),
    "zero_": lambda m: m.weight.zero_(),
    "data": lambda m: m.weight.data,
    "data fill": lambda m: m.weight.data.fill_(0),
    "set data": lambda m: setattr(m.weight, "data", torch.zeros(2, 3)),
    "detach": lambda m: m.weight.detach(),
    "clone": lambda m: m.weight.clone(),
    "index": lambda m: m.weight[0],
    "set index": lambda m: m.weight.__setitem__(0, 1.0),
    "sum": lambda m: m.weight.sum(),
    "item": lambda m: m.weight.tolist(),
    "numpy": lambda m: m.weight.numpy(),
    "matmul": lambda m: torch.ones(4, 3) @ m.weight.t(),
    "linear": lambda m: nn.functional.linear(torch.ones(3), m.weight),
    "stack": lambda m: torch.stack([m.weight, m.weight]),
    "foreach": lambda m: torch._foreach_mul([m.weight], 2.0),
    "equal": lambda m: torch.equal(m.weight, torch.zeros(2, 3)),
    "init": lambda m: nn.init.normal_(m.weight),
    "norm": lambda m: torch.nn.utils.get_total_norm([m.weight]),
    "to vector": lambda m: nn.utils.parameters_to_vector([m.weight]),
    "to": lambda m: m.to(torch.bfloat16),
    "double": lambda m: m.double(),
    "state_dict": nn.Module.state_dict,
    "deepcopy": copy.deepcopy,
    "copy of parameter": lambda m: copy.copy(m.weight) + 1,
    "pickle": pickle.dumps,
    "torch.save": lambda m: torch.save(m, io.BytesIO()),
    "save of state": lambda m: torch.save(m.state_dict(), io.BytesIO()),
    "ema": lambda m: torch.zeros(2, 3).lerp_(m.weight, 0.5),
    "iterate": lambda m: list(m.weight),
    "format": lambda m: f"{m.weight.mean():.3f}",
    "share": lambda m: m.share_memory(),
}


def edits_at_rest(rank: int, how: str) -> None:
    model = nn.Linear(3, 2)
    zero = partition(model, stage=3)
    before = zero.state_dict()
    for context in (torch.enable_grad(), torch.no_grad()):
        with context, pytest.raises(RestingError, match=r"'weight'.*gathered\(\)|save"):
            EDITS[how](model)
    check_same("parameter", before, zero.state_dict())
    model(torch.ones(3)).sum().backward()


@pytest.mark.parametrize("how", sorted(EDITS))
def test_reading_or_writing_values_at_rest_raises_by_name_with_the_remedy(
    rank_pools: RankPools, how: str
) -> None:
    rank_pools(2).run(edits_at_rest, how)


GRADIENT_READS: dict[str, Callable[[Tensor], object]] = {
    "add": lambda g: g + 1,
    "norm": lambda g: g.norm(),
    "scale": lambda g: g.mul_(2.0),
    "item": lambda g: g.tolist(),
    "isnan": lambda g: g.isnan().any(),
    "clone": lambda g: g.clone(),
    "foreach": lambda g: torch._foreach_norm([g]),
    "clip value": lambda g: g.clamp_(-1, 1),
    "numpy": lambda g: g.numpy(),
}


def gradient_reads(rank: int, how: str) -> None:
    for stage in (1, 2, 3):
        model = nn.Linear(3, 2)
        zero = partition(model, stage=stage)
        for finish in (lambda: None, zero.finish):
            model(torch.ones(3)).sum().backward()
            finish()
            grad = model.weight.grad
            assert (grad.shape, grad.dtype) == ((2, 3), torch.float32)
            with pytest.raises(RestingError, match=r"'weight'.*zero\.gradients\(\)"):
                GRADIENT_READS[how](grad)
            zero.zero_grad()
            assert model.weight.grad is None


@pytest.mark.parametrize("how", sorted(GRADIENT_READS))
def test_a_sharded_gradient_raises_by_name_when_it_is_read(rank_pools: RankPools, how: str) -> None:
    rank_pools(2).run(gradient_reads, how)
