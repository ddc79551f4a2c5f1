"""Files and dialects that the tests of converting share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nvalchemi_lightning.data import Dialect

DIALECTS = {
    "ase_standard": Dialect(),
    "ref_prefix_stress9": Dialect(energy_key="REF_energy", forces_key="REF_forces", stress_key="REF_stress"),
    "virial_force_singular": Dialect(energy_key="energy_pbe", forces_key="force", virial_key="virial"),
    "kcal_and_vasp_kbar": Dialect(
        energy_key="energy_kcal_mol",
        energy_unit="kcal/mol",
        forces_key="forces_kcal_mol_A",
        force_unit="kcal/mol/A",
        stress_key="vasp_stress_kB",
        stress_unit="kbar",
        stress_sign="vasp",
        stress_order="vasp",
    ),
    "per_atom_hartree_gpa": Dialect(
        energy_key="energy_per_atom",
        energy_per_atom=True,
        forces_key="forces_Ha_Bohr",
        force_unit="Ha/Bohr",
        stress_key="stress_voigt_GPa",
        stress_unit="GPa",
    ),
}
"""The five files of the dialects set, and how to read them."""


def frame_text(number: int = 0, *, atoms: int = 3, head: str = "", row: str = "") -> str:
    """Return one frame of an extended XYZ file with energy and forces."""
    rng = np.random.default_rng(number)
    rows = [
        f"{element} " + " ".join(f"{value:.8f}" for value in rng.normal(size=6)) + row
        for element in ["O", *["H"] * (atoms - 1)]
    ]
    return "\n".join(
        [str(atoms), head or f"Properties=species:S:1:pos:R:3:forces:R:3 energy={-number - 0.5}", *rows, ""]
    )


def write_frames(path: Path, *texts: str) -> Path:
    """Write frames to a file and return its path."""
    path.write_text("".join(texts), encoding="utf-8")
    return path
