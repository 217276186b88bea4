"""Three training loops in the styles of public DeepSpeed programs, with only the import changed.

Each trains on 1, 2 or 3 ranks and must leave the bits of one process that plays all ranks.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import plait as deepspeed
from engine_reference import ReferenceLoop, check_same
from loop_programs import (
    CausalLM,
    Net,
    Prompts,
    bert,
    bert_config,
    bert_loss,
    chat_config,
    get_linear_schedule,
    image_config,
    image_loss,
    images,
    optimizer_grouped_parameters,
    quarter_steps,
    rank_batches,
    seeded,
)
from ranktest import RankPools


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The ranks have one thread each; the reference must sum in the same order."""
    torch.set_num_threads(1)


# 1. The image classifier of the tutorial: everything from the command line and a file.


def classify_images(rank: int, config_file: str) -> tuple[dict[str, Tensor], list[float]]:
    parser = argparse.ArgumentParser(description="images")
    parser.add_argument("-e", "--epochs", default=2, type=int)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", config_file])

    deepspeed.init_distributed()
    net = seeded(Net)
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    trainset = images()
    model_engine, optimizer, trainloader, __ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=trainset
    )
    local_device = model_engine.device
    criterion = nn.CrossEntropyLoss()
    losses = []
    for _epoch in range(args.epochs):
        for data in trainloader:
            inputs, labels = data[0].to(local_device), data[1].to(local_device)
            outputs = model_engine(inputs)
            loss = criterion(outputs, labels)
            model_engine.backward(loss)
            model_engine.step()
            losses.append(loss.item())
    model_engine.eval()
    with torch.no_grad():
        outputs = model_engine(trainset.tensors[0])
    assert outputs.shape == (22, 10)
    assert isinstance(optimizer, torch.optim.AdamW)
    return model_engine.module_state_dict(), losses


def image_reference(num_ranks: int) -> tuple[dict[str, Tensor], list[list[float]]]:
    """The parameters, and the losses by micro-batch and rank."""
    loop = ReferenceLoop(seeded(Net), num_ranks=num_ranks, accumulation_steps=1, clipping=1.0)
    loop.optimizer = torch.optim.AdamW(
        loop.masters, lr=0.01, betas=(0.8, 0.999), eps=1e-8, weight_decay=3e-7
    )
    loop.scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, quarter_steps)
    losses = []
    for epoch in range(2):
        read = [
            rank_batches(images(), rank, num_ranks, epoch=epoch, batch_size=4)
            for rank in range(num_ranks)
        ]
        for batch in zip(*read, strict=True):
            losses.append(loop.micro_batch(functools.partial(image_loss, batch=batch)))
            loop.update()
    return loop.state(), losses


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_tutorials_classifier_trains_as_in_one_process(
    rank_pools: RankPools, tmp_path: Path, stage: int, num_ranks: int
) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(image_config(stage)))
    expected, expected_losses = image_reference(num_ranks)
    found = rank_pools(num_ranks).run(classify_images, str(file))
    for rank, (state, losses) in enumerate(found):
        check_same(expected, state)
        assert losses == [each[rank] for each in expected_losses]


# 2. Fine-tuning of a language model: optimizer, schedule and loader are the program's own.


def fine_tune(rank: int, folder: str, stage: int, resume: bool) -> dict[str, Tensor]:
    deepspeed.init_distributed()
    num_ranks = dist.get_world_size()
    train_dataset = Prompts()
    train_sampler = DistributedSampler(train_dataset)
    train_dataloader = DataLoader(train_dataset, sampler=train_sampler, batch_size=2)
    model: Any = seeded(CausalLM)
    optimizer: Any = torch.optim.AdamW(
        optimizer_grouped_parameters(model, 0.1), lr=0.02, betas=(0.9, 0.95)
    )
    lr_scheduler = get_linear_schedule(optimizer)
    model, optimizer, _, lr_scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=chat_config(stage, num_ranks),
        lr_scheduler=lr_scheduler,
        dist_init_required=True,
    )
    first_epoch = 0
    if resume:
        _, client_state = model.load_checkpoint(folder)
        first_epoch = client_state["epoch"] + 1
    for epoch in range(first_epoch, 2):
        train_sampler.set_epoch(epoch)
        model.train()
        for batch in train_dataloader:
            outputs = model(**batch)
            model.backward(outputs.loss)
            model.step()
        if epoch == 0:
            model.save_checkpoint(folder, client_state={"epoch": epoch})
    model.save_16bit_model(folder, save_filename="pytorch_model.bin")
    return dict(model.module_state_dict())


