"""A batch: attributes, counts, assignment, selection, copies."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from nvalchemi_lightning.data import AtomicData, Batch, differences
from nvalchemi_lightning.errors import ConfigurationError, DataError, LabelNotFoundError, UnknownNameError

EDGES = ([[0, 1], [1, 0]], [], [[0, 1], [0, 2], [1, 0], [2, 0]])


def structure(size, edges=None, shift=0.0):
    fields = {"energy": torch.full((1, 1), shift), "forces": torch.full((size, 3), shift)}
    if edges is not None:
        fields["neighbor_list"] = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2)
        fields["shifts"] = torch.full((len(edges), 3), shift)
    return AtomicData(torch.arange(3.0 * size).reshape(size, 3) + shift, torch.arange(1, size + 1), **fields)


@pytest.fixture
def batch():
    return Batch.from_data_list([structure(n, e, float(n)) for n, e in zip((2, 1, 3), EDGES, strict=True)])


def test_fields_are_concatenated_and_read_both_ways(batch):
    assert batch.positions.shape == (6, 3)
    assert batch.energy.flatten().tolist() == [2.0, 1.0, 3.0]
    assert batch["forces"] is batch.forces
    assert dict(iter(batch)).keys() == {"positions", "atomic_numbers", "energy", "forces", "neighbor_list", "shifts"}
    assert "forces" in batch
    assert "batch_idx" not in batch


def test_counts_and_offsets(batch):
    assert batch.num_graphs == batch.batch_size == len(batch) == 3
    assert (batch.num_nodes, batch.num_edges, batch.max_num_nodes) == (6, 6, 3)
    assert batch.num_nodes_list == batch.num_nodes_per_graph.tolist() == [2, 1, 3]
    assert batch.num_edges_list == batch.num_edges_per_graph.tolist() == [2, 0, 4]
    assert batch.batch_idx.tolist() == [0, 0, 1, 2, 2, 2]
    assert batch.batch_ptr.tolist() == [0, 2, 3, 6]
    assert batch.edge_ptr.tolist() == [0, 1, 2, 2, 4, 5, 6]
    assert {batch.batch_idx.dtype, batch.batch_ptr.dtype, batch.num_nodes_per_graph.dtype} == {torch.int64}
    assert batch.batch_idx is batch.batch_idx
    assert batch.keys == {
        "node": {"positions", "atomic_numbers", "forces"},
        "edge": {"neighbor_list", "shifts"},
        "system": {"energy"},
    }
    assert set(batch.level_keys) == {"atoms", "edges", "system"}
    assert batch.device.type == "cpu"
    assert batch.dtype == torch.float32


def test_atom_indices_count_through_the_batch(batch):
    assert batch.neighbor_list.tolist() == [[0, 1], [1, 0], [3, 4], [3, 5], [4, 3], [5, 3]]


def test_batch_idx_scatters_without_a_cast(batch):
    sums = torch.zeros(3).index_add(0, batch.batch_idx, torch.ones(6))
    assert sums.tolist() == [2.0, 1.0, 3.0]


def test_absent_fields(batch):
    assert getattr(batch, "stress", None) is None
    with pytest.raises(AttributeError, match="this Batch has no 'stress'; its fields are positions"):
        _ = batch.stress
    with pytest.raises(AttributeError, match="no 'forcs'; did you mean 'forces'"):
        _ = batch.forcs
    with pytest.raises(LabelNotFoundError, match="no 'forcs'; did you mean 'forces'"):
        _ = batch["forcs"]
    with pytest.raises(KeyError):
        _ = batch["batch_idx"]
    with pytest.raises(LabelNotFoundError, match="has no 'neighbor_list'"):
        _ = Batch.from_data_list([structure(2)]).edge_ptr


def test_defaults_are_read_but_not_stored(batch):
    assert batch.atomic_masses[2].item() == pytest.approx(1.008)
    assert batch.velocities.shape == (6, 3)
    assert batch.atom_categories.tolist() == [0] * 6
    assert "velocities" not in batch
    with pytest.raises(RuntimeError, match=r"single memory location|expanded tensor"):
        batch.velocities[0] = 1.0


def test_assignment_keeps_the_tensor(batch):
    forces = torch.zeros(6, 3, dtype=torch.float64, requires_grad=True)
    batch.forces = forces
    assert batch.forces is forces
    batch["charges"] = torch.zeros(6)
    assert batch.field_levels["charges"] == "node"
    batch.domain = torch.arange(3)
    assert batch.field_levels["domain"] == "system"
    batch.domain = torch.zeros(3, 2)
    assert batch.domain.shape == (3, 2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("forces", torch.zeros(5, 3), r"length mismatch: 'forces' must have shape \(6, 3\) on the node level, got \(5"),
        ("energy", torch.zeros(3), r"'energy' must have shape \(3, 1\) on the system level, got \(3,\)"),
        ("stress", torch.zeros(3, 6), r"'stress' must have shape \(3, 3, 3\)"),
        ("pbc", torch.zeros(3, 3), "pbc must have a dtype of kind bool, got torch.float32"),
        (
            "mine",
            torch.zeros(6),
            r"\(3, \.\.\.\) on the system level, got \(6,\); values per atom are added with add_key",
        ),
        ("mine", torch.zeros(()), "length mismatch"),
        ("mine", [1, 2, 3], "mine must be a torch.Tensor, got list"),
        ("shifts", torch.zeros(5, 3), r"'shifts' must have shape \(6, 3\) on the edge level"),
        ("neighbor_list", torch.zeros(2, 4, dtype=torch.int64), r"'neighbor_list' must have shape \(2, 2\)"),
        ("neighbor_list", torch.zeros(2, 2), "neighbor_list must have a dtype of kind int"),
        ("neighbor_list", None, "neighbor_list must be a torch.Tensor"),
    ],
)
def test_bad_assignment_changes_nothing(batch, name, value, message):
    before = batch.clone()
    with pytest.raises(DataError, match=message):
        setattr(batch, name, value)
    assert not differences(batch, before)
    assert list(batch.field_levels) == list(before.field_levels)


def test_names_of_the_class_are_refused(batch):
    with pytest.raises(ConfigurationError, match="'num_nodes' cannot be the name of a field"):
        batch.num_nodes = torch.zeros(3)


def test_new_edges_replace_the_old_ones(batch):
    assert batch.num_edges_list == [2, 0, 4]
    batch.neighbor_list = torch.tensor([[2, 2], [3, 4], [4, 3]], dtype=torch.int32)
    assert "shifts" not in batch
    assert batch.num_edges == 3
    assert batch.num_edges_list == [0, 1, 2]
    batch.shifts = torch.ones(3, 3)
    assert batch[2].neighbor_list.tolist() == [[0, 1], [1, 0]]
    assert batch[0].neighbor_list.shape == (0, 2)
    assert batch[1].shifts.shape == (1, 3)


def test_edges_must_be_grouped_by_structure(batch):
    batch.neighbor_list = torch.tensor([[3, 4], [0, 1]])
    assert batch.num_edges == 2
    with pytest.raises(DataError, match="not grouped by structure; sort them"):
        _ = batch.num_edges_per_graph
    batch.neighbor_list = torch.tensor([[0, 6]])
    with pytest.raises(DataError, match=r"no atoms of the batch \(0 to 5\)"):
        _ = batch.num_edges_per_graph


def test_edge_fields_come_after_the_neighbor_list():
    batch = Batch.from_data_list([structure(2)])
    with pytest.raises(DataError, match="assign neighbor_list before 'shifts'"):
        batch.shifts = torch.zeros(2, 3)
    batch.neighbor_list = torch.zeros(0, 2, dtype=torch.int64)
    batch.shifts = torch.zeros(0, 3)
    assert batch.num_edges_per_graph.tolist() == [0]


def test_without_edges_counts_are_zero():
    batch = Batch.from_data_list([structure(2), structure(1)])
    assert batch.num_edges == 0
    assert batch.num_edges_list == batch.num_edges_per_graph.tolist() == [0, 0]


def test_deletion(batch):
    del batch.forces
    assert "forces" not in batch
    del batch.shifts
    del batch.neighbor_list
    assert batch.num_edges == 0
    with pytest.raises(DataError, match="'positions' cannot be removed"):
        del batch.positions
    with pytest.raises(AttributeError, match="has no 'forces'"):
        del batch.forces


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ([2, 0], [2, 0]),
        ([0, 0, -1], [0, 0, 2]),
        (slice(1, None), [1, 2]),
        (slice(None, None, -2), [2, 0]),
        (torch.tensor([1]), [1]),
        (torch.tensor([True, False, True]), [0, 2]),
        ([False, True, False], [1]),
        (np.array([2, 1]), [2, 1]),
        (range(2), [0, 1]),
    ],
)
def test_selection_equals_joining_the_same_structures(batch, index, expected):
    structures = batch.to_data_list()
    chosen = batch[index]
    assert not differences(chosen, Batch.from_data_list([structures[i] for i in expected]))
    assert chosen.batch_ptr.tolist()[-1] == chosen.num_nodes


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], "selects none of the 3"),
        (slice(3, 9), "selects none of the 3"),
        ([False] * 3, "selects none"),
        ([0, 3], "structure 3 does not exist: there are 3"),
        (-4, "structure -4 does not exist"),
        ([True], "mask has 1 entries, but there are 3"),
        ([0.5], "indexed by integers or a mask, got torch.float32"),
    ],
)
def test_bad_selection(batch, index, message):
    with pytest.raises(IndexError, match=message):
        _ = batch[index]


def test_selection_can_drop_fields(batch):
    chosen = batch.index_select([0], drop=["neighbor_list", "shifts"])
    assert chosen.keys["edge"] == set()
    assert chosen.num_edges == 0
    with pytest.raises(UnknownNameError, match="cannot drop 'spam'"):
        batch.index_select([0], drop=["spam"])


def test_single_structures(batch):
    for index, data in enumerate(batch.to_data_list()):
        assert data == batch[index] == batch.get_data(index) == batch[np.int64(index)]
        assert data.neighbor_list.tolist() == EDGES[index]
    assert batch[-1] == batch[2]


def test_structures_do_not_write_into_the_atom_indices_of_the_batch(batch):
    before = batch.neighbor_list.clone()
    batch[1].neighbor_list.add_(1)
    batch.to_data_list()[2].neighbor_list.add_(1)
    assert torch.equal(batch.neighbor_list, before)


def test_copies_are_independent(batch):
    copies = (batch.clone(), batch.to("cpu"), batch.cpu(), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch)))
    for other in copies:
        assert not differences(other, batch)
        assert other.num_edges_list == [2, 0, 4]
        other.forces.add_(1.0)
        other.domain = torch.zeros(3)
        assert batch.forces[0, 0] == 2.0
        assert "domain" not in batch


def test_clone_after_new_edges_counts_its_own(batch):
    batch.neighbor_list = torch.tensor([[0, 1]])
    other = batch.to(dtype=torch.float64)
    assert other.num_edges_list == [1, 0, 0]
    assert pickle.loads(pickle.dumps(batch)).num_edges_list == [1, 0, 0]


def test_to_honors_dtype_for_floats(batch):
    other = batch.to(dtype=torch.float64)
    assert other.positions.dtype == other.energy.dtype == torch.float64
    assert other.neighbor_list.dtype == torch.int64
    assert batch.positions.dtype == torch.float32


def test_to_another_device_takes_the_offsets_along(batch):
    other = batch.to("meta")
    assert {value.device.type for _, value in other} == {"meta"}
    assert other.num_nodes_per_graph.device.type == other.num_edges_per_graph.device.type == "meta"
    assert other.num_nodes_list == [2, 1, 3]
    assert other.batch_idx.shape == (6,)


def test_clone_keeps_history_and_private_attributes_and_drops(batch):
    batch.positions.requires_grad_()
    batch._cutoff = 5.0
    other = batch.clone(drop=["neighbor_list", "shifts"])
    assert other.positions.grad_fn is not None
    assert other._cutoff == 5.0
    assert other.num_edges == 0
    assert batch.num_edges == 6


def test_contiguous(batch):
    batch.forces = torch.zeros(3, 6).t()
    assert batch.contiguous().forces.is_contiguous()


def test_append(batch):
    expected = Batch.from_data_list([*batch.to_data_list(), structure(2, EDGES[0], 7.0)])
    batch.append(structure(2, EDGES[0], 7.0))
    assert not differences(batch, expected)
    batch.append(expected)
    assert len(batch) == 8
    assert batch.batch_ptr.shape == (9,)


def test_append_fills_missing_labels_and_bad_input_changes_nothing(batch):
    other = AtomicData(torch.zeros(1, 3), torch.tensor([1]), neighbor_list=torch.zeros(0, 2, dtype=torch.int64))
    batch.append(other)
    assert batch.energy[3].isnan().all()
    with pytest.raises(DataError, match="sample 1 has no 'neighbor_list' but others do"):
        batch.append(structure(2))
    assert len(batch) == 4


def test_add_key(batch):
    batch.add_key("tags", [torch.arange(n) for n in (2, 1, 3)])
    batch.add_key("bond", [torch.ones(n, 1) for n in (2, 0, 4)], level="edge")
    batch.add_key("gap", [torch.ones(1, 1)] * 3, level="system")
    assert batch.tags.tolist() == [0, 1, 0, 0, 1, 2]
    assert batch.keys["edge"] == {"neighbor_list", "shifts", "bond"}
    assert batch[2].field_levels["tags"] == "node"
    batch.add_key("gap", [torch.zeros(1, 1)] * 3, level="system", overwrite=True)
    assert batch.gap.sum() == 0
    batch.add_key("stress", [torch.zeros(1, 3, 3)] * 3, level="system")
    assert batch.stress.shape == (3, 3, 3)


@pytest.mark.parametrize(
    ("key", "sizes", "level", "error", "message"),
    [
        ("forces", (2, 1, 3), "node", ConfigurationError, "already a field of this batch; pass overwrite=True"),
        ("len", (2, 1), "node", DataError, r"one tensor per structure: 3, got 2"),
        ("mine", (2, 2, 3), "node", DataError, r"'mine' must have shape \(1, \.\.\.\) on the node level"),
        ("stress", (1, 1, 1), "node", ConfigurationError, "'stress' belongs to the level 'system', not 'node'"),
        ("append", (2, 1, 3), "node", ConfigurationError, "'append' cannot be the name of a field"),
    ],
)
def test_bad_add_key(batch, key, sizes, level, error, message):
    with pytest.raises(error, match=message):
        batch.add_key(key, [torch.zeros(n) for n in sizes], level=level)


def test_add_key_cannot_move_a_field_to_another_level(batch):
    batch.add_key("tags", [torch.zeros(n) for n in (2, 1, 3)])
    with pytest.raises(ConfigurationError, match="'tags' belongs to the level 'node', not 'system'"):
        batch.add_key("tags", [torch.zeros(1)] * 3, level="system", overwrite=True)


def test_repr(batch):
    assert repr(batch).startswith("Batch(3 structures, 6 atoms, 6 edges: positions (6, 3), ")


def test_from_levels_wraps_without_copies(batch):
    node = {name: batch[name] for name in ("positions", "atomic_numbers", "forces")}
    edge = {name: batch[name] for name in ("neighbor_list", "shifts")}
    made = Batch.from_levels(
        node=node,
        edge=edge,
        system={"energy": batch.energy},
        num_nodes_per_graph=torch.tensor([2, 1, 3], dtype=torch.int32),
        num_edges_per_graph=[2, 0, 4],
    )
    assert made.forces is batch.forces
    assert not differences(made, batch)
    counted = Batch.from_levels(node=node, edge=edge, num_nodes_per_graph=[2, 1, 3])
    assert counted.num_edges_list == [2, 0, 4]
    assert "energy" not in counted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"node": {"positions": torch.zeros(3, 3)}}, "a batch cannot be without 'atomic_numbers'"),
        ({"system": {"energy": torch.zeros(3, 1)}}, "'energy' has 3 rows, but the system level has 2"),
        ({"system": {"positions": torch.zeros(2, 1)}}, r"fields on more than one level: \['positions'\]"),
        ({"num_nodes_per_graph": [1, 1]}, "'positions' has 3 rows, but the node level has 2"),
        ({"edge": {"shifts": torch.zeros(2, 3)}}, "edge fields without neighbor_list need num_edges_per_graph"),
        (
            {"edge": {"shifts": torch.zeros(2, 3)}, "num_edges_per_graph": [1, 2]},
            "num_edges_per_graph adds up to 3 edges of 2 graphs, but there are 2 edges and 2 graphs",
        ),
    ],
)
def test_from_levels_checks_the_numbers_of_rows(change, message):
    node = {"positions": torch.zeros(3, 3), "atomic_numbers": torch.ones(3, dtype=torch.int64)}
    arguments = {"node": node, "num_nodes_per_graph": [1, 2]} | change
    with pytest.raises(DataError, match=message):
        Batch.from_levels(**arguments)


def test_neighbor_matrix_indices_follow_joining_and_selection():
    def padded(size, rows):
        return AtomicData(
            torch.zeros(size, 3),
            torch.ones(size, dtype=torch.int64),
            neighbor_matrix=torch.tensor(rows),
            neighbor_matrix_shifts=torch.zeros(size, len(rows[0]), 3, dtype=torch.int32),
        )

    batch = Batch.from_data_list([padded(2, [[1], [0]]), padded(3, [[1, 2], [0, 3], [0, 3]])])
    assert batch.neighbor_matrix.tolist() == [[1, 5], [0, 5], [3, 4], [2, 5], [2, 5]]
    assert batch.neighbor_matrix_shifts.shape == (5, 2, 3)
    assert batch[1].neighbor_matrix.tolist() == [[1, 2], [0, 3], [0, 3]]
    assert batch[[1, 0]].neighbor_matrix.tolist() == [[1, 2], [0, 5], [0, 5], [4, 5], [3, 5]]
