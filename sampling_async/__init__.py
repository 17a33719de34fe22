"""The asyncio client for External Sampling Services.

All public names of the client are in this namespace; the modules behind it are private. The tools are in
public submodules: `matching`, `campaign`, `notifications`, `routing`, `health`, `frames` (tables), and
`simulator`, a service to test against. `sync` has the same client for programs without asyncio.

The names that send requests are loaded on first access, because they import an HTTP library. A process that
only matches members never imports it, and so starts faster.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from sampling_async._calls.retry import RetryPolicy
from sampling_async._contract.currencies import CurrencyRates
from sampling_async._contract.errors import (
    BadRequestError,
    ClientClosedError,
    DecodeError,
    Delivery,
    Endpoint,
    ForbiddenError,
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
from sampling_async._contract.records import (
    Invite,
    Layer,
    Price,
    QuestionAndAnswers,
    Quota,
    Quotas,
    RecontactMembers,
    Setting,
    SubQuota,
    Survey,
    SurveyWaveExclusion,
)
from sampling_async._contract.result_codes import ResultCode
from sampling_async._contract.settings import MemberURL, PartnerSettings
from sampling_async._contract.timing import Timing
from sampling_async._json.converter import describe_to_pydantic, from_json, make_converter, to_json
from sampling_async._pacing.latency import Percentiles
from sampling_async._pacing.patience import OutagePolicy
from sampling_async._protocol.requests import InviteRequest
from sampling_async._protocol.results import BulkInviteResult, IncompleteBulkError, InviteOutcome, OutcomeStatus
from sampling_async._snapshot import Connections, Snapshot
from sampling_async._version import __version__

if TYPE_CHECKING:
    from sampling_async._bulk.options import Goal, Repeats
    from sampling_async._bulk.stream import OutcomeStream, Progress
    from sampling_async._calls.recontact import RecontactStream
    from sampling_async._calls.reports import AttemptReport, CallReport
    from sampling_async._client import SamplingClient
    from sampling_async._journal.journal import Journal
    from sampling_async._profiles.record import PanelProfile
    from sampling_async._telemetry.otel import Telemetry
    from sampling_async._watch.changes import Change, ChangeKind
    from sampling_async._watch.reader import QuotaChanges
    from sampling_async._watch.watch import QuotaWatch, WatchStatus
    from sampling_async._wire.bodies import BodyLimits
    from sampling_async._wire.session import Timeouts

__all__ = [
    "AttemptReport",
    "BadRequestError",
    "BodyLimits",
    "BulkInviteResult",
    "CallReport",
    "Change",
    "ChangeKind",
    "ClientClosedError",
    "Connections",
    "CurrencyRates",
    "DecodeError",
    "Delivery",
    "Endpoint",
    "ForbiddenError",
    "Goal",
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
    "PanelProfile",
    "PartnerSettings",
    "Percentiles",
    "Price",
    "Progress",
    "QuestionAndAnswers",
    "Quota",
    "QuotaChanges",
    "QuotaWatch",
    "Quotas",
    "RecontactMembers",
    "RecontactStream",
    "Repeats",
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
    "Telemetry",
    "Timeouts",
    "Timing",
    "TransportError",
    "TransportTimeoutError",
    "UnexpectedStatusError",
    "WatchStatus",
    "__version__",
    "from_json",
    "make_converter",
    "to_json",
]

describe_to_pydantic()
del describe_to_pydantic

# Names that `__getattr__` loads, each with its module.
_OF_CLIENT: Final = {
    "AttemptReport": "_calls.reports",
    "BodyLimits": "_wire.bodies",
    "CallReport": "_calls.reports",
    "Change": "_watch.changes",
    "ChangeKind": "_watch.changes",
    "Goal": "_bulk.options",
    "Journal": "_journal.journal",
    "OutcomeStream": "_bulk.stream",
    "PanelProfile": "_profiles.record",
    "Progress": "_bulk.stream",
    "QuotaChanges": "_watch.reader",
    "QuotaWatch": "_watch.watch",
    "RecontactStream": "_calls.recontact",
    "Repeats": "_bulk.options",
    "SamplingClient": "_client",
    "Telemetry": "_telemetry.otel",
    "Timeouts": "_wire.session",
    "WatchStatus": "_watch.watch",
}


def __getattr__(name: str) -> Any:
    """Import a name that sends requests, on its first access."""
    if name not in _OF_CLIENT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Stored in the module, so that Python finds it there and does not call this function again.
    value = globals()[name] = getattr(import_module(f"sampling_async.{_OF_CLIENT[name]}"), name)
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return __all__
