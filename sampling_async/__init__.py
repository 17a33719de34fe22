"""The asyncio client for External Sampling Services.

Everything a user needs is here, flat; the modules behind it are private. The simulator to test against is
`sampling_async.simulator`.
"""

from sampling_async._bodies import BodyLimits
from sampling_async._bulk import OutcomeStream
from sampling_async._client import SamplingClient
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
    PagingError,
    SamplingError,
    ServerError,
    ServiceError,
    TransportError,
    TransportTimeoutError,
    UnexpectedStatusError,
)
from sampling_async._journal import Journal
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
from sampling_async._policy import RetryPolicy, Timeouts
from sampling_async._protocol import InviteRequest
from sampling_async._recontact import RecontactStream
from sampling_async._settings import MemberURL, PartnerSettings
from sampling_async._snapshot import Snapshot
from sampling_async._version import __version__

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
    "OutcomeStatus",
    "OutcomeStream",
    "PagingError",
    "PartnerSettings",
    "Price",
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