def chat_reference(num_ranks: int) -> dict[str, Tensor]:
    model = seeded(CausalLM)
    loop = ReferenceLoop(model, num_ranks=num_ranks, accumulation_steps=3, clipping=1.0)
    loop.optimizer = torch.optim.AdamW(
        optimizer_grouped_parameters(model, 0.1), lr=0.02, betas=(0.9, 0.95)
    )
    loop.scheduler = get_linear_schedule(loop.optimizer)
    micro = 0
    for epoch in range(2):
        read = [
            rank_batches(Prompts(), rank, num_ranks, epoch=epoch, batch_size=2)
            for rank in range(num_ranks)
        ]
        for batch in zip(*read, strict=True):
            loop.micro_batch(lambda model, rank, batch=batch: model(**batch[rank]).loss)
            micro += 1
            if micro % 3 == 0:
                loop.update()
    return loop.state()


@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 0), (2, 1), (2, 3), (3, 2)])
def test_fine_tuning_with_its_own_optimizer_trains_as_in_one_process(
    rank_pools: RankPools, tmp_path: Path, num_ranks: int, stage: int
) -> None:
    expected = chat_reference(num_ranks)
    ranks = rank_pools(num_ranks)
    for resume in (False, True):
        for state in ranks.run(fine_tune, str(tmp_path), stage, resume):
            check_same(expected, state)
        written = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
        check_same(expected, written)
        seeded(CausalLM).load_state_dict(written)


# 3. Pre-training: a dict of settings, 16 bits, stage 3, logging at boundaries, other ranks later.


def pretrain(rank: int, folder: str, iterations: Iterable[int], resume: bool) -> Any:
    num_ranks = dist.get_world_size()
    engine, _optimizer, _, lr_scheduler = deepspeed.initialize(
        model=seeded(bert), config_params=bert_config()
    )
    if resume:
        path, client_state = engine.load_checkpoint(
            folder, load_optimizer_states=True, load_lr_scheduler_states=True
        )
        assert path is not None
        iterations = range(client_state["iteration"] + 1, max(iterations) + 1)
    log: list[tuple[int, list[float], float]] = []
    total = 0.0
    for iteration in iterations:
        engine.train()
        loss = bert_loss(engine, iteration, rank, num_ranks)
        total += loss.item() / engine.gradient_accumulation_steps()
        engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            log.append((engine.global_steps, engine.get_lr(), total))
            total = 0.0
        engine.step()
        if engine.global_steps % 2 == 0:
            engine.eval()
            with torch.no_grad():
                bert_loss(engine, 1000, rank, num_ranks)
        if engine.global_steps == 3 and engine.was_step_applied() and not resume:
            engine.save_checkpoint(
                folder, tag="iter", client_state={"iteration": iteration, "done": False}
            )
    assert lr_scheduler is engine.lr_scheduler
    return engine.module_state_dict(), log, engine.get_global_grad_norm()


def bert_reference(parts: list[tuple[int, range]]) -> ReferenceLoop:
    """A loop over ranks whose number changes on the way."""
    loop = ReferenceLoop(
        seeded(bert), num_ranks=parts[0][0], accumulation_steps=2, clipping=0.5, bf16=True
    )
    loop.optimizer = torch.optim.AdamW(
        loop.masters, lr=0.02, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01
    )

    def share(update: int) -> float:
        return update / 2 if update < 2 else max(0.0, (6 - update) / 4)

    loop.scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, share)
    for num_ranks, iterations in parts:
        loop.num_ranks = num_ranks
        loop.run(iterations, lambda m, i, rank, n=num_ranks: bert_loss(m, i, rank, n))
    return loop


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (2, 3), (1, 2), (3, 2)])
def test_pre_training_goes_on_on_other_ranks_as_in_one_process(
    rank_pools: RankPools, tmp_path: Path, before: int, after: int
) -> None:
    undisturbed = bert_reference([(before, range(12))])
    for state, log, norm in rank_pools(before).run(pretrain, str(tmp_path), range(12), False):
        check_same(undisturbed.state(), state)
        assert [rates for _, rates, _ in log] == undisturbed.rates
        assert [update for update, _, _ in log] == list(range(6))
        assert norm == undisturbed.norms[-1]
    moved = bert_reference([(before, range(6)), (after, range(6, 12))])
    for state, log, _ in rank_pools(after).run(pretrain, str(tmp_path), range(12), True):
        check_same(moved.state(), state)
        assert [rates for _, rates, _ in log] == moved.rates[3:]
        assert [update for update, _, _ in log] == [3, 4, 5]
