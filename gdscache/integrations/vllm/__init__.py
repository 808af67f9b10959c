"""vLLM: `GdsCacheConnector` is the KV connector that its command line names. vLLM is imported with it, not before.

`connector`, `events` and `metrics` import vLLM; the other modules read its objects by their attributes.
"""

from __future__ import annotations

from typing import Any

__all__ = ["GdsCacheConnector"]


def __getattr__(name: str) -> Any:
    if name == "GdsCacheConnector":
        from gdscache.integrations.vllm.connector import GdsCacheConnector

        return GdsCacheConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
