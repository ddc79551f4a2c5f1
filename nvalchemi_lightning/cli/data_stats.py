"""``nvalchemi-lightning data stats``: the numbers that a model starts from, and a picture of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nvalchemi_lightning.cli.output import progress, show_json, show_line, show_table
from nvalchemi_lightning.errors import DataError

if TYPE_CHECKING:
    from nvalchemi_lightning.data.batch import Batch
    from nvalchemi_lightning.models import AtomicStatistics

__all__ = ["stats"]


def stats(
    sources: Annotated[list[Path], typer.Argument(help="Zarr stores, or files of structures, taken together.")],
    cutoff: Annotated[float, typer.Option(help="Distance within which neighbors are counted [A].")] = 5.0,
    isolated_atoms: Annotated[
        Path | None,
        typer.Option(help="Store or file with isolated atoms, whose energies are the references; default: a fit."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw distributions to this file (png, pdf, svg).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, which a model can start from too.")] = False,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Keep the statistics in the store.")] = True,
) -> None:
    """Show reference energies, scales of the labels and neighbors, and keep them in the store for models."""
    from nvalchemi_lightning.data.inspection.picture import check_picture
    from nvalchemi_lightning.models import AtomicStatistics
    from nvalchemi_lightning.neighbors import check_cutoff

    check_cutoff(cutoff)
    if plot is not None:
        check_picture(plot)
    references = None if isolated_atoms is None else _references(isolated_atoms, cutoff)
    found = AtomicStatistics.fit(_blocks(sources, "reading"), cutoff=cutoff, reference_energies=references)
    if as_json:
        show_json({"statistics": found.model_dump(mode="json"), "remarks": found.remarks})
    else:
        _show(found)
    if plot is not None:
        _draw(found, sources, plot)
    # Several sources have no single store, and a file has no place for them.
    if save and len(sources) == 1 and sources[0].is_dir():
        found.save(sources[0])


def _references(path: Path, cutoff: float) -> dict[int, float]:
    from nvalchemi_lightning.models import isolated_atom_energies

    found = isolated_atom_energies(path, cutoff)
    if not found:
        raise DataError(f"{path} has no isolated atom with an energy: a single atom without neighbors in {cutoff:g} A")
    return found


def _blocks(sources: Sequence[Path], what: str) -> Iterator[Batch]:
    from nvalchemi_lightning.data.inspection.blocks import read_blocks

    with progress(what, None) as advance:
        for batch in chain.from_iterable(map(read_blocks, sources)):
            yield batch
            advance(batch.num_graphs)


def _draw(found: AtomicStatistics, sources: Sequence[Path], path: Path) -> None:
    from nvalchemi_lightning.data.inspection.distributions import Distributions
    from nvalchemi_lightning.data.inspection.picture import draw_distributions

    references = dict(zip(found.elements, found.reference_energies, strict=True))
    title = f"{', '.join(source.name for source in sources)}: {found.num_structures} structures"
    draw_distributions(Distributions(_blocks(sources, "drawing"), references), path, title)


def _show(found: AtomicStatistics) -> None:
    sizes = found.sizes
    show_line(
        f"{found.num_structures} structures, {found.num_atoms} atoms, {sizes.smallest} to {sizes.largest} in a "
        f"structure, median {sizes.median:g}"
    )
    show_line(f"{found.neighbors_per_atom:.4g} neighbors per atom within {found.cutoff:g} A")
    show_line()
    rows = [
        ("energy after references [eV/atom]", found.num_energies, _known(found.energy_residual)),
        ("forces [eV/A]", found.num_forces, _known(found.force_scale)),
        ("stress [eV/A^3]", found.num_stresses, _known(found.stress_scale)),
    ]
    show_table(["label", "structures", "rms"], rows)
    show_line()
    show_table(
        ["element", "atoms", f"reference energy [eV], {found.references}", "force rms [eV/A]"],
        [
            (element.symbol, element.atoms, f"{element.reference_energy:.6f}", _known(element.force_scale))
            for element in found.per_element
        ],
    )
    for remark in found.remarks:
        show_line()
        show_line(remark)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
