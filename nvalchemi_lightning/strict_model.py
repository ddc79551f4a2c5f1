"""The pydantic base of every recipe: unknown keywords name the nearest valid one."""

from __future__ import annotations

import inspect
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from nvalchemi_lightning.errors import ConfigurationTypeError, UnknownNameError, nearest

__all__ = ["StrictModel"]


class StrictModel(BaseModel):
    """A pydantic model that holds live objects and refuses keywords it does not know."""

    model_config = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, revalidate_instances="never", hide_input_in_errors=True
    )

    def __init__(self, *positional: Any, **fields: Any) -> None:
        if positional:
            name, first = type(self).__name__, next(iter(type(self).model_fields))
            raise ConfigurationTypeError(
                f"{name} takes no positional argument like {positional[0]!r}; write {name}({first}=...)"
            )
        super().__init__(**fields)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keywords(cls, data: Any) -> Any:
        if isinstance(data, dict):
            valid = cls._keywords()
            for name in data:
                if name not in valid:
                    known = ", ".join(sorted(valid))
                    raise UnknownNameError(
                        f"{cls.__name__} has no field {name!r}{nearest(name, valid)} (fields: {known})"
                    )
        return data

    @classmethod
    def _keywords(cls) -> set[str]:
        return set(cls.model_fields)


# Of what is refused nothing is to be seen in the signatures of the models.
StrictModel.__init__.__signature__ = inspect.signature(BaseModel.__init__)  # type: ignore[attr-defined]
