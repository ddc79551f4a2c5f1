"""What a store says about where its structures came from; other readers of the layout pass it over.

::

    <store>/    attribute nvalchemi_lightning: version, units, sources, frames that were left out
      origin/   source [N], frame [N]: number of the source and of the frame in it, -1 where that is not known
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, ValidationError

from nvalchemi_lightning.data.origins import SampleOrigin
from nvalchemi_lightning.data.store.arrays import create_array
from nvalchemi_lightning.data.store.layout import (
    ZarrStoreLike,
    ZarrWriteConfig,
    committed_samples,
    open_store,
    store_name,
    stored_array,
)
from nvalchemi_lightning.errors import StoreError
from nvalchemi_lightning.strict_model import StrictModel

__all__ = [
    "PROVENANCE",
    "UNITS",
    "OmittedFrame",
    "Provenance",
    "SourceRecord",
    "origin_array",
    "origin_of",
    "origins_in",
    "provenance_of",
    "write_origins",
    "write_provenance",
]

PROVENANCE = "nvalchemi_lightning"
"""Attribute of a store that holds its provenance."""

UNITS = {
    "energy": "eV",
    "length": "A",
    "forces": "eV/A",
    "stress": "eV/A^3, positive under tension",
    "virial": "eV, -dE/dstrain",
    "dipole": "e*A",
    "charge": "e",
}
"""What the numbers of a store are in."""


class SourceRecord(StrictModel):
    """One file or store that structures came from.

    Attributes
    ----------
    name : str
        Its path, as it was given.
    size : int or None, default None
        Its bytes; None for a store.
    format : str or None, default None
        The format that was asked for.
    dialect : dict
        The options of its :class:`~nvalchemi_lightning.data.Dialect` that differ from the defaults.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    size: int | None = None
    format: str | None = None
    dialect: dict[str, Any] = Field(default_factory=dict)


class OmittedFrame(StrictModel):
    """A frame that was left out because it could not be read.

    Attributes
    ----------
    source, frame : int
        Number of the source and of the frame in it.
    reason : str
        Why.
    """

    model_config = ConfigDict(frozen=True)

    source: int
    frame: int
    reason: str


class Provenance(StrictModel):
    """Where the structures of a store came from.

    Attributes
    ----------
    version : str
        Version of this package that wrote it.
    units : dict of str to str
        Units of the store.
    sources : tuple of SourceRecord
        What was read, in this order.
    omitted : tuple of OmittedFrame
        Frames that were left out.
    """

    model_config = ConfigDict(frozen=True)

    version: str
    units: dict[str, str] = UNITS
    sources: tuple[SourceRecord, ...] = ()
    omitted: tuple[OmittedFrame, ...] = ()

    def after(self, earlier: Provenance, sources: int) -> Provenance:
        """Return the provenance of a store to whose first ``sources`` sources those of this one were added."""
        moved = [frame.model_copy(update={"source": frame.source + sources}) for frame in self.omitted]
        kept = [frame for frame in earlier.omitted if frame.source < sources]
        return self.model_copy(
            update={"sources": (*earlier.sources[:sources], *self.sources), "omitted": (*kept, *moved)}
        )


def provenance_of(store: ZarrStoreLike | zarr.Group) -> Provenance | None:
    """Return where the structures of a store came from, None if it does not say.

    Raises
    ------
    FileNotFoundError
        If there is no store.
    StoreError
        If what it says cannot be understood.
    """
    group = store if isinstance(store, zarr.Group) else open_store(store, "r")
    noted = group.attrs.get(PROVENANCE)
    if noted is None:
        return None
    try:
        return Provenance.model_validate(noted)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise StoreError(f"{group.store_path}: attribute {PROVENANCE} cannot be understood: {problem}") from error


def origin_of(store: ZarrStoreLike, physical_index: int) -> SampleOrigin | None:
    """Return the source and the number of the frame that a stored structure came from, None if that is not known.

    Parameters
    ----------
    store : str, PathLike, zarr Store, StorePath or dict
        The store.
    physical_index : int
        Number of the structure among all that are stored, deleted ones included.

    Raises
    ------
    FileNotFoundError
        If there is no store.
    IndexError
        If there is no such structure.
    StoreError
        If the store is damaged.
    """
    (origin,) = origins_in(store, [physical_index])
    return origin


def origins_in(store: ZarrStoreLike, physical_indices: Sequence[int]) -> list[SampleOrigin | None]:
    """Return what :func:`origin_of` does for several structures."""
    group = open_store(store, "r")
    name = store_name(store)
    samples = committed_samples(group, name)
    for index in physical_indices:
        if not 0 <= index < samples:
            raise IndexError(f"{name}: there is no structure {index}; it has {samples}")
    provenance = provenance_of(group)
    if provenance is None or "origin/source" not in group:
        return [None] * len(physical_indices)
    sources, frames = (np.asarray(stored_array(group, path, name)[:]) for path in ("origin/source", "origin/frame"))
    return [_origin(provenance, sources, frames, index) for index in physical_indices]


def _origin(
    provenance: Provenance, sources: NDArray[np.int64], frames: NDArray[np.int64], index: int
) -> SampleOrigin | None:
    # Whoever appends without knowing of origins leaves the arrays short.
    source = int(sources[index]) if index < len(sources) else -1
    if not 0 <= source < len(provenance.sources):
        return None
    return SampleOrigin(provenance.sources[source].name, int(frames[index]))


def write_origins(
    group: zarr.Group, start: int, origins: Mapping[str, NDArray[np.int64]], config: ZarrWriteConfig
) -> None:
    """Note the origins of the structures from number ``start`` on; those before that have none get -1.

    Parameters
    ----------
    group : zarr.Group
        The store, open for writing.
    start : int
        Number of the first structure.
    origins : mapping of str to ndarray
        "source" and "frame", one number per structure.
    config : ZarrWriteConfig
        How new arrays are chunked.
    """
    for name, values in origins.items():
        path = f"origin/{name}"
        array = group.get(path)
        if not isinstance(array, zarr.Array):
            array = create_array(group, path, np.zeros(0, dtype=np.int64), config, fill_value=-1)
        if array.shape[0] > start:
            array.resize((start,))
        array.resize((start + len(values),))
        if len(values):
            array[start:] = values


def write_provenance(group: zarr.Group, provenance: Provenance) -> None:
    """Note where the structures of a store came from."""
    group.attrs[PROVENANCE] = provenance.model_dump(mode="json")


def origin_array(store: ZarrStoreLike, name: str) -> NDArray[np.int64]:
    """Return the numbers that :func:`write_origins` wrote under a name."""
    group = open_store(store, "r")
    return np.asarray(stored_array(group, f"origin/{name}", store_name(store))[:])
