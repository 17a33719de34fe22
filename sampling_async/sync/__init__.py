"""The client for programs without asyncio: the same names, each call waits for its result.

It wraps the async client, whose event loop runs in a background thread. See `SamplingClient`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sampling_async.sync._client import SamplingClient
from sampling_async.sync._streams import OutcomeStream, RecontactStream

if TYPE_CHECKING:
    from sampling_async.sync._router import Route, SurveyRouter

__all__ = ["OutcomeStream", "RecontactStream", "Route", "SamplingClient", "SurveyRouter"]


def __getattr__(name: str) -> Any:
    """Import the router on first use: scripts need no index and no store."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("sampling_async.sync._router"), name)
