"""The questions of the programs, their answers, and a tool."""

from __future__ import annotations

MODEL = "tiny"
CONTEXT_LENGTH = 2048
# More than a client waits for, and more than it reads before it leaves.
ENDLESS_TOKENS = 1900

SUM, TOTAL = "What is 12 + 30?", "42"
FORECAST = "What is the weather in Oslo?"
PERSON = "Write as JSON: Ben is a chef, 10 years old."
# More tokens than the context has.
TOO_LONG = "a " * (CONTEXT_LENGTH + 500)

WEATHER = {"name": "get_weather", "description": "Get the weather in a city"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

cities: list[str] = []
"""The arguments of calls of `get_weather`."""


def get_weather(city: str) -> str:
    """Get the weather in a city"""
    cities.append(city)
    return '{"sky": "sunny", "degrees": 21}'
