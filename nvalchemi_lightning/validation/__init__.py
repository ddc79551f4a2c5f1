"""Validation: what is configured, when it is due, and how its summary is computed."""

from nvalchemi_lightning.validation.config import (
    BatchValidationCallback,
    ValidationConfig,
    ensure_reiterable_validation_data,
)
from nvalchemi_lightning.validation.summary import SummaryAccumulator

__all__ = [
    "BatchValidationCallback",
    "SummaryAccumulator",
    "ValidationConfig",
    "ensure_reiterable_validation_data",
]
