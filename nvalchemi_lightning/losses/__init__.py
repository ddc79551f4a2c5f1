"""Loss terms, weight schedules, and compositions of both."""

from nvalchemi_lightning.losses.base import BaseLossFunction, ReductionContext
from nvalchemi_lightning.losses.checks import DTypePolicy, assert_same_shape
from nvalchemi_lightning.losses.composition import (
    ComposedLossFunction,
    ComposedLossOutput,
    CountReducer,
    as_composed_loss,
)
from nvalchemi_lightning.losses.energy import EnergyHuberLoss, EnergyMAELoss, EnergyMSELoss
from nvalchemi_lightning.losses.forces import ForceHuberLoss, ForceL2NormLoss, ForceMSELoss
from nvalchemi_lightning.losses.reductions import (
    Reduction,
    frobenius_mse,
    graph_balanced_mean,
    masked_mean,
    per_graph_mean,
    per_graph_sum,
)
from nvalchemi_lightning.losses.schedules import (
    BaseWeightSchedule,
    ConstantWeight,
    CosineWeight,
    LinearWeight,
    LossWeightSchedule,
    PiecewiseWeight,
    ProductWeight,
)
from nvalchemi_lightning.losses.serialization import loss_component_to_spec
from nvalchemi_lightning.losses.stress import StressHuberLoss, StressMSELoss
from nvalchemi_lightning.losses.targets import (
    LossTargetAssemblyProtocol,
    assemble_loss_targets,
    compute_supervised_loss,
    loss_target_keys,
)

__all__ = [
    "BaseLossFunction",
    "BaseWeightSchedule",
    "ComposedLossFunction",
    "ComposedLossOutput",
    "ConstantWeight",
    "CosineWeight",
    "CountReducer",
    "DTypePolicy",
    "EnergyHuberLoss",
    "EnergyMAELoss",
    "EnergyMSELoss",
    "ForceHuberLoss",
    "ForceL2NormLoss",
    "ForceMSELoss",
    "LinearWeight",
    "LossTargetAssemblyProtocol",
    "LossWeightSchedule",
    "PiecewiseWeight",
    "ProductWeight",
    "Reduction",
    "ReductionContext",
    "StressHuberLoss",
    "StressMSELoss",
    "as_composed_loss",
    "assemble_loss_targets",
    "assert_same_shape",
    "compute_supervised_loss",
    "frobenius_mse",
    "graph_balanced_mean",
    "loss_component_to_spec",
    "loss_target_keys",
    "masked_mean",
    "per_graph_mean",
    "per_graph_sum",
]
