"""Turn the values of a spec into JSON and back.

A value whose JSON form is ambiguous without the parameter's annotation carries a tag, so it reads back as it was:

==========================================  ====================================================================
``torch.dtype``, ``torch.device``           ``"torch.float64"``, ``"cuda:0"``
``torch.Tensor``                            ``{"data": nested list, "dtype": "torch.float32", "shape": [2]}``
class                                       ``"pkg.mod.Class"`` if annotated as a type, else ``{"__type__": path}``
function                                    ``{"__callable__": "pkg.mod.function"}``
enum                                        ``{"__enum__": "pkg.mod.Class", "value": v}``
float that is not finite                    ``{"__float__": "nan"}``
registered type in an ambiguous place       ``{"__value__": form, "type": "pkg.mod.Class"}``
mapping that looks like one of the above    ``{"__dict__": {...}}``
anything else                               what pydantic makes of it for the annotation
==========================================  ====================================================================
"""

from __future__ import annotations

import enum
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, get_args, get_origin

import torch
from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError

from nvalchemi_lightning.errors import AlchemiError, ConfigurationError, ConfigurationTypeError
from nvalchemi_lightning.specs.hints import NO_HINT, adapter_of, is_class, item_hint, sole
from nvalchemi_lightning.specs.trust import dotted_path, resolve

__all__ = ["DTYPE_ALIASES", "decode", "encode", "register_type_serializer"]

DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Short names of dtypes that people write into files."""

_TENSOR_KEYS = {"data", "dtype", "shape"}

Rehydrate = Callable[[Mapping[str, Any], Any], Any]


@dataclass(frozen=True)
class _Serializer:
    serialize: Callable[[Any], Any]
    deserialize: Callable[[Any], Any]


_registry: dict[type, _Serializer] = {}


def register_type_serializer(type_: type, serialize: Callable[[Any], Any], deserialize: Callable[[Any], Any]) -> None:
    """Teach specs how to store the values of a type.

    Parameters
    ----------
    type_ : type
        The type; its subclasses are stored the same way and come back as what ``deserialize`` returns.
    serialize : callable
        Takes a value and returns something that JSON can hold.
    deserialize : callable
        Takes that back and returns the value.

    Raises
    ------
    ConfigurationTypeError
        If ``type_`` is not a class.
    """
    if not is_class(type_):
        raise ConfigurationTypeError(f"register_type_serializer needs a class, got {type_!r}")
    _registry[type_] = _Serializer(serialize, deserialize)


def encode(value: Any, hint: Any, where: str) -> Any:
    """Return the JSON form of a value.

    Parameters
    ----------
    value : Any
        What the spec holds.
    hint : Any
        The annotation of its parameter, or ``NO_HINT``.
    where : str
        How messages name the value, such as ``"torch.optim.Adam.lr"``.

    Raises
    ------
    ConfigurationTypeError
        If nothing knows how to store the value.
    """
    if isinstance(value, enum.Enum):
        return {"__enum__": dotted_path(type(value)), "value": encode(value.value, NO_HINT, where)}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"__float__": str(float(value))}
    if hasattr(value, "to_spec") and not isinstance(value, type):
        return value.to_spec().model_dump()
    if isinstance(value, Mapping):
        return _encode_mapping(value, hint, where)
    if isinstance(value, list | tuple):
        return [encode(item, item_hint(hint), f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, PathLike):
        return fspath(value)
    return _encode_object(value, hint, where)


def _encode_mapping(value: Mapping[Any, Any], hint: Any, where: str) -> dict[str, Any]:
    keys = [key for key in value if not isinstance(key, str)]
    if keys and not _takes_integer_keys(hint):
        raise ConfigurationTypeError(
            f"{where} has the key {keys[0]!r}; JSON has only text keys, so annotate the parameter as dict[int, ...]"
        )
    plain = {str(key): encode(item, item_hint(hint), f"{where}[{key!r}]") for key, item in value.items()}
    return {"__dict__": plain} if _is_special(plain) else plain


def _takes_integer_keys(hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if is_class(origin) and issubclass(origin, Mapping):
        return arguments[:1] == (int,)
    return any(_takes_integer_keys(argument) for argument in arguments)


def _is_special(form: Mapping[str, Any]) -> bool:
    return "cls_path" in form or form.keys() == _TENSOR_KEYS or "__dict__" in form or not _TAGS.keys().isdisjoint(form)


def _encode_object(value: Any, hint: Any, where: str) -> Any:
    registered = next((type_ for type_ in type(value).__mro__ if type_ in _registry), None)
    if registered is not None:
        form = _registry[registered].serialize(value)
        plain = registered is torch.Tensor or sole(hint) is registered
        return form if plain else {"__value__": form, "type": dotted_path(registered)}
    if is_class(value):
        return dotted_path(value) if _class_bound(hint) else {"__type__": dotted_path(value)}
    if inspect.isroutine(value):
        return {"__callable__": _path_of_function(value, where)}
    return _encode_with_pydantic(value, hint, where)


def _path_of_function(value: Any, where: str) -> str:
    try:
        return dotted_path(value)
    except ConfigurationTypeError as error:
        raise ConfigurationTypeError(f"{where}: {error}") from error


def _encode_with_pydantic(value: Any, hint: Any, where: str) -> Any:
    adapter: TypeAdapter[Any] | None = adapter_of(hint)
    try:
        if adapter is not None:
            return adapter.dump_python(value, mode="json", warnings="error")
    except PydanticSerializationError:
        pass
    raise ConfigurationTypeError(
        f"{where} is a {type(value).__qualname__}, which a spec cannot store; give a spec of it "
        f"(create_model_spec({type(value).__qualname__}, ...)), a to_spec() method, or call register_type_serializer"
    )


def decode(form: Any, hint: Any, where: str, rehydrate: Rehydrate) -> Any:
    """Return the value that a JSON form stands for; nested specs come back as specs.

    Parameters
    ----------
    form : Any
        What JSON holds.
    hint : Any
        The annotation of the parameter, or ``NO_HINT``.
    where : str
        How messages name the value.
    rehydrate : callable
        Makes a spec from a mapping with ``cls_path`` and the annotation.

    Raises
    ------
    UntrustedPathError
        If a class, function or enum lies outside the trusted packages.
    ConfigurationError
        If a form is damaged.
    """
    if isinstance(form, Mapping) and _is_special(form):
        return _decode_special(form, hint, where, rehydrate)
    type_ = sole(hint)
    if form is not None and type_ in _registry:
        return _deserialized(type_, form, where)
    if isinstance(form, Mapping):
        return {key: decode(item, item_hint(hint), f"{where}[{key!r}]", rehydrate) for key, item in form.items()}
    if isinstance(form, list | tuple):
        return [decode(item, item_hint(hint), f"{where}[{i}]", rehydrate) for i, item in enumerate(form)]
    bound = _class_bound(hint)
    return resolve(form, kind=bound) if isinstance(form, str) and bound else form


def _decode_special(form: Mapping[str, Any], hint: Any, where: str, rehydrate: Rehydrate) -> Any:
    if "cls_path" in form:
        return rehydrate(form, hint)
    if form.keys() == _TENSOR_KEYS:
        return _deserialized(torch.Tensor, form, where)
    tag = next((tag for tag in _TAGS if tag in form), None)
    if tag is not None:
        return _decode_tagged(form, tag, where)
    plain = form["__dict__"]
    if not isinstance(plain, Mapping):
        raise ConfigurationError(f"{where} is a damaged value: '__dict__' is {plain!r}, not an object")
    return {key: decode(item, item_hint(hint), f"{where}[{key!r}]", rehydrate) for key, item in plain.items()}


def _decode_tagged(form: Mapping[str, Any], tag: str, where: str) -> Any:
    try:
        return _TAGS[tag](form, where)
    except AlchemiError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{where} is a damaged value: {tag!r} is {form[tag]!r} ({error})") from error


def _deserialized(type_: type, form: Any, where: str) -> Any:
    try:
        return _registry[type_].deserialize(form)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ConfigurationError(f"{where} does not hold a {type_.__qualname__}: {error}") from error


def _class_bound(hint: Any) -> type | None:
    """Return T for an annotation that allows nothing but ``type[T]`` and ``None``."""
    option = sole(hint)
    if option is type:
        return object
    if get_origin(option) is not type:
        return None
    bound = get_args(option)[0]
    return bound if is_class(bound) else object


def _decode_enum(form: Mapping[str, Any], where: str) -> Any:
    class_ = resolve(form["__enum__"], kind=enum.Enum)
    value = form.get("value")
    return class_(tuple(value) if isinstance(value, list) else value)


def _decode_registered(form: Mapping[str, Any], where: str) -> Any:
    for type_ in _registry:
        if dotted_path(type_) == form.get("type"):
            return _deserialized(type_, form["__value__"], where)
    raise ConfigurationError(
        f"{where} is stored as a {form.get('type')!r}, which has no serializer; call register_type_serializer first"
    )


_TAGS: dict[str, Callable[[Mapping[str, Any], str], Any]] = {
    "__type__": lambda form, where: resolve(form["__type__"], kind=object),
    "__callable__": lambda form, where: resolve(form["__callable__"], kind="callable"),
    "__enum__": _decode_enum,
    "__float__": lambda form, where: float(form["__float__"]),
    "__value__": _decode_registered,
}


def _dtype_from_text(text: Any) -> torch.dtype:
    name = str(text).removeprefix("torch.")
    dtype = getattr(torch, DTYPE_ALIASES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text!r} is not a dtype such as 'torch.float64'")
    return dtype


def _tensor_to_form(tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.is_complex():
        raise ConfigurationTypeError("a spec cannot store complex tensors; store the real and imaginary parts")
    data = tensor.detach().cpu().tolist()
    return {"data": _named_nonfinite(data), "dtype": str(tensor.dtype), "shape": list(tensor.shape)}


def _named_nonfinite(data: Any) -> Any:
    if isinstance(data, list):
        return [_named_nonfinite(item) for item in data]
    return data if not isinstance(data, float) or math.isfinite(data) else str(data)


def _numbers(data: Any) -> Any:
    if isinstance(data, list):
        return [_numbers(item) for item in data]
    return float(data) if isinstance(data, str) else data


def _tensor_from_form(form: Mapping[str, Any]) -> torch.Tensor:
    tensor = torch.tensor(_numbers(form["data"]), dtype=_dtype_from_text(form["dtype"]))
    return tensor.reshape(tuple(form["shape"]))


register_type_serializer(torch.dtype, str, _dtype_from_text)
register_type_serializer(torch.device, str, torch.device)
register_type_serializer(torch.Tensor, _tensor_to_form, _tensor_from_form)
