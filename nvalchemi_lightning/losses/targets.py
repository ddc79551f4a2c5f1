"""From a batch and a model's output to the loss: which labels, under which names, with which metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from nvalchemi_lightning.errors import ConfigurationTypeError, MissingTargetError, TrainingStateError, nearest
from nvalchemi_lightning.losses.metadata import METADATA
from nvalchemi_lightning.losses.term import LossTerm

if TYPE_CHECKING:
    from nvalchemi_lightning.losses.composition import ComposedLossFunction, ComposedLossOutput, CountReducer

__all__ = [
    "LossTargetAssemblyProtocol",
    "assemble_loss_targets",
    "compute_supervised_loss",
    "count_labels",
    "loss_target_keys",
]


class LossTargetAssemblyProtocol(Protocol):
    """A callable that finds the targets of a loss for one batch."""

    def __call__(
        self,
        loss_fn: ComposedLossFunction,
        predictions: Mapping[str, Tensor],
        batch: Any,
        *,
        workflow: Any = None,
        target_keys: Sequence[str] | None = None,
        batch_label: str = "Batch",
    ) -> Mapping[str, Tensor]:
        """Return the targets by key; they must cover every component of the loss.

        Parameters
        ----------
        loss_fn : ComposedLossFunction
            The loss that will be evaluated.
        predictions : mapping of str to Tensor
            What the forward function returned, for instance a teacher's energies beside the student's.
        batch : Batch
            The batch.
        workflow : object, optional
            The strategy that trains or validates.
        target_keys : sequence of str, optional
            The keys that the loss needs. Default: ``loss_target_keys(loss_fn)``.
        batch_label : str
            How messages call the batch.
        """
        ...


def loss_target_keys(composed: ComposedLossFunction) -> tuple[str, ...]:
    """Return the target keys of a composition, each once, in the order of its components."""
    keys = (getattr(leaf, "target_key", None) for leaf in composed.components)
    return tuple(dict.fromkeys(key for key in keys if key is not None))


def assemble_loss_targets(
    loss_fn: ComposedLossFunction,
    predictions: Mapping[str, Tensor],
    batch: Any,
    *,
    workflow: Any = None,
    target_keys: Sequence[str] | None = None,
    batch_label: str = "Batch",
) -> dict[str, Tensor]:
    """Take every target from the batch, as the attribute of that name.

    Parameters and result are those of ``LossTargetAssemblyProtocol``; ``predictions`` and ``workflow`` are not used.

    Raises
    ------
    MissingTargetError
        If the batch lacks a target; the message names the component, the key and what the batch has.
    """
    targets = {}
    for key in loss_target_keys(loss_fn) if target_keys is None else target_keys:
        value = getattr(batch, key, None)
        if value is None:
            raise _missing_target(loss_fn, key, batch, batch_label)
        targets[key] = value
    return targets


def compute_supervised_loss(
    loss_fn: ComposedLossFunction,
    predictions: Mapping[str, Tensor],
    batch: Any,
    *,
    step: int,
    epoch: int | None,
    workflow: Any = None,
    target_assembler: LossTargetAssemblyProtocol = assemble_loss_targets,
    target_keys: Sequence[str] | None = None,
    batch_label: str = "Batch",
    count_reducer: CountReducer | None = None,
) -> ComposedLossOutput:
    """Assemble the targets of a batch and evaluate the loss; a NaN label means that the structure has none.

    Parameters
    ----------
    loss_fn : ComposedLossFunction
        The loss. ``as_composed_loss`` wraps a single term.
    predictions : mapping of str to Tensor
        What the forward function returned.
    batch : Batch
        The batch, with ``batch_idx``, ``num_graphs`` and ``num_nodes_per_graph`` where the terms need them.
    step, epoch : int
        For weight schedules.
    workflow : object, optional
        Handed to the assembler.
    target_assembler : LossTargetAssemblyProtocol
        Where the targets come from. Default: the batch.
    target_keys : sequence of str, optional
        Handed to the assembler. Default None: it works them out.
    batch_label : str
        How messages call the batch. Default ``"Batch"``.
    count_reducer : callable, optional
        See ``ComposedLossFunction.forward``.

    Raises
    ------
    MissingTargetError
        If the batch lacks a target, or ``loss_fn`` is a single term.
    MissingPredictionError
        If the predictions lack what a component reads.
    ConfigurationTypeError
        If the assembler does not return a mapping.
    """
    if isinstance(loss_fn, LossTerm):
        name = type(loss_fn).__name__
        raise MissingTargetError(f"{name} is a single term and has no components; pass as_composed_loss({name}(...))")
    targets = _mapping(
        target_assembler(
            loss_fn, predictions, batch, workflow=workflow, target_keys=target_keys, batch_label=batch_label
        )
    )
    metadata = _metadata(batch)
    output: ComposedLossOutput = loss_fn(
        predictions,
        targets,
        step=step,
        epoch=epoch,
        count_reducer=count_reducer,
        missing_is_nan=True,
        **metadata,
    )
    return output


def count_labels(
    loss_fn: ComposedLossFunction,
    batch: Any,
    *,
    workflow: Any = None,
    target_assembler: LossTargetAssemblyProtocol = assemble_loss_targets,
) -> Tensor:
    """Return by what `compute_supervised_loss` will divide the sum of every term, before there are predictions.

    Parameters
    ----------
    loss_fn, batch, workflow, target_assembler
        As there. The assembler is called with predictions that cannot be read yet.

    Returns
    -------
    Tensor
        The counts of the terms in order, float64, shape (T,).

    Raises
    ------
    MissingTargetError
        If the batch lacks a target.
    TrainingStateError
        If the assembler reads a prediction.
    """
    targets = _mapping(
        target_assembler(loss_fn, _NotYetPredicted(), batch, workflow=workflow, target_keys=loss_target_keys(loss_fn))
    )
    return loss_fn.counts(targets, missing_is_nan=True, **_metadata(batch))


class _NotYetPredicted(Mapping[str, Tensor]):
    """The predictions of a batch whose labels are counted before its forward pass."""

    def __getitem__(self, key: str) -> Tensor:
        raise TrainingStateError(
            f"the loss_target_assembler reads the prediction {key!r}, but the labels of an accumulation window are "
            "counted before its forward passes; write GradientAccumulationHook(..., normalize='graphs')"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _metadata(batch: Any) -> dict[str, Any]:
    return {name: value for name in METADATA if (value := getattr(batch, name, None)) is not None}


def _mapping(targets: Any) -> Mapping[str, Tensor]:
    if not isinstance(targets, Mapping):
        raise ConfigurationTypeError(
            f"the target assembler must return a mapping of target keys to tensors; got {type(targets).__name__}"
        )
    return targets


def _missing_target(loss_fn: ComposedLossFunction, key: str, batch: Any, batch_label: str) -> MissingTargetError:
    users = [type(leaf).__name__ for leaf in loss_fn.components if getattr(leaf, "target_key", None) == key]
    fields = _fields(batch)
    return MissingTargetError(
        f"{batch_label} is missing target attribute {key!r} required by {' and '.join(users) or 'the loss'}"
        f"{nearest(key, fields) or '.'} It has {', '.join(fields) or 'no fields'}; add the label, point target_key at "
        "another one, or drop the term"
    )


def _fields(batch: Any) -> list[str]:
    """Return the names of what a batch holds, of whatever class it is."""
    keys = getattr(batch, "keys", None)
    names = keys() if callable(keys) else keys
    if isinstance(names, Mapping):
        # Grouped by level, as in {"node": {...}, "edge": {...}, "system": {...}}.
        names = set().union(*names.values())
    if names is None:
        names = [name for name in getattr(batch, "__dict__", ()) if not name.startswith("_")]
    return sorted(names)
