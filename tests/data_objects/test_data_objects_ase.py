"""ASE structures in and out (B03, B11, B13, B23, B24, B52d)."""

from __future__ import annotations

import builtins

import numpy as np
import pytest
import torch

from nvalchemi_lightning.data import AtomicData, Batch
from nvalchemi_lightning.errors import DataError, LabelNotFoundError

pytest.importorskip("ase")
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write

NAN = float("nan")
SYMMETRIC = np.array([[1.0, 6.0, 5.0], [6.0, 2.0, 4.0], [5.0, 4.0, 3.0]])
VOIGT = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def labelled(**results):
    atoms = molecule("H2O")
    atoms.calc = SinglePointCalculator(atoms, **results)
    return atoms


def convert(atoms, **keywords):
    return AtomicData.from_atoms(atoms, **{"dtype": torch.float64} | keywords)


def test_labels_of_the_calculator_b03(tmp_path):
    forces = np.arange(9.0).reshape(3, 3)
    for suffix in ("extxyz", "traj"):
        write(tmp_path / f"w.{suffix}", labelled(energy=-1.5, forces=forces, dipole=[0.0, 0.1, 0.2]))
        data = convert(read(tmp_path / f"w.{suffix}"))
        assert data.energy.tolist() == [[-1.5]]
        assert data.forces.tolist() == forces.tolist()
        assert data.dipole.tolist() == [[0.0, 0.1, 0.2]]


def test_labels_under_other_names_b03():
    atoms = molecule("H2O")
    atoms.info["DFT_energy"] = -1.5
    atoms.arrays["DFT_forces"] = np.ones((3, 3))
    data = convert(atoms, energy_key="DFT_energy", forces_key="DFT_forces")
    assert data.energy.item() == -1.5
    assert data.forces.sum().item() == 9.0
    assert "DFT_energy" not in data.info
    assert "energy" not in convert(atoms)


def test_a_key_that_was_asked_for_must_be_there_b03():
    atoms = labelled(energy=1.0)
    atoms.info["DFT_energy"] = -1.5
    with pytest.raises(LabelNotFoundError) as error:
        convert(atoms, energy_key="DFT_enrgy")
    assert str(error.value) == (
        "H2O: no energy under the key 'DFT_enrgy'; did you mean 'DFT_energy'? "
        "(info: DFT_energy; arrays: numbers, positions; calculator results: energy)"
    )
    with pytest.raises(LabelNotFoundError, match=r"no forces under the key 'f' .*info: DFT_energy"):
        convert(atoms, forces_key="f")


def test_info_and_arrays_come_before_the_calculator():
    atoms = labelled(energy=1.0)
    atoms.info["energy"] = 2.0
    assert convert(atoms).energy.item() == 2.0
    assert "energy" not in convert(atoms, energy_key=None)


def test_results_of_another_geometry_are_refused():
    atoms = labelled(energy=1.0)
    atoms.positions += 0.1
    with pytest.raises(DataError, match="H2O: the structure changed after its calculator was attached"):
        convert(atoms)
    atoms.calc = None
    assert "energy" not in convert(atoms)


def test_live_calculator():
    atoms = bulk("Cu")
    atoms.calc = EMT()
    assert "energy" not in convert(atoms)
    energy = atoms.get_potential_energy()
    assert convert(atoms).energy.item() == energy


@pytest.mark.parametrize("given", [SYMMETRIC, SYMMETRIC.ravel(), VOIGT, SYMMETRIC[None]])
@pytest.mark.parametrize("key", ["stress", "virials"])
def test_stress_and_virial_in_every_notation_b23(given, key):
    atoms = bulk("Cu")
    atoms.info[key] = given
    data = convert(atoms)
    matrix = data.stress if key == "stress" else data.virial
    assert matrix.tolist() == [SYMMETRIC.tolist()]


def test_stress_keeps_sign_and_order_through_ase_b23():
    atoms = bulk("Cu", cubic=True).repeat((2, 1, 1))
    atoms.set_cell(atoms.cell @ np.array([[1, 0.02, 0.01], [0, 1, 0.03], [0, 0, 1]]), scale_atoms=True)
    atoms.calc = EMT()
    stress = atoms.get_stress(voigt=False)
    data = convert(atoms)
    np.testing.assert_array_equal(data.stress[0].numpy(), stress)
    np.testing.assert_array_equal(data.to_atoms().get_stress(), atoms.get_stress())


