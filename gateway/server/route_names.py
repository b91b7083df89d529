"""What a path is called where calls are counted and traced: as its route, of which few are."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import compile_path


class RouteNames:
    """The names of some routes."""

    def __init__(self, paths: Iterable[str]) -> None:
        """`paths`: those of the routes, in their order, with names in braces for what varies."""
        paths = list(dict.fromkeys(paths))
        self._plain = frozenset(each for each in paths if "{" not in each)
        # Starlette's pattern, and the path without the kinds of what stands in braces.
        self._patterns = [compile_path(each)[:2] for each in paths if "{" in each]

    def of(self, path: str) -> str:
        """The name of the route that a path takes, such as "/v2/models/{model}/infer"; "" where
        there is none, so that nobody makes names."""
        if path in self._plain:
            return path
        return next((name for pattern, name in self._patterns if pattern.match(path)), "")
