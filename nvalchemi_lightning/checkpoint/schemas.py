"""What ``manifest.json`` and the record of an index must look like; a file may come from a stranger."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from nvalchemi_lightning.checkpoint.layout import is_folder_name
from nvalchemi_lightning.errors import StoreError

__all__ = ["check_manifest", "check_record"]

_LARGEST_INDEX = 10**12


def _folder_name(name: str) -> str:
    if not is_folder_name(name):
        raise ValueError("it is no name of a folder")
    return name


Name = Annotated[str, AfterValidator(_folder_name)]


class _Schema(BaseModel):
    # What other versions add is passed over.
    model_config = ConfigDict(strict=True, extra="ignore")


class _Associations(_Schema):
    optimizers: list[Name] = []
    schedulers: list[Name] = []
    scheduler_optimizers: dict[Name, Name] = {}
    optimizer_parameter_names: dict[Name, list[str]] = {}


class _Manifest(_Schema):
    checkpoint_index: int = Field(ge=0, le=_LARGEST_INDEX)
    schema_version: int = Field(default=0, ge=0)
    models: list[Name] = []
    optimizers: list[Name] = []
    schedulers: list[Name] = []
    associations: dict[Name, _Associations] = {}


class _Record(_Schema):
    files: dict[str, str]
    manifest: _Manifest
    metrics: dict[str, FiniteFloat] = {}


def check_manifest(content: Mapping[str, Any], path: Path) -> None:
    """Refuse a manifest that is not one.

    Parameters
    ----------
    content : mapping
        What the file holds.
    path : Path
        The file, for the message.

    Raises
    ------
    StoreError
        Naming the file and the field.
    """
    _check(_Manifest, content, path)


def check_record(content: Mapping[str, Any], path: Path, index: int) -> None:
    """Refuse a record that is not one, or names files that are not of its index.

    Parameters
    ----------
    content : mapping
        What the file holds.
    path : Path
        The file, for the message.
    index : int
        Its index.

    Raises
    ------
    StoreError
        Naming the file and the field.
    """
    _check(_Record, content, path)
    foreign = [name for name in content["files"] if not _is_of(name, index)]
    if foreign:
        raise StoreError(f"{path} is damaged: {foreign[0]!r} is no file of checkpoint {index}")
    if content["manifest"]["checkpoint_index"] != index:
        raise StoreError(f"{path} is damaged: its manifest is of checkpoint {content['manifest']['checkpoint_index']}")


def _is_of(name: str, index: int) -> bool:
    *folders, last = name.split("/")
    plain = all(map(is_folder_name, folders)) and folders[-1:] == ["checkpoints"]
    return plain and last in (f"{index}.pt", f"{index}.json")


def _check(schema: type[BaseModel], content: Mapping[str, Any], path: Path) -> None:
    try:
        schema.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise StoreError(f"{path} is damaged: {where} is {first['input']!r:.80} ({first['msg']})") from error
