"""Specs: making them, their JSON form, reading and building them."""

from __future__ import annotations

import enum
import functools
import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from torch import nn

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, UntrustedPathError
from nvalchemi_lightning.specs import (
    BaseSpec,
    create_model_spec,
    create_model_spec_from_json,
    register_type_serializer,
    trust,
    without_timestamps,
)

if TYPE_CHECKING:
    from decimal import Decimal

TRUST = sys.modules["nvalchemi_lightning.specs.trust"]


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRUST, "_added", {__name__: None})


class Color(enum.Enum):
    RED = 5
    PAIR = (1, 2)


class Options(BaseModel):
    width: int = 1


@dataclass
class Cell:
    """Pydantic can make nothing of it: a data class brings its own configuration, and a tensor needs another."""

    vectors: torch.Tensor


class Weight(Protocol):
    def __call__(self, step: int) -> float: ...


class Holder:
    """Keeps whatever it is given; no parameter is annotated."""

    def __init__(self, value=None, dtype=None, device=None, **more):
        self.value, self.dtype, self.device, self.more = value, dtype, device, more


class Typed:
    def __init__(
        self,
        *,
        size: int = 1,
        names: tuple[str, ...] = (),
        color: Color | None = None,
        path: Path | None = None,
        options: Options | None = None,
        kind: type[nn.Module] | None = None,
        numbers: Iterable[float] = (),
        function: Callable[[float], float] | None = None,
        weight: float | Weight = 1.0,
        table: dict[int, float] | None = None,
        chosen: set[int] | None = None,
        precision: torch.dtype | None = None,
        text_or_precision: str | torch.dtype = "x",
        later: Decimal | None = None,
        bounded: Annotated[int, Field(gt=0)] = 1,
        direct: Options = Options(),  # noqa: B008 (never changed)
        anything: type[Any] | None = None,
        bare: type | None = None,
        free_table: dict[str, torch.dtype | None] | None = None,
    ):
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})


class Wrapper:
    def __init__(self, model: nn.Module, extra: list[nn.Module] | None = None):
        self.model, self.extra = model, extra


class Keeper:
    def __init__(self, recipe: BaseSpec):
        self.recipe = recipe


class WithSpec:
    def __init__(self, n: int = 0):
        self.n = n

    def to_spec(self) -> BaseSpec:
        return create_model_spec(WithSpec, n=self.n)

    @classmethod
    def doubled(cls, n: int) -> WithSpec:
        return cls(2 * n)


class Confused:
    def to_spec(self) -> str:
        return "no"


class Angle:
    """A foreign type with a registered serializer."""

    def __init__(self, degrees: float):
        self.degrees = degrees

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Angle) and other.degrees == self.degrees

    __hash__ = None


def takes_angle(angle: Angle | None = None, angles: list[Angle] | None = None, free=None) -> Holder:
    return Holder(value=(angle, angles, free))


def positional(x, /, y) -> Holder:
    return Holder(y)


def halve(x: float) -> float:
    return x / 2


