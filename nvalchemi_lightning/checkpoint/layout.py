"""The folder of checkpoints: names and places.

::

    manifest.json                                the newest index, and which components it has
    models/<name>/spec.json                      how to build the component
    models/<name>/checkpoints/<N>.pt             its state at index N; weights that train, never averaged ones
    optimizers/<name>/...  schedulers/<name>/... likewise
    hooks/checkpoints/<N>.pt                     states of hooks, averaged weights among them
    strategy.json                                recipe and counters of the newest index
    strategy/checkpoints/<N>.json                the same of index N
    lightning/checkpoints/<N>.pt                 random states of every rank; the reference ignores it
    lightning/checkpoints/<N>.json               the files of index N, their SHA-256, which weights they hold, the
                                                 validation and where it comes from; the reference ignores it

The layout is that of the reference (nvalchemi-toolkit 0.3), so either product reads what the other wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nvalchemi_lightning.errors import ConfigurationError, StoreError

__all__ = [
    "HOOKS",
    "KINDS",
    "MANIFEST",
    "RESUME",
    "SCHEMA_VERSION",
    "STRATEGY",
    "as_object",
    "check_index",
    "component_names",
    "existing_indices",
    "indices",
    "is_folder_name",
    "locate",
    "manifest_of",
    "read_json",
    "record_file",
    "saved_counts",
    "spec_file",
    "state_file",
    "state_files",
    "strategy_file",
]

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
STRATEGY = "strategy.json"
HOOKS = "hooks"
RESUME = "lightning"
KINDS = ("models", "optimizers", "schedulers")

# What walks through a recipe calls itself, several times for each level.
_DEEPEST = 50

_LONGEST_NAME = 200  # bytes; file systems allow 255, and temporary names add to it

_ALIAS = re.compile(r"(?P<kind>step|epoch)_(?P<count>\d+)|final")


def component_names(kind: str, configs: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
    """Return the names of a kind of component by model.

    Parameters
    ----------
    kind : {"optimizer", "scheduler"}
        What the names end with.
    configs : mapping of str to sequence
        One entry per component; several on one model are numbered.
    """
    return {
        model: [f"{model}_{kind}" if len(listed) == 1 else f"{model}_{kind}_{i}" for i in range(len(listed))]
        for model, listed in configs.items()
    }


def is_folder_name(name: str) -> bool:
    """Tell whether a name can be that of a folder of its own, on every system.

    Parameters
    ----------
    name : str
        Such as ``"main"``.
    """
    plain = name.isprintable() and not set(name) & set('/\\:*?"<>|') and name.strip(" .") != ""
    return plain and len(name.encode()) <= _LONGEST_NAME


def state_file(component: str, index: int) -> str:
    """Return where the state of a component lies, such as ``"models/main"`` or ``HOOKS``."""
    return f"{component}/checkpoints/{index}.pt"


def spec_file(component: str) -> str:
    """Return where the recipe of a component lies."""
    return f"{component}/spec.json"


def strategy_file(index: int) -> str:
    """Return where recipe and counters of an index lie."""
    return f"strategy/checkpoints/{index}.json"


def record_file(index: int) -> str:
    """Return where the list of files of an index lies."""
    return f"lightning/checkpoints/{index}.json"


def state_files(root: Path, index: int) -> set[str]:
    """Return the files of an index that are there, relative to the folder."""
    patterns = [state_file(f"{kind}/*", index) for kind in KINDS]
    patterns += [state_file(HOOKS, index), state_file(RESUME, index), strategy_file(index)]
    return {path.relative_to(root).as_posix() for pattern in patterns for path in root.glob(pattern)}


def manifest_of(index: int, components: Sequence[str], associations: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``manifest.json`` says.

    Parameters
    ----------
    index : int
        The newest index.
    components : sequence of str
        Such as ``"models/main"``.
    associations : mapping
        Per model its optimizers, schedulers, and which belongs to which.
    """
    names = {
        kind: sorted(component.partition("/")[2] for component in components if component.startswith(f"{kind}/"))
        for kind in KINDS
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "checkpoint_index": index,
        **names,
        "associations": dict(associations),
    }


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises
    ------
    StoreError
        If it is damaged, naming the path.
    FileNotFoundError
        If it does not exist.
    """
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is damaged: it is no regular file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:  # no JSON, no text, a number of thousands of digits
        raise StoreError(f"{path} is damaged: {error}; restore it or load another checkpoint_index") from error
    if _is_deep(content):
        raise StoreError(f"{path} is damaged: it is nested more than {_DEEPEST} levels deep")
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {max(names, key=names.count)!r} is there twice")
    return content


def _is_deep(content: Any) -> bool:
    level = [content]
    for _ in range(_DEEPEST):
        level = [item for each in level for item in _items(each)]
    return bool(level)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def as_object(value: Any) -> dict[str, Any]:
    """Return a JSON object that files may hold, or an empty one if they hold something else there."""
    return value if isinstance(value, dict) else {}


def indices(root: Path) -> list[int]:
    """Return the indices that a folder holds, complete or not, in order."""
    found = {
        int(path.stem)
        for pattern in ("strategy/checkpoints/*.json", "lightning/checkpoints/*.json", "models/*/checkpoints/*.pt")
        for path in root.glob(pattern)
        if path.stem.isascii() and path.stem.isdecimal()
    }
    return sorted(found)


def existing_indices(root: Path) -> list[int]:
    """Return `indices`, or refuse a folder that has none.

    Raises
    ------
    FileNotFoundError
        If there is no checkpoint.
    """
    found = indices(root)
    if not found:
        raise FileNotFoundError(f"{root} holds no checkpoints; give the folder that they were saved to")
    return found


def check_index(index: int) -> int:
    """Return an index that is asked for.

    Raises
    ------
    ConfigurationError
        If it is neither an integer >= 0 nor -1.
    """
    if not isinstance(index, int) or isinstance(index, bool) or index < -1:
        raise ConfigurationError(f"checkpoint_index must be an integer >= 0, or -1 for the newest; got {index!r}")
    return index


def locate(path: str | Path, index: int = -1) -> tuple[Path, int]:
    """Return the folder and the index that a path stands for.

    Parameters
    ----------
    path : str or Path
        A folder of checkpoints, or one followed by ``step_<K>`` (after K executed steps), ``epoch_<K>`` (at the end
        of K epochs) or ``final`` (the newest).
    index : int
        An index of the folder; -1 is the newest.

    Raises
    ------
    FileNotFoundError
        If there is no such folder or nothing in it fits; it lists what there is.
    ConfigurationError
        If the index is below -1, or both a name and an index are given.
    """
    path, index = Path(path), check_index(index)
    alias = _ALIAS.fullmatch(path.name)
    if path.is_dir() or alias is None:
        return path, index
    if index != -1:
        raise ConfigurationError(
            f"{path} names a checkpoint already, so checkpoint_index={index} contradicts it; give {path.parent} "
            "or leave the index out"
        )
    return path.parent, -1 if alias["kind"] is None else _counted(path.parent, alias["kind"], int(alias["count"]))


def _counted(root: Path, kind: str, count: int) -> int:
    """Return the newest index that was saved at a count."""
    states = {index: saved_counts(root / strategy_file(index)) for index in indices(root)}
    found = [index for index, state in states.items() if _name(kind, state) == f"{kind}_{count}"]
    if not found:
        names = dict.fromkeys(name for state in states.values() for name in _names(state))
        raise FileNotFoundError(f"{root} has no checkpoint {kind}_{count}; it has {', '.join(names) or 'none'}")
    return max(found)


def saved_counts(path: Path) -> Mapping[str, Any]:
    """Return the counters in a file of recipe and counters; empty if there are none."""
    try:
        state = read_json(path).get("runtime_state")
    except (OSError, StoreError, AttributeError):
        return {}
    return state if isinstance(state, Mapping) else {}


def _name(kind: str, state: Mapping[str, Any]) -> str | None:
    if kind == "epoch" and state.get("epoch_step_count") != 0:
        return None
    return f"{kind}_{state[f'{kind}_count']}" if f"{kind}_count" in state else None


def _names(state: Mapping[str, Any]) -> list[str]:
    return [name for kind in ("step", "epoch") if (name := _name(kind, state)) is not None]
