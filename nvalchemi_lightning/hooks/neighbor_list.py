"""The hook that builds neighbor lists before the model is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvalchemi_lightning.data.edge_assignment import assign_edges
from nvalchemi_lightning.errors import ConfigurationError
from nvalchemi_lightning.models.base import NeighborConfig, NeighborListFormat
from nvalchemi_lightning.neighbors import neighbor_list
from nvalchemi_lightning.specs.base import BaseSpec, create_model_spec
from nvalchemi_lightning.stages import TrainingStage

__all__ = ["NeighborListHook"]


class NeighborListHook:
    """Write ``neighbor_list`` and ``neighbor_list_shifts`` onto every batch, in place.

    Parameters
    ----------
    config : NeighborConfig or mapping, optional
        What the model needs, such as ``model.model_config.neighbor_config``.
    skin : float, default 0.0
        Added to the cutoff [A]; a model applies its own cutoff, so longer lists cost time alone.
    cutoff : float, optional
        Largest distance [A]; instead of ``config``.
    format : {"coo"}, default "coo"
        With ``cutoff``: how neighbors are stored.
    stage : TrainingStage, default TrainingStage.BEFORE_FORWARD
        When to act.

    Raises
    ------
    ConfigurationError
        Unless exactly one of ``config`` and ``cutoff`` is given, or if the list would be a matrix or a half list.

    Notes
    -----
    At ``BEFORE_FORWARD`` it fires for every training and validation batch. Edges that came with the batch are
    replaced, since the atoms may have moved; without this hook they are used as they are. Structures that come again
    and again are cheaper with `NeighborListTransform`, which searches once. Nothing is checkpointed.
    """

    frequency: int = 1

    def __init__(
        self,
        config: NeighborConfig | Mapping[str, Any] | None = None,
        skin: float = 0.0,
        *,
        cutoff: float | None = None,
        format: NeighborListFormat | str = NeighborListFormat.COO,  # noqa: A002 (the key of job specs)
        stage: TrainingStage = TrainingStage.BEFORE_FORWARD,
    ) -> None:
        if (config is None) == (cutoff is None):
            raise ConfigurationError("NeighborListHook needs either config or cutoff=..., not both and not neither")
        given = {"cutoff": cutoff, "format": format} if config is None else config
        self.config = NeighborConfig.model_validate(given, from_attributes=True)
        if self.config.format is not NeighborListFormat.COO or self.config.half_list:
            raise ConfigurationError(
                f"NeighborListHook writes full lists in the format 'coo', got format={self.config.format.value!r} and "
                f"half_list={self.config.half_list}"
            )
        self.skin = skin
        self.stage: TrainingStage = stage

    @property
    def cutoff(self) -> float:
        """Largest distance of the search [A]."""
        return self.config.cutoff + self.config.skin + self.skin

    def to_spec(self) -> BaseSpec:
        """Return the recipe."""
        return create_model_spec(type(self), config=self.config, skin=self.skin, stage=self.stage)

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Give ``ctx.batch`` its edges."""
        assign_edges(ctx.batch, *neighbor_list(ctx.batch, self.cutoff), self.cutoff)
