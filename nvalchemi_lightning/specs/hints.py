"""Read what a callable takes: its signature, its annotations, and values checked against them."""

from __future__ import annotations

import collections.abc
import inspect
import reprlib
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeGuard, get_args, get_origin
from weakref import WeakKeyDictionary

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.warnings import ArbitraryTypeWarning

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, nearest

__all__ = [
    "NO_HINT",
    "adapter_of",
    "allowed_classes",
    "check_names",
    "coerce",
    "is_class",
    "item_hint",
    "leaves",
    "signature_of",
    "sole",
]

NO_HINT = inspect.Parameter.empty

_LAZY = (collections.abc.Iterable, collections.abc.Iterator, collections.abc.Generator)
# Names that modules often import for type checkers only; without them their annotations could not be read.
_COMMON = {name: getattr(collections.abc, name) for name in collections.abc.__all__}


def is_class(value: object) -> TypeGuard[type]:
    """Tell whether ``value`` is a class; ``list[int]``, ``Any`` and the mark of an absent annotation are not."""
    return isinstance(value, type) and get_origin(value) is None and value not in (NO_HINT, Any)


def signature_of(target: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of ``target`` with its annotations evaluated.

    An annotation that cannot be evaluated (imported for type checkers only) counts as absent, so such a callable
    can still be described by a spec.

    Raises
    ------
    ConfigurationTypeError
        If Python cannot tell the signature, as for some callables written in C.
    """
    if not isinstance(target, type | types.FunctionType):
        return _read_signature(target)
    if target not in _signatures:
        _signatures[target] = _read_signature(target)
    return _signatures[target]


# A checkpoint describes the whole recipe, and is taken while training waits.
_signatures: WeakKeyDictionary[Callable[..., Any], inspect.Signature] = WeakKeyDictionary()


def _read_signature(target: Callable[..., Any]) -> inspect.Signature:
    try:
        signature = inspect.signature(target)
    except ValueError as error:
        raise ConfigurationTypeError(
            f"the signature of {target!r} cannot be read; wrap it in a function with keyword parameters"
        ) from error
    names = _namespace(target)
    parameters = [p.replace(annotation=_evaluated(p.annotation, names)) for p in signature.parameters.values()]
    result = _evaluated(signature.return_annotation, names)
    return signature.replace(parameters=parameters, return_annotation=result)


def _namespace(target: Callable[..., Any]) -> dict[str, Any]:
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    own = getattr(inspect.unwrap(function), "__globals__", {})
    return {**_COMMON, **(vars(module) if module else {}), **own}


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, names, include_extras=True)["it"]
    except (NameError, AttributeError, TypeError, SyntaxError):
        return NO_HINT


def leaves(hint: Any) -> Iterator[Any]:
    """Yield the innermost types of an annotation: ``list[int | None]`` gives ``int`` and ``NoneType``.

    ``type[T]``, ``Literal[...]`` and ``Callable[...]`` are leaves themselves; of a mapping only the values count.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (type, Literal, collections.abc.Callable) or not arguments:
        yield hint
        return
    if origin is Annotated:
        arguments = arguments[:1]
    elif is_class(origin) and issubclass(origin, Mapping):
        arguments = arguments[-1:]
    for argument in arguments:
        if argument is not Ellipsis:
            yield from leaves(argument)


def alternatives(hint: Any) -> list[Any]:
    """Return what a value may be: ``list[int] | str | None`` gives ``list[int]``, ``str`` and ``NoneType``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return alternatives(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return [option for argument in arguments for option in alternatives(argument)]
    return [hint]


def sole(hint: Any) -> Any:
    """Return the only alternative besides ``None``, or ``NO_HINT`` when there are several."""
    found = [option for option in alternatives(hint) if option is not type(None)]
    return found[0] if len(found) == 1 else NO_HINT


def item_hint(hint: Any) -> Any:
    """Return the annotation of the items of a container, or of the values of a mapping; ``NO_HINT`` if unknown."""
    for option in alternatives(hint):
        origin = get_origin(option)
        arguments = [argument for argument in get_args(option) if argument is not Ellipsis]
        if arguments and is_class(origin) and issubclass(origin, Mapping):
            return arguments[-1]
        if arguments and is_class(origin) and issubclass(origin, Iterable):
            return typing.Union[tuple(arguments)]  # noqa: UP007 (the number of arguments is known at run time only)
    return NO_HINT


def allowed_classes(hint: Any) -> tuple[type, ...]:
    """Return the classes that ``hint`` allows, or ``(object,)`` where it allows anything that is not one class."""
    found = tuple(option for option in alternatives(hint) if option is not type(None))
    plain = all(is_class(option) and not getattr(option, "_is_protocol", False) for option in found)
    return found if plain and found else (object,)


def check_names(names: Iterable[str], signature: inspect.Signature, where: str) -> None:
    """Refuse keyword names that the signature does not take.

    Raises
    ------
    ConfigurationTypeError
        Listing the unknown names, the nearest valid one and what is taken.
    """
    kinds = {name: p.kind for name, p in signature.parameters.items()}
    if inspect.Parameter.VAR_KEYWORD in kinds.values():
        return
    valid = [name for name, kind in kinds.items() if kind is not inspect.Parameter.VAR_POSITIONAL]
    unknown = [name for name in names if name not in valid]
    if unknown:
        hint = nearest(unknown[0], valid)
        raise ConfigurationTypeError(f"Unknown kwargs for {where}: {unknown}{hint}; it takes {sorted(valid)}")


def coerce(value: Any, hint: Any, where: str) -> Any:
    """Check ``value`` against an annotation and convert it where that loses nothing.

    Text that is a number becomes one (``"1e-4"`` for a float), a list becomes the tuple that is asked for.

    Parameters
    ----------
    value : Any
        What was given.
    hint : Any
        The annotation; ``NO_HINT`` accepts anything.
    where : str
        How the message names the value, such as ``"torch.optim.Adam.lr"``.

    Raises
    ------
    ConfigurationError
        If the value is not what the annotation asks for.
    """
    adapter = adapter_of(hint)
    if adapter is None:
        return value
    if isinstance(value, bool) and not _takes_bool(hint):
        raise ConfigurationError(f"{where} is {value!r}; give {_shown(hint)}, not a bool")
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise ConfigurationError(
            f"{where} is {reprlib.repr(value)}; give {_shown(hint)} ({reason[0].lower()}{reason[1:]})"
        ) from error


def _takes_bool(hint: Any) -> bool:
    return not any(leaf in (int, float) for leaf in leaves(hint)) or bool in leaves(hint)


def _shown(hint: Any) -> str:
    return hint.__name__ if is_class(hint) else str(hint)


def adapter_of(hint: Any) -> TypeAdapter[Any] | None:
    """Return what checks and converts values for an annotation, or None where nothing can.

    Parameters
    ----------
    hint : Any
        The annotation, or ``NO_HINT``.
    """
    try:
        return _known_adapter(hint)
    except TypeError:  # not every annotation can be looked up: Annotated may hold anything
        return _new_adapter(hint)


def _new_adapter(hint: Any) -> TypeAdapter[Any] | None:
    # Pydantic turns an Iterable into a one-shot iterator and cannot ask plain protocols; both stay unchecked.
    if hint is NO_HINT or _is_lazy(hint) or any(getattr(leaf, "_is_protocol", False) for leaf in leaves(hint)):
        return None
    # A model or data class brings its own configuration and refuses another.
    for config in (ConfigDict(arbitrary_types_allowed=True), None):
        with suppress(PydanticUserError, ArbitraryTypeWarning), warnings.catch_warnings():
            warnings.simplefilter("error", ArbitraryTypeWarning)
            return TypeAdapter(hint, config=config)
    return None


_known_adapter = lru_cache(maxsize=512)(_new_adapter)


def _is_lazy(hint: Any) -> bool:
    return (get_origin(hint) or hint) in _LAZY or any(_is_lazy(argument) for argument in get_args(hint))
