"""The client for programs without asyncio: the same names, each call waits for its result.

It wraps the async client, whose event loop runs in a background thread. See `SamplingClient`.
"""

from sampling_async.sync._client import SamplingClient
from sampling_async.sync._streams import OutcomeStream, RecontactStream

__all__ = ["OutcomeStream", "RecontactStream", "SamplingClient"]
