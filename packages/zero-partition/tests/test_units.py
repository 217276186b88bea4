"""Which parameters travel together, and what cannot travel at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_partition import partition
from zero_partition._units import find_units, repeated_blocks


class Model(nn.Module):
    """Two stacks of blocks, an embedding and a head, as transformers are built."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.positions = nn.Embedding(5, 4)
        self.encoder = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.decoder = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.head = nn.Linear(4, 5)


def names(model: nn.Module, units: list[nn.Module] | None = None) -> dict[str, list[str]]:
    return {u.name: [name for name, _ in u.parameters] for u in find_units(model, units)}


def test_the_outermost_repeated_blocks_are_units_and_the_rest_travels_with_the_model() -> None:
    assert names(Model()) == {
        "": ["embed.weight", "positions.weight", "head.weight", "head.bias"],
        "encoder.0": ["encoder.0.0.weight", "encoder.0.0.bias"],
        "encoder.1": ["encoder.1.0.weight", "encoder.1.0.bias"],
        "decoder.a": ["decoder.a.weight", "decoder.a.bias"],
        "decoder.b": ["decoder.b.weight", "decoder.b.bias"],
    }


def test_a_list_of_lists_has_its_members_for_units_since_lists_have_no_forward() -> None:
    rows = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(2))
    assert [m is b for m, b in zip(repeated_blocks(rows), [*rows[0], *rows[1]], strict=True)]
    assert len(repeated_blocks(rows)) == 4


def test_blocks_without_parameters_are_no_units() -> None:
    assert repeated_blocks(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(2, 2))) == []


def test_every_parameter_is_in_exactly_one_unit_the_innermost() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    chosen = [model[0], model[0][1]]
    assert names(model, chosen) == {
        "": ["1.weight", "1.bias"],
        "0": ["0.0.weight", "0.0.bias"],
        "0.1": ["0.1.weight", "0.1.bias"],
    }


def test_a_parameter_that_two_units_share_travels_with_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    found = names(model, list(model))
    assert found[""] == ["0.weight"]
    assert found["0"] == ["0.bias"]
    assert found["2"] == ["2.bias"]


def test_a_tie_inside_one_unit_stays_there() -> None:
    block = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    block[1].weight = block[0].weight
    model = nn.Sequential(block, nn.Linear(3, 3))
    assert names(model, [block])["0"] == ["0.0.weight", "0.0.bias", "0.1.bias"]


def test_units_come_in_the_order_of_the_model_whatever_the_callers_order() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert list(names(model, [model[1], model[0]])) == ["", "0", "1"]


def test_a_unit_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="units: a Linear is not part of the model"):
        partition(nn.Linear(2, 2), stage=1, units=[nn.Linear(2, 2)])


def test_a_unit_that_comes_twice_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(ValueError, match="the same module comes twice"):
        partition(model, stage=1, units=[model[0], model[0]])


def test_a_container_without_a_forward_is_refused_as_a_unit() -> None:
    model = Model()
    with pytest.raises(ValueError, match="a ModuleList has no forward of its own"):
        partition(model, stage=1, units=[model.encoder])


def test_a_unit_that_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match="units must be modules, got str"):
        partition(nn.Linear(2, 2), stage=1, units=["blocks"])  # type: ignore[list-item]


def meta() -> nn.Module:
    return nn.Linear(2, 2, device="meta")


def lazy() -> nn.Module:
    return nn.LazyLinear(2)


def complex_valued() -> nn.Module:
    return nn.Linear(2, 2, dtype=torch.complex64)


def sparse_gradients() -> nn.Module:
    return nn.Embedding(3, 2, sparse=True)


def no_parameters() -> nn.Module:
    return nn.ReLU()


def twice() -> nn.Module:
    model = nn.Linear(2, 2)
    partition(model, stage=0)
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (meta, "on the meta device; give it values first"),
        (lazy, "has no shape yet; run one forward pass first"),
        (complex_valued, "is complex; hold its real view"),
        (sparse_gradients, "makes sparse gradients; build it with sparse=False"),
        (no_parameters, "the model has no parameters"),
        (twice, "is partitioned already"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_what_cannot_be_cut_is_refused_with_its_remedy(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        partition(make(), stage=3)  # type: ignore[operator]


def test_a_parameter_of_a_class_with_a_layout_of_its_own_is_refused_by_name() -> None:
    class Packed(nn.Parameter):
        pass

    model = nn.Linear(2, 2)
    model.weight = Packed(torch.ones(2, 2))
    with pytest.raises(TypeError, match="parameter 'weight' is a Packed; only plain"):
        partition(model, stage=3)


def test_a_refusal_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True))
    before = model[0].weight.data_ptr()
    with pytest.raises(ValueError, match="sparse"):
        partition(model, stage=3)
    assert model[0].weight.data_ptr() == before
    assert not model[0]._forward_hooks
