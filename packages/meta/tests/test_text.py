"""The text: what is read, how it is cut, and that every number of ranks sees the same batch."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait._batch import BatchSizes
from plait._batches import Batches
from plait._bigram import bigram_loss
from plait._text import Text, TextError, _split, batch_starts, held_out_starts, load_text, windows
from strategies import batch_sizes_list

CPU = torch.device("cpu")


def numbered_text(length: int) -> Text:
    content = torch.arange(length) % 251
    return Text(
        name="numbers",
        train=content.to(torch.uint8),
        held_out=content[: length // 2].to(torch.uint8),
        sha256="",
    )


def sizes_for(ranks: int, micro: int, accumulation: int) -> BatchSizes:
    return BatchSizes(
        train_batch_size=ranks * micro * accumulation,
        micro_batch_size=micro,
        accumulation_steps=accumulation,
        num_ranks=ranks,
    )


def global_batch(sizes: BatchSizes, step: int) -> torch.Tensor:
    rows = []
    for rank in range(sizes.num_ranks):
        batches = Batches(
            numbered_text(1000), sizes, context_length=8, seed=3, rank=rank, device=CPU
        )
        for tokens, targets in batches.micro_batches(step):
            assert tokens.shape == (sizes.micro_batch_size, 8)
            rows.append(torch.cat([tokens, targets[:, -1:]], dim=1))
    return torch.cat(rows)


@given(sizes=batch_sizes_list(), step=st.integers(0, 5))
def test_the_global_batch_is_the_same_for_any_ranks_and_accumulation(
    sizes: BatchSizes, step: int
) -> None:
    alone = sizes_for(1, sizes.train_batch_size, 1)
    assert torch.equal(global_batch(sizes, step), global_batch(alone, step))


def test_steps_and_seeds_draw_different_batches() -> None:
    drawn = [
        batch_starts(seed=seed, step=step, samples=range(8), num_starts=10**6)
        for seed, step in ((0, 0), (0, 1), (1, 0))
    ]
    assert len({tuple(starts) for starts in drawn}) == 3


def test_targets_are_the_next_bytes() -> None:
    text = torch.arange(20, dtype=torch.uint8)
    tokens, targets = windows(text, [0, 11], context_length=4)
    assert tokens.tolist() == [[0, 1, 2, 3], [11, 12, 13, 14]]
    assert targets.tolist() == [[1, 2, 3, 4], [12, 13, 14, 15]]


@given(numel=st.integers(2, 500), context_length=st.integers(1, 40), num_windows=st.integers(1, 30))
def test_held_out_windows_lie_within_the_text_and_do_not_overlap(
    numel: int, context_length: int, num_windows: int
) -> None:
    starts = held_out_starts(
        held_out_numel=numel, context_length=context_length, num_windows=num_windows
    )
    assert len(starts) == min(num_windows, (numel - 1) // context_length)
    assert all(b - a >= context_length for a, b in itertools.pairwise(starts))
    assert all(0 <= start <= numel - 1 - context_length for start in starts)


@given(ranks=st.integers(1, 5), micro=st.integers(1, 6), num_windows=st.integers(1, 20))
def test_the_ranks_share_the_held_out_windows_in_equally_many_batches(
    ranks: int, micro: int, num_windows: int
) -> None:
    seen: list[list[int]] = []
    counts = set()
    for rank in range(ranks):
        batches = Batches(
            numbered_text(502),
            sizes_for(ranks, micro, 1),
            context_length=8,
            seed=0,
            rank=rank,
            device=CPU,
        )
        held_out = list(batches.held_out(num_windows))
        counts.add(len(held_out))
        for tokens, _, count in held_out:
            assert len(tokens) == micro
            seen += tokens[:count].tolist()
    starts = held_out_starts(held_out_numel=251, context_length=8, num_windows=num_windows)
    text = numbered_text(502).held_out
    assert len(counts) == 1
    assert sorted(seen) == sorted(windows(text, starts, context_length=8)[0].tolist())


def test_every_twentieth_chunk_is_held_out_and_no_byte_is_in_both_parts(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    chunks = [bytes([65 + i % 26]) * 50 for i in range(40)]
    path.write_bytes(b"".join(chunks))
    text = load_text(str(path), context_length=9)
    assert bytes(text.held_out.tolist()) == chunks[20] + chunks[21]
    assert bytes(text.train.tolist()) == b"".join(chunks[:20] + chunks[22:])


def test_the_shipped_text_is_a_few_megabytes_and_the_same_each_time() -> None:
    text = load_text(None, context_length=128)
    assert 1_000_000 < text.train.numel() < 20_000_000
    assert 0.04 < text.held_out.numel() / text.train.numel() < 0.06
    assert text.sha256 == load_text(None, context_length=128).sha256


@given(length=st.integers(40, 3000))
def test_any_text_of_two_windows_is_cut_into_two_parts_of_a_window_at_least(length: int) -> None:
    window = 20
    whole = bytes(i % 251 for i in range(length))
    train, held_out = _split(whole, max(window, min(16384, length // 20)))
    assert len(train) + len(held_out) == length
    assert min(len(train), len(held_out)) >= window


def test_a_folder_is_read_in_order_and_what_is_skipped_is_said(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("two" * 20)
    (tmp_path / "a.txt").write_text("one" * 20)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "nothing.txt").write_text("")
    text = load_text(str(tmp_path), context_length=8)
    assert text.note == "skipped files: 1 binary, 1 empty"
    whole = text.train.numel() + text.held_out.numel()
    assert whole == 60 + 1 + 60


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "{path} cannot be read: No such file or directory"),
        (b"", "{path} is empty"),
        (b" \n\n", "{path} is empty"),
        (b"abc\0def" * 50, "{path} is binary (it holds zero bytes), expected text"),
        (
            b"short",
            (
                "{path} holds 5 bytes; model.context_length 16 needs at least 34, "
                "half of them to train on and half held out"
            ),
        ),
    ],
)
def test_a_file_that_cannot_be_trained_on_is_named_with_the_reason(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "book.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TextError) as caught:
        load_text(str(path), context_length=16)
    assert str(caught.value) == "data.path: " + message.format(path=path)


def test_a_folder_without_text_is_named_with_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="holds no files, expected text files"):
        load_text(str(tmp_path), context_length=16)
    (tmp_path / "a.bin").write_bytes(b"\0")
    with pytest.raises(TextError, match=r"only files that cannot be used \(1 binary\)"):
        load_text(str(tmp_path), context_length=16)


def test_a_path_that_is_no_file_is_refused() -> None:
    with pytest.raises(TextError, match=r"data\.path: /dev/zero is not a file or folder"):
        load_text("/dev/zero", context_length=16)
    with pytest.raises(TextError, match="cannot be read"):
        load_text("a\0b", context_length=16)


def test_the_bigram_baseline_equals_counting_by_hand() -> None:
    train = torch.tensor([1, 2, 1, 3, 1, 2], dtype=torch.uint8)
    tokens, targets = torch.tensor([[1, 2]]), torch.tensor([[2, 9]])
    alpha = 0.5
    after_one = (2 + alpha) / (3 + 256 * alpha)  # 1 is followed by 2, 3, 2
    unseen = alpha / (1 + 256 * alpha)  # 2 is followed by 1 once
    expected = -(math.log(after_one) + math.log(unseen)) / 2
    assert bigram_loss(train, tokens, targets, alpha=alpha) == pytest.approx(expected)
