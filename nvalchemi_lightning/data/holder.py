"""What a structure and a batch of structures have in common: named tensors on three levels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from nvalchemi_lightning.data.elements import standard_masses
from nvalchemi_lightning.data.fields import CORE_FIELDS, FIELDS, Level
from nvalchemi_lightning.errors import DataError, LabelNotFoundError, UnknownNameError, nearest

__all__ = ["FieldHolder"]


class _AbsentMessage:
    """Message of a failed attribute lookup, written only when read: ``getattr(batch, name, None)`` stays cheap."""

    def __init__(self, kind: str, name: str, present: Mapping[str, Level]) -> None:
        self._kind = kind
        self._name = name
        self._present = present

    def __str__(self) -> str:
        hint = nearest(self._name, self._present)
        return f"this {self._kind} has no {self._name!r}{hint}; its fields are {', '.join(self._present)}"


class FieldHolder(ABC):
    """Named tensors on the levels node, edge and system; not to be used by itself.

    A field lies in the instance dictionary under its own name, so that reading it costs one dictionary lookup.
    ``_levels`` maps the names of the fields to their levels; it is shared between objects and replaced, never changed.
    Names that begin with an underscore are plain attributes; copies keep them.
    """

    positions: Tensor
    atomic_numbers: Tensor
    _levels: Mapping[str, Level]

    @classmethod
    def _build(cls, fields: Mapping[str, Tensor], levels: Mapping[str, Level], **private: Any) -> Self:
        """Make an object from parts that are right already."""
        new = object.__new__(cls)
        state = new.__dict__
        state.update(fields)
        state["_levels"] = levels
        state.update(private)
        return new

    @property
    @abstractmethod
    def num_graphs(self) -> int:
        """Number of structures."""

    @abstractmethod
    def _default(self, name: str) -> Tensor | None:
        """Return what reading an absent field of the table gives, or raise AttributeError."""

    def __getattr__(self, name: str) -> Any:
        """Answer for names that are not set: the documented default of a field, or an AttributeError."""
        if name in FIELDS:
            return self._default(name)
        raise self._absent(name)

    def _absent_message(self, name: str) -> _AbsentMessage:
        return _AbsentMessage(type(self).__name__, name, self._levels)

    def _absent(self, name: str) -> AttributeError:
        # Copying and unpickling look up special names before there are any fields.
        message: object = name if name.startswith("_") else self._absent_message(name)
        return AttributeError(message)

    def _readable_default(self, name: str) -> Tensor:
        """Return the value of an unset field that has one: masses from the elements, or zeros that refuse writing."""
        if FIELDS[name].missing == "mass":
            return standard_masses(self.atomic_numbers, self.dtype)
        dtype = torch.int64 if FIELDS[name].kind == "int" else self.dtype
        row = tuple(size for size in FIELDS[name].row if isinstance(size, int))
        return torch.zeros((), dtype=dtype, device=self.device).expand(self.num_nodes, *row)

    def __delattr__(self, name: str) -> None:
        """Remove a field.

        Raises
        ------
        DataError
            If it is one that nothing can be without.
        """
        if name.startswith("_"):
            object.__delattr__(self, name)
        elif name in self._levels:
            self._drop(self._droppable((name,)))
        else:
            raise self._absent(name)

    def _drop(self, names: Iterable[str]) -> None:
        gone = set(names)
        self.__dict__["_levels"] = {name: level for name, level in self._levels.items() if name not in gone}
        for name in gone:
            del self.__dict__[name]

    def _store(self, name: str, value: Tensor, level: Level) -> None:
        """Set a field whose value has been checked."""
        self.__dict__[name] = value
        if name not in self._levels:
            self.__dict__["_levels"] = {**self._levels, name: level}

    def __contains__(self, name: object) -> bool:
        """Say whether a field is set; defaults and derived quantities are not fields."""
        return name in self._levels

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (name, tensor)."""
        return ((name, self.__dict__[name]) for name in self._levels)

    def _field(self, name: str) -> Tensor:
        if name not in self._levels:
            raise LabelNotFoundError(str(self._absent_message(name)))
        tensor: Tensor = self.__dict__[name]
        return tensor

    @property
    def field_levels(self) -> Mapping[str, Level]:
        """Level of every field that is set, by name."""
        return MappingProxyType(dict(self._levels))

    def _at(self, level: Level) -> dict[str, Tensor]:
        return {name: self.__dict__[name] for name, at in self._levels.items() if at == level}

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.positions.device

    @property
    def dtype(self) -> torch.dtype:
        """Floating dtype of the positions."""
        return self.positions.dtype

    @property
    def num_nodes(self) -> int:
        """Number of atoms V."""
        return self.positions.shape[0]

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy whose fields went through ``change``."""
        new = object.__new__(type(self))
        state = new.__dict__
        state.update(self.__dict__)
        for name in self._levels:
            state[name] = change(state[name])
        return new

    def to(
        self,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> Self:
        """Return a copy on a device, with its floating fields in a dtype.

        Parameters
        ----------
        device : torch.device, str, int or None, default None
            Where to; None stays.
        dtype : torch.dtype or None, default None
            Floating dtype for every floating field; None keeps each.
        non_blocking : bool, default False
            Let copies from pinned memory run asynchronously.

        Notes
        -----
        The tensors are always copied, so changing the copy leaves the original alone. Autograd history is kept.
        """
        stays = device is None or torch.device(device) == self.device
        if stays and dtype is None:
            return self._mapped(torch.clone)

        def move(tensor: Tensor) -> Tensor:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            return tensor.to(device, kind, non_blocking=non_blocking, copy=True)

        return self._mapped(move)

    def cpu(self) -> Self:
        """Return a copy in main memory."""
        return self.to("cpu")

    def cuda(self, device: torch.device | int | None = None, non_blocking: bool = False) -> Self:
        """Return a copy on a GPU; None means the current one."""
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)

    def clone(self, *, drop: Iterable[str] = ()) -> Self:
        """Return a deep copy without the fields in ``drop``; autograd history is kept.

        Raises
        ------
        UnknownNameError
            If a name in ``drop`` is not a field that is set.
        DataError
            If it is one that nothing can be without.
        """
        gone = self._droppable(drop)
        new = self._mapped(torch.clone)
        if gone:
            new._drop(gone)
        return new

    def _droppable(self, names: Iterable[str]) -> tuple[str, ...]:
        names = tuple(names)
        for name in names:
            if name not in self._levels:
                raise UnknownNameError(f"cannot drop {name!r}: {self._absent_message(name)}")
            if name in CORE_FIELDS:
                raise DataError(f"{name!r} cannot be removed: every structure has it")
        return names

    def contiguous(self) -> Self:
        """Return an object whose tensors are contiguous; those that are already are shared."""
        return self._mapped(torch.Tensor.contiguous)

    def pin_memory(self) -> Self:
        """Return a copy in page-locked memory, from which ``to(..., non_blocking=True)`` is asynchronous."""
        return self._mapped(torch.Tensor.pin_memory)
