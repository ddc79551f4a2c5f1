"""Joining structures whose fields differ (B11, B13, B24, B49)."""

from __future__ import annotations

import pytest
import torch

from nvalchemi_lightning.data import AtomicData, Batch, differences
from nvalchemi_lightning.errors import ConfigurationTypeError, DataError

NAN = float("nan")


def atoms(size=2, dtype=torch.float32, **fields):
    return AtomicData(torch.zeros(size, 3, dtype=dtype), torch.arange(1, size + 1), **fields)


def crystal(size=2):
    return atoms(size, cell=5 * torch.eye(3)[None], pbc=torch.ones(1, 3, dtype=torch.bool), stress=torch.ones(1, 3, 3))


def test_missing_labels_become_nan_b11_b49():
    batch = Batch.from_data_list(
        [
            atoms(2, energy=torch.ones(1, 1), forces=torch.ones(2, 3), stress=torch.ones(1, 3, 3)),
            atoms(1, energy=torch.ones(1, 1), forces=torch.ones(1, 3)),
            atoms(3, forces=torch.ones(3, 3), dipole=torch.ones(1, 3), charges=torch.ones(3)),
            atoms(1),
        ]
    )
    assert batch.energy.isnan().flatten().tolist() == [False, False, True, True]
    assert batch.stress.isnan().all((1, 2)).tolist() == [False, True, True, True]
    assert batch.forces.isnan().any(1).tolist() == [False] * 6 + [True]
    assert batch.dipole.isnan().all(1).tolist() == [True, True, False, True]
    assert batch.charges.isnan().tolist() == [True] * 3 + [False] * 3 + [True]
    assert {value.dtype for name, value in batch if name != "atomic_numbers"} == {torch.float32}


def test_absent_and_nan_labels_collate_alike_b11():
    with_nan = [atoms(energy=torch.ones(1, 1)), atoms(energy=torch.full((1, 1), NAN), forces=torch.ones(2, 3))]
    absent = [atoms(energy=torch.ones(1, 1)), atoms(forces=torch.ones(2, 3))]
    one, two = Batch.from_data_list(with_nan), Batch.from_data_list(absent)
    assert not differences(one, two)
    assert "energy" not in one[1]


def test_order_of_the_structures_does_not_decide_the_fields_b49():
    pair = [atoms(), atoms(energy=torch.ones(1, 1))]
    assert set(Batch.from_data_list(pair).field_levels) == set(Batch.from_data_list(pair[::-1]).field_levels)


def test_molecule_beside_a_crystal_b13():
    batch = Batch.from_data_list([atoms(3), crystal(1)])
    assert batch.cell[0].tolist() == [[0.0] * 3] * 3
    assert batch.pbc.tolist() == [[False] * 3, [True] * 3]
    assert batch.stress[0].isnan().all()
    molecule, solid = batch.to_data_list()
    assert not {"cell", "pbc", "stress"} & set(molecule.field_levels)
    assert solid == crystal(1)


def test_other_defaults_fill_in():
    moving = atoms(
        2,
        velocities=torch.ones(2, 3),
        atomic_masses=torch.tensor([2.0, 3.0]),
        atom_categories=torch.tensor([4, 5]),
    )
    batch = Batch.from_data_list([atoms(1), moving])
    assert batch.velocities[0].tolist() == [0.0] * 3
    assert batch.atomic_masses.tolist() == pytest.approx([1.008, 2.0, 3.0])
    assert batch.atom_categories.tolist() == [0, 4, 5]
    assert batch.to_data_list() == [atoms(1), moving]


def test_fields_of_ones_own():
    tagged = atoms(2)
    tagged.add_node_property("tags", torch.tensor([7, 8]))
    tagged.add_system_property("gap", torch.tensor([[1.5]]))
    other = atoms(1)
    other.add_node_property("tags", torch.tensor([9]))
    batch = Batch.from_data_list([tagged, other])
    assert batch.tags.tolist() == [7, 8, 9]
    assert batch.gap[1].isnan().all()
    assert batch.to_data_list() == [tagged, other]
    with pytest.raises(DataError, match=r"sample 1 has no 'tags' but others do, and torch.int64 has no value"):
        Batch.from_data_list([tagged, atoms(1)])
    assert "tags" not in Batch.from_data_list([tagged, atoms(1)], exclude_keys=["tags"])
    other = atoms(1)
    other.add_system_property("tags", torch.tensor([9]))
    with pytest.raises(DataError, match="'tags' is on the level 'node' in one sample and 'system' in another"):
        Batch.from_data_list([tagged, other])


def test_float_dtypes_promote():
    batch = Batch.from_data_list([atoms(), atoms(dtype=torch.float64)])
    assert batch.positions.dtype == torch.float64


@pytest.mark.parametrize("size", [1, 2])
def test_isolated_atoms_and_empty_edge_lists_b24(size):
    empty = torch.zeros(0, 2, dtype=torch.int64)
    lone = [atoms(1, neighbor_list=empty, shifts=torch.zeros(0, 3)) for _ in range(size)]
    batch = Batch.from_data_list(lone)
    assert batch.neighbor_list.shape == (0, 2)
    assert batch.num_edges_per_graph.tolist() == [0] * size
    assert batch.edge_ptr.tolist() == [0] * (size + 1)
    assert batch.to_data_list() == lone
    bonded = atoms(2, neighbor_list=torch.tensor([[0, 1], [1, 0]]), shifts=torch.zeros(2, 3))
    mixed = Batch.from_data_list([*lone, bonded, *lone])
    assert mixed.neighbor_list.tolist() == [[size, size + 1], [size + 1, size]]
    assert mixed.to_data_list() == [*lone, bonded, *lone]


