"""What a checkpoint holds, whether it is a folder's or a file of Lightning; nothing in it is built or imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nvalchemi_lightning.checkpoint.layout import as_object, read_json, spec_file
from nvalchemi_lightning.checkpoint.listing import writer_of
from nvalchemi_lightning.checkpoint.reading import Stored, read, read_record, recorded_metrics
from nvalchemi_lightning.checkpoint.states import plain_name
from nvalchemi_lightning.checkpoint.tensors import load_tensors
from nvalchemi_lightning.errors import StoreError

__all__ = ["Contents", "read_contents"]

_EXTRA = "nvalchemi_lightning"
_MODELS = "models."
_AVERAGE, _COUNT, _PREFIX = "averaged_model_state", "n_averaged", "module."


@dataclass(frozen=True)
class Contents:
    """A checkpoint as it was read.

    Attributes
    ----------
    path : Path
        The folder or file.
    index : int or None
        Which checkpoint of a folder.
    written_by : str
        Product and version.
    recipe : dict or None
        What ``strategy.json`` says, counters aside; None for components alone, and where it was left out.
    counters : dict of str to int
        Executed steps and so on.
    models, averaged : dict of str to dict
        Weights by model: those that train, and averaged ones where there are such.
    optimizers, schedulers, hooks : dict of str to Any
        States by name.
    specs : dict of str to Any
        Recipes by component, such as ``"models/main"``.
    trained : dict of str to list of str
        The names of the parameters of each optimizer, where they are known.
    metrics : dict of str to float
        The validation of these weights.
    provenance : dict
        What `RunProvenance.form` returned when it was written.
    """

    path: Path
    index: int | None
    written_by: str
    recipe: dict[str, Any] | None
    counters: dict[str, Any]
    models: dict[str, dict[str, Tensor]]
    averaged: dict[str, dict[str, Tensor]]
    optimizers: dict[str, Any]
    schedulers: dict[str, Any]
    hooks: dict[str, Any]
    specs: dict[str, Any]
    trained: dict[str, list[str]]
    metrics: dict[str, float]
    provenance: dict[str, Any]


def read_contents(path: str | Path, index: int = -1) -> Contents:
    """Read a checkpoint.

    Parameters
    ----------
    path : str or Path
        A folder of checkpoints, a name in it (``step_<K>``, ``epoch_<K>``, ``final``), or a file of Lightning's
        ModelCheckpoint.
    index : int
        Which one of a folder; -1 is the newest complete one.

    Raises
    ------
    FileNotFoundError
        If there is no such file, folder or index.
    StoreError
        If it is damaged, or no file of `AlchemiModule`.
    """
    path = Path(path)
    return _of_lightning(path) if path.is_file() else _of_folder(read(path, index))


def _of_folder(stored: Stored) -> Contents:
    record = read_record(stored.root, stored.index)
    recipe, counters = _recipe(stored.strategy)
    files = {component: stored.root / spec_file(component) for component in stored.states}
    models, optimizers, schedulers = (
        {name.partition("/")[2]: state for name, state in stored.states.items() if name.startswith(f"{kind}/")}
        for kind in ("models", "optimizers", "schedulers")
    )
    return Contents(
        path=stored.root,
        index=stored.index,
        written_by=writer_of(record),
        recipe=recipe,
        counters=counters,
        models=models,
        averaged=_averaged(models, stored.hooks),
        optimizers=optimizers,
        schedulers=schedulers,
        hooks=stored.hooks,
        # The folder has one recipe per component, the newest; those of the models are kept with every index.
        specs={**{name: read_json(file) for name, file in files.items() if file.is_file()}, **_model_specs(recipe)},
        trained=_trained(as_object(stored.manifest.get("associations"))),
        metrics=recorded_metrics(stored.root, stored.index),
        provenance=as_object(as_object(record).get("provenance")),
    )


def _recipe(form: Any) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return recipe and counters of what `checkpoint_dict` returned; no recipe where there is none."""
    known = {name: value for name, value in as_object(form).items() if name != "runtime_state"}
    has_recipe = known and "omitted" not in known
    return known if has_recipe else None, as_object(as_object(form).get("runtime_state"))


def _model_specs(recipe: Mapping[str, Any] | None) -> dict[str, Any]:
    return {f"models/{name}": form for name, form in as_object((recipe or {}).get("model_specs")).items()}


def _trained(associations: Mapping[str, Any]) -> dict[str, list[str]]:
    entries = [as_object(as_object(entry).get("optimizer_parameter_names")) for entry in associations.values()]
    return {name: names for entry in entries for name, names in entry.items()}


def _of_lightning(path: Path) -> Contents:
    saved = load_tensors(path)
    weights, added = as_object(saved.get("state_dict")), as_object(saved.get(_EXTRA))
    models: dict[str, dict[str, Tensor]] = {}
    for name, value in weights.items():
        if name.startswith(_MODELS):
            model, _, rest = name.removeprefix(_MODELS).partition(".")
            models.setdefault(model, {})[plain_name(rest)] = value
    if not models:
        raise StoreError(f"{path} is no checkpoint of an AlchemiModule: its state_dict has no models.<name>.<tensor>")
    hooks, (recipe, _) = as_object(added.get("hooks")), _recipe(added.get("recipe"))
    optimizers = _numbered("optimizer", saved.get("optimizer_states"))
    return Contents(
        path=path,
        index=None,
        written_by=f"Lightning {saved.get('pytorch-lightning_version')}",
        recipe=recipe,
        counters=as_object(weights.get("_extra_state")),
        models=models,
        averaged=_averaged(models, hooks),
        optimizers=optimizers,
        schedulers=_numbered("scheduler", saved.get("lr_schedulers")),
        hooks=hooks,
        specs=_model_specs(recipe),
        trained=dict(zip(optimizers, added.get("parameters", ()), strict=False)),
        metrics={},
        provenance=as_object(added.get("provenance")),
    )


def _numbered(kind: str, states: Any) -> dict[str, Any]:
    return {f"{kind}_{i}": state for i, state in enumerate(states or ())}


def _averaged(models: Mapping[str, Any], hooks: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return the averages among the states of hooks; tensors that an average leaves out are those that train."""
    found = {}
    for state in hooks.values():
        form = as_object(state)
        model, average = str(form.get("model_key")), as_object(form.get(_AVERAGE))
        if form.get("num_updates") and average and model in models:
            own = {plain_name(name.removeprefix(_PREFIX)): value for name, value in average.items() if name != _COUNT}
            found[model] = {**models[model], **own}
    return found
