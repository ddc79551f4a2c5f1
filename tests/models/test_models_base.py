"""The configuration that every model carries."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import nn

import nvalchemi_lightning.models as face
from nvalchemi_lightning.errors import ConfigurationTypeError, UnknownNameError
from nvalchemi_lightning.models import BaseModelMixin, ModelConfig, NeighborConfig, NeighborListFormat


class Potential(nn.Module, BaseModelMixin):
    def __init__(self, config: ModelConfig | None) -> None:
        super().__init__()
        if config is not None:
            self.model_config = config


def test_defaults() -> None:
    config = ModelConfig()
    assert config.outputs == config.active_outputs == {"energy"}
    assert config.autograd_inputs == {"positions"}
    assert not config.needs_neighborlist
    assert (config.supports_pbc, config.needs_pbc, config.gradient_keys) == (False, False, set())
    neighbors = NeighborConfig(cutoff=5)
    assert (neighbors.format, neighbors.half_list, neighbors.skin) == ("coo", False, 0.0)
    assert ModelConfig(neighbor_config=neighbors).needs_neighborlist


def test_active_outputs_of_none_mean_all() -> None:
    config = ModelConfig(outputs=frozenset({"energy", "forces"}), active_outputs={"energy"})
    assert config.active_outputs == {"energy"}
    config.active_outputs = None
    assert config.active_outputs == {"energy", "forces"}


def test_configurations_do_not_share_sets() -> None:
    first, second = ModelConfig(), ModelConfig()
    first.active_outputs.add("forces")
    assert second.active_outputs == {"energy"}


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (ModelConfig(), set()),
        (ModelConfig(needs_pbc=True, required_inputs=frozenset({"charge"})), {"pbc", "charge"}),
        (ModelConfig(neighbor_config=NeighborConfig(cutoff=1)), {"neighbor_list"}),
        (
            ModelConfig(neighbor_config=NeighborConfig(cutoff=1, format=NeighborListFormat.MATRIX)),
            {"neighbor_matrix", "num_neighbors"},
        ),
    ],
)
def test_input_data(config: ModelConfig, names: set[str]) -> None:
    assert Potential(config).input_data() == {"positions", "atomic_numbers"} | names


def test_autograd_is_needed_for_active_derivatives_only() -> None:
    model = Potential(ModelConfig(outputs=frozenset({"energy", "forces"}), autograd_outputs=frozenset({"forces"})))
    assert model.requires_autograd
    model.set_config("active_outputs", {"energy"})
    assert not model.requires_autograd
    assert model.output_data() == {"energy"}


def test_outputs_are_sorted_and_shaped() -> None:
    model = Potential(ModelConfig(outputs=frozenset({"forces", "energy", "charges"})))
    outputs = model.adapt_output({"forces": torch.ones(2, 3), "energy": torch.ones(4), "stress": torch.ones(1)})
    assert list(outputs) == ["charges", "energy", "forces"]
    assert outputs["charges"] is None
    assert outputs["energy"] is not None
    assert outputs["energy"].shape == (4, 1)


def test_unknown_outputs_are_refused_and_change_nothing() -> None:
    model = Potential(ModelConfig(outputs=frozenset({"energy", "forces"})))
    with pytest.raises(UnknownNameError, match="Potential has no output 'force'; did you mean 'forces'"):
        model.set_config("active_outputs", {"force"})
    assert model.output_data() == {"energy", "forces"}
    model.model_config.active_outputs.add("force")
    with pytest.raises(UnknownNameError, match="Potential has no output 'force'"):
        model.output_data()


def test_unknown_entries_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="model_config has no entry 'active_output'; did you mean"):
        Potential(ModelConfig()).set_config("active_output", set())
    with pytest.raises(ValidationError, match="ModelConfig has no field 'output'; did you mean 'outputs'"):
        ModelConfig(output={"energy"})  # type: ignore[call-arg]


def test_neighbor_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        NeighborConfig(cutoff=1.0).cutoff = 2.0  # type: ignore[misc]


def test_a_model_without_configuration_is_told_so() -> None:
    with pytest.raises(ConfigurationTypeError, match=r"Potential must set self.model_config = ModelConfig\(\.\.\.\)"):
        Potential(None).output_data()


def test_public_names() -> None:
    assert dir(face) == sorted(face.__all__)
    assert all(getattr(face, name).__name__ == name for name in face.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Painn'; did you mean 'PaiNN'"):
        _ = face.Painn