def test_compression_is_negative_b23():
    squeezed = bulk("Cu", a=3.4)
    squeezed.calc = EMT()
    squeezed.get_stress()
    assert torch.einsum("bii->", convert(squeezed).stress).item() < 0


def test_labels_that_are_nan_are_missing_b11():
    atoms = labelled(energy=NAN, forces=np.full((3, 3), NAN))
    atoms.info["REF_stress"] = np.full(6, NAN)
    data = convert(atoms, stress_key="REF_stress")
    assert not {"energy", "forces", "stress"} & set(data.field_levels)
    partly = convert(labelled(forces=np.array([[NAN] * 3, [1.0] * 3, [2.0] * 3])))
    assert partly.forces.isnan().sum() == 3


def test_molecules_have_no_cell_b13():
    atoms = molecule("H2O", cell=[9, 9, 9])
    data = convert(atoms)
    assert data.cell is None
    assert data.pbc is None
    assert data.to_atoms().cell.rank == 0


def test_dtypes_b52():
    data = AtomicData.from_atoms(labelled(energy=-123456.789, forces=np.ones((3, 3))))
    assert data.positions.dtype == data.energy.dtype == data.forces.dtype == torch.float32
    assert data.atomic_numbers.dtype == torch.int32

    class Precise(AtomicData):
        precision_preserving_keys = frozenset({"energy"})

    precise = Precise.from_atoms(labelled(energy=-123456.789))
    assert type(precise) is Precise
    assert precise.energy.item() == -123456.789
    assert Batch.from_data_list([precise]).energy.dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("info", "charges", "expected"),
    [
        ({"charge": 1}, None, 1.0),
        ({"charge": -2.0}, None, -2.0),
        ({"charge": np.int64(1)}, [0.1, 0.2, 0.3], 1.0),
        ({}, [-0.8, 0.4, 0.405], 0.0),
        ({}, [-0.8, 0.9, 0.9], 1.0),
        ({}, [NAN, 0.4, 0.4], None),
        ({}, None, None),
    ],
)
def test_charge(info, charges, expected):
    atoms = molecule("H2O")
    atoms.info.update(info)
    if charges is not None:
        atoms.arrays["charges"] = np.array(charges)
    data = convert(atoms)
    assert (None if data.charge is None else data.charge.item()) == expected


@pytest.mark.parametrize(
    ("info", "charges", "message"),
    [
        ({"charge": 0.5}, None, r"info\['charge'\] must be a whole number, got 0.5"),
        ({"charge": "one"}, None, r"info\['charge'\] must be a whole number, got 'one'"),
        ({"charge": True}, None, "must be a whole number, got True"),
        ({"charge": NAN}, None, "must be a whole number, got nan"),
        (
            {},
            [0.1, 0.1, 0.1],
            r"sum of the partial charges must be a whole number, got 0.3.*set atoms.info\['charge'\]",
        ),
    ],
)
def test_bad_charge(info, charges, message):
    atoms = molecule("H2O")
    atoms.info.update(info)
    if charges is not None:
        atoms.arrays["charges"] = np.array(charges)
    with pytest.raises(DataError, match=message):
        convert(atoms)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"energy": "low"}, "H2O: energy under the key 'energy' is not numbers: 'low'"),
        ({"energy": [1.0, 2.0]}, r"energy must be one number, got shape \(2,\)"),
        ({"dipole": [1.0, 2.0]}, r"dipole must be three numbers, got shape \(2,\)"),
        ({"stress": np.ones(5)}, r"stress must have shape \(3, 3\), \(9,\) or \(6,\), got \(5,\)"),
        ({"stress": np.arange(9.0)}, "stress is not symmetric, transposed entries differ by 4"),
        ({"stress": np.full(6, np.inf)}, "stress holds .* at row 0; it must be finite"),
        ({"energy": np.inf}, "energy holds .*inf.* at row 0"),
    ],
)
def test_bad_labels(info, message):
    atoms = molecule("H2O")
    atoms.info.update(info)
    with pytest.raises(DataError, match=message):
        convert(atoms)


