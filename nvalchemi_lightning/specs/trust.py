"""Decide which dotted paths of a file may be imported and called.

A spec is data that came from somewhere. A path in it resolves only if it lies in a trusted package; that is checked
before anything is imported. What it leads to must be defined in a trusted package as well and be of the kind that the
place in the recipe needs; that is checked before anything is called.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, Literal, Self

from nvalchemi_lightning.errors import ConfigurationError, ConfigurationTypeError, UntrustedPathError, nearest
from nvalchemi_lightning.specs.hints import is_class, signature_of

__all__ = ["dotted_path", "own_path", "resolve", "trust", "trusted_packages"]

_REFERENCE = "nvalchemi"
_BUILT_IN = (_REFERENCE, "nvalchemi_lightning", "torch.nn", "torch.optim")
_OWN_FUNCTIONS = ("nvalchemi_lightning", "torch")
_added: dict[str, None] = {}

# Where the names of a package of the reference live here; the longest matching row counts.
_COUNTERPARTS = {
    "nvalchemi.training.losses": "nvalchemi_lightning.losses",
    "nvalchemi.training.optimizers": "nvalchemi_lightning.optim",
    "nvalchemi.training.hooks": "nvalchemi_lightning.hooks",
    "nvalchemi.hooks": "nvalchemi_lightning.hooks",
    "nvalchemi.models": "nvalchemi_lightning.models",
    "nvalchemi.data": "nvalchemi_lightning.data",
    "nvalchemi.training": "nvalchemi_lightning",
}


def trust(*packages: str) -> None:
    """Let specs of this process name what the given packages define.

    Parameters
    ----------
    *packages : str
        Packages or modules, such as ``"my_lab.models"``; what lies below is trusted too. ``"__main__"`` stands for
        the script that is running.

    Raises
    ------
    ConfigurationError
        If a name is not a dotted name.
    """
    for package in packages:
        if not all(part.isidentifier() for part in package.split(".")):
            raise ConfigurationError(f"{package!r} is not a package; give a dotted name such as 'my_lab.models'")
    _added.update(dict.fromkeys(packages))


def trusted_packages() -> tuple[str, ...]:
    """Return the packages that specs may name, the built-in ones first."""
    return tuple(dict.fromkeys((*_BUILT_IN, *_added)))


def resolve(
    path: str, *, kind: type | tuple[type, ...] | Literal["callable"] = "callable", factory: bool = False
) -> Any:
    """Return what a dotted path names, without calling it.

    Parameters
    ----------
    path : str
        Such as ``"torch.optim.adamw.AdamW"``. Names of the reference lead to their counterparts here.
    kind : type, tuple of type or "callable"
        What the place needs: a class derived from ``kind`` (or from one of them), or anything callable.
    factory : bool
        Whether something that produces an instance of ``kind`` will do as well: a class method, or a function whose
        return annotation is such a class. Functions of torch and of this package do not count.

    Raises
    ------
    UntrustedPathError
        If the path, or what it leads to, lies outside the trusted packages.
    ConfigurationError
        If nothing has that name, or what has it is of another kind.
    """
    _require_dotted(path)
    target = own_path(path) or path
    _require_trusted(target, path)
    found = _locate(target.split("."), path)
    _require_home(found, path)
    if factory:
        _require_no_action(found, path)
    _require_kind(found, kind, factory, path)
    return found


def dotted_path(target: Any) -> str:
    """Return ``module.qualified_name`` of a class, function or class method.

    Raises
    ------
    ConfigurationTypeError
        If it cannot be imported under that name: a lambda, something local to a function, a bound method.
    """
    owner = getattr(target, "__self__", None)
    if inspect.ismethod(target) and isinstance(owner, type):
        return f"{dotted_path(owner)}.{target.__name__}"
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not module or not name or _walk(sys.modules.get(module), name.split(".")) is not target:
        raise ConfigurationTypeError(
            f"{target!r} is not an importable callable: a spec stores a dotted path, so move it to the top level of a "
            "module (no lambda, no function inside a function, no bound method)"
        )
    return f"{module}.{name}"


def own_path(path: str) -> str | None:
    """Return the path here of a name of the reference, or None when there is no counterpart.

    ``nvalchemi.training.losses.terms.EnergyMSELoss`` gives ``nvalchemi_lightning.losses.EnergyMSELoss``.
    """
    matches = [prefix for prefix in _COUNTERPARTS if path.startswith(f"{prefix}.")]
    if not matches:
        return None
    prefix = max(matches, key=len)
    names = path[len(prefix) + 1 :].split(".")
    for package in dict.fromkeys((_COUNTERPARTS[prefix], "nvalchemi_lightning")):
        tail = _public_tail(package, names)
        if tail:
            return f"{package}.{tail}"
    return None


def _public_tail(package: str, names: Sequence[str]) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    module = importlib.import_module(package)
    for i, name in enumerate(names):
        if not name.startswith("_") and not isinstance(getattr(module, name, module), ModuleType):
            return ".".join(names[i:])
    return None


def _is_trusted(name: str) -> bool:
    return _is_below(name, trusted_packages())


def _is_below(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _require_dotted(path: object) -> None:
    parts = path.split(".") if isinstance(path, str) else []
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigurationError(f"Could not resolve {path!r}: give a dotted path such as 'torch.optim.AdamW'")
    if any(part.startswith("__") for part in parts[1:]):
        raise UntrustedPathError(f"{path!r} names Python's internals; name a class or a function")


def _require_trusted(name: str, path: str) -> None:
    if not _is_trusted(name):
        raise UntrustedPathError(
            f"{path!r} lies outside the trusted packages ({', '.join(trusted_packages())}); if you know this "
            f'code and want files to name it, call nvalchemi_lightning.trust("{name.partition(".")[0]}") first'
        )


def _locate(parts: Sequence[str], path: str) -> Any:
    try:
        module, names = _import_longest(parts)
    except ImportError as error:
        raise ConfigurationError(f"Could not resolve {path!r}: {error}") from error
    if not names:
        raise ConfigurationError(f"Could not resolve {path!r}: it is a module; name a class or a function in it")
    found: Any = module
    where = module.__name__
    for name in names:
        if name.startswith("_") and not _is_below(path, _added):
            raise UntrustedPathError(f"{path!r} names {name!r}, a private part of {where}; name something public")
        if not hasattr(found, name):
            raise ConfigurationError(f"Could not resolve {path!r}: {where} has no {name!r}{nearest(name, dir(found))}")
        found, where = getattr(found, name), f"{where}.{name}"
        if isinstance(found, ModuleType):
            raise UntrustedPathError(f"{path!r} leads through the imported module {found.__name__!r}")
    return found


def _import_longest(parts: Sequence[str]) -> tuple[ModuleType, Sequence[str]]:
    module = importlib.import_module(parts[0])
    for i in range(1, len(parts)):
        name = ".".join(parts[: i + 1])
        if name not in sys.modules and (not hasattr(module, "__path__") or importlib.util.find_spec(name) is None):
            return module, parts[i:]
        module = importlib.import_module(name)
    return module, ()


def _walk(start: Any, names: Sequence[str]) -> Any:
    for name in names:
        start = getattr(start, name, None)
    return start


def _require_home(found: Any, path: str) -> None:
    owner = getattr(found, "__self__", None)
    homes = [getattr(thing, "__module__", None) for thing in ((found, owner) if isinstance(owner, type) else (found,))]
    for home in homes:
        if home is None or not _is_trusted(home):
            raise UntrustedPathError(
                f"{path!r} leads to {found!r}, defined in {home or 'no Python module'}, which is outside the "
                f"trusted packages ({', '.join(trusted_packages())})"
            )
    # The reference has class methods that unpickle a file, so unasked only its classes are called.
    if str(homes[0]).partition(".")[0] == _REFERENCE and not is_class(found) and _REFERENCE not in _added:
        raise UntrustedPathError(
            f"{path!r} is not a class; unless you call nvalchemi_lightning.trust({_REFERENCE!r}), specs may "
            f"name only the classes of {_REFERENCE}"
        )


def _require_no_action(found: Any, path: str) -> None:
    """Refuse to call the functions that do this package's work, such as writing a store, unless it is asked for."""
    home = str(getattr(found, "__module__", None)).partition(".")[0]
    if home in _OWN_FUNCTIONS and inspect.isfunction(found) and home not in _added:
        raise UntrustedPathError(
            f"{path!r} is a function, and unless you call nvalchemi_lightning.trust({home!r}), specs may call only "
            f"the classes of {home} and their class methods"
        )


def _require_kind(found: Any, kind: type | tuple[type, ...] | Literal["callable"], factory: bool, path: str) -> None:
    if isinstance(kind, str):
        fits, wanted = callable(found), "something callable"
    else:
        made = _produced(found) if factory else found
        fits = is_class(made) and issubclass(made, kind)
        wanted = _described_kind(kind)
    if not fits:
        note = " (a function counts when its return annotation is such a class)" if factory else ""
        raise ConfigurationError(f"Could not resolve {path!r}: {found!r} is not {wanted}{note}")


def _described_kind(kind: type | tuple[type, ...]) -> str:
    names = [k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)) if k is not object]
    return "a class" + (f" derived from {' or '.join(names)}" if names else "")


def _produced(found: Any) -> Any:
    """Return the class whose instance a call gives, or None when nothing tells."""
    if is_class(found):
        return found
    if not callable(found):
        return None
    owner = getattr(found, "__self__", None)
    result = signature_of(found).return_annotation
    if isinstance(owner, type) and (result is Self or not is_class(result)):
        return owner
    return result if is_class(result) and result.__module__ != "builtins" else None
