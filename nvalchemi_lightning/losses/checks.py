"""Agreement of prediction and target in dtype and shape."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from nvalchemi_lightning.errors import ConfigurationError, DataError, nearest

__all__ = ["DTypePolicy", "align_dtypes", "assert_same_shape", "check_dtype_policy"]

DTypePolicy = Literal["strict", "prediction_to_target", "target_to_prediction"]
"""What happens when prediction and target differ in dtype: an error, or one is cast to the other's."""


def check_dtype_policy(policy: DTypePolicy) -> DTypePolicy:
    """Return the policy, or raise ``ConfigurationError`` with the three that exist."""
    valid = get_args(DTypePolicy)
    if policy not in valid:
        hint = nearest(str(policy), valid)
        raise ConfigurationError(f"dtype_policy must be one of {', '.join(map(repr, valid))}; got {policy!r}{hint}")
    return policy


def align_dtypes(pred: Tensor, target: Tensor, policy: DTypePolicy) -> tuple[Tensor, Tensor]:
    """Cast prediction or target as the policy says; ``"strict"`` leaves both alone."""
    if policy == "prediction_to_target":
        return pred.to(target.dtype), target
    if policy == "target_to_prediction":
        return pred, target.to(pred.dtype)
    return pred, target


def assert_same_shape(
    pred: Tensor,
    target: Tensor,
    *,
    name: str,
    prediction_key: str | None = None,
    target_key: str | None = None,
    strict: bool = False,
) -> None:
    """Refuse a prediction and a target that differ in dtype or do not fit in shape.

    Parameters
    ----------
    pred, target : Tensor
        The pair.
    name : str
        Name of the loss, for the message.
    prediction_key, target_key : str, optional
        Where they came from, for the message.
    strict : bool
        Ask for identical shapes. Default False: shapes that broadcast will do.

    Raises
    ------
    DataError
        If the dtypes differ (checked first), or the shapes do not fit.
    """
    predicted = f"prediction_key={prediction_key!r}" if prediction_key else "prediction"
    labelled = f"target_key={target_key!r}" if target_key else "target"
    if pred.dtype != target.dtype:
        raise DataError(
            f"{name}: prediction and target dtype mismatch; {predicted} has dtype {pred.dtype}, {labelled} has dtype "
            f"{target.dtype}. Cast one of them, or set dtype_policy='prediction_to_target' or 'target_to_prediction'"
        )
    if pred.shape == target.shape:
        return
    shapes = f"{predicted} has shape {tuple(pred.shape)}, {labelled} has shape {tuple(target.shape)}"
    if strict:
        raise DataError(f"{name}: shape must match exactly for elementwise loss; {shapes}")
    trailing = zip(reversed(pred.shape), reversed(target.shape), strict=False)
    if any(m != n and 1 not in (m, n) for m, n in trailing):
        raise DataError(f"{name}: shape mismatch; {shapes}")
