"""Distributions and their picture."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from stats_rigs import cut, random_structures, structure

from nvalchemi_lightning.data import Batch
from nvalchemi_lightning.data.inspection.distributions import Distributions
from nvalchemi_lightning.data.inspection.picture import check_picture, draw_distributions
from nvalchemi_lightning.errors import ConfigurationError

REFERENCES = {1: -1.0, 6: -2.0, 8: 3.0, 79: 0.0}


def test_distributions_are_those_of_numpy() -> None:
    structures = random_structures(np.random.default_rng(4), 100)
    found = Distributions(cut(structures, [9, 2]), REFERENCES)
    sizes = [data.num_nodes for data in structures]
    assert found.sizes == {size: sizes.count(size) for size in sizes}
    energies = [
        (float(data.energy) - sum(REFERENCES[number] for number in data.atomic_numbers.tolist())) / data.num_nodes
        for data in structures
        if data.energy is not None
    ]
    np.testing.assert_array_equal(found.energies.counts, np.histogram(energies, found.energies.edges)[0])
    forces = np.concatenate([data.forces.norm(dim=1) for data in structures if data.forces is not None])
    np.testing.assert_array_equal(found.forces.counts, np.histogram(np.log10(forces), found.forces.edges)[0])
    assert found.zero_forces == 0


def test_zero_and_missing_forces() -> None:
    data = structure([1, 1, 1], forces=[[0.0] * 3, [math.nan, 0.0, 0.0], [10.0, 0.0, 0.0]])
    found = Distributions([Batch.from_data_list([data])], {})
    assert found.zero_forces == 1
    assert (found.forces.counts.tolist(), found.forces.edges[0]) == ([1], 1.0)


@pytest.mark.parametrize("ending", ["png", "svg"])
@pytest.mark.parametrize("count", [1, 40])
def test_a_picture_is_drawn(ending: str, count: int, tmp_path: Path) -> None:
    structures = random_structures(np.random.default_rng(6), count)
    structures[0] = structure([1] * 120, forces=np.zeros((120, 3)))
    path = tmp_path / f"picture.{ending}"
    draw_distributions(Distributions(cut(structures, [8]), REFERENCES), path, "random")
    assert path.stat().st_size > 5000
    if ending == "svg":
        text = path.read_text()
        for label in ("atoms in a structure", "energy after references [eV/atom]", "force on an atom [eV/Å]"):
            assert f"<!-- {label} -->" in text
        assert "<!-- not shown: 120 atoms without force -->" in text
        assert ("<!-- nothing to show -->" in text) == (count == 1)


def test_drawing_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    code = "matplotlib.pyplot"
    before = code in sys.modules
    draw_distributions(Distributions(cut([structure([1])], [1]), {}), tmp_path / "one.png", "one")
    assert (code in sys.modules) == before


def test_what_cannot_be_written_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"picture\.docx must end in one of .*pdf.*png.*svg"):
        check_picture("picture.docx")
    with pytest.raises(ConfigurationError, match=r"picture must end in one of"):
        check_picture("picture")
    with pytest.raises(ConfigurationError, match=r"there is no folder .*absent for the picture"):
        check_picture(tmp_path / "absent" / "picture.png")
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(ImportError, match=r'a picture needs matplotlib: pip install "nvalchemi-lightning\[plot\]"'):
        check_picture("picture.png")
