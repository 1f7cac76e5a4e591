"""What every section of the configuration is, and the types of values that several of them have."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.\-]*$")]
Probability = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, values do not change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """YAML reads yes, no, on and off as booleans, and pydantic would go on to read those as 1 and 0."""
        items = value if isinstance(value, list | tuple) else [value]
        wants_boolean = cls.model_fields[str(info.field_name)].annotation is bool
        if not wants_boolean and any(isinstance(item, bool) for item in items):
            raise ValueError(f"{str(value).lower()} (in YAML also yes, no, on, off) is no value of this key")
        return value
