"""A schema for answers, in environments that have pydantic."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class Person(BaseModel):
    """The person that a text describes."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    job: Literal["chef", "pilot", "teacher"]
