"""What a loss term is: a fixed pipeline of small hooks that ends in one sum and one count."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from nvalchemi_lightning._keywords import refuse_unknown_keywords
from nvalchemi_lightning.errors import ConfigurationTypeError
from nvalchemi_lightning.losses.checks import DTypePolicy, align_dtypes, assert_same_shape, check_dtype_policy
from nvalchemi_lightning.losses.composition import ComposedLossFunction
from nvalchemi_lightning.losses.metadata import find
from nvalchemi_lightning.losses.reductions import Reduction, weighted_sums
from nvalchemi_lightning.losses.schedules import BaseWeightSchedule as _BaseWeightSchedule
from nvalchemi_lightning.losses.serialization import constructor_arguments
from nvalchemi_lightning.losses.term import LossTerm
from nvalchemi_lightning.losses.weights import is_weight

__all__ = [
    "BaseLossFunction",
    "DTypePolicy",
    "ReductionContext",
    "_BaseWeightSchedule",
    "label_mask",
]


class ReductionContext(dict[str, Any]):
    """What ``normalize`` hands to ``mask`` and ``reduce``.

    The key ``"weights"`` holds weights that expand to the shape of the residual; other keys are the term's own.
    """


class _LastCall:
    # A plain object beside the module: every assignment to an attribute of an nn.Module costs microseconds.
    __slots__ = ("collecting", "per_sample", "recorded")

    def __init__(self) -> None:
        self.collecting = False
        self.per_sample: Tensor | None = None
        self.recorded: tuple[Tensor, Reduction] | None = None


class BaseLossFunction(LossTerm):
    """Base of every loss term; the only method a subclass must write is ``compute_residual``.

    A call runs ``align_dtypes``, ``validate``, ``normalize``, ``mask``, ``compute_residual`` and ``reduce`` in this
    order and returns the unweighted scalar. Weights and schedules belong to ``ComposedLossFunction``, which
    ``2.0 * term``, ``schedule * term`` and ``term + term`` build.

    Keyword arguments of a call reach ``normalize``, ``mask`` and ``reduce``; a hook swallows those it does not use.
    The ones with a meaning are ``batch_idx`` (V,), ``num_graphs``, ``num_nodes_per_graph`` (B,) counts or (B, V_max)
    node mask, ``batch`` (an object with those as attributes; an explicit keyword wins) and ``missing_is_nan``
    (a NaN in the target means that the structure has no such label).

    Parameters
    ----------
    dtype_policy : {"strict", "prediction_to_target", "target_to_prediction"}
        What to do when prediction and target differ in dtype. Default ``"strict"``: an error.

    Attributes
    ----------
    requires_eval_grad : bool or None
        Whether evaluating the term needs autograd, as forces and stress do. Default None: undeclared.
    prediction_key, target_key : str
        Where a composition finds prediction and target; on the class or the instance.
    """

    # Numpy scalars then leave the multiplication to __rmul__ instead of building an object array.
    __array_ufunc__ = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse keywords that do not exist."""
        refuse_unknown_keywords(cls, kwargs)
        return super().__new__(cls)

    def __init__(self, *, dtype_policy: DTypePolicy = "strict") -> None:
        super().__init__()
        self._last = _LastCall()
        self.dtype_policy = dtype_policy

    @property
    def dtype_policy(self) -> DTypePolicy:
        """What happens when prediction and target differ in dtype."""
        return self._dtype_policy

    @dtype_policy.setter
    def dtype_policy(self, policy: DTypePolicy) -> None:
        self._dtype_policy = check_dtype_policy(policy)

    @property
    def per_sample_loss(self) -> Tensor | None:
        """Loss of each graph in the last call, detached, shape (B,); None where the term has none."""
        return self._last.per_sample

    @per_sample_loss.setter
    def per_sample_loss(self, value: Tensor | None) -> None:
        self._last.per_sample = value

    def forward(self, pred: Tensor, target: Tensor, **metadata: Any) -> Tensor:
        """Return the unweighted loss.

        Parameters
        ----------
        pred, target : Tensor
            Prediction and label, of the shape that the term asks for.
        **metadata
            Graph metadata, see the class.
        """
        last = self._last
        last.per_sample = last.recorded = None
        pred, target = self.align_dtypes(pred, target)
        self.validate(pred, target)
        pred, target, ctx = self.normalize(pred, target, **metadata)
        valid = self.mask(pred, target, ctx, **metadata)
        residual = self.compute_residual(pred, target, valid)
        return self.reduce(residual, valid, ctx, **metadata)

    def align_dtypes(self, pred: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Apply ``dtype_policy``."""
        return align_dtypes(pred, target, self._dtype_policy)

    def validate(self, pred: Tensor, target: Tensor) -> None:
        """Refuse inputs of the wrong dtype or shape; by default both must agree exactly.

        Raises
        ------
        DataError
            If dtype or shape differ.
        """
        assert_same_shape(
            pred,
            target,
            name=type(self).__name__,
            prediction_key=getattr(self, "prediction_key", None),
            target_key=getattr(self, "target_key", None),
            strict=True,
        )

    def normalize(self, pred: Tensor, target: Tensor, **metadata: Any) -> tuple[Tensor, Tensor, ReductionContext]:
        """Change units or scale before the residual; by default nothing changes."""
        return pred, target, ReductionContext()

    def mask(self, pred: Tensor, target: Tensor, ctx: ReductionContext, **metadata: Any) -> Tensor:
        """Return a bool tensor that is True where the target counts.

        By default every entry counts, except NaN where ``missing_is_nan`` says that NaN means "no label".
        """
        return label_mask(target, metadata)

    @abstractmethod
    def compute_residual(self, pred: Tensor, target: Tensor, valid: Tensor) -> Tensor:
        """Return the loss of each entry, zero where ``valid`` is False."""

    def sums(self, residual: Tensor, valid: Tensor, ctx: ReductionContext, **metadata: Any) -> Reduction:
        """Return numerator and denominator of the loss, apart.

        By default the sum of the residual over valid entries, weighted with ``ctx["weights"]`` where present, and
        the sum of those weights (or the number of valid entries). A term that needs another mean overrides this
        method, so that accumulation windows, ranks and validation can divide by global counts.
        """
        return weighted_sums(residual, valid, ctx.get("weights"))

    def reduce(self, residual: Tensor, valid: Tensor, ctx: ReductionContext, **metadata: Any) -> Tensor:
        """Return the scalar loss: numerator over denominator, the latter at least 1.

        A term for which no sum and count exist overrides this method; a composition then treats its value as a
        mean over graphs.
        """
        reduction = self.sums(residual, valid, ctx, **metadata)
        value = reduction.value
        last = self._last
        if reduction.per_sample is not None:
            last.per_sample = reduction.per_sample.detach()
        if last.collecting:
            last.recorded = (value, reduction)
        return value

    def collect(self, pred: Tensor, target: Tensor, **metadata: Any) -> tuple[Tensor, Reduction]:
        """Call the term and hand over its sums, on the graph; the term itself keeps no graph alive.

        Parameters
        ----------
        pred, target, **metadata
            As in a call.

        Returns
        -------
        tuple of Tensor and Reduction
            The value of the call, and its sums. A term whose ``reduce`` is its own counts as a mean over
            ``num_graphs`` graphs (over 1 where that is unknown).

        Raises
        ------
        ConfigurationTypeError
            If the term returns something else than a tensor.
        """
        last = self._last
        last.collecting = True
        try:
            value = self(pred, target, **metadata)
            recorded = last.recorded
        finally:
            last.collecting = False
            last.recorded = None
        if recorded is not None and recorded[0] is value:
            return recorded
        if not isinstance(value, Tensor):
            raise ConfigurationTypeError(f"{type(self).__name__} must return a tensor; got {type(value).__name__}")
        # A reduce that post-processes the built-in one keeps its count, whatever it did to the value.
        count = _graph_count(metadata, value) if recorded is None else recorded[1].denominator
        return value, Reduction(value * count, count)

    def extra_repr(self) -> str:
        """Return the settings of the term."""
        return ", ".join(f"{name}={value!r}" for name, value in constructor_arguments(self).items())

    def __mul__(self, factor: object) -> ComposedLossFunction:
        """Return a composition in which the term has the weight ``factor``, a number or a schedule."""
        return ComposedLossFunction([self], weights=[factor]) if is_weight(factor) else NotImplemented

    __rmul__ = __mul__

    def __add__(self, other: object) -> ComposedLossFunction:
        """Return a composition of both terms, each with weight 1."""
        return ComposedLossFunction([self, other]) if isinstance(other, LossTerm) else NotImplemented

    def __radd__(self, other: object) -> BaseLossFunction:
        """Return the term itself for ``0 + term``, the first step of ``sum([...])``."""
        return self if type(other) is int and other == 0 else NotImplemented


def label_mask(target: Tensor, metadata: Mapping[str, Any]) -> Tensor:
    """Return which labels exist: all of them, or with ``missing_is_nan`` those that are not NaN."""
    if metadata.get("missing_is_nan"):
        # One kernel where ~isnan takes two.
        return target.eq(target)
    return torch.ones_like(target, dtype=torch.bool)


def _graph_count(metadata: Mapping[str, Any], like: Tensor) -> Tensor:
    count = find(metadata, "num_graphs")
    if isinstance(count, Tensor):
        return count.to(like.device)
    return like.new_full((), 1 if count is None else count, dtype=torch.int64)
