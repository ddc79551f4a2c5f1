"""What a composition knows of a loss term."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from nvalchemi_lightning.losses.checks import DTypePolicy
from nvalchemi_lightning.losses.reductions import Reduction

__all__ = ["LossTerm"]


class LossTerm(nn.Module, ABC):
    """The interface between compositions and terms; write a term on top of ``BaseLossFunction``.

    Attributes
    ----------
    requires_eval_grad : bool or None
        Whether evaluating the term needs autograd, as forces and stress do. None means undeclared.
    prediction_key, target_key : str
        Where a composition finds prediction and target.
    dtype_policy : {"strict", "prediction_to_target", "target_to_prediction"}
        What happens when prediction and target differ in dtype.
    per_sample_loss : Tensor or None
        Loss of each graph in the last call, detached, shape (B,); None where the term has none.
    """

    requires_eval_grad: bool | None = None
    prediction_key: str
    target_key: str
    dtype_policy: DTypePolicy
    per_sample_loss: Tensor | None

    @abstractmethod
    def collect(self, pred: Tensor, target: Tensor, **metadata: Any) -> tuple[Tensor, Reduction]:
        """Call the term and hand over its value and its sums, both on the graph.

        Parameters
        ----------
        pred, target : Tensor
            Prediction and label, of the shape that the term asks for.
        **metadata
            Graph metadata, see ``BaseLossFunction``.
        """
