"""Optimizers and learning-rate schedules: their description, construction and steps."""

from nvalchemi_lightning.optim.config import OptimizerConfig, SchedulerMetricAdapter, uses_validation_metric
from nvalchemi_lightning.optim.groups import ParamGroup
from nvalchemi_lightning.optim.schedules import CosineThenConstant, FactorSchedule, WarmupCosine
from nvalchemi_lightning.optim.stepping import (
    OptSchedPair,
    require_metric,
    setup_optimizers,
    step_lr_schedulers,
    step_metric_schedulers,
    step_optimizers,
    summary_numbers,
    zero_gradients,
)
from nvalchemi_lightning.runtime import iter_qualified_named_parameters

__all__ = [
    "CosineThenConstant",
    "FactorSchedule",
    "OptSchedPair",
    "OptimizerConfig",
    "ParamGroup",
    "SchedulerMetricAdapter",
    "WarmupCosine",
    "iter_qualified_named_parameters",
    "require_metric",
    "setup_optimizers",
    "step_lr_schedulers",
    "step_metric_schedulers",
    "step_optimizers",
    "summary_numbers",
    "uses_validation_metric",
    "zero_gradients",
]
