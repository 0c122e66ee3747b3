"""The base of every configuration section: frozen, strict about names, documented by field docstrings."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """One section of the configuration. A field's docstring is its documentation (`docs/reference/config.md`)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, given: Any) -> Any:
        """Python takes `true` for 1: as text it is refused with the field's name and range."""
        if not isinstance(given, dict):
            return given
        return {k: str(v).lower() if isinstance(v, bool) and cls._takes_numbers(k) else v for k, v in given.items()}

    @classmethod
    def _takes_numbers(cls, name: Any) -> bool:
        kind = cls.model_fields[name].annotation if name in cls.model_fields else None
        kinds = {kind, *get_args(kind)}
        return bool not in kinds and not kinds.isdisjoint((int, float))
