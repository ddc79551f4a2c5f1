"""Real files of the reference: what can be built here is read, built and written back as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nvalchemi_lightning.optim import OptimizerConfig
from nvalchemi_lightning.specs import create_model_spec_from_json

OPTIMIZER_CONFIG = "nvalchemi.training.optimizers.OptimizerConfig"


def specs_in(form: Any) -> Iterator[dict[str, Any]]:
    if isinstance(form, dict):
        if isinstance(form.get("cls_path"), str):
            yield form
        for item in form.values():
            yield from specs_in(item)
    elif isinstance(form, list):
        for item in form:
            yield from specs_in(item)


def sample_specs(shared: Path) -> list[dict[str, Any]]:
    """Return every spec in the samples but those that are wrong on purpose."""
    paths = sorted(path for path in (shared / "samples").rglob("*.json") if not path.name.startswith("bad_"))
    return [spec for path in paths for spec in specs_in(json.loads(path.read_text()))]


def test_every_torch_spec_of_the_samples_comes_back_word_for_word(shared: Path) -> None:
    specs = [spec for spec in sample_specs(shared) if spec["cls_path"].startswith("torch.")]
    assert {spec["cls_path"].rsplit(".")[-1] for spec in specs} >= {"Adam", "AdamW", "SGD", "Linear", "StepLR"}
    for form in specs:
        assert create_model_spec_from_json(form).model_dump() == form


def test_the_optimizers_schedulers_and_models_of_the_checkpoints_are_built(shared: Path) -> None:
    weights = [torch.zeros(2, requires_grad=True)]
    for path in sorted((shared / "samples").glob("ckpt_*/optimizers/*/spec.json")):
        form = json.loads(path.read_text())
        optimizer = create_model_spec_from_json(form, kind=torch.optim.Optimizer).build(weights)
        assert optimizer.param_groups[0]["lr"] == form["lr"]
        for schedule in path.parents[2].glob("schedulers/*/spec.json"):
            spec = create_model_spec_from_json(json.loads(schedule.read_text()))
            assert isinstance(spec.build(optimizer), torch.optim.lr_scheduler.LRScheduler)
    linear = json.loads((shared / "samples/ckpt_components/models/main/spec.json").read_text())
    assert create_model_spec_from_json(linear, kind=nn.Module).build().weight.shape == (2, 4)


def test_every_optimizer_config_of_the_samples_is_built_and_comes_back(shared: Path) -> None:
    forms = [spec for spec in sample_specs(shared) if spec["cls_path"] == OPTIMIZER_CONFIG]
    assert len(forms) > 20
    for form in forms:
        spec = create_model_spec_from_json(form, kind=OptimizerConfig)
        assert spec.model_dump() == form
        config = spec.build()
        assert config == OptimizerConfig.from_spec(spec)
        assert config.lr == form["optimizer_kwargs"]["lr"]
        written = config.to_spec().model_dump()
        assert {k: v for k, v in written.items() if k not in ("cls_path", "timestamp")} == {
            k: v for k, v in form.items() if k not in ("cls_path", "timestamp")
        }


def test_every_loss_of_the_samples_is_built_and_comes_back_word_for_word(shared: Path) -> None:
    forms = [spec for spec in sample_specs(shared) if spec["cls_path"].endswith(".ComposedLossFunction")]
    assert len(forms) > 20
    for form in forms:
        spec = create_model_spec_from_json(form, kind=nn.Module)
        assert spec.model_dump() == form
        assert len(spec.build().components) == len(form["components"])


def test_the_named_models_sample_keeps_its_plateau_configuration(shared: Path) -> None:
    form = json.loads((shared / "samples/to_spec_dict_named_models.json").read_text())["optimizer_configs"]["student"][
        0
    ]
    config = create_model_spec_from_json(form).build()
    optimizer, scheduler = config.build([torch.zeros(1, requires_grad=True)])
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    assert scheduler.patience == 3
    assert config.scheduler_metric_adapter == "total_loss"
