"""The hooks that a job file names, as far as their order goes; nothing of strangers is imported or built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nvalchemi_lightning.errors import ConfigurationError, UnknownNameError, UntrustedPathError, nearest
from nvalchemi_lightning.hooks.recipes import hook_from
from nvalchemi_lightning.hooks.registry import HookRegistry
from nvalchemi_lightning.hooks.update import TrainingUpdateHook
from nvalchemi_lightning.lifecycle import Lifecycle
from nvalchemi_lightning.specs import own_path, resolve
from nvalchemi_lightning.stages import TrainingStage
from nvalchemi_lightning.validation import ValidationConfig

__all__ = ["job_lifecycle"]

_OWN = "nvalchemi_lightning."


def job_lifecycle(job: Any) -> tuple[Lifecycle, list[str]]:
    """Resolve the order of the hooks of a job file.

    Hooks of this package are built from their specs, to be asked where they act. Of a class of a trusted package its
    attributes ``stage`` and ``priority`` are read. Of any other nothing but the file is known.

    Parameters
    ----------
    job : mapping
        The job: ``source.hooks`` holds specs, or ``{"spec": ..., "stages": [names]}``, and ``validation`` the cadence.

    Returns
    -------
    Lifecycle
        The order.
    list of str
        The paths of hooks whose stages the file does not tell.

    Raises
    ------
    ConfigurationError
        If the file is of another shape, or the hooks do not fit together.
    """
    hooks, unknown = [], []
    for where, entry in _entries(job):
        found = list(_hooks(entry, where))
        hooks += found
        if not found:
            unknown.append(str(entry["spec"]["cls_path"]))
    return Lifecycle.of(HookRegistry.on_trial(hooks), _validation(job)), unknown


def _entries(job: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    source = job.get("source", {}) if isinstance(job, Mapping) else None
    listed = source.get("hooks", []) if isinstance(source, Mapping) else None
    if not isinstance(listed, list):
        raise ConfigurationError("a job file is an object whose source.hooks is a list of specs; look at the file")
    for index, entry in enumerate(listed):
        where = f"source.hooks[{index}]"
        form = dict(entry) if isinstance(entry, Mapping) else {}
        stages = form.pop("stages", [])
        spec = form.get("spec", form)
        if not isinstance(spec, Mapping) or not isinstance(spec.get("cls_path"), str) or not isinstance(stages, list):
            raise ConfigurationError(f"{where} must be a spec with cls_path, or {{'spec': ..., 'stages': [names]}}")
        yield where, {"spec": spec, "stages": [_stage(name, where) for name in stages]}


def _stage(name: Any, where: str) -> TrainingStage:
    short = str(name).removeprefix("TrainingStage.")
    if short not in TrainingStage.__members__:
        raise UnknownNameError(f"{where}.stages has {name!r}{nearest(short, TrainingStage.__members__)}")
    return TrainingStage[short]


def _hooks(entry: Mapping[str, Any], where: str) -> Iterator[Any]:
    path, stages = entry["spec"]["cls_path"], entry["stages"]
    if (own_path(path) or path).startswith(_OWN):
        yield from _built(entry["spec"], stages, where)
        return
    try:
        class_ = resolve(path)
    except UntrustedPathError:
        class_ = type(path.rpartition(".")[2], (), {})
    if isinstance(class_, type) and issubclass(class_, TrainingUpdateHook):
        yield type(class_.__name__, (TrainingUpdateHook,), {"priority": class_.priority})()
        return
    declared = getattr(class_, "stage", None)
    for stage in stages or ([declared] if isinstance(declared, TrainingStage) else []):
        yield _stand_in(class_.__name__, stage, entry["spec"].get("frequency", 1))


def _built(spec: Mapping[str, Any], stages: list[TrainingStage], where: str) -> Iterator[Any]:
    if not stages:
        yield hook_from(spec)
    for stage in stages:
        hook = hook_from(spec)
        if hasattr(hook, "_runs_on_stage"):
            raise ConfigurationError(f"{where}: {type(hook).__name__} decides its stages itself; leave stages out")
        hook.stage = stage
        yield hook


def _stand_in(name: str, stage: TrainingStage, frequency: Any) -> Any:
    def call(self: Any, ctx: Any, stage: TrainingStage) -> None:
        raise NotImplementedError

    return type(name, (), {"stage": stage, "frequency": frequency, "__call__": call})()


def _validation(job: Mapping[str, Any]) -> ValidationConfig | None:
    cadence = job.get("validation")
    return None if cadence is None else ValidationConfig(validation_data=(), **cadence)