def test_edges_of_some_structures_are_refused():
    with pytest.raises(DataError, match="sample 1 has no 'neighbor_list' but others do; build neighbor lists for all"):
        Batch.from_data_list([atoms(neighbor_list=torch.tensor([[0, 1]])), atoms()])
    batch = Batch.from_data_list([atoms(neighbor_list=torch.tensor([[0, 1]])), atoms()], exclude_keys=["neighbor_list"])
    assert batch.num_edges == 0


def test_lattice_shifts_of_a_molecule_are_zero():
    edges = torch.tensor([[0, 1], [1, 0]])
    shifted = atoms(neighbor_list=edges, neighbor_list_shifts=torch.ones(2, 3, dtype=torch.int32))
    batch = Batch.from_data_list([atoms(neighbor_list=edges), shifted])
    assert batch.neighbor_list_shifts.tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
    assert batch.neighbor_list_shifts.dtype == torch.int32


def test_small_integers_do_not_overflow():
    edges = torch.tensor([[0, 1]], dtype=torch.uint8)
    matrix = torch.tensor([[1], [0]], dtype=torch.int8)
    batch = Batch.from_data_list([atoms(neighbor_list=edges, neighbor_matrix=matrix)] * 200)
    assert batch.neighbor_list[-1].tolist() == [398, 399]
    assert batch.neighbor_matrix[-1].tolist() == [398]
    assert batch.neighbor_list.dtype == batch.neighbor_matrix.dtype == torch.int32
    wide = atoms(neighbor_list=edges.long())
    assert Batch.from_data_list([wide]).neighbor_list.dtype == torch.int64


def test_rows_that_differ_are_named():
    with pytest.raises(DataError, match=r"'node_attrs' of sample 1 has rows of shape \(4,\), but \(3,\) in sample 0"):
        Batch.from_data_list([atoms(node_attrs=torch.zeros(2, 3)), atoms(node_attrs=torch.zeros(2, 4))])
    with pytest.raises(DataError, match="'positions' of sample 1 is on meta, but that of sample 0 on cpu"):
        Batch.from_data_list([atoms(), atoms().to("meta")])
    scalar = {"positions": torch.zeros(1, 3), "atomic_numbers": torch.tensor([1]), "energy": torch.tensor(1.0)}
    with pytest.raises(DataError, match="'energy' of the samples does not fit together: zero-dimensional"):
        Batch.from_data_list([scalar, scalar])


def test_nothing_to_join():
    with pytest.raises(DataError, match="cannot make a batch of no structures"):
        Batch.from_data_list([])
    with pytest.raises(DataError, match="a batch cannot be without 'positions': take it out of exclude_keys"):
        Batch.from_data_list([atoms()], exclude_keys=["positions"])
    with pytest.raises(ConfigurationTypeError, match=r"sample 1 must be an AtomicData or a mapping .* got int"):
        Batch.from_data_list([atoms(), 3])


def test_plain_mappings_join_too():
    plain = {"positions": torch.zeros(2, 3), "atomic_numbers": torch.tensor([1, 1]), "tags": torch.zeros(2)}
    batch = Batch.from_data_list([plain, plain], field_levels={"tags": "node"})
    assert batch.field_levels["tags"] == "node"
    with pytest.raises(DataError, match="'tags' has 4 rows, but the system level has 2"):
        Batch.from_data_list([plain, plain])


def test_device():
    assert Batch.from_data_list([atoms()], device="cpu").device.type == "cpu"
    assert Batch.from_data_list([atoms()], device="meta").device.type == "meta"


def test_info_is_not_batched():
    batch = Batch.from_data_list([atoms(info={"t": torch.ones(1)})])
    assert "t" not in batch
    assert not hasattr(batch, "info")


def test_batches_cross_process_boundaries():
    structures = [atoms(neighbor_list=torch.tensor([[0, 1]])), atoms(1, neighbor_list=torch.tensor([[0, 0]]))]
    loader = torch.utils.data.DataLoader(structures, batch_size=2, num_workers=1, collate_fn=Batch.from_data_list)
    (received,) = list(loader)
    assert not differences(received, Batch.from_data_list(structures))
    assert received.batch_idx.tolist() == [0, 0, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    structures = [atoms(neighbor_list=torch.tensor([[0, 1]])), crystal_with_edges()]
    batch = Batch.from_data_list(structures)
    moved = batch.pin_memory().cuda(non_blocking=True)
    assert {value.device.type for _, value in moved} == {"cuda"}
    assert moved.batch_idx.device == moved.edge_ptr.device == moved.device
    assert not differences(moved[[1, 0]].cpu(), batch[[1, 0]])
    assert moved[torch.tensor([True, False], device="cuda")][0] == structures[0].to("cuda")
    assert Batch.from_data_list(structures, device="cuda").to_data_list() == [data.cuda() for data in structures]
    moved.neighbor_list = torch.tensor([[2, 2]], device="cuda")
    assert moved.num_edges_per_graph.tolist() == [0, 1]
    assert moved.atomic_masses.device == moved.velocities.device == moved.device


def crystal_with_edges():
    data = crystal(1)
    data.neighbor_list = torch.tensor([[0, 0]])
    return data
