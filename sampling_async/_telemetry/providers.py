"""Whether something makes spans and metrics, and with which providers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sampling_async._contract.errors import InvalidRequestError
from sampling_async._contract.extras import install

if TYPE_CHECKING:
    from sampling_async._telemetry.otel import Telemetry


def telemetry_of(telemetry: bool | Telemetry) -> Telemetry | None:  # noqa: FBT001
    """Return where spans and metrics go. OpenTelemetry is imported only if it is used.

    Raises:
        InvalidRequestError: OpenTelemetry is not installed, or the value is of another type.
    """
    if not telemetry:
        return None
    try:
        from sampling_async._telemetry.otel import Telemetry  # noqa: PLC0415
    except ImportError as exc:
        raise InvalidRequestError(
            f"telemetry needs OpenTelemetry's API, and the module {exc.name} is missing: {install('otel')}"
        ) from None
    if telemetry is True:
        return Telemetry()
    if not isinstance(telemetry, Telemetry):
        raise InvalidRequestError(
            f"telemetry must be True, False or a Telemetry, not {type(telemetry).__name__}"
        )
    return telemetry
