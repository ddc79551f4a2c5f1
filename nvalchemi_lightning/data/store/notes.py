"""Results about a store, kept in its root attributes together with a fingerprint of the data they are about.

Readers ignore attributes that they do not know, so the layout of the store stays what it is.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import zarr

from nvalchemi_lightning.data.store.layout import (
    ZarrStoreLike,
    committed_samples,
    open_store,
    store_name,
    stored_array,
    stored_fields,
)
from nvalchemi_lightning.errors import DataError

__all__ = ["fingerprint", "read_note", "write_note"]

_ROWS = 2**20


def fingerprint(group: zarr.Group, name: str) -> str:
    """Return a text that changes when structures are added or deleted, or energies are written anew.

    Parameters
    ----------
    group : zarr.Group
        The store.
    name : str
        Named in messages.
    """
    samples = committed_samples(group, name)
    state = blake2b(digest_size=16)
    _add_rows(state, stored_array(group, "meta/samples_mask", name), samples)
    _add_rows(state, stored_array(group, "meta/atoms_ptr", name), samples + 1)
    energy = stored_fields(group, name).get("energy")
    if energy is not None:
        _add_rows(state, stored_array(group, energy.path, name), samples)
    return state.hexdigest()


def _add_rows(state: blake2b, array: zarr.Array[Any], rows: int) -> None:
    for start in range(0, rows, _ROWS):
        state.update(np.asarray(array[start : min(start + _ROWS, rows)]).tobytes())


def write_note(store: ZarrStoreLike, key: str, value: dict[str, Any]) -> None:
    """Keep a result about a store in its attribute ``key``.

    Parameters
    ----------
    store : str, PathLike, zarr Store, StorePath or dict
        The store.
    key : str
        Name of the attribute.
    value : dict
        What JSON can hold.

    Raises
    ------
    FileNotFoundError
        If there is no store.
    """
    group = open_store(store, "r+")
    group.attrs[key] = {"fingerprint": fingerprint(group, store_name(store)), "value": value}


def read_note(store: ZarrStoreLike, key: str) -> dict[str, Any] | None:
    """Return what :func:`write_note` kept, or None if there is nothing.

    Raises
    ------
    FileNotFoundError
        If there is no store.
    DataError
        If the store changed since, or the attribute is not what was written.
    """
    group = open_store(store, "r")
    note = group.attrs.get(key)
    if note is None:
        return None
    if not isinstance(note, dict) or not isinstance(note.get("value"), dict):
        raise DataError(f"{store_name(store)}: the attribute {key} is not what was written there; remove it")
    if note.get("fingerprint") != fingerprint(group, store_name(store)):
        raise DataError(f"{store_name(store)} changed after its {key} were computed; compute them again")
    value: dict[str, Any] = note["value"]
    return value
