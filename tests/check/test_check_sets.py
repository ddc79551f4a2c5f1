"""Checks of whole sets, and between sets."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from check_rigs import changed, crystals, molecules, named, structure

from nvalchemi_lightning.data import AtomicData, Finding, Place, check
from nvalchemi_lightning.data.checkup.table import CHECKS
from nvalchemi_lightning.errors import ConfigurationError

MOLECULES = molecules(40, 0.03, walk=False)
OTHERS = molecules(40, 0.03, walk=False, seed=1)
CUBE = 12.0 * np.eye(3)


def only(found: list[Finding]) -> Finding:
    (finding,) = found
    return finding


def frames_of(finding: Finding) -> list[int]:
    return [place.frame for place in finding.places]


def test_the_table_has_each_name_once() -> None:
    names = [row.name for row in CHECKS]
    assert len(names) == len(set(names))


def test_findings_are_frozen_and_sorted() -> None:
    report = check([*MOLECULES, structure([[0, 0, 0], [0, 0, 0]], [29, 29])])
    severities = [finding.severity for finding in report]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert report.count("error") == 1
    assert not report.is_sensible()
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.findings[0].count = 3  # type: ignore[misc]
    place = only(named(report, "coincident_atoms")).places[0]
    assert str(place).startswith("argument 1: frame 40: Cu 0 and Cu 1")
    assert str(Place("a.xyz", 3)) == "a.xyz: frame 3"
    assert report.as_dict()["findings"][0]["places"][0]["frame"] == 40


def test_the_summary_counts() -> None:
    (first, second) = check(MOLECULES, against=[crystals(3)]).sets
    assert (first.source, first.held_out, first.structures, first.atoms) == ("argument 1", False, 40, 120)
    assert (first.elements, first.labels) == (("H", "O"), {"energy": 40, "forces": 40})
    assert (second.source, second.held_out, second.elements) == ("argument 2", True, ("Cu",))


def test_only_the_first_structures_are_named() -> None:
    bad = [structure([[0, 0, 0], [0, 0, 0.01 * n]], [29, 29], energy=0.0) for n in range(1, 12)]
    finding = only(named(check(bad), "coincident_atoms"))
    assert (finding.count, frames_of(finding)) == (11, list(range(8)))


def test_structures_are_read_one_at_a_time() -> None:
    seen: list[str] = []

    def stream() -> object:
        for data in MOLECULES:
            seen.append("read")
            yield data

    check(stream(), on_structure=lambda: seen.append("seen"))  # type: ignore[arg-type]
    assert seen == ["read", "seen"] * 40


def test_nothing_to_check_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nothing to check; give at least one file"):
        check(against=[MOLECULES])
    with pytest.raises(FileNotFoundError, match=r"no file or store at absent\.xyz"):
        check("absent.xyz")


def test_no_structures_and_no_labels_are_errors() -> None:
    """B81, B03: a training on nothing must not look like one."""
    assert "no structure to look at" in only(named(check([]), "no_structures")).message
    bare = [structure([[0, 0, 0], [0, 0, 1]], [1, 9])] * 3
    finding = only(named(check(bare), "no_labels"))
    assert (finding.severity, finding.message[:27]) == ("error", "none of the 3 structures ha")


def test_gaps_in_labels_are_noted() -> None:
    without = [data.clone(drop=["forces"]) for data in OTHERS[:2]]
    nan = changed(OTHERS[2:3], energy=math.nan)
    report = check([*MOLECULES, *without, *nan])
    messages = {finding.message: frames_of(finding) for finding in named(report, "partial_labels")}
    assert messages == {"41 of 43 structures have forces": [40, 41], "42 of 43 structures have energy": [42]}


def test_far_atoms_are_unreadable_and_the_rest_goes_on() -> None:
    far = structure([[0, 0, 0], [1e6, 0, 0]], [1, 1])
    report = check([far, *MOLECULES])
    assert "extends over 1e+06 A" in only(named(report, "unreadable")).places[0].seen
    assert report.sets[0].structures == 40


class TestEnergies:
    """Energies are compared with what most structures say."""

    def test_outliers_are_found(self) -> None:
        frames = [*MOLECULES]
        frames[7] = changed(frames[7:8], energy=2.0)[0]
        finding = only(named(check(frames), "energy_outliers"))
        assert frames_of(finding) == [7]
        assert finding.places[0].seen.startswith("-3.25 eV per atom")

    def test_one_absurd_energy_does_not_hide_another(self) -> None:
        frames = [*MOLECULES]
        frames[7] = changed(frames[7:8], energy=1e36)[0]
        frames[9] = changed(frames[9:10], energy=1.5)[0]
        assert frames_of(only(named(check(frames), "energy_outliers"))) == [7, 9]

    def test_compositions_of_few_structures_are_compared_by_element(self) -> None:
        rng = np.random.default_rng(0)
        frames = []
        for _ in range(60):
            copper, gold = rng.integers(1, 6, 2)
            line = [[2.6 * n, 0, 0] for n in range(copper + gold)]
            noise = rng.normal(0, 0.02) * (copper + gold)
            frames.append(structure(line, [29] * copper + [79] * gold, energy=-3.0 * copper - 5.0 * gold + noise))
        assert not named(check(frames), "energy_outliers")
        frames[5] = changed(frames[5:6], energy=1.5)[0]
        assert frames_of(only(named(check(frames), "energy_outliers"))) == [5]

    def test_isolated_atoms_are_no_outliers(self) -> None:
        atoms = [structure([[0, 0, 0]], [number], energy=0.0) for number in (1, 8)]
        assert not named(check([*atoms, *MOLECULES]), "energy_outliers")

    def test_constants_are_placeholders(self) -> None:
        frames = [data.clone() for data in MOLECULES]
        for data in frames:
            data.energy = data.energy * 0
        message = only(named(check(frames), "constant_energy")).message
        assert message == "40 structures have the same energy as all others of their composition"

    def test_compositions_that_determine_nothing_are_noted(self) -> None:
        """B84: references fitted to water alone say nothing of its elements."""
        message = only(named(check(MOLECULES), "undetermined_references")).message
        assert message == "1 independent compositions of the 2 elements H O"
        atom = structure([[0, 0, 0]], [1], energy=-1.0)
        assert not named(check([*MOLECULES, atom]), "undetermined_references")


class TestLevels:
    """Sets of several levels of theory do not share energies per element."""

    def test_the_same_composition_is_compared(self) -> None:
        other = molecules(40, 0.03, walk=False, seed=1, offset=-11.0)
        finding = only(named(check(MOLECULES, other), "energy_levels"))
        assert (finding.severity, finding.source) == ("warning", "argument 1, argument 2")
        assert "-0.3" in finding.message
        assert not named(check(MOLECULES, OTHERS), "energy_levels")

    @pytest.mark.parametrize(("shift", "known"), [(0.0, True), (5.0, True), (5.0, False)])
    def test_other_compositions_are_predicted(self, shift: float, known: bool) -> None:
        def line(copper: int, gold: int, shift: float) -> AtomicData:
            places = [[2.6 * n, 0, 0] for n in range(copper + gold)]
            energy = -3.0 * copper - 5.0 * gold + shift * (copper + gold)
            return structure(places, [29] * copper + [79] * gold, energy=energy)

        first = [line(2, 1, 0.0), line(1, 2, 0.0)] if known else [line(2, 2, 0.0), line(1, 1, 0.0)]
        found = named(check(first, [line(4, 1, shift), line(1, 5, shift)]), "energy_levels")
        assert [finding.message for finding in found] == [
            "the energies of argument 2 are +5 eV per atom off those of argument 1"
        ] * (shift != 0 and known)


class TestElements:
    """Elements that training does not see."""

    def test_unseen_elements_are_errors(self) -> None:
        finding = only(named(check(MOLECULES, against=[OTHERS, crystals(2)]), "unseen_elements"))
        assert (finding.severity, finding.source, finding.message) == (
            "error",
            "argument 3",
            "Cu is not among H, O",
        )

    def test_rare_elements_are_noted(self) -> None:
        finding = only(named(check([*MOLECULES, structure([[0, 0, 0]], [94])]), "rare_elements"))
        assert (finding.message, frames_of(finding)) == ("Pu occurs in 1 of 41 structures", [40])
        assert not named(check(MOLECULES[:2]), "rare_elements")


class TestIsolatedAtoms:
    """B121: one atom in a primitive cell is a crystal."""

    def test_only_atoms_without_images_are_references(self) -> None:
        crystal = structure([[0, 0, 0]], [29], cell=2.5 * np.eye(3), energy=-3.5)
        alone = [structure([[0, 0, 0]], [29], energy=0.1), structure([[0, 0, 0]], [29], cell=CUBE, energy=0.1)]
        report = check([crystal, *alone])
        assert frames_of(only(named(report, "one_atom_cells"))) == [0]
        assert not named(report, "isolated_atoms")

    def test_energies_of_one_element_must_agree(self) -> None:
        alone = [structure([[0, 0, 0]], [29], energy=energy) for energy in (0.1, 0.1, 0.9)]
        finding = only(named(check(alone), "isolated_atoms"))
        assert finding.message == "the first isolated Cu atom has 0.1 eV, others differ"
        assert finding.places == (Place("argument 1", 2, "0.9 eV"),)


class TestDuplicates:
    """The same structure again, in one set or in two."""

    def test_copies_within_a_set_are_noted(self) -> None:
        moved = MOLECULES[3].clone()
        moved.positions = moved.positions + 7.0
        finding = only(named(check([*MOLECULES, moved]), "duplicates"))
        assert (finding.severity, finding.places) == ("note", (Place("argument 1", 40, "as frame 3"),))

    def test_leaks_into_held_out_data_are_warnings(self) -> None:
        report = check(MOLECULES, against=[[*OTHERS, MOLECULES[5], MOLECULES[6]]])
        finding = only(named(report, "duplicates"))
        assert (finding.severity, finding.source, finding.count) == ("warning", "argument 1, argument 2", 2)
        assert finding.message == "the same structure again, in training and held-out data"
        assert finding.places[0] == Place("argument 2", 40, "as argument 1: frame 5")

    def test_contradicting_labels_are_warnings(self) -> None:
        other = changed(MOLECULES[5:6], energy=1.1)
        finding = only(named(check([*MOLECULES, *other]), "duplicates"))
        assert finding.severity == "warning"
        assert "the same geometry with another energy" in finding.message
        assert finding.places[0].seen.startswith("as frame 5, but its energy differs by 0.3")

    def test_many_copies_are_all_counted(self) -> None:
        assert only(named(check(MOLECULES[:1] * 30), "duplicates")).count == 29

    def test_isolated_atoms_may_be_in_every_set(self) -> None:
        atom = structure([[0, 0, 0]], [29], energy=0.1)
        assert not named(check([atom], against=[[atom]]), "duplicates")

    def test_correlated_sets_are_noted(self) -> None:
        walk = molecules(40, 0.003, walk=True)
        finding = only(named(check(walk[::2], against=[walk[1::2]]), "duplicates"))
        assert finding.severity == "note"
        assert "20 of 20 structures looked at are within about 0.01 A" in finding.message
        wide = [molecules(40, 0.15, walk=False, seed=seed) for seed in (0, 1)]
        assert not named(check(wide[0], against=[wide[1]]), "duplicates")