def test_rounding_of_a_symmetric_stress_passes():
    atoms = bulk("Cu")
    atoms.info["stress"] = SYMMETRIC + 1e-3 * np.arange(9).reshape(3, 3)
    assert convert(atoms).stress[0, 0, 1] != convert(atoms).stress[0, 1, 0]


def test_other_numbers_become_info():
    atoms = molecule("H2O")
    atoms.info.update(
        temperature=300.0, steps=[1, 2], big=np.array([1.0], dtype=">f8"), name="w", flag=True, ragged=[[1], [2, 3]]
    )
    data = convert(atoms)
    assert {key: value.tolist() for key, value in data.info.items()} == {
        "temperature": 300.0,
        "steps": [1, 2],
        "big": [1.0],
    }
    assert data.to_atoms().info["steps"].tolist() == [1, 2]


def test_masses_of_ones_own():
    atoms = molecule("H2O")
    assert "atomic_masses" not in convert(atoms)
    np.testing.assert_array_equal(convert(atoms).atomic_masses.numpy(), atoms.get_masses())
    atoms.set_masses([16.0, 2.0, 2.0])
    assert convert(atoms).atomic_masses.tolist() == [16.0, 2.0, 2.0]
    assert convert(atoms).to_atoms().get_masses().tolist() == [16.0, 2.0, 2.0]


def test_one_hot_elements():
    data = convert(molecule("H2O"), z_table=[1, 6, 8])
    assert data.node_attrs.tolist() == [[0, 0, 1], [1, 0, 0], [1, 0, 0]]
    with pytest.raises(DataError, match=r"atomic numbers \[8\] are not in z_table \(1, 6\)"):
        convert(molecule("H2O"), z_table=[1, 6])


def test_device():
    assert AtomicData.from_atoms(molecule("H2O"), device="meta").device.type == "meta"


def test_everything_comes_back():
    atoms = bulk("NaCl", "rocksalt", a=5.6)
    data = AtomicData(
        torch.tensor(atoms.positions),
        torch.tensor(atoms.numbers, dtype=torch.int32),
        cell=torch.tensor(atoms.cell.array)[None],
        pbc=torch.ones(1, 3, dtype=torch.bool),
        energy=torch.tensor([[-1.5]], dtype=torch.float64),
        forces=torch.rand(2, 3, dtype=torch.float64),
        stress=torch.tensor(SYMMETRIC)[None],
        virial=2 * torch.tensor(SYMMETRIC)[None],
        dipole=torch.rand(1, 3, dtype=torch.float64),
        charges=torch.tensor([0.9, -0.9], dtype=torch.float64),
        charge=torch.zeros(1, 1, dtype=torch.float64),
        info={"temperature": torch.tensor(300.0)},
    )
    assert convert(data.to_atoms()) == data
    assert convert(data.to_atoms()).info["temperature"].item() == 300.0


def test_missing_labels_and_fields_of_ones_own_on_the_way_back():
    data = convert(molecule("H2O"))
    assert data.to_atoms().calc is None
    data.energy = torch.full((1, 1), NAN, dtype=torch.float64)
    assert data.to_atoms().calc is None
    data.add_node_property("tags2", torch.arange(3))
    data.add_system_property("gap", torch.tensor([[1.5]]))
    back = data.to_atoms()
    assert back.arrays["tags2"].tolist() == [0, 1, 2]
    assert back.info["gap"] == 1.5


def test_without_ase_the_extra_is_named(monkeypatch):
    data = convert(molecule("H2O"))
    real = builtins.__import__

    def refuse(name, *arguments, **keywords):
        if name.startswith("ase"):
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r'pip install "nvalchemi-lightning\[ase\]"'):
        data.to_atoms()


def test_no_atoms():
    with pytest.raises(DataError, match="no atoms: a structure needs at least one atom"):
        convert(Atoms())


