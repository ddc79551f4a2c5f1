"""Joining and dividing are inverse to each other, for any mixture of fields, levels and missing labels."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from nvalchemi_lightning.data import AtomicData, Batch, differences

# Optional fields of the drawn structures: name to (level, shape of a row).
LABELS = {
    "energy": ("system", (1,)),
    "forces": ("node", (3,)),
    "stress": ("system", (3, 3)),
    "virial": ("system", (3, 3)),
    "dipole": ("system", (3,)),
    "charges": ("node", ()),
    "charge": ("system", (1,)),
    "momenta": ("node", (3,)),
    "velocities": ("node", (3,)),
    "atomic_masses": ("node", ()),
    "node_embeddings": ("node", (2,)),
}
OWN = {"tensor": ("node", (2, 2)), "gap": ("system", (1,)), "weight": ("system", ())}


@st.composite
def structures(draw, with_edges):
    size = draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)

    def numbers(level, row):
        return torch.randn((size if level == "node" else 1, *row), generator=generator)

    fields = {name: numbers(*LABELS[name]) for name in draw(st.sets(st.sampled_from(sorted(LABELS))))}
    for name in draw(st.sets(st.sampled_from(["forces", "energy"]))):
        if name in fields and draw(st.booleans()):
            fields[name][0] = float("nan")
    if draw(st.booleans()):
        fields["cell"] = 4 * torch.eye(3)[None] + 0.1 * numbers("system", (3, 3))
        fields["pbc"] = torch.tensor([draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))])
    if with_edges:
        count = draw(st.integers(0, 5))
        fields["neighbor_list"] = torch.randint(size, (count, 2), generator=generator)
        fields["shifts"] = torch.randn(count, 3, generator=generator)
        fields["edge_embeddings"] = torch.randn(count, 2, generator=generator)
    data = AtomicData(torch.randn(size, 3, generator=generator), torch.randint(1, 90, (size,)), **fields)
    for name in draw(st.sets(st.sampled_from(sorted(OWN)))):
        level, row = OWN[name]
        (data.add_node_property if level == "node" else data.add_system_property)(name, numbers(level, row))
    if with_edges:
        data.add_edge_property("bond", torch.ones(count))
    data.add_node_property("index", torch.arange(size))
    return data


lists = st.booleans().flatmap(lambda edges: st.lists(structures(edges), min_size=1, max_size=6))


@given(lists)
@settings(deadline=None, max_examples=60)
def test_dividing_undoes_joining(data_list):
    batch = Batch.from_data_list(data_list)
    divided = batch.to_data_list()
    assert divided == data_list
    assert [batch[i] for i in range(len(batch))] == data_list
    for given_data, got in zip(data_list, divided, strict=True):
        labels = {name for name, value in given_data if value.numel() and value.isnan().all()}
        assert not labels & set(got.field_levels)
        assert set(got.field_levels) >= set(given_data.field_levels) - labels


@given(lists)
@settings(deadline=None, max_examples=40)
def test_joining_undoes_dividing(data_list):
    batch = Batch.from_data_list(data_list)
    assert not differences(Batch.from_data_list(batch.to_data_list()), batch)


@given(lists, st.data())
@settings(deadline=None, max_examples=40)
def test_selection_commutes_with_joining(data_list, data):
    batch = Batch.from_data_list(data_list)
    order = data.draw(st.lists(st.integers(-len(batch), len(batch) - 1), min_size=1, max_size=6))
    assert batch[order].to_data_list() == [data_list[i] for i in order]


@given(lists, lists)
@settings(deadline=None, max_examples=30)
def test_appending_equals_joining_at_once(first, second):
    if ("neighbor_list" in first[0]) != ("neighbor_list" in second[0]):
        second = first
    batch = Batch.from_data_list(first)
    batch.append(Batch.from_data_list(second))
    assert not differences(batch, Batch.from_data_list([*first, *second]))


@given(lists)
@settings(deadline=None, max_examples=30)
def test_comparison_notices_every_field(data_list):
    batch = Batch.from_data_list(data_list)
    for name, value in batch:
        if name == "neighbor_list" or not value.numel() or value.dtype == torch.bool:
            continue
        changed = batch.clone()
        setattr(changed, name, torch.where(value.isnan(), value, value + 1) if value.is_floating_point() else value + 1)
        assert differences(changed, batch) == ([] if value.isnan().all() else [name])


def test_comparison_notices_how_atoms_divide():
    one, two = (AtomicData(torch.zeros(n, 3), torch.ones(n, dtype=torch.int64)) for n in (1, 2))
    assert differences(Batch.from_data_list([one, two]), Batch.from_data_list([two, one])) == ["number of nodes"]


@pytest.mark.parametrize("field", ["positions", "forces"])
def test_gradients_flow_through_joining_and_selection(field):
    data = AtomicData(torch.zeros(2, 3), torch.tensor([1, 1]), forces=torch.zeros(2, 3))
    getattr(data, field).requires_grad_()
    batch = Batch.from_data_list([data, data])
    (batch[[1]][field].sum() + batch[0].clone().to(dtype=torch.float64).__dict__[field].sum()).backward()
    assert getattr(data, field).grad.tolist() == [[2.0] * 3] * 2
