"""Recipes of models, derived from their constructors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from checkpoint_rigs import Net
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError
from nvalchemi_lightning.specs import BaseSpec, create_model_spec
from nvalchemi_lightning.specs.model_spec import model_spec, model_spec_or_warning


class Plain(nn.Module):
    def __init__(self, width: int, scale: float = 2.0, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.width, self.scale = width, scale
        self.weight = nn.Parameter(torch.randn(width, device=device))


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module, parts: Sequence[nn.Module], table: torch.Tensor) -> None:
        super().__init__()
        self.model, self.parts = model, nn.ModuleList(parts)
        self.register_buffer("table", table)


class Heads(nn.Module):
    def __init__(self, heads: dict[str, nn.Module]) -> None:
        super().__init__()
        self.heads = nn.ModuleDict(heads)


class OtherName(nn.Module):
    def __init__(self, cutoff: float = 5.0) -> None:
        super().__init__()
        self.r_max = cutoff


class Transforms(nn.Module):
    def __init__(self, cutoff: float) -> None:
        super().__init__()
        self.cutoff = cutoff * 2


class KeepsLists(nn.Module):
    def __init__(self, widths: Any, *parts: Any) -> None:
        super().__init__()
        self.widths = widths


class Open(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options


class Picky(nn.Module):
    """Refuses what its own attribute says afterwards."""

    def __init__(self, width: int) -> None:
        super().__init__()
        if width < 0:
            raise ValueError("width must be positive")
        self.width = -width


class HoldsFunction(nn.Module):
    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act


class MethodName(nn.Module):
    def __init__(self, energy: float) -> None:
        super().__init__()
        self._energy = energy

    def energy(self) -> float:
        return self._energy


class Own(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner_width = width

    def checkpoint_spec(self) -> Any:
        return create_model_spec(Own, width=self.inner_width)


class NoArguments(nn.Module):
    pass


class OwnNothing(Plain):
    def checkpoint_spec(self) -> Any:
        return None


class OwnWrong(Plain):
    def checkpoint_spec(self) -> Any:
        return {"width": 1}


def test_arguments_are_read_from_attributes() -> None:
    spec = model_spec(Plain(3))
    assert spec.kwargs == {"width": 3, "scale": 2.0}
    assert spec.build().weight.shape == (3,)


def test_device_is_no_part_of_the_recipe() -> None:
    assert "device" not in model_spec(Plain(3, device=torch.device("cpu"))).kwargs


def test_a_model_without_a_constructor_has_no_arguments() -> None:
    assert model_spec(NoArguments()).kwargs == {}


def test_submodules_lists_and_buffers_recurse() -> None:
    spec = model_spec(Wrapper(Plain(2), [Plain(1), nn.Linear(2, 3, bias=False)], torch.arange(3.0)))
    assert isinstance(spec.kwargs["model"], BaseSpec)
    rebuilt = spec.build()
    assert rebuilt.parts[1].bias is None
    assert torch.equal(rebuilt.table, torch.arange(3.0))


def test_mappings_of_modules_recurse() -> None:
    rebuilt = model_spec(Heads({"energy": Plain(2), "charge": Plain(3)})).build()
    assert {name: head.width for name, head in rebuilt.heads.items()} == {"energy": 2, "charge": 3}


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(2, 3), nn.Linear(2, 3, bias=False), nn.LayerNorm(4), nn.Embedding(5, 2, padding_idx=0), nn.SiLU()],
    ids=repr,
)
def test_layers_of_torch_have_recipes(layer: nn.Module) -> None:
    rebuilt = model_spec(layer).build()
    assert repr(rebuilt) == repr(layer)
    assert rebuilt.state_dict().keys() == layer.state_dict().keys()


def test_wrappers_are_looked_through() -> None:
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = Plain(4)
    assert model_spec(wrapped) == model_spec(Plain(4))
    assert model_spec(torch.compile(Plain(4), backend="eager")) == model_spec(Plain(4))
    assert model_spec(OwnNothing(4)).kwargs["width"] == 4


def test_a_compiled_submodule_is_looked_through() -> None:
    wrapper = Wrapper(torch.compile(Plain(2), backend="eager"), [], torch.zeros(1))
    assert model_spec(wrapper).kwargs["model"].cls_path.endswith(".Plain")


def test_the_model_decides_itself() -> None:
    assert model_spec(Own(7)).build().inner_width == 7


def test_an_argument_that_is_also_a_method_is_read_from_the_private_attribute() -> None:
    assert model_spec(MethodName(1.5)).kwargs == {"energy": 1.5}


def test_a_wrong_checkpoint_spec_is_refused() -> None:
    with pytest.raises(ConfigurationTypeError, match=r"OwnWrong.checkpoint_spec\(\) must return a BaseSpec or None"):
        model_spec(OwnWrong(1))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (OtherName(), r"OtherName does not store its constructor argument 'cutoff'; add self.cutoff = cutoff"),
        (Transforms(2.0), r"Transforms changes its constructor argument 'cutoff': built with 4.0 it holds 8.0"),
        (KeepsLists([1]), r"KeepsLists takes \*parts, whose values nothing tells"),
        (Open(a=1), r"Open takes \*options, whose values nothing tells"),
        (Picky(2), r"Picky cannot be built again from what its attributes hold \(width must be positive\)"),
        (HoldsFunction(lambda x: x), r".*HoldsFunction.act: .* is not an importable callable"),
        (Wrapper(OtherName(), [], torch.zeros(1)), r"OtherName does not store its constructor argument 'cutoff'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_b38_what_would_be_lost_is_named(model: nn.Module, reason: str) -> None:
    """B38: an argument is never dropped in silence."""
    with pytest.raises(ConfigurationError, match=reason):
        model_spec(model)
    with pytest.warns(UserWarning, match=rf"^Omitting model spec for 'main': {reason}"):
        assert model_spec_or_warning("main", model) is None


def test_a_local_class_has_no_recipe() -> None:
    class Local(nn.Module):
        pass

    with pytest.raises(ConfigurationError, match=r"not an importable callable.*or implement Local.checkpoint_spec"):
        model_spec(Local())


def test_the_random_state_is_untouched_and_proving_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    init = Net.__init__

    def noted(self: Net, hidden: int = 4) -> None:
        built.append(hidden)
        init(self, hidden)

    model = Net(3)
    monkeypatch.setattr(Net, "__init__", noted)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = model_spec(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert model_spec(model) is first
    model.hidden = 8
    assert model_spec(model).kwargs == {"hidden": 8}
    assert built == [3, 8]