@pytest.fixture
def angle_serializer(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = sys.modules["nvalchemi_lightning.specs.serializers"]._registry
    monkeypatch.setattr(sys.modules["nvalchemi_lightning.specs.serializers"], "_registry", dict(registry))
    register_type_serializer(Angle, lambda angle: [angle.degrees], lambda form: Angle(form[0]))


def through_json(spec: BaseSpec) -> BaseSpec:
    return create_model_spec_from_json(json.loads(spec.model_dump_json()))


def same(a: Any, b: Any) -> bool:
    """Compare values bit by bit: NaN equals NaN, 1 differs from 1.0, a list from a tuple."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


# The JSON form ------------------------------------------------------------------------------------------------------


def test_the_form_is_one_flat_object_with_the_encodings_of_the_reference() -> None:
    spec = create_model_spec(nn.Linear, in_features=8, out_features=4, dtype=torch.float64, device=torch.device("cpu"))
    form = spec.model_dump()
    assert list(form) == ["cls_path", "timestamp", "in_features", "out_features", "dtype", "device"]
    assert without_timestamps(form) == {
        "cls_path": "torch.nn.modules.linear.Linear",
        "in_features": 8,
        "out_features": 4,
        "dtype": "torch.float64",
        "device": "cpu",
    }
    assert spec.timestamp.endswith("+00:00")
    assert len(spec.timestamp) == 32
    assert json.loads(spec.model_dump_json(indent=2)) == form
    assert spec.build().weight.dtype is torch.float64


def test_nested_specs_and_tagged_values_have_the_forms_of_the_reference() -> None:
    inner = create_model_spec(nn.Linear, in_features=1, out_features=1)
    form = create_model_spec(
        Holder, value=[inner, 1], tensor=torch.tensor([1.0, 2.0]), cls=Color, color=Color.RED, f=halve
    ).model_dump()
    assert form["value"][0]["cls_path"] == "torch.nn.modules.linear.Linear"
    assert form["tensor"] == {"data": [1.0, 2.0], "dtype": "torch.float32", "shape": [2]}
    assert form["cls"] == {"__type__": f"{__name__}.Color"}
    assert form["color"] == {"__enum__": f"{__name__}.Color", "value": 5}
    assert form["f"] == {"__callable__": f"{__name__}.halve"}
    assert create_model_spec(Typed, kind=nn.Linear).model_dump()["kind"] == "torch.nn.modules.linear.Linear"


def test_the_time_of_making_survives_reading_and_does_not_count_for_equality() -> None:
    form = {"cls_path": "torch.nn.Linear", "timestamp": "yesterday", "in_features": 1, "out_features": 2}
    spec = create_model_spec_from_json(form)
    assert spec.timestamp == "yesterday"
    assert spec.model_dump() == form
    assert spec == create_model_spec_from_json({**form, "timestamp": "today"})
    assert spec != create_model_spec_from_json({**form, "in_features": 2})
    assert spec != form


def test_a_form_written_by_hand_needs_no_timestamp() -> None:
    spec = create_model_spec_from_json({"cls_path": "torch.nn.Linear", "in_features": 1, "out_features": 2})
    assert spec.timestamp.startswith("20")
    assert spec.build().out_features == 2


def test_without_timestamps_leaves_other_keys_of_that_name_alone() -> None:
    form = {
        "cls_path": "x.Y",
        "timestamp": "t",
        "log": {"timestamp": 3},
        "inner": [{"cls_path": "x.Z", "timestamp": 1}],
    }
    assert without_timestamps(form) == {"cls_path": "x.Y", "log": {"timestamp": 3}, "inner": [{"cls_path": "x.Z"}]}


# Round trips --------------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
tensors = st.lists(st.floats(width=32), max_size=4).map(lambda xs: torch.tensor(xs, dtype=torch.float32))
special = st.sampled_from(
    [torch.float16, torch.device("cuda:1"), Color.RED, Color.PAIR, Color, halve, {"cls_path": "a"}, {"__enum__": 1}]
)
keys = st.text(max_size=3) | st.sampled_from(["cls_path", "data", "__type__", "__dict__", "timestamp"])
values = st.recursive(
    scalars | tensors | special,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150)
@given(value=values)
def test_any_value_comes_back_as_it_was_without_an_annotation(value: Any) -> None:
    spec = through_json(create_model_spec(Holder, value=value))
    assert same(spec.value, value)
    assert same(spec.build().value, value)


@settings(deadline=None, max_examples=50)
@given(
    shape=st.lists(st.integers(0, 3), max_size=3), dtype=st.sampled_from([torch.float64, torch.bfloat16, torch.int64])
)
def test_tensors_keep_dtype_and_shape(shape: list[int], dtype: torch.dtype) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    assert same(through_json(create_model_spec(Holder, value=tensor)).value, tensor)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("size", 3),
        ("names", ("a", "b")),
        ("color", Color.RED),
        ("path", Path("a/b")),
        ("options", Options(width=3)),
        ("kind", nn.Linear),
        ("function", halve),
        ("weight", 0.5),
        ("table", {6: 1.5}),
        ("chosen", {1, 2}),
        ("precision", torch.float64),
        ("text_or_precision", torch.float64),
        ("text_or_precision", "torch.float64"),
        ("later", None),
        ("anything", nn.Linear),
        ("bare", nn.Linear),
        ("bounded", 2),
        ("direct", Options(width=2)),
        ("free_table", {"a": torch.float16, "b": None}),
    ],
)
def test_annotated_values_come_back_as_they_were(name: str, value: Any) -> None:
    built = through_json(create_model_spec(Typed, **{name: value})).build()
    assert getattr(built, name) == value
    assert type(getattr(built, name)) is type(value)


def test_a_bare_enum_value_of_the_reference_is_read_for_an_optional_parameter() -> None:
    spec = create_model_spec_from_json({"cls_path": f"{__name__}.Typed", "color": 5})
    assert spec.color is Color.RED


@pytest.mark.parametrize(("name", "text"), [("dtype", "float32"), ("dtype", "torch.float32"), ("device", "cuda:0")])
def test_text_for_dtype_and_device_is_read_without_an_annotation(name: str, text: str) -> None:
    value = getattr(create_model_spec_from_json({"cls_path": f"{__name__}.Holder", name: text}), name)
    assert value == {"dtype": torch.float32, "device": torch.device("cuda:0")}[name]


def test_specs_nest_in_lists_and_mappings_at_any_depth() -> None:
    linear = create_model_spec(nn.Linear, in_features=1, out_features=1)
    spec = through_json(create_model_spec(Holder, value={"a": [[linear], {"b": linear}], "c": (1, linear)}))
    value = spec.build().value
    assert isinstance(value["a"][0][0], nn.Linear)
    assert isinstance(value["a"][1]["b"], nn.Linear)
    assert value["c"][0] == 1
    assert isinstance(spec.value["a"][0][0], BaseSpec)


def test_a_parameter_annotated_as_a_spec_gets_the_spec() -> None:
    spec = through_json(create_model_spec(Keeper, recipe=create_model_spec(nn.Linear, in_features=1, out_features=2)))
    assert spec.build().recipe.out_features == 2


def test_objects_that_have_a_spec_are_stored_as_one_and_built_anew() -> None:
    live = WithSpec(3)
    built = create_model_spec(Holder, value=[live]).build()
    assert built.value[0].n == 3
    assert built.value[0] is not live


def test_a_class_method_is_a_target() -> None:
    spec = create_model_spec(WithSpec.doubled, n=2)
    assert spec.cls_path == f"{__name__}.WithSpec.doubled"
    assert through_json(spec).build().n == 4


def test_a_function_with_an_annotated_result_is_a_target() -> None:
    assert isinstance(through_json(create_model_spec(takes_angle)).build(), Holder)


def test_names_imported_for_type_checkers_only_do_not_prevent_a_spec() -> None:
    assert len(create_model_spec(nn.ModuleList, modules=None).build()) == 0
    assert create_model_spec(torch.optim.lr_scheduler.MultiStepLR, milestones=[1, 2]).milestones == [1, 2]


def test_an_annotation_that_means_nothing_checks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for annotation in (5, Cell):
        monkeypatch.setitem(takes_angle.__annotations__, "free", annotation)
        assert create_model_spec(takes_angle, free="x").free == "x"


@pytest.mark.usefixtures("angle_serializer")
def test_registered_types_come_back_annotated_or_not() -> None:
    spec = create_model_spec(takes_angle, angle=Angle(1.0), angles=[Angle(2.0)], free={"x": Angle(3.0)})
    form = spec.model_dump()
    assert (form["angle"], form["angles"]) == ([1.0], [[2.0]])
    assert form["free"] == {"x": {"__value__": [3.0], "type": f"{__name__}.Angle"}}
    assert through_json(spec).build().value == (Angle(1.0), [Angle(2.0)], {"x": Angle(3.0)})


# Building -----------------------------------------------------------------------------------------------------------


def test_build_takes_runtime_objects_and_overrides() -> None:
    model = nn.Linear(1, 1)
    optimizer = create_model_spec(torch.optim.SGD, lr=0.1).build(model.parameters(), momentum=0.5)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_build_hands_out_fresh_containers() -> None:
    given = [1]
    spec = create_model_spec(Holder, value=given)
    given.append(2)
    spec.build().value.append(3)
    assert spec.build().value == [1]


def test_build_hands_on_overrides_as_the_same_object() -> None:
    loader = [[1], [2]]
    assert create_model_spec(Holder).build(value=loader).value is loader
    assert create_model_spec(Holder).build(value=[create_model_spec(nn.ReLU)]).value[0].__class__ is nn.ReLU


def test_what_the_target_raises_itself_comes_out_as_it_is() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate") as caught:
        create_model_spec(torch.optim.SGD, lr=-1.0).build([torch.zeros(1)])
    assert type(caught.value) is ValueError


def test_a_missing_keyword_is_named_when_built() -> None:
    spec = create_model_spec(nn.Linear, in_features=1)
    with pytest.raises(
        ConfigurationTypeError, match=r"Failed to build torch\.nn.*saved at 20.*'out_features'.*changed"
    ):
        spec.build()
    with pytest.raises(ConfigurationTypeError, match="unexpected keyword argument 'width'"):
        spec.build(out_features=1, width=3)


def test_accepts_kwarg() -> None:
    assert create_model_spec(nn.Linear).accepts_kwarg("bias")
    assert not create_model_spec(nn.Linear).accepts_kwarg("width")
    assert create_model_spec(Holder).accepts_kwarg("anything")


def test_keywords_read_as_attributes() -> None:
    spec = create_model_spec(nn.Linear, in_features=1)
    assert spec.in_features == 1
    with pytest.raises(AttributeError, match=r"has no keyword 'out_features'; it has \['in_features'\]"):
        _ = spec.out_features
    with pytest.raises(AttributeError):
        spec.cls_path = "os.system"


# Refusals -----------------------------------------------------------------------------------------------------------


def test_b38_an_unknown_keyword_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        ConfigurationTypeError, match=r"Unknown kwargs for .*Linear: \['in_feature'\]; did you mean 'in_f"
    ):
        create_model_spec(nn.Linear, in_feature=1)
    with pytest.raises(TypeError, match="Unknown kwargs"):
        create_model_spec_from_json({"cls_path": "torch.nn.Linear", "width": 1})


def test_b38_a_value_that_cannot_be_stored_is_refused_with_its_name() -> None:
    with pytest.raises(
        ConfigurationTypeError, match=r"Wrapper\.model is a Linear, which a spec cannot store; give a spec"
    ):
        create_model_spec(Wrapper, model=nn.Linear(1, 1))
    with pytest.raises(ConfigurationTypeError, match=r"Holder\.value\[0\]\['a'\] is a object"):
        create_model_spec(Holder, value=[{"a": object()}])
    with pytest.raises(ConfigurationTypeError, match=r"Holder\.value is a complex"):
        create_model_spec(Holder, value=1j)
    with pytest.raises(ConfigurationTypeError, match="complex tensors"):
        create_model_spec(Holder, value=torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(ConfigurationTypeError, match=r"Holder\.value.*not an importable callable"):
        create_model_spec(Holder, value=lambda x: x)
    with pytest.raises(ConfigurationTypeError, match=r"Typed\.numbers is a generator"):
        create_model_spec(Typed, numbers=(x for x in (1.0, 2.0)))
    with pytest.raises(ConfigurationTypeError, match=r"has the key 6; JSON has only text keys"):
        create_model_spec(Holder, value={6: 1.0})
    with pytest.raises(ConfigurationTypeError, match=r"Confused\.to_spec\(\) must return a BaseSpec, got 'no'"):
        create_model_spec(Holder, value=Confused())


@pytest.mark.parametrize(
    "target",
    [lambda x: x, functools.partial(halve, 1.0), WithSpec().to_spec, type("Local", (), {})],
    ids=["lambda", "partial", "bound", "class-of-no-module"],
)
def test_a_target_that_cannot_be_imported_is_refused(target: Any) -> None:
    with pytest.raises(ConfigurationTypeError, match="is not an importable callable"):
        create_model_spec(target)


def test_positional_only_parameters_are_refused() -> None:
    with pytest.raises(ConfigurationTypeError, match=r"positional has the positional-only parameter 'x'"):
        create_model_spec(positional, y=1)


def test_reserved_keys_are_refused() -> None:
    with pytest.raises(ConfigurationTypeError, match="is given 'timestamp', a key that every spec keeps"):
        create_model_spec(Holder, timestamp=1)


def test_a_target_without_a_signature_is_refused() -> None:
    with pytest.raises(ConfigurationTypeError, match=r"the signature of .* cannot be read; wrap it"):
        create_model_spec(max)


def test_b90_wrong_types_are_refused_with_key_value_and_type() -> None:
    with pytest.raises(ConfigurationError, match=r"torch\.nn\.Linear\.in_features is 'wide'; give int"):
        create_model_spec_from_json({"cls_path": "torch.nn.Linear", "in_features": "wide"})
    with pytest.raises(ConfigurationError, match=r"Linear\.in_features is 0\.5; give int"):
        create_model_spec(nn.Linear, in_features=0.5)
    with pytest.raises(ConfigurationError, match=r"in_features is True; give int, not a bool"):
        create_model_spec(nn.Linear, in_features=True)
    with pytest.raises(ConfigurationError, match=r"Typed\.bounded is 0; give .* \(input should be greater than 0\)"):
        create_model_spec(Typed, bounded=0)
    assert create_model_spec_from_json({"cls_path": "torch.optim.Adam", "lr": "1e-4"}).lr == 1e-4


@pytest.mark.parametrize(
    ("form", "error", "match"),
    [
        ({"timestamp": "t"}, ConfigurationError, r"missing required field 'cls_path'; present keys: \['timestamp'\]"),
        ([1], ConfigurationTypeError, "a spec is a JSON object with 'cls_path', got list"),
        ({"cls_path": 3}, ConfigurationError, "Could not resolve 3: give a dotted path"),
        ({"cls_path": "Linear"}, ConfigurationError, "Could not resolve 'Linear': give a dotted path"),
        ({"cls_path": "torch.nn.Linaer"}, ConfigurationError, r"torch\.nn has no 'Linaer'; did you mean 'Linear'"),
        ({"cls_path": "torch.nn.modules.pooling"}, ConfigurationError, "it is a module; name a class or"),
        ({"cls_path": f"{__name__}.halve"}, ConfigurationError, "is not a class .a function counts when its return"),
    ],
)
def test_a_damaged_form_is_refused(form: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        create_model_spec_from_json(form)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"__float__": "big"}, r"Holder\.value is a damaged value: '__float__' is 'big'"),
        ({"__enum__": f"{__name__}.Color", "value": 9}, r"Holder\.value is a damaged value: '__enum__'"),
        ({"__enum__": f"{__name__}.Holder", "value": 9}, "is not a class derived from Enum"),
        ({"__dict__": 3}, r"Holder\.value is a damaged value: '__dict__' is 3, not an object"),
        ({"__value__": 3, "type": "my.Type"}, "'my.Type', which has no serializer; call register_type_serializer"),
        ({"data": [1, 2], "dtype": "torch.float32", "shape": [3]}, r"Holder\.value does not hold a Tensor"),
        ({"data": [1], "dtype": "torch.save", "shape": [1]}, "'torch.save' is not a dtype such as 'torch.float64'"),
    ],
)
def test_a_damaged_value_is_refused(value: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        create_model_spec_from_json({"cls_path": f"{__name__}.Holder", "value": value})


def test_a_serializer_needs_a_class() -> None:
    with pytest.raises(ConfigurationTypeError, match="register_type_serializer needs a class, got 'x'"):
        register_type_serializer("x", str, str)  # type: ignore[arg-type]


# Kinds --------------------------------------------------------------------------------------------------------------


def test_the_kind_of_the_place_is_required_before_anything_is_built() -> None:
    linear = {"cls_path": "torch.nn.Linear", "in_features": 1, "out_features": 1}
    assert create_model_spec_from_json(linear, kind=nn.Module).target is nn.Linear
    with pytest.raises(ConfigurationError, match="is not a class derived from Optimizer"):
        create_model_spec_from_json(linear, kind=torch.optim.Optimizer)


def test_a_nested_spec_must_be_what_the_annotation_says() -> None:
    path = f"{__name__}.Wrapper"
    linear = {"cls_path": "torch.nn.Linear", "in_features": 1, "out_features": 1}
    optimizer = {"cls_path": "torch.optim.SGD"}
    assert isinstance(create_model_spec_from_json({"cls_path": path, "model": linear}).build().model, nn.Linear)
    with pytest.raises(ConfigurationError, match=r"'torch\.optim\.SGD': .* is not a class derived from Module"):
        create_model_spec_from_json({"cls_path": path, "model": optimizer})
    with pytest.raises(ConfigurationError, match="is not a class derived from Module"):
        create_model_spec_from_json({"cls_path": path, "model": linear, "extra": [optimizer]})


def test_a_nested_spec_outside_the_trust_list_is_refused() -> None:
    with pytest.raises(UntrustedPathError, match=r"'os\.mkdir' lies outside"):
        create_model_spec_from_json({"cls_path": f"{__name__}.Holder", "value": [{"a": {"cls_path": "os.mkdir"}}]})
    with pytest.raises(UntrustedPathError, match=r"'os\.mkdir' lies outside"):
        create_model_spec_from_json({"cls_path": f"{__name__}.Holder", "value": {"__callable__": "os.mkdir"}})


def test_live_objects_need_no_trust_but_reading_them_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRUST, "_added", {})
    form = create_model_spec(Holder, value=1).model_dump()
    with pytest.raises(UntrustedPathError, match="trust"):
        create_model_spec_from_json(form)
    trust(__name__)
    assert create_model_spec_from_json(form).build().value == 1
