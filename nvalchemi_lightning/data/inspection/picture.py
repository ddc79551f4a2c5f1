"""A picture of how sizes, energies and forces of a data set are distributed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nvalchemi_lightning.data.inspection.distributions import Distributions
from nvalchemi_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_picture", "draw_distributions"]

_WIDE = 10
"""Ratio of the largest to the smallest size, or count, from which an axis is logarithmic."""


def check_picture(path: str | os.PathLike[str]) -> None:
    """Refuse early what :func:`draw_distributions` could not write.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ConfigurationError
        If the ending names no format of pictures, or there is no such folder.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ImportError('a picture needs matplotlib: pip install "nvalchemi-lightning[plot]"') from error
    path = Path(path)
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        raise ConfigurationError(f"{path} must end in one of {', '.join(sorted(known))}")
    if not path.parent.is_dir():
        raise ConfigurationError(f"there is no folder {path.parent} for the picture")


def draw_distributions(found: Distributions, path: str | os.PathLike[str], title: str) -> None:
    """Draw sizes, energies after references, and forces, side by side.

    Parameters
    ----------
    found : Distributions
        What to draw.
    path : str or PathLike
        Where to; the ending decides about the format, such as png, pdf or svg.
    title : str
        What the data set is called.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ConfigurationError
        If the picture cannot be written there.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    figure.suptitle(title)
    sizes, energies, forces = figure.subplots(1, 3)
    _draw_sizes(sizes, found.sizes)
    _draw_bins(energies, found.energies.counts, found.energies.edges, "structures")
    energies.set_xlabel("energy after references [eV/atom]")
    _draw_bins(forces, found.forces.counts, 10.0**found.forces.edges, "atoms")
    forces.set_xlabel("force on an atom [eV/Å]")
    if len(found.forces.counts):
        _make_logarithmic(forces)
    if found.zero_forces:
        forces.set_title(f"not shown: {found.zero_forces} atoms without force", fontsize="medium")
    figure.savefig(path, dpi=150)


def _draw_sizes(axes: Axes, found: Mapping[int, int]) -> None:
    from matplotlib.ticker import MaxNLocator

    sizes = np.array(sorted(found))
    smallest, largest = sizes[[0, -1]].tolist()
    wide = largest > _WIDE * smallest
    edges = np.geomspace(smallest / 1.04, largest * 1.04, 65) if wide else np.arange(smallest, largest + 2) - 0.5
    counts, _ = np.histogram(sizes, edges, weights=[found[size] for size in sizes.tolist()])
    _draw_bins(axes, counts, edges, "structures")
    axes.set_xlabel("atoms in a structure")
    if wide:
        _make_logarithmic(axes)
    else:
        # The margin keeps a single bar from filling the axes.
        axes.set_xlim(max(0, smallest - 2), largest + 2)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _make_logarithmic(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")


def _draw_bins(axes: Axes, counts: NDArray[np.int64], edges: NDArray[np.float64], what: str) -> None:
    axes.set_ylabel(what)
    if not len(counts):
        axes.text(0.5, 0.5, "nothing to show", transform=axes.transAxes, ha="center")
        axes.set(xticks=[], yticks=[])
        return
    axes.stairs(counts, edges, fill=True, color="tab:blue")
    axes.locator_params(axis="x", nbins=7)
    axes.set_ylim(bottom=0)
    if counts.max() > _WIDE * counts[counts > 0].min():
        axes.set_yscale("log")
        # A bin with a single structure stands out from an empty one.
        axes.set_ylim(bottom=0.7)
        axes.yaxis.set_major_formatter("{x:g}")
