"""A weighted sum of loss terms, with the sum and count of each kept apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn

from nvalchemi_lightning.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    LabelNotFoundError,
    MissingPredictionError,
    MissingTargetError,
    nearest,
)
from nvalchemi_lightning.losses.checks import DTypePolicy, align_dtypes, check_dtype_policy
from nvalchemi_lightning.losses.schedules import LossWeightSchedule
from nvalchemi_lightning.losses.serialization import loss_component_to_spec
from nvalchemi_lightning.losses.targets import compute_supervised_loss, loss_target_keys
from nvalchemi_lightning.losses.term import LossTerm
from nvalchemi_lightning.losses.weights import (
    Weight,
    check_weights,
    is_weight,
    multiply_weights,
    normalized,
    resolve_weight,
)
from nvalchemi_lightning.specs import BaseSpec, create_model_spec

__all__ = [
    "ComposedLossFunction",
    "ComposedLossOutput",
    "CountReducer",
    "as_composed_loss",
    "compute_supervised_loss",
    "loss_target_keys",
]

CountReducer = Callable[[Tensor], Tensor]
"""Maps the counts of all components, 1-D float64 in their order, to what their sums are divided by."""


class ComposedLossOutput(TypedDict):
    """What a composition returns. Dictionaries are keyed by component name, in order.

    A name is the class name of the term, with ``_0``, ``_1``, ... where a class occurs more than once.
    """

    total_loss: Tensor
    """Sum of effective weight times value, on the graph."""

    per_component_unweighted: dict[str, Tensor]
    """Value of each term, on the graph."""

    per_component_weight: dict[str, float]
    """Effective weight, after normalization."""

    per_component_raw_weight: dict[str, float]
    """Weight before normalization."""

    per_component_sample: dict[str, Tensor]
    """Effective weight times the loss of each graph, detached, shape (B,). Terms without one are absent."""

    per_component_sum: dict[str, Tensor]
    """Numerator of each value, on the graph."""

    per_component_count: dict[str, Tensor]
    """Denominator of each value before the clamp at 1, detached: 0 means that the batch has no such label."""


class ComposedLossFunction(nn.Module):
    """A weighted sum of loss terms; ``energy + 10 * forces`` builds one.

    Parameters
    ----------
    components : sequence of BaseLossFunction or ComposedLossFunction
        The terms. A composition among them is replaced by its terms, with the weights multiplied; its own
        ``normalize_weights`` and ``dtype_policy`` are dropped.
    weights : sequence of float, LossWeightSchedule or None, optional
        One per entry of ``components``; None is 1. Default: 1 for each.
    normalize_weights : bool
        Divide the weights by their sum at every call. Default True: ``energy + 10 * forces`` trains with 1/11 and
        10/11.
    dtype_policy : {"strict", "prediction_to_target", "target_to_prediction"}, optional
        Policy for those terms whose own is ``"strict"``.

    Attributes
    ----------
    names : tuple of str
        Name of each term, see ``ComposedLossOutput``.

    Raises
    ------
    ConfigurationError
        If there is no component, or the number of weights differs.
    ConfigurationTypeError
        If an entry is not a loss, or a weight not a number or schedule.
    """

    # Numpy scalars then leave the multiplication to __rmul__ instead of building an object array.
    __array_ufunc__ = None

    def __init__(
        self,
        components: Sequence[LossTerm | ComposedLossFunction],
        *,
        weights: Sequence[Weight | None] | None = None,
        normalize_weights: bool = True,
        dtype_policy: DTypePolicy | None = None,
    ) -> None:
        super().__init__()
        _check_components(components)
        pairs = list(_flatten(components, check_weights(weights, len(components))))
        self.components = nn.ModuleList(leaf for leaf, _ in pairs)
        self.weights: tuple[Weight, ...] = tuple(weight for _, weight in pairs)
        self.names = _component_names(leaf for leaf, _ in pairs)
        self.normalize_weights = normalize_weights
        self.dtype_policy = dtype_policy

    @property
    def terms(self) -> list[LossTerm]:
        """The terms, in order."""
        return cast("list[LossTerm]", list(self.components))

    @property
    def dtype_policy(self) -> DTypePolicy | None:
        """Policy for those terms whose own is ``"strict"``, or None."""
        return self._dtype_policy

    @dtype_policy.setter
    def dtype_policy(self, policy: DTypePolicy | None) -> None:
        self._dtype_policy = None if policy is None else check_dtype_policy(policy)

    def forward(
        self,
        predictions: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        *,
        step: int = 0,
        epoch: int | None = None,
        count_reducer: CountReducer | None = None,
        missing_is_nan: bool = False,
        **metadata: Any,
    ) -> ComposedLossOutput:
        """Evaluate every term and their weighted sum.

        Parameters
        ----------
        predictions, targets : mapping of str to Tensor
            Read at ``prediction_key`` and ``target_key`` of each term.
        step, epoch : int
            For weight schedules; ``epoch`` may be None where no schedule counts in epochs.
        count_reducer : callable, optional
            Gets this batch's counts of all terms, one 1-D float64 tensor, and returns what their sums are divided by,
            ready to use: for instance counts summed over ranks, at least 1. Default None: each count, at least 1.
        missing_is_nan : bool
            NaN in a target means that the structure has no such label: it neither contributes nor counts, in any
            term. Default False: ``ignore_nonfinite`` of each term decides.
        **metadata
            Handed to every term, see ``BaseLossFunction``.

        Raises
        ------
        MissingPredictionError, LabelNotFoundError
            If the mappings lack what a term reads.
        ConfigurationTypeError
            If what they hold, or a term returns, is not a tensor.
        ConfigurationError
            If a weight is not finite, or the weights cannot be normalized.
        """
        raw, weights = self._weights_at(step, epoch)
        if missing_is_nan:
            metadata["missing_is_nan"] = True
        values: dict[str, Tensor] = {}
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        samples: dict[str, Tensor] = {}
        for name, leaf, weight in zip(self.names, self.terms, weights, strict=True):
            pred, target = self._inputs(leaf, predictions, targets)
            values[name], (sums[name], count, _) = leaf.collect(pred, target, **metadata)
            counts[name] = _without_graph(count)
            sample = leaf.per_sample_loss
            if sample is not None:
                samples[name] = _scaled_sample(leaf, sample, weight)
        if count_reducer is not None:
            values = _divide(sums, counts, count_reducer)
        return {
            "total_loss": _weighted_sum(values.values(), weights),
            "per_component_unweighted": values,
            "per_component_weight": dict(zip(self.names, weights, strict=True)),
            "per_component_raw_weight": dict(zip(self.names, raw, strict=True)),
            "per_component_sample": samples,
            "per_component_sum": sums,
            "per_component_count": counts,
        }

    @torch.no_grad()
    def counts(self, targets: Mapping[str, Tensor], **metadata: Any) -> Tensor:
        """Return by what the sum of every term will be divided, without predictions.

        Every term is called with its target in the place of the prediction: its count must not depend on the
        prediction.

        Parameters
        ----------
        targets : mapping of str to Tensor
            Read at ``target_key`` of each term.
        **metadata
            As in a call.

        Returns
        -------
        Tensor
            The counts of the terms in order, before the clamp at 1, float64, shape (T,).

        Raises
        ------
        LabelNotFoundError
            If the mapping lacks what a term reads.
        """
        counts = []
        for leaf in self.terms:
            # An absent target is told about when it is read.
            same: Any = targets.get(getattr(leaf, "target_key", ""))
            pred, target = self._inputs(leaf, {getattr(leaf, "prediction_key", ""): same}, targets)
            counts.append(leaf.collect(pred, target, **metadata)[1].denominator)
        return torch.stack(counts).double()

    def current_weight(self, step: int = 0, epoch: int | None = None) -> list[float]:
        """Return the effective weight of each term at a step and epoch."""
        return self._weights_at(step, epoch)[1]

    def weight_factors(self, step: int = 0, epoch: int | None = None) -> dict[str, float]:
        """Return the effective weights by component name."""
        return dict(zip(self.names, self.current_weight(step, epoch), strict=True))

    def requires_eval_grad(self) -> bool:
        """Return whether evaluating the loss needs autograd.

        Raises
        ------
        ConfigurationError
            If no term needs it and some do not say.
        """
        declared = [(name, leaf.requires_eval_grad) for name, leaf in zip(self.names, self.terms, strict=True)]
        if any(needs for _, needs in declared):
            return True
        silent = [name for name, needs in declared if needs is None]
        if silent:
            raise ConfigurationError(
                f"Cannot infer whether {', '.join(silent)} needs gradients to be evaluated. Set requires_eval_grad to "
                "True or False on the class, or set grad_mode to 'enabled' or 'disabled'"
            )
        return False

    def to_spec(self) -> BaseSpec:
        """Return what rebuilds the composition from a checkpoint or job file."""
        return create_model_spec(
            ComposedLossFunction,
            components=[loss_component_to_spec(leaf) for leaf in self.terms],
            weights=[weight if isinstance(weight, float) else weight.to_spec() for weight in self.weights],
            normalize_weights=self.normalize_weights,
            dtype_policy=self.dtype_policy,
        )

    def extra_repr(self) -> str:
        """Return weights and settings."""
        return (
            f"weights={list(self.weights)!r}, normalize_weights={self.normalize_weights}, "
            f"dtype_policy={self.dtype_policy!r}"
        )

    def __mul__(self, factor: object) -> ComposedLossFunction:
        """Return a composition whose every weight is multiplied by a number."""
        if not is_weight(factor):
            return NotImplemented
        if isinstance(factor, LossWeightSchedule):
            raise ConfigurationTypeError(
                "a composition cannot be multiplied by a schedule; multiply its terms, as in schedule * EnergyMSELoss()"
            )
        number = float(factor)
        return self._rebuilt(self.terms, [multiply_weights(number, weight) for weight in self.weights])

    __rmul__ = __mul__

    def __add__(self, other: object) -> ComposedLossFunction:
        """Return a composition with the terms of both; a single term gets weight 1."""
        if isinstance(other, LossTerm):
            return self._rebuilt([*self.terms, other], [*self.weights, 1.0])
        if not isinstance(other, ComposedLossFunction):
            return NotImplemented
        if self.normalize_weights != other.normalize_weights:
            raise ConfigurationError(
                "compositions with different normalize_weights cannot be added: "
                f"{self.normalize_weights} on the left, {other.normalize_weights} on the right"
            )
        policy = other.dtype_policy if self.dtype_policy is None else self.dtype_policy
        return self._rebuilt([*self.terms, *other.terms], [*self.weights, *other.weights], policy)

    def __radd__(self, other: object) -> ComposedLossFunction:
        """Return a composition that begins with the term ``other``; ``0 + composition`` is the composition itself."""
        if type(other) is int and other == 0:
            return self
        if not isinstance(other, LossTerm):
            return NotImplemented
        return self._rebuilt([other, *self.terms], [1.0, *self.weights])

    def _rebuilt(
        self, terms: Sequence[LossTerm], weights: Sequence[Weight], policy: DTypePolicy | None = None
    ) -> ComposedLossFunction:
        return ComposedLossFunction(
            terms,
            weights=weights,
            normalize_weights=self.normalize_weights,
            dtype_policy=self.dtype_policy if policy is None else policy,
        )

    def _weights_at(self, step: int, epoch: int | None) -> tuple[list[float], list[float]]:
        """Return the weights before and after normalization."""
        raw = []
        for name, weight in zip(self.names, self.weights, strict=True):
            if isinstance(weight, float) and math.isfinite(weight):
                raw.append(weight)
            else:
                raw.append(resolve_weight(weight, name, step, epoch))
        return raw, normalized(raw, self.names, step, epoch) if self.normalize_weights else raw

    def _inputs(
        self, leaf: LossTerm, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        try:
            pred, target = predictions[leaf.prediction_key], targets[leaf.target_key]
        except (AttributeError, KeyError):
            _explain_absence(leaf, predictions, targets)
            raise
        if not (isinstance(pred, Tensor) and isinstance(target, Tensor)):
            raise _not_a_tensor(leaf, pred, target)
        if self._dtype_policy is not None and leaf.dtype_policy == "strict":
            return align_dtypes(pred, target, self._dtype_policy)
        return pred, target


def as_composed_loss(loss: LossTerm | ComposedLossFunction) -> ComposedLossFunction:
    """Wrap a single term into a composition; a composition comes back unchanged.

    Raises
    ------
    ConfigurationTypeError
        If ``loss`` is neither.
    """
    if isinstance(loss, ComposedLossFunction):
        return loss
    if isinstance(loss, LossTerm):
        return ComposedLossFunction([loss])
    hint = f" (a class; pass an instance, {loss.__name__}())" if isinstance(loss, type) else ""
    raise ConfigurationTypeError(
        f"loss_fn must be a BaseLossFunction or ComposedLossFunction; got {type(loss).__name__}{hint}"
    )


def _check_components(components: Sequence[object]) -> None:
    if not components:
        raise ConfigurationError("components must contain at least one loss term")
    for i, component in enumerate(components):
        if not isinstance(component, LossTerm | ComposedLossFunction):
            raise ConfigurationTypeError(
                f"components[{i}] must be a BaseLossFunction or ComposedLossFunction; got {type(component).__name__}"
            )


def _flatten(
    components: Sequence[LossTerm | ComposedLossFunction], weights: Sequence[Weight]
) -> Iterator[tuple[LossTerm, Weight]]:
    for component, weight in zip(components, weights, strict=True):
        if isinstance(component, LossTerm):
            yield component, weight
            continue
        for leaf, inner in zip(component.terms, component.weights, strict=True):
            yield leaf, multiply_weights(weight, inner)


def _component_names(terms: Iterable[LossTerm]) -> tuple[str, ...]:
    classes = [type(leaf).__name__ for leaf in terms]
    occurrences, seen = Counter(classes), Counter[str]()
    names = []
    for name in classes:
        names.append(f"{name}_{seen[name]}" if occurrences[name] > 1 else name)
        seen[name] += 1
    return tuple(names)


def _explain_absence(leaf: LossTerm, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    name = type(leaf).__name__
    for attribute in ("prediction_key", "target_key"):
        if getattr(leaf, attribute, None) is None:
            raise MissingTargetError(
                f"{name} has no {attribute}, which a composition needs; set it on the class or instance"
            )
    if leaf.prediction_key not in predictions:
        raise MissingPredictionError(_absent(name, "prediction", leaf.prediction_key, predictions))
    if leaf.target_key not in targets:
        raise LabelNotFoundError(_absent(name, "target", leaf.target_key, targets))


def _absent(name: str, kind: str, key: str, mapping: Mapping[str, Tensor]) -> str:
    available = ", ".join(map(repr, mapping)) or "nothing"
    return f"{name} needs the {kind} {key!r}, which is absent{nearest(key, mapping)} (available: {available})"


def _not_a_tensor(leaf: LossTerm, pred: object, target: object) -> ConfigurationTypeError:
    kind, key, value = "prediction", leaf.prediction_key, pred
    if isinstance(pred, Tensor):
        kind, key, value = "target", leaf.target_key, target
    return ConfigurationTypeError(
        f"{type(leaf).__name__}: the {kind} {key!r} must be a tensor; got {type(value).__name__}"
    )


def _scaled_sample(leaf: LossTerm, sample: object, weight: float) -> Tensor:
    if not isinstance(sample, Tensor):
        raise ConfigurationTypeError(
            f"{type(leaf).__name__}.per_sample_loss must be a tensor; got {type(sample).__name__}"
        )
    if sample.ndim != 1:
        raise ConfigurationError(
            f"{type(leaf).__name__}.per_sample_loss must be 1-D, one entry per graph; got {tuple(sample.shape)}"
        )
    return _without_graph(sample if weight == 1.0 else sample * weight)


def _without_graph(values: Tensor) -> Tensor:
    # Hardly any of these has a graph, and asking is cheaper than detaching.
    return values.detach() if values.requires_grad else values


def _weighted_sum(values: Iterable[Tensor], weights: Iterable[float]) -> Tensor:
    pairs = zip(values, weights, strict=True)
    value, weight = next(pairs)
    total = value if weight == 1.0 else value * weight
    for value, weight in pairs:
        total = total.add(value, alpha=weight)
    return total


def _divide(sums: Mapping[str, Tensor], counts: Mapping[str, Tensor], count_reducer: CountReducer) -> dict[str, Tensor]:
    own = torch.stack(list(counts.values())).double()
    divisors = count_reducer(own)
    if divisors.shape != own.shape:
        raise ConfigurationError(
            f"count_reducer must return one divisor per component, shape {tuple(own.shape)}; "
            f"got {tuple(divisors.shape)}"
        )
    pairs = zip(sums.items(), divisors.unbind(), strict=True)
    return {name: total / divisor.to(total.dtype) for (name, total), divisor in pairs}
