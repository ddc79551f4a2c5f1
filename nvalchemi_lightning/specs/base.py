"""Recipes: what to call with which keywords, as one flat JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from inspect import Parameter, Signature
from typing import Any, Literal

import torch

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError
from nvalchemi_lightning.specs.hints import NO_HINT, allowed_classes, check_names, coerce, leaves, signature_of
from nvalchemi_lightning.specs.serializers import decode, encode
from nvalchemi_lightning.specs.trust import dotted_path, resolve

__all__ = ["BaseSpec", "checked", "create_model_spec", "create_model_spec_from_json", "without_timestamps"]

_RESERVED = ("cls_path", "timestamp")


@dataclass(frozen=True, eq=False)
class BaseSpec:
    """A recipe for one object: a callable and the keywords to call it with.

    Make one with :func:`create_model_spec` or :func:`create_model_spec_from_json`. Keywords read as attributes
    (``spec.hidden_dim``). Two specs are equal when their JSON forms are, whenever they were made.

    Parameters
    ----------
    target : callable
        What :meth:`build` calls.
    kwargs : mapping
        Its keywords; a value may be a spec, or hold specs in lists and mappings.
    cls_path : str
        The dotted path of ``target`` as it is written to JSON.
    timestamp : str
        When the spec was made, ISO 8601.
    """

    target: Callable[..., Any]
    kwargs: Mapping[str, Any]
    cls_path: str
    timestamp: str

    def __getattr__(self, name: str) -> Any:
        """Return the keyword of that name."""
        kwargs = self.__dict__.get("kwargs", {})
        if name in kwargs:
            return kwargs[name]
        raise AttributeError(
            f"the spec of {self.__dict__.get('cls_path')} has no keyword {name!r}; it has {list(kwargs)}"
        )

    def __eq__(self, other: object) -> bool:
        """Compare the JSON forms, times of making aside."""
        if not isinstance(other, BaseSpec):
            return NotImplemented
        return bool(without_timestamps(self.model_dump()) == without_timestamps(other.model_dump()))

    __hash__ = None  # type: ignore[assignment]

    def to_spec(self) -> BaseSpec:
        """Return the spec itself, so a spec may stand wherever an object that has one may."""
        return self

    def accepts_kwarg(self, name: str) -> bool:
        """Tell whether the target takes a keyword of that name."""
        parameters = signature_of(self.target).parameters
        return name in parameters or any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())

    def model_dump(self) -> dict[str, Any]:
        """Return the flat JSON object: ``cls_path``, ``timestamp`` and the keywords."""
        parameters = signature_of(self.target).parameters
        forms = {
            name: encode(value, _form_hint(parameters, name), f"{self.cls_path}.{name}")
            for name, value in self.kwargs.items()
        }
        return {"cls_path": self.cls_path, "timestamp": self.timestamp, **forms}

    def model_dump_json(self, indent: int | None = None) -> str:
        """Return :meth:`model_dump` as JSON text.

        Parameters
        ----------
        indent : int, optional
            Spaces per level; one line by default.
        """
        return json.dumps(self.model_dump(), indent=indent, allow_nan=False)

    def build(self, *args: Any, **overrides: Any) -> Any:
        """Build the nested specs, then call the target.

        Parameters
        ----------
        *args : Any
            Objects that exist at run time only, such as ``model.parameters()`` for an optimizer.
        **overrides : Any
            Keywords that replace the stored ones.

        Raises
        ------
        ConfigurationTypeError
            If the target does not take these arguments, for example because its signature has changed.
        """
        signature = signature_of(self.target)
        # What is given here exists already and is handed on as the same object.
        given = {name: value for name, value in overrides.items() if not _holds_spec(value)}
        kwargs = {
            name: value if name in given or BaseSpec in leaves(_hint(signature.parameters, name)) else _built(value)
            for name, value in {**self.kwargs, **overrides}.items()
        }
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigurationTypeError(
                f"Failed to build {self.cls_path} from spec (saved at {self.timestamp}): {error}; "
                "the signature may have changed"
            ) from error
        return self.target(*args, **kwargs)


def create_model_spec(target: Callable[..., Any], /, **kwargs: Any) -> BaseSpec:
    """Describe a call of ``target`` as a spec.

    Parameters
    ----------
    target : callable
        A class, function or class method that can be imported.
    **kwargs : Any
        Its keywords. Those left out keep the default that the target has when the spec is built. A value may be a
        spec, or an object that has one (``to_spec()``).

    Returns
    -------
    BaseSpec
        The recipe; nothing is called.

    Raises
    ------
    ConfigurationTypeError
        If the target cannot be imported by its name or has positional-only parameters, or a keyword is unknown or of
        a kind that a spec cannot store.
    ConfigurationError
        If a value contradicts the annotation of its parameter.

    Examples
    --------
    >>> spec = create_model_spec(torch.nn.Linear, in_features=8, out_features=4, dtype=torch.float64)
    >>> spec.build()
    Linear(in_features=8, out_features=4, bias=True)
    """
    path = dotted_path(target)
    parameters = _checked(target, kwargs, path).parameters
    values = {name: checked(value, _hint(parameters, name), f"{path}.{name}") for name, value in kwargs.items()}
    spec = BaseSpec(target, values, path, datetime.now(UTC).isoformat(timespec="microseconds"))
    spec.model_dump()
    return spec


def create_model_spec_from_json(
    data: Mapping[str, Any], *, kind: type | tuple[type, ...] | Literal["callable"] = object
) -> BaseSpec:
    """Read a spec from its JSON object. Nothing is called.

    Parameters
    ----------
    data : mapping
        ``{"cls_path": ..., "timestamp": ..., <keywords>}``; a missing ``timestamp`` is the time of reading.
    kind : type, tuple of type or "callable"
        What :meth:`BaseSpec.build` has to give, such as ``torch.nn.Module``.

    Raises
    ------
    UntrustedPathError
        If the object, or anything in it, names something outside the trusted packages.
    ConfigurationError
        If a path leads nowhere or to something of another kind, or a value is damaged or of the wrong type.
    ConfigurationTypeError
        If ``data`` is not an object or has unknown keywords.
    """
    try:
        return _from_json(data, kind)
    except RecursionError as error:
        raise ConfigurationError("a spec is nested too deeply to be read; it describes no object of use") from error


def _from_json(data: Mapping[str, Any], kind: type | tuple[type, ...] | Literal["callable"]) -> BaseSpec:
    if not isinstance(data, Mapping):
        raise ConfigurationTypeError(f"a spec is a JSON object with 'cls_path', got {type(data).__name__}: {data!r}")
    path = data.get("cls_path")
    if path is None:
        raise ConfigurationError(f"Spec JSON missing required field 'cls_path'; present keys: {sorted(data)}")
    target = resolve(path, kind=kind, factory=True)
    forms = {name: form for name, form in data.items() if name not in _RESERVED}
    parameters = _checked(target, forms, path).parameters
    values = {name: _read(form, parameters, name, path) for name, form in forms.items()}
    return BaseSpec(target, values, path, data.get("timestamp", datetime.now(UTC).isoformat(timespec="microseconds")))


def without_timestamps(form: Any) -> Any:
    """Return a JSON form without the ``timestamp`` of every spec in it, for comparing recipes."""
    if isinstance(form, Mapping):
        dropped = "timestamp" if "cls_path" in form else None
        return {name: without_timestamps(item) for name, item in form.items() if name != dropped}
    if isinstance(form, list | tuple):
        return [without_timestamps(item) for item in form]
    return form


def _checked(target: Callable[..., Any], names: Mapping[str, Any], path: str) -> Signature:
    signature = signature_of(target)
    for parameter in signature.parameters.values():
        if parameter.kind is Parameter.POSITIONAL_ONLY:
            raise ConfigurationTypeError(
                f"{path} has the positional-only parameter {parameter.name!r}; a spec stores keywords only"
            )
    reserved = [name for name in _RESERVED if name in names]
    if reserved:
        raise ConfigurationTypeError(f"{path} is given {reserved[0]!r}, a key that every spec keeps for itself")
    check_names(names, signature, path)
    return signature


def _hint(parameters: Mapping[str, Parameter], name: str) -> Any:
    return parameters[name].annotation if name in parameters else NO_HINT


def _form_hint(parameters: Mapping[str, Parameter], name: str) -> Any:
    """Return the annotation, or what the name of an unannotated parameter says by custom."""
    hint = _hint(parameters, name)
    return {"dtype": torch.dtype, "device": torch.device}.get(name, NO_HINT) if hint is NO_HINT else hint


def _read(form: Any, parameters: Mapping[str, Parameter], name: str, path: str) -> Any:
    value = decode(form, _form_hint(parameters, name), f"{path}.{name}", _nested)
    return checked(value, _hint(parameters, name), f"{path}.{name}")


def _nested(form: Mapping[str, Any], hint: Any) -> BaseSpec:
    kind = allowed_classes(hint)
    return create_model_spec_from_json(form, kind=(object,) if BaseSpec in kind else kind)


def checked(value: Any, hint: Any, where: str) -> Any:
    """Check a value, and replace objects that have a spec by it."""
    plain = _described(value)
    return plain if _holds_spec(plain) else coerce(plain, hint, where)


def _described(value: Any) -> Any:
    if not hasattr(value, "to_spec") or isinstance(value, type):
        return _mapped(_described, value)
    spec = value.to_spec()
    if not isinstance(spec, BaseSpec):
        raise ConfigurationTypeError(f"{type(value).__qualname__}.to_spec() must return a BaseSpec, got {spec!r}")
    return spec


def _built(value: Any) -> Any:
    return value.build() if isinstance(value, BaseSpec) else _mapped(_built, value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function inside plain containers, making new ones."""
    if type(value) is dict:
        return {key: function(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(function(item) for item in value)
    return value


def _holds_spec(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_spec(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_spec(item) for item in value)
    return isinstance(value, BaseSpec)
