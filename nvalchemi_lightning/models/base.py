"""What the package expects of a potential: what it computes, what it needs, and how it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator
from torch import Tensor

from nvalchemi_lightning._keywords import refuse_unknown_keywords
from nvalchemi_lightning.errors import ConfigurationTypeError, UnknownNameError, nearest
from nvalchemi_lightning.strict_model import StrictModel

__all__ = ["BaseModelMixin", "ModelConfig", "NeighborConfig", "NeighborListFormat"]


class NeighborListFormat(StrEnum):
    """How neighbors are stored: as pairs, or as a padded matrix with a row per atom."""

    COO = "coo"
    MATRIX = "matrix"


class NeighborConfig(StrictModel):
    """Which neighbors a model needs.

    Attributes
    ----------
    cutoff : float
        Largest distance [A].
    format : NeighborListFormat, default "coo"
        How they are stored.
    half_list : bool, default False
        Whether each pair is listed in one direction alone.
    skin : float, default 0.0
        Added to the cutoff of the search [A].
    """

    model_config = ConfigDict(frozen=True)

    cutoff: float = Field(gt=0, allow_inf_nan=False)
    format: NeighborListFormat = NeighborListFormat.COO
    half_list: bool = False
    skin: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class ModelConfig(StrictModel):
    """What a model can compute and needs, and what is asked of it now.

    Attributes
    ----------
    outputs : frozenset of str, default {"energy"}
        Everything that the model can compute.
    autograd_outputs : frozenset of str
        Those that it computes as derivatives of the energy.
    autograd_inputs : frozenset of str, default {"positions"}
        With respect to what.
    required_inputs, optional_inputs : frozenset of str
        Fields of the batch beside positions, atomic numbers and neighbors.
    supports_pbc, needs_pbc : bool, default False
        Whether structures may, or have to, be periodic.
    neighbor_config : NeighborConfig or None
        Which neighbors the model needs; None if none.
    active_outputs : set of str
        What the next call computes; None means all of ``outputs``.
    gradient_keys : set of str
        Fields of the batch that have to require gradients before the call.
    """

    model_config = ConfigDict(validate_assignment=True)

    outputs: frozenset[str] = frozenset({"energy"})
    autograd_outputs: frozenset[str] = frozenset()
    autograd_inputs: frozenset[str] = frozenset({"positions"})
    required_inputs: frozenset[str] = frozenset()
    optional_inputs: frozenset[str] = frozenset()
    supports_pbc: bool = False
    needs_pbc: bool = False
    neighbor_config: NeighborConfig | None = None
    active_outputs: set[str] = Field(default=None, validate_default=True)
    gradient_keys: set[str] = Field(default_factory=set)

    @field_validator("active_outputs", mode="before")
    @classmethod
    def _all_by_default(cls, value: Any, info: ValidationInfo) -> Any:
        return set(info.data.get("outputs", ())) if value is None else value

    @property
    def needs_neighborlist(self) -> bool:
        """Whether the model needs neighbors."""
        return self.neighbor_config is not None


class BaseModelMixin:
    """What a potential shares with all others, beside being an ``nn.Module``.

    A subclass sets ``self.model_config`` in its constructor and implements ``forward(data)``. It is called with a
    ``Batch`` or an ``AtomicData`` and returns its active outputs by name: ``energy`` (B, 1) [eV], ``forces`` (V, 3)
    [eV/A], ``stress`` (B, 3, 3) [eV/A^3]. If it stores its constructor arguments under their own names, a checkpoint
    can rebuild it.
    """

    model_config: ModelConfig

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse keywords that do not exist."""
        refuse_unknown_keywords(cls, kwargs)
        return super().__new__(cls)

    def _config(self) -> ModelConfig:
        config = getattr(self, "model_config", None)
        if not isinstance(config, ModelConfig):
            raise ConfigurationTypeError(
                f"{type(self).__name__} must set self.model_config = ModelConfig(...) in its __init__, has {config!r}"
            )
        return config

    def input_data(self) -> set[str]:
        """Return the names of the fields that the model reads from a batch."""
        config = self._config()
        names = {"positions", "atomic_numbers"} | config.required_inputs
        if config.needs_pbc:
            names |= {"pbc"}
        if config.neighbor_config is None:
            return names
        if config.neighbor_config.format is NeighborListFormat.MATRIX:
            return names | {"neighbor_matrix", "num_neighbors"}
        return names | {"neighbor_list"}

    def output_data(self) -> set[str]:
        """Return the names of the outputs that the next call computes.

        Raises
        ------
        UnknownNameError
            If one is asked for that the model does not have.
        """
        config = self._config()
        for name in sorted(config.active_outputs - config.outputs):
            raise UnknownNameError(
                f"{type(self).__name__} has no output {name!r}{nearest(name, config.outputs)}; "
                f"it has {sorted(config.outputs)}"
            )
        return set(config.active_outputs)

    @property
    def requires_autograd(self) -> bool:
        """Whether the next call differentiates the energy."""
        config = self._config()
        return bool(config.autograd_outputs & config.active_outputs)

    def set_config(self, key: str, value: Any) -> None:
        """Change an entry of the configuration, such as ``set_config("active_outputs", {"energy", "stress"})``.

        Raises
        ------
        UnknownNameError
            If there is no such entry, or no such output.
        """
        config = self._config()
        if key not in type(config).model_fields:
            raise UnknownNameError(
                f"model_config has no entry {key!r}{nearest(key, type(config).model_fields)}; "
                f"it has {sorted(type(config).model_fields)}"
            )
        previous = getattr(config, key)
        setattr(config, key, value)
        try:
            self.output_data()
        except UnknownNameError:
            setattr(config, key, previous)
            raise

    def adapt_output(self, raw: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return the active ones of some outputs, sorted by name, with energies of shape (B, 1).

        Parameters
        ----------
        raw : mapping of str to Tensor or None
            What was computed.
        """
        outputs = {name: raw.get(name) for name in sorted(self.output_data())}
        energy = outputs.get("energy")
        if energy is not None and energy.ndim == 1:
            outputs["energy"] = energy.unsqueeze(1)
        return outputs
