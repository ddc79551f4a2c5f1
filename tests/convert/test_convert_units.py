"""Units and orders of labels: known factors, round trips, and refusals."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nvalchemi_lightning.data import Dialect
from nvalchemi_lightning.data.sources.translate import six_to_matrix
from nvalchemi_lightning.data.sources.units import UNITS, unit_factor
from nvalchemi_lightning.errors import UnknownNameError

KNOWN = [
    ("energy", "Ha", 27.2113860),
    ("energy", "Ry", 13.6056930),
    ("energy", "kcal/mol", 0.04336410),
    ("energy", "kJ/mol", 0.01036427),
    ("length", "Bohr", 0.52917721),
    ("force", "Ha/Bohr", 51.4220671),
    ("force", "kcal/mol/A", 0.04336410),
    ("stress", "GPa", 0.00624150913),
    ("stress", "kbar", 0.000624150913),
    ("stress", "eV/A^3", 1.0),
    ("dipole", "Debye", 0.20819434),
]


@pytest.mark.parametrize(("quantity", "unit", "factor"), KNOWN)
def test_known_factors(quantity, unit, factor):
    assert unit_factor(quantity, unit) == pytest.approx(factor, rel=1e-7)


def test_factors_are_those_of_ase():
    units = pytest.importorskip("ase.units")
    assert unit_factor("energy", "Ha") == units.Hartree
    assert unit_factor("length", "Bohr") == units.Bohr
    assert unit_factor("energy", "kcal/mol") == pytest.approx(units.kcal / units.mol, rel=1e-15)
    assert unit_factor("stress", "GPa") == pytest.approx(units.GPa, rel=1e-15)
    assert unit_factor("dipole", "Debye") == pytest.approx(units.Debye, rel=1e-15)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("hartree/bohr", "Ha/Bohr"), ("Eh/a0", "Ha/Bohr"), ("eV/Å", "eV/A"), ("kcal/mol/Ang", "kcal/mol/A")],
)
def test_other_spellings(spelling, name):
    assert unit_factor("force", spelling) == unit_factor("force", name)


def test_powers_are_written_in_two_ways():
    assert unit_factor("stress", "eV / Å**3") == 1.0


@pytest.mark.parametrize(
    ("quantity", "unit", "message"),
    [
        ("energy", "MeV", "'MeV' is not a unit of energy; did you mean 'eV'"),
        ("stress", "Gpa", "'Gpa' is not a unit of stress; did you mean 'GPa'"),
        ("force", "GPa", "'GPa' is not a unit of force"),
    ],
)
def test_unknown_units_name_the_nearest(quantity, unit, message):
    with pytest.raises(UnknownNameError, match=message):
        unit_factor(quantity, unit)


ANY_UNIT = st.sampled_from([(quantity, unit) for quantity, units in UNITS.items() for unit in units])
NUMBER = st.floats(-1e6, 1e6)


@given(ANY_UNIT, ANY_UNIT, NUMBER)
def test_conversions_round_trip(one, two, value):
    there = value * unit_factor(*one) / unit_factor(*two)
    assert there * unit_factor(*two) / unit_factor(*one) == pytest.approx(value, rel=1e-14)


SYMMETRIC = st.tuples(*[NUMBER] * 6).map(
    lambda n: np.array([[n[0], n[1], n[2]], [n[1], n[3], n[4]], [n[2], n[4], n[5]]])
)
ORDERS = st.permutations(["xx", "yy", "zz", "xy", "yz", "xz"])
AXES = {"x": 0, "y": 1, "z": 2}


@given(SYMMETRIC, ORDERS, st.lists(st.booleans(), min_size=6, max_size=6))
def test_six_numbers_in_any_order_are_the_matrix(matrix, order, swapped):
    names = [name[::-1] if swap else name for name, swap in zip(order, swapped, strict=True)]
    six = [matrix[AXES[name[0]], AXES[name[1]]] for name in names]
    assert six_to_matrix(six, Dialect(stress_order=" ".join(names))).tolist() == matrix.tolist()


def test_named_orders():
    six = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert six_to_matrix(six, Dialect()).tolist() == [[1, 6, 5], [6, 2, 4], [5, 4, 3]]
    assert six_to_matrix(six, Dialect(stress_order="vasp")).tolist() == [[1, 4, 6], [4, 2, 5], [6, 5, 3]]
    assert Dialect(stress_order="xx,yy,zz,xy,yz,zx") == Dialect(stress_order="vasp")


@pytest.mark.parametrize("order", ["voigt", "xx yy zz", "xx yy zz yz xz xz", "xx yy zz yz zy xy", ""])
def test_orders_that_are_none(order):
    with pytest.raises(ValidationError, match="the six components in the file's order"):
        Dialect(stress_order=order)


def test_every_permutation_is_an_order():
    assert (
        len(
            {
                Dialect(stress_order=" ".join(order)).matrix_places
                for order in permutations(["xx", "yy", "zz", "xy", "yz", "xz"])
            }
        )
        == 720
    )


def test_a_misspelt_option_names_the_nearest():
    with pytest.raises(ValidationError, match="Dialect has no field 'forces_unit'; did you mean 'force_unit'"):
        Dialect(forces_unit="eV/A")


def test_a_unit_is_checked_when_the_dialect_is_made():
    with pytest.raises(ValidationError, match="'kcal' is not a unit of energy; did you mean 'kcal/mol'"):
        Dialect(energy_unit="kcal")


def test_a_unit_for_a_label_that_is_left_out():
    with pytest.raises(ValidationError, match="stress_sign says how to read stress, but stress_key=None leaves it"):
        Dialect(stress_key=None, stress_sign="vasp")


def test_a_key_is_used_once():
    with pytest.raises(ValidationError, match="'virial' is used twice"):
        Dialect(stress_key="virial", virial_key="virial")


def test_a_dialect_goes_through_json():
    dialect = Dialect(energy_key=None, stress_order="vasp", keep=("temperature",))
    assert Dialect.model_validate_json(dialect.model_dump_json()) == dialect