def test_every_valid_frame_converts_batches_and_converts_back_b24(shared):
    frames = read(shared / "data/nasty/nasty_valid.extxyz", ":")
    data_list = [convert(atoms) for atoms in frames]
    batch = Batch.from_data_list(data_list)
    assert len(batch) == 25
    assert batch.energy.isfinite().all()
    assert batch.forces.isfinite().all()
    assert batch.stress.isfinite().all((1, 2)).sum() == 16
    assert batch.to_data_list() == data_list
    for atoms, data in zip(frames, batch.to_data_list(), strict=True):
        back = data.to_atoms()
        assert back.get_potential_energy() == atoms.calc.results["energy"]
        np.testing.assert_array_equal(back.positions, atoms.positions)
        np.testing.assert_array_equal(back.pbc, atoms.pbc)
        assert convert(back) == data


INVALID = {
    "inf_force": "forces holds .*inf.* at row 3; it must be finite",
    "nan_position": "positions holds .*nan.* at row 2",
    "pbc_true_zero_cell": "zero or linearly dependent",
    "pbc_true_singular_cell": "zero or linearly dependent",
    "nan_cell": "cell holds .*nan",
    "dummy_element_X": "atomic_numbers holds 0 at row 0: not an element",
    "overflow_energy_1e39": "too large for torch.float32",
}


def test_every_invalid_frame_is_refused_or_masked(shared):
    frames = read(shared / "data/nasty/nasty_invalid.extxyz", ":")
    for atoms in frames:
        case = atoms.info["case"]
        if case in INVALID:
            with pytest.raises(DataError, match=INVALID[case]):
                AtomicData.from_atoms(atoms)
        else:
            data = AtomicData.from_atoms(atoms)
            assert ("energy" in data) == (case not in ("nan_energy", "duplicate_positions")), case
            assert ("forces" in data) == (case not in ("all_nan_forces", "duplicate_positions")), case


def test_asymmetric_stress_is_refused(shared):
    atoms = read(shared / "data/nasty/asymmetric_stress.extxyz")
    with pytest.raises(DataError, match="Au11Cu21: stress is not symmetric"):
        AtomicData.from_atoms(atoms, stress_key="REF_stress")


DIALECTS = {
    "ref_prefix_stress9": {"energy_key": "REF_energy", "forces_key": "REF_forces", "stress_key": "REF_stress"},
    "virial_force_singular": {"energy_key": "energy_pbe", "forces_key": "force", "virials_key": "virial"},
}


@pytest.mark.parametrize("name", DIALECTS)
def test_dialects_hold_the_same_labels_b23(shared, name):
    standard = [convert(atoms) for atoms in read(shared / "data/dialects/ase_standard.extxyz", ":")]
    other = [convert(atoms, **DIALECTS[name]) for atoms in read(shared / f"data/dialects/{name}.extxyz", ":")]
    for one, two in zip(standard, other, strict=True):
        volume = torch.det(one.cell).abs()[:, None, None]
        stress = two.stress if "stress" in two else -two.virial / volume
        torch.testing.assert_close(two.energy, one.energy)
        torch.testing.assert_close(two.forces, one.forces)
        torch.testing.assert_close(stress, one.stress)


def test_mixed_labels_b11_b49(shared):
    frames = read(shared / "data/mixed_missing_labels.extxyz.gz", ":")
    data_list = [AtomicData.from_atoms(atoms) for atoms in frames]
    batch = Batch.from_data_list(data_list)
    known = {name: sum(name in data for data in data_list) for name in ("energy", "forces", "stress")}
    assert known == {"energy": 353, "forces": 343, "stress": 160}
    assert (~batch.energy.isnan()).sum() == 353
    assert (~batch.stress.isnan()).all((1, 2)).sum() == 160
    assert batch.to_data_list() == data_list


def test_absent_and_nan_spellings_agree_b11(shared):
    absent = read(shared / "data/mixed_missing_labels.extxyz.gz", ":80")
    as_nan = read(shared / "data/mixed_missing_as_nan.extxyz.gz", ":")
    assert [AtomicData.from_atoms(a) for a in as_nan] == [AtomicData.from_atoms(a) for a in absent]
