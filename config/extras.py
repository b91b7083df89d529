"""Optional dependencies, by the extra that installs them."""

from __future__ import annotations

_EXTRAS = {
    "serve": ("cryptography", "jwt", "python_multipart", "re2", "starlette", "uvicorn"),
    "kserve": ("google", "grpc", "ml_dtypes"),
    "batch": ("obstore", "pyarrow"),
    "mcp": ("mcp",),
    "ray": ("ray",),
}
_EXTRA_OF = {module: extra for extra, modules in _EXTRAS.items() for module in modules}


def advice(error: ModuleNotFoundError) -> str:
    """Return how to install a missing optional dependency; "" if the module is none."""
    module = (error.name or "").partition(".")[0]
    if module not in _EXTRA_OF:
        return ""
    extra = _EXTRA_OF[module]
    return f"the package {module} is not installed; pip install 'nano-inference[{extra}]'"
