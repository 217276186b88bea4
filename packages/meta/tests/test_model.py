"""The example model: causal, tied where asked, and the same sample on every rank."""

from __future__ import annotations

import torch

from plait import read_config
from plait._model import ByteGPT, generate


def small_model(*overrides: str) -> ByteGPT:
    small = ["model.num_layers=2", "model.hidden_size=16", "model.context_length=12"]
    torch.manual_seed(0)
    return ByteGPT(read_config(overrides=[*small, *overrides]).model)


def test_the_default_model_has_a_few_million_parameters() -> None:
    count = sum(p.numel() for p in ByteGPT(read_config().model).parameters())
    assert 2_000_000 < count < 5_000_000


def test_a_position_depends_on_the_bytes_before_it_alone() -> None:
    model = small_model()
    tokens = torch.randint(0, 256, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = 0
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_the_embeddings_are_tied_where_asked() -> None:
    tied, untied = small_model(), small_model("model.tie_embeddings=false")
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight


def test_scores_are_float32_at_any_parameter_type() -> None:
    logits = small_model().bfloat16()(torch.zeros(1, 3, dtype=torch.long))
    assert logits.dtype == torch.float32
    assert logits.shape == (1, 3, 256)


def test_a_sample_depends_on_the_seed_alone_and_outgrows_the_context() -> None:
    model, cpu = small_model(), torch.device("cpu")
    first, again, other = (
        generate(model, b"def", seed=seed, num_bytes=20, device=cpu) for seed in (1, 1, 2)
    )
    assert len(first) == 20
    assert first == again
    assert first != other
    assert generate(model, b"def", seed=1, num_bytes=0, device=cpu) == b""
