"""ASE databases in files: SQLite (.db) and JSON; rows with their key-value pairs and data as structures."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nvalchemi_lightning.data.sources.dialect import Dialect
from nvalchemi_lightning.errors import DataError

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["DATABASES", "database_rows"]

DATABASES = ("db", "json")


def database_rows(path: Path, kind: str, dialect: Dialect) -> Iterator[Atoms]:
    """Yield the structures of a database; key-value pairs and data lie in ``info``.

    Raises
    ------
    DataError
        If it is not one of ASE's.
    """
    from ase.db import connect

    opened: Any = connect
    if kind == "db":
        _check_sqlite(path)
    per_atom = [key for key in (dialect.forces_key, dialect.charges_key) if key is not None]
    with opened(str(path), type=kind, create_indices=False, use_lock_file=False) as database:
        for row in database.select():
            atoms: Atoms = row.toatoms()
            extra: dict[str, Any] = {**row.key_value_pairs, **row.get("data", {})}
            atoms.info.update(extra)
            atoms.arrays.update({key: np.asarray(extra[key]) for key in per_atom if key in extra})
            yield atoms


def _check_sqlite(path: Path) -> None:
    """Refuse what ASE would turn into a database of its own: it makes its tables where it does not find them."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    except sqlite3.DatabaseError as error:
        raise DataError(f"not an SQLite file: {error}") from error
    if "systems" not in tables:
        raise DataError("an SQLite file, but not a database of ASE: it has no table 'systems'")
