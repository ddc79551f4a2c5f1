"""The nvalchemi training strategy, executed by PyTorch Lightning.

Names are loaded on first use, so importing the package is light.
"""

from __future__ import annotations

import sys
from importlib import import_module

from nvalchemi_lightning._lazy import lazy_exports

__version__ = "0.1.0"

_HOME = {
    "AlchemiModule": "module",
    "AtomicDataModule": "datamodule",
    "BaseLossFunction": "losses",
    "BaseSpec": "specs",
    "BatchValidationCallback": "validation",
    "CheckpointHook": "hooks",
    "CheckpointManifest": "checkpoint",
    "CheckpointableHook": "hooks",
    "ComposedLossFunction": "losses",
    "ComposedLossOutput": "losses",
    "ConstantWeight": "losses",
    "CosineThenConstant": "optim",
    "CosineWeight": "losses",
    "EMAHook": "hooks",
    "EnergyHuberLoss": "losses",
    "EnergyMAELoss": "losses",
    "EnergyMSELoss": "losses",
    "ForceHuberLoss": "losses",
    "ForceL2NormLoss": "losses",
    "ForceMSELoss": "losses",
    "GradientAccumulationHook": "hooks",
    "Hook": "hooks",
    "HookContext": "hooks",
    "LinearWeight": "losses",
    "LossTargetAssemblyProtocol": "losses",
    "LossWeightSchedule": "losses",
    "OptimizerConfig": "optim",
    "ParamGroup": "optim",
    "PiecewiseWeight": "losses",
    "ReductionContext": "losses",
    "SecondOwnerError": "errors",
    "SingleOwner": "owner",
    "SingleOwnerDDP": "owner",
    "StressHuberLoss": "losses",
    "StressMSELoss": "losses",
    "TrainContext": "hooks",
    "TrainingStage": "stages",
    "TrainingStrategy": "strategy",
    "ValidationConfig": "validation",
    "WarmupCosine": "optim",
    "assemble_loss_targets": "losses",
    "compute_supervised_loss": "losses",
    "create_model_spec": "specs",
    "create_model_spec_from_json": "specs",
    "default_training_fn": "training_fn",
    "ensure_reiterable_validation_data": "validation",
    "eval_configured_models": "runtime",
    "evaluating": "runtime",
    "freeze_unconfigured_models": "runtime",
    "load_checkpoint": "checkpoint",
    "loss_component_to_spec": "losses",
    "move_to_devices": "runtime",
    "register_type_serializer": "specs",
    "rehome_optimizer_state": "runtime",
    "save_checkpoint": "checkpoint",
    "setup_optimizers": "optim",
    "step_lr_schedulers": "optim",
    "step_optimizers": "optim",
    "trust": "specs",
    "trusted_packages": "specs",
    "unwrap_model": "runtime",
    "zero_gradients": "optim",
}

__all__ = [*_HOME]  # noqa: PLE0604  the keys are the public names


__getattr__, __dir__ = lazy_exports(__name__, _HOME)

if "lightning.pytorch" in sys.modules:
    # A Trainer may be built by strategy name before any other name of this package is used.
    import_module(f"{__name__}.owner")
