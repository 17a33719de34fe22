"""The asyncio client for External Sampling Services.

Everything a user needs is here, flat; the modules behind it are private. The simulator to test against is
`sampling_async.simulator`.

What sends requests is loaded when it is first asked for, since it takes an HTTP library: processes that match
members, of which there may be many, and that start often, do without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from sampling_async._codec import from_json, to_json
from sampling_async._errors import (
    BadRequestError,
    ClientClosedError,
    DecodeError,
    Delivery,
    Endpoint,
    ForbiddenError,
    IncompleteBulkError,
    InvalidRequestError,
    JournalError,
    OutageError,
    PagingError,
    SamplingError,
    ServerError,
    ServiceError,
    TransportError,
    TransportTimeoutError,
    UnexpectedStatusError,
)
from sampling_async._models import (
    Invite,
    Layer,
    Price,
    QuestionAndAnswers,
    Quota,
    Quotas,
    RecontactMembers,
    ResultCode,
    Setting,
    SubQuota,
    Survey,
    SurveyWaveExclusion,
)
from sampling_async._outcomes import BulkInviteResult, InviteOutcome, OutcomeStatus
from sampling_async._policy import OutagePolicy, RetryPolicy, Timeouts
from sampling_async._protocol import InviteRequest
from sampling_async._settings import MemberURL, PartnerSettings
from sampling_async._snapshot import Snapshot
from sampling_async._version import __version__

if TYPE_CHECKING:
    from sampling_async._bodies import BodyLimits
    from sampling_async._bulk import OutcomeStream, Progress
    from sampling_async._client import SamplingClient
    from sampling_async._journal import Journal
    from sampling_async._recontact import RecontactStream

__all__ = [
    "BadRequestError",
    "BodyLimits",
    "BulkInviteResult",
    "ClientClosedError",
    "DecodeError",
    "Delivery",
    "Endpoint",
    "ForbiddenError",
    "IncompleteBulkError",
    "InvalidRequestError",
    "Invite",
    "InviteOutcome",
    "InviteRequest",
    "Journal",
    "JournalError",
    "Layer",
    "MemberURL",
    "OutageError",
    "OutagePolicy",
    "OutcomeStatus",
    "OutcomeStream",
    "PagingError",
    "PartnerSettings",
    "Price",
    "Progress",
    "QuestionAndAnswers",
    "Quota",
    "Quotas",
    "RecontactMembers",
    "RecontactStream",
    "ResultCode",
    "RetryPolicy",
    "SamplingClient",
    "SamplingError",
    "ServerError",
    "ServiceError",
    "Setting",
    "Snapshot",
    "SubQuota",
    "Survey",
    "SurveyWaveExclusion",
    "Timeouts",
    "TransportError",
    "TransportTimeoutError",
    "UnexpectedStatusError",
    "__version__",
    "from_json",
    "to_json",
]

_OF_CLIENT: Final = {
    "BodyLimits": "_bodies",
    "Journal": "_journal",
    "OutcomeStream": "_bulk",
    "Progress": "_bulk",
    "RecontactStream": "_recontact",
    "SamplingClient": "_client",
}


def __getattr__(name: str) -> Any:
    """Load what sends requests."""
    if name not in _OF_CLIENT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"sampling_async.{_OF_CLIENT[name]}"), name)
    return value


def __dir__() -> list[str]:
    """Return what is there to be used, loaded or not."""
    return __all__
