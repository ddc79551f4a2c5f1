"""One structure: construction, checks, assignment, copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from nvalchemi_lightning.data import AtomicData
from nvalchemi_lightning.errors import ConfigurationError, DataError, UnknownNameError


def water(**fields):
    positions = torch.tensor([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    return AtomicData(positions, torch.tensor([8, 1, 1]), **fields)


def periodic(cell, pbc=(True, True, True)):
    return {"cell": torch.tensor([cell], dtype=torch.float32), "pbc": torch.tensor([pbc])}


def test_reads_what_was_given_and_none_for_the_rest():
    forces = torch.ones(3, 3)
    data = water(forces=forces, energy=torch.tensor([[-1.0]]), stress=None)
    assert data.forces is forces
    assert data.energy.item() == -1.0
    assert data.stress is None
    assert "stress" not in data
    assert data.info == {}
    assert (data.num_nodes, data.num_edges, data.num_graphs) == (3, 0, 1)
    assert data.device.type == "cpu"
    assert [name for name, _ in data] == ["positions", "atomic_numbers", "forces", "energy"]


def test_defaults_are_read_but_not_stored():
    data = water()
    assert data.atomic_masses.tolist() == pytest.approx([15.999, 1.008, 1.008])
    assert data.velocities.tolist() == [[0.0] * 3] * 3
    assert data.atom_categories.tolist() == [0, 0, 0]
    assert data.atom_categories.dtype == torch.int64
    assert set(data.node_properties) == {"positions", "atomic_numbers"}
    with pytest.raises(RuntimeError, match=r"single memory location|expanded tensor"):
        data.velocities += 1.0
    with pytest.raises(RuntimeError, match=r"single memory location|expanded tensor"):
        data.velocities[0] = 1.0


def test_properties_by_level():
    data = water(energy=torch.zeros(1, 1), neighbor_list=torch.tensor([[0, 1], [1, 0]]))
    assert set(data.node_properties) == {"positions", "atomic_numbers"}
    assert set(data.edge_properties) == {"neighbor_list"}
    assert set(data.system_properties) == {"energy"}
    assert data.num_edges == 2
    assert data.field_levels["neighbor_list"] == "edge"


def test_floats_take_the_dtype_of_the_positions():
    data = water(energy=torch.zeros(1, 1, dtype=torch.float64), charges=torch.zeros(3, dtype=torch.float16))
    assert data.energy.dtype == data.charges.dtype == torch.float32


def test_precision_preserving_keys_keep_float64_energies():
    class Precise(AtomicData):
        precision_preserving_keys = frozenset({"energy"})

    energy = torch.tensor([[-123456.789]], dtype=torch.float64)
    data = Precise(torch.zeros(1, 3), torch.tensor([1]), energy=energy, forces=torch.zeros(1, 3, dtype=torch.float64))
    assert data.energy is energy
    assert data.forces.dtype == torch.float32
    data.energy = energy.clone()
    assert data.energy.dtype == torch.float64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"energy": torch.tensor(1.0)}, r"energy must have shape \(1, 1\), got \(\); use energy.reshape\(1, 1\)"),
        ({"energy": torch.zeros(1)}, r"energy must have shape \(1, 1\), got \(1,\)"),
        ({"cell": torch.eye(3)}, r"cell must have shape \(1, 3, 3\), got \(3, 3\); use cell.reshape\(1, 3, 3\)"),
        ({"pbc": torch.ones(3, dtype=torch.bool)}, r"pbc must have shape \(1, 3\), got \(3,\)"),
        ({"forces": torch.zeros(2, 3)}, r"forces must have shape \(V, 3\) with V = 3, got \(2, 3\)$"),
        ({"charges": torch.zeros(3, 1)}, r"charges must have shape \(V,\) with V = 3, got \(3, 1\)"),
        ({"node_attrs": torch.zeros(3)}, r"node_attrs must have shape \(V, A\) with V = 3, got \(3,\)$"),
        ({"neighbor_list": torch.zeros(2, 4, dtype=torch.int64)}, r"neighbor_list must have shape \(E, 2\), got"),
        (
            {"neighbor_list": torch.tensor([[0, 1]]), "shifts": torch.zeros(2, 3)},
            r"shifts must have shape \(E, 3\) with E = 1",
        ),
        ({"charge": torch.zeros(1, 1, dtype=torch.int64)}, "charge must have a dtype of kind float, got torch.int64"),
        ({"pbc": torch.ones(1, 3)}, "pbc must have a dtype of kind bool"),
        ({"energy": -1.0}, r"energy must be a torch.Tensor, got float; use torch.as_tensor"),
        ({"forces": torch.zeros(3, 3, device="meta")}, "forces is on meta but positions is on cpu"),
        ({"energy": torch.tensor([[float("inf")]])}, r"energy holds \[inf\] at row 0; it must be finite \(NaN would"),
        (
            {"energy": torch.tensor([[1e39]], dtype=torch.float64)},
            r"energy holds \[1e\+39\] at row 0, too large for torch.float32",
        ),
        ({"neighbor_list": torch.tensor([[0, 1], [0, 3]])}, r"neighbor_list holds \[0, 3\] at row 1: not an atom"),
        ({"neighbor_list": torch.tensor([[-1, 1]])}, r"neighbor_list holds \[-1, 1\] at row 0"),
    ],
)
def test_wrong_values_are_refused(fields, message):
    with pytest.raises(DataError, match=message):
        water(**fields)


@pytest.mark.parametrize(
    ("positions", "numbers", "message"),
    [
        (torch.zeros(3), torch.ones(3, dtype=torch.int64), r"positions must have shape \(V, 3\), got \(3,\)"),
        (torch.zeros(2, 2), torch.ones(2, dtype=torch.int64), r"positions must have shape \(V, 3\) with V = 2"),
        ([[0.0] * 3], torch.ones(1, dtype=torch.int64), "positions must be a torch.Tensor, got list"),
        (torch.zeros(0, 3), torch.ones(0, dtype=torch.int64), "at least one atom"),
        (torch.zeros(2, 3), torch.ones(3, dtype=torch.int64), r"atomic_numbers must have shape \(V,\) with V = 2"),
        (torch.zeros(1, 3), torch.ones(1), "atomic_numbers must have a dtype of kind int"),
        (torch.zeros(2, 3), torch.tensor([1, 0]), r"atomic_numbers holds 0 at row 1: not an element \(1 to 118\)"),
        (torch.zeros(2, 3), torch.tensor([119, 1]), "atomic_numbers holds 119 at row 0"),
        (torch.tensor([[0.0, float("nan"), 0.0]]), torch.tensor([1]), "positions holds .*nan.* at row 0; it must be"),
    ],
)
def test_wrong_atoms_are_refused(positions, numbers, message):
    with pytest.raises(DataError, match=message):
        AtomicData(positions, numbers)


def test_misspelt_field_names_the_nearest():
    with pytest.raises(UnknownNameError, match="'enrgy' is not a field; did you mean 'energy'"):
        water(enrgy=torch.zeros(1, 1))
    with pytest.raises(UnknownNameError, match="add_node_property"):
        water().spam = torch.zeros(1)


def test_missing_labels_may_be_nan_and_large_finite_ones_are_fine():
    data = water(forces=torch.tensor([[float("nan")] * 3, [3e38, 3e38, 3e38], [3e38] * 3]))
    assert data.forces.isnan().sum() == 3


def test_a_sum_that_overflows_is_not_mistaken_for_an_infinite_number():
    assert water(forces=torch.full((3, 3), 3e38)).forces.max() < float("inf")


@pytest.mark.parametrize(
    ("cell", "pbc"),
    [
        ([[0, 5, 0], [5, 0, 0], [0, 0, 5]], (True, True, True)),  # left-handed
        ([[5, 0, 0], [0, 5, 0], [0, 0, 0]], (True, True, False)),
        ([[0, 0, 0], [0, 5, 0], [0, 0, 0]], (False, True, False)),
        ([[0, 0, 0], [0, 0, 0], [0, 0, 0]], (False, False, False)),
        ([[2.9, 0, 0], [0, 2.9, 0], [0, 0, 120]], (True, True, True)),
        ([[1, 0, 0], [100, 1, 0], [0, 0, 1]], (True, True, True)),
    ],
)
def test_legal_cells(cell, pbc):
    assert water(**periodic(cell, pbc)).pbc.tolist() == [list(pbc)]


@pytest.mark.parametrize(
    ("cell", "pbc"),
    [
        ([[0, 0, 0], [0, 5, 0], [0, 0, 5]], (True, True, True)),
        ([[5, 0, 0], [0, 5, 0], [5, 5, 0]], (True, True, True)),
        ([[5, 0, 0], [10, 0, 0], [0, 0, 5]], (True, True, False)),
        ([[0, 0, 0], [0, 5, 0], [0, 0, 5]], (True, False, False)),
    ],
)
def test_periodic_directions_need_independent_vectors(cell, pbc):
    with pytest.raises(DataError, match="zero or linearly dependent"):
        water(**periodic(cell, pbc))


def test_periodic_without_a_cell_is_refused():
    with pytest.raises(DataError, match="there is no cell"):
        water(pbc=torch.tensor([[True, False, False]]))
    assert water(pbc=torch.zeros(1, 3, dtype=torch.bool)).cell is None


def test_assignment_is_checked_and_bad_input_changes_nothing():
    data = water(forces=torch.zeros(3, 3))
    before = data.forces
    with pytest.raises(DataError, match="forces must have shape"):
        data.forces = torch.zeros(2, 3)
    assert data.forces is before
    data.forces = torch.ones(3, 3, dtype=torch.float64)
    assert data.forces.dtype == torch.float32
    data.energy = torch.zeros(1, 1)
    assert "energy" in data
    data.energy = None
    assert "energy" not in data
    data.energy = None
    del data.forces
    assert data.forces is None


def test_core_fields_stay():
    data = water()
    with pytest.raises(DataError, match="'positions' cannot be removed"):
        data.positions = None
    with pytest.raises(DataError, match="'atomic_numbers' cannot be removed"):
        del data.atomic_numbers
    with pytest.raises(DataError, match=r"use to\(dtype=torch.float64\)"):
        data.positions = torch.zeros(3, 3, dtype=torch.float64)
    with pytest.raises(DataError, match="with V = 3"):
        data.positions = torch.zeros(4, 3)


def test_assigned_cell_is_checked_against_the_periodicity():
    data = water(pbc=torch.zeros(1, 3, dtype=torch.bool))
    data.pbc = torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(DataError, match="linearly dependent"):
        data.cell = torch.zeros(1, 3, 3)
    data.cell = 5 * torch.eye(3)[None]
    assert data.cell is not None


def test_new_neighbor_list_removes_what_belonged_to_the_old_one():
    data = water(neighbor_list=torch.tensor([[0, 1]]), shifts=torch.zeros(1, 3))
    data.neighbor_list = torch.tensor([[0, 1], [1, 0]])
    assert "shifts" not in data
    assert data.num_edges == 2
    with pytest.raises(DataError, match="with E = 2"):
        data.shifts = torch.zeros(1, 3)


def test_absent_attributes_name_the_nearest_field():
    with pytest.raises(AttributeError, match="this AtomicData has no 'forcs'; did you mean 'forces'"):
        _ = water(forces=torch.zeros(3, 3)).forcs
    with pytest.raises(AttributeError, match="has no 'spam'; its fields are positions, atomic_numbers"):
        del water().spam


def test_fields_of_ones_own():
    data = water(neighbor_list=torch.tensor([[0, 1]]))
    data.add_node_property("tags", torch.arange(3))
    data.add_edge_property("bond", torch.ones(1, 1))
    data.add_system_property("bandgap", torch.tensor([[1.5]]))
    assert data.field_levels["tags"] == "node"
    assert set(data.edge_properties) == {"neighbor_list", "bond"}
    assert data.bandgap.item() == 1.5
    data.tags = torch.zeros(3)
    data.bandgap = None
    assert "bandgap" not in data
    with pytest.raises(DataError, match=r"tags must have 3 row\(s\) on this level, got shape \(2,\)"):
        data.tags = torch.zeros(2)
    with pytest.raises(ConfigurationError, match="'tags' is already a field on the level 'node'"):
        data.add_system_property("tags", torch.zeros(1))


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("forces", torch.zeros(3, 3), ConfigurationError, "is a field of the table: assign it"),
        ("to", torch.zeros(3), ConfigurationError, "'to' cannot be the name of a field"),
        ("batch_idx", torch.zeros(3), ConfigurationError, "'batch_idx' cannot be the name of a field"),
        ("info", torch.zeros(3), ConfigurationError, "'info' cannot be the name of a field"),
        ("_mine", torch.zeros(3), ConfigurationError, "'_mine' cannot be the name of a field"),
        ("two words", torch.zeros(3), ConfigurationError, "cannot be the name of a field"),
        ("mine", torch.zeros(()), DataError, r"mine must have 3 row\(s\) on this level, got shape \(\)"),
        ("mine", [1, 2, 3], DataError, "mine must be a torch.Tensor, got list"),
        ("mine", torch.zeros(3, device="meta"), DataError, "mine is on meta but positions is on cpu"),
    ],
)
def test_bad_fields_of_ones_own(name, value, error, message):
    with pytest.raises(error, match=message):
        water().add_node_property(name, value)


def test_info_holds_tensors_and_follows_copies():
    data = water(info={"temperature": torch.tensor(300.0)})
    assert data.to(dtype=torch.float64).info["temperature"].dtype == torch.float64
    with pytest.raises(DataError, match=r"info\['name'\] must be a torch.Tensor, got str"):
        water(info={"name": "water"})
    with pytest.raises(DataError, match=r"info\['name'\]"):
        data.info = {"name": "water"}


def test_unchecked_wraps_without_a_look():
    fields = {"positions": torch.zeros(2, 3), "atomic_numbers": torch.tensor([0, 0]), "mine": torch.zeros(2)}
    data = AtomicData.unchecked(fields, {"mine": "node"})
    assert data.positions is fields["positions"]
    assert data.field_levels["mine"] == "node"
    assert AtomicData.unchecked(fields).field_levels["mine"] == "system"


def test_copies_are_independent():
    data = water(forces=torch.zeros(3, 3), info={"t": torch.zeros(1)})
    for other in (data.clone(), data.to("cpu"), data.cpu(), copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert other == data
        other.forces.add_(1.0)
        other.info["t"].add_(1.0)
        other.energy = torch.zeros(1, 1)
        assert data.forces.abs().max() == 0
        assert data.info["t"] == 0
        assert "energy" not in data


def test_shallow_copy_does_not_share_the_set_of_fields():
    data = water()
    other = copy.copy(data)
    other.energy = torch.zeros(1, 1)
    assert "energy" not in data


def test_to_casts_floating_fields_only():
    data = water(energy=torch.zeros(1, 1)).to(dtype=torch.float64)
    assert data.positions.dtype == data.energy.dtype == torch.float64
    assert data.atomic_numbers.dtype == torch.int64


def test_clone_keeps_autograd_history_and_drops_on_request():
    data = water(forces=torch.zeros(3, 3))
    data.positions.requires_grad_()
    clone = data.clone(drop=["forces"])
    assert clone.positions.grad_fn is not None
    assert "forces" not in clone
    assert "forces" in data
    with pytest.raises(UnknownNameError, match="cannot drop 'spam'"):
        data.clone(drop=["spam"])
    with pytest.raises(DataError, match="'positions' cannot be removed"):
        data.clone(drop=["positions"])


def test_private_attributes_are_plain():
    data = water()
    data._note = "anything"
    assert data.clone()._note == "anything"
    del data._note
    with pytest.raises(AttributeError, match="_note"):
        _ = data._note


def test_equality_is_exact_and_reads_missing_as_nan():
    data = water(forces=torch.zeros(3, 3))
    assert data == water(forces=torch.zeros(3, 3), energy=torch.full((1, 1), float("nan")))
    assert data == water(forces=torch.zeros(3, 3), **periodic([[0] * 3] * 3, (False, False, False)))
    assert data == water(forces=torch.zeros(3, 3), velocities=torch.zeros(3, 3), atomic_masses=data.atomic_masses)
    assert data != water(forces=torch.full((3, 3), 1e-30))
    assert data != water(forces=torch.zeros(3, 3), energy=torch.zeros(1, 1))
    assert data != water(forces=torch.zeros(3, 3), neighbor_list=torch.zeros(0, 2, dtype=torch.int64))
    assert data != data.to(dtype=torch.float64)
    assert data != "water"
    assert data != AtomicData(torch.zeros(1, 3), torch.tensor([1]))


def test_repr_shows_the_fields():
    assert repr(water()) == "AtomicData(positions (3, 3), atomic_numbers (3,))"


def test_contiguous():
    data = AtomicData(torch.zeros(3, 4).t()[:, :3], torch.ones(4, dtype=torch.int64))
    assert data.contiguous().positions.is_contiguous()
