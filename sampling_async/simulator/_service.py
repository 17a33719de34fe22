"""The service itself: the five endpoints, without HTTP, time and faults.

A quota ID that is requested for a member gets the first result code that applies:

    12 NO_MEMBER_FOUND          the panel has no such member
    10 NO_QUOTA_ID              there is no such quota
     9 QUOTA_NOT_LIVE           the quota was closed
    28 QUOTA_FULL               the quota, or its survey, needs no more completes
    38 SURVEY_TAKEN             the member holds an invite of this survey and wave, to this quota or to another
                                one, since a member can be targeted to one quota of a survey only
    31 DEVICETYPE_NOT_SUPPORTED_FOR_SURVEY
    17 NO_RECONTACT_GID         a recontact survey, and the member is not on the quota's list
    30 EXCLUDED_SURVEY_TAKEN    a past participation is among the survey's wave exclusions
    16 MEMBER_DOES_NOT_MATCH_QUOTA
    41 SUB_QUOTA_FULL           the member matches, but the sub-quota of some layer is full
     1 SUCCESS

Every invite counts as a complete at once, so quotas and sub-quotas fill as invites are made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from random import Random
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Final
from uuid import NAMESPACE_URL, UUID, uuid5

from attrs import define, field, frozen

from sampling_async import Endpoint, Invite, RecontactMembers, ResultCode, Setting
from sampling_async._contract.records import REFERENCE_DATA_KEY
from sampling_async.simulator._answers import JSON, PLAINTEXT, BulkItem, ServiceResponse, refusal
from sampling_async.simulator._members import SimulatedMember, fits_of

if TYPE_CHECKING:
    from sampling_async import Survey
    from sampling_async.simulator._ledger import Ledger
    from sampling_async.simulator._live import LiveInventory, LiveQuota, LiveSurvey
    from sampling_async.simulator._members import Fit
    from sampling_async.simulator._outbox import Outbox

RECONTACT_SHARE: Final = 0.3
"""The share of a panel's members on the list of a recontact quota, unless the list is replaced."""


@frozen
class SimulatedPanel:
    """A panel of the simulator: the Guid and key that a client needs, and its members by code."""

    panel_guid: str
    api_key: str = field(repr=False)
    members: Mapping[str, SimulatedMember] = field(repr=lambda members: f"<{len(members)} members>")


@define(eq=False)
class MemberState:
    """The service's state of a member: the surveys with an invite, and the quotas that the member fits."""

    member: SimulatedMember
    # The result codes that do not depend on the counts: a byte for each quota; 0 is not known yet.
    settled: bytearray
    taken: set[LiveSurvey] = field(factory=set["LiveSurvey"])
    fits: dict[int, tuple[Fit, ...]] = field(factory=dict[int, "tuple[Fit, ...]"])


class PanelState:
    """A panel inside the service: the states of its members and its recontact lists."""

    def __init__(
        self, panel: SimulatedPanel, *, quotas: int, recontacts: Iterable[int], seed: int | str
    ) -> None:
        self.panel = panel
        self._quotas = quotas
        self._states: dict[str, MemberState] = {}
        self.recontact_codes: dict[int, tuple[str, ...]] = {}  # by quota ID, sorted by code point
        self._wanted: dict[int, frozenset[str]] = {}
        for quota_id in recontacts:
            random = Random(f"{seed}/recontact/{panel.panel_guid}/{quota_id}")  # noqa: S311  no secret
            self.set_recontact(quota_id, (c for c in panel.members if random.random() < RECONTACT_SHARE))

    def state(self, member_code: str) -> MemberState | None:
        state = self._states.get(member_code)
        if state is None and member_code in self.panel.members:
            settled = bytearray(self._quotas)
            state = self._states[member_code] = MemberState(self.panel.members[member_code], settled)
        return state

    def is_wanted(self, quota_id: int, member_code: str) -> bool:
        return member_code in self._wanted.get(quota_id, ())

    def set_recontact(self, quota_id: int, member_codes: Iterable[str]) -> None:
        self._wanted[quota_id] = frozenset(member_codes)
        self.recontact_codes[quota_id] = tuple(sorted(self._wanted[quota_id]))
        # Stored result codes may depend on the old list.
        for state in self._states.values():
            state.settled = bytearray(self._quotas)
            state.fits.clear()


def new_panel(
    seed: int | str, number: int, members: Iterable[SimulatedMember], api_key: str | None
) -> SimulatedPanel:
    """Return a panel whose Guid, and key if none is given, follow from the seed and the panel's number."""
    random = Random(f"{seed}/panel/{number}")  # noqa: S311  no secret
    by_code: dict[str, SimulatedMember] = {}
    for member in members:
        if by_code.setdefault(member.member_code, member) is not member:
            raise ValueError("a member code occurs twice; it must be unique in its panel")
    return SimulatedPanel(
        panel_guid=str(UUID(int=random.getrandbits(128), version=4)),
        api_key=api_key or str(UUID(int=random.getrandbits(128), version=4)),
        members=MappingProxyType(by_code),
    )


_PANEL_SITE: Final = "https://panel.example"

_END_PAGES: Final = {
    "Qualified URL": ("complete", "Where members go on completing a survey"),
    "Terminate URL": ("terminate", "Where members go on terminating a survey"),
    "Quota Full URL": ("quota-full", "Where members go when the quota is full"),
    "Fraud Terminate URL": ("fraud", "Where members go when marked as fraudulent"),
    "Digital Finger Printing Failure URL": (
        "fingerprint",
        "Where members go when they cannot be fingerprinted",
    ),
    "No Surveys URL": ("no-surveys", "Where members go when no surveys are available "),
    "Survey Taken URL": ("taken", "Where members go when they already took the survey"),
    "No Cookies URL": ("no-cookies", "Where members go when cookies are disabled"),
    "Survey Not Available URL": ("closed", "Where members go when the survey is no longer available"),
    "Not Qualified URL": ("not-qualified", "Where members go when they do not qualify"),
    "Max Surveys Reached URL": (None, "Where members go after reaching the daily maximum of surveys"),
}
_NOTIFICATIONS: Final = {
    "Invite Notification URL": ("invite", "Where invite notifications or requests are sent"),
    "Completion Notification URL": ("completion", "Where qualified completes are sent"),
    "Terminate Notification URL": ("terminate", "Where terminates are sent"),
    "Survey Notification URL": ("survey_closed", "Where notifications of closed surveys are sent "),
}
_MADE_UP_URLS: Final = {
    "completion": f"{_PANEL_SITE}/notify/completions",
    "terminate": f"{_PANEL_SITE}/notify/terminates",
    "survey_closed": f"{_PANEL_SITE}/notify/surveys",
    "quota_status": f"{_PANEL_SITE}/notify/quotas",
}


def settings_of(panel_guid: str, urls: Mapping[str, str] | None = None) -> tuple[Setting, ...]:
    """Return all settings of the contract. Some are unset; some descriptions end in a blank."""
    urls = _MADE_UP_URLS if urls is None else urls
    return (
        *(
            Setting(name, text, page and f"{_PANEL_SITE}/{page}?member=[pid]")
            for name, (page, text) in _END_PAGES.items()
        ),
        Setting("Max Surveys To Fetch", "Maximum number of surveys a dashboard call returns", "0"),
        *(Setting(name, text, urls.get(kind)) for name, (kind, text) in _NOTIFICATIONS.items()),
        Setting(
            REFERENCE_DATA_KEY, "Authorization key for reference data", str(uuid5(NAMESPACE_URL, panel_guid))
        ),
        Setting("Panel GUID", "Identifier of the partner and culture", panel_guid),
        Setting("Quota Notifications Enabled", "Whether quota notifications are sent", "True"),
        Setting("Quota Notification URL", "Where quota status updates are sent", urls.get("quota_status")),
        Setting("Standard EncryptionResult Parameter Name", "Parameter of the encrypted value", "hash"),
    )


BULK_LIMIT: Final = 100
"""The largest number of quota IDs in a bulk invite."""


@frozen
class ServiceCall:
    """A request as the service sees it.

    `quota_ids` is None if they could not be read: not JSON, not a list of whole numbers, or not a number in the
    path. `refused` maps quota IDs to the result codes that faults set for them; the key None is for all others.
    """

    endpoint: Endpoint
    panel_guid: str | None
    api_key: str | None
    member_code: str | None = None
    quota_ids: tuple[int, ...] | None = ()
    query: Mapping[str, str] = field(factory=dict[str, str])
    request_number: int = 0
    refused: Mapping[int | None, int] = field(factory=dict["int | None", int])

    def refusal(self, quota_id: int | None = None) -> int | None:
        """Return the result code that a fault sets for a quota ID, or for the whole call; None if none does."""
        code = self.refused.get(quota_id)
        return self.refused.get(None) if code is None else code


@define(eq=False)
class Service:
    """The state behind the endpoints. It changes under one lock: served simulators run in another thread."""

    _inventory: LiveInventory
    _ledger: Ledger
    _outbox: Outbox
    _recontact_page_size: int
    notification_urls: Mapping[str, str] | None = None
    lock: Lock = field(factory=Lock)
    panels: dict[str, PanelState] = field(factory=dict[str, PanelState])  # by Guid in lower case
    _keys: set[str] = field(factory=set[str])

    def register(self, panel: PanelState) -> None:
        self.panels[panel.panel.panel_guid.lower()] = panel
        self._keys.add(panel.panel.api_key.lower())

    def answer(self, call: ServiceCall) -> ServiceResponse:
        """Respond to a call: check its key and panel, then process it."""
        key = (call.api_key or "").lower()
        if key not in self._keys:
            return ServiceResponse(b'{"Message":"Authorization has been denied for this request."}', 403)
        if not call.panel_guid:
            return refusal(ResultCode.NO_PANEL_GUID)
        panel = self.panels.get(call.panel_guid.strip("{}").lower())
        if panel is None:
            return refusal(ResultCode.PANEL_DOES_NOT_EXIST)
        if panel.panel.api_key.lower() != key:
            return ServiceResponse(b'{"Message":"The key belongs to another panel."}', 403)
        with self.lock:
            return self._endpoint(panel, call)

    def _endpoint(self, panel: PanelState, call: ServiceCall) -> ServiceResponse:
        if call.refused and call.endpoint != "bulk_invite":
            code = call.refusal(call.quota_ids[0] if call.quota_ids else None)
            if code is not None:
                return refusal(code, content_type=PLAINTEXT if call.endpoint == "generate_invite" else JSON)
        match call.endpoint:
            case "get_quotas":
                return self._get_quotas(call)
            case "bulk_invite":
                return self._bulk_invite(panel, call)
            case "generate_invite":
                return self._generate_invite(panel, call)
            case "get_settings":
                return ServiceResponse(settings_of(panel.panel.panel_guid, self.notification_urls))
            case "recontact_members":
                return self._recontact_members(panel, call)

    def _get_quotas(self, call: ServiceCall) -> ServiceResponse:
        wanted = call.query.get("includeRoutables", "true").strip().lower()
        if wanted not in {"true", "false"}:
            return refusal(ResultCode.PANEL_INVALID_ES_REQUEST)
        return ServiceResponse(self._inventory.body(include_routables=wanted == "true"))

    def _bulk_invite(self, panel: PanelState, call: ServiceCall) -> ServiceResponse:
        quota_ids = call.quota_ids
        if quota_ids is None or len(quota_ids) > BULK_LIMIT:
            return refusal(ResultCode.PANEL_INVALID_ES_REQUEST)
        if not quota_ids:
            return refusal(ResultCode.NO_QUOTA_ID)
        state = panel.state(call.member_code or "")
        if state is None:
            nobody = ResultCode.NO_MEMBER_FOUND
            return ServiceResponse([BulkItem(id_, call.refusal(id_) or nobody) for id_ in quota_ids])
        return ServiceResponse([self._invite(panel, state, quota_id, call) for quota_id in quota_ids])

    def _generate_invite(self, panel: PanelState, call: ServiceCall) -> ServiceResponse:
        state = panel.state(call.member_code or "")
        if not call.quota_ids:
            code, invite = ResultCode.NO_QUOTA_ID, None
        elif state is None:
            code, invite = ResultCode.NO_MEMBER_FOUND, None
        else:
            _, code, invite = self._invite(panel, state, call.quota_ids[0], call)
        if invite is not None:
            return ServiceResponse(invite)
        # The body is JSON as everywhere; only this endpoint labels it application/plaintext.
        return refusal(code, content_type=PLAINTEXT)

    def _recontact_members(self, panel: PanelState, call: ServiceCall) -> ServiceResponse:
        quota = self._inventory.get(call.quota_ids[0]) if call.quota_ids else None
        if quota is None:
            return refusal(ResultCode.NO_QUOTA_ID)
        codes = panel.recontact_codes.get(quota.quota.quota_id)
        if codes is None:
            return refusal(ResultCode.SURVEY_NOT_FOR_RECONTACT)
        # At most nine digits and not 0: such a number fits 32 bits.
        asked = call.query.get("maxResults", str(self._recontact_page_size))
        if not (asked.isascii() and asked.isdecimal() and len(asked) < 10 and int(asked)):  # noqa: PLR2004  32 bits
            return refusal(ResultCode.PANEL_INVALID_ES_REQUEST)
        last = call.query.get("lastMemberCodeReceived")
        # The page begins after the last code received, even if that code is no longer on the list.
        start = bisect_right(codes, last) if last is not None else 0
        page = codes[start : start + int(asked)]
        return ServiceResponse(RecontactMembers(len(page), start + len(page) < len(codes), page))

    def code(self, panel: PanelState, member_code: str, quota_id: int) -> int:
        """Return the result code that a request would get now, without making an invite."""
        with self.lock:
            state = panel.state(member_code)
            quota = self._inventory.get(quota_id)
            if state is None:
                return ResultCode.NO_MEMBER_FOUND
            return ResultCode.NO_QUOTA_ID if quota is None else self._code(panel, state, quota)

    def _code(self, panel: PanelState, state: MemberState, quota: LiveQuota) -> int:
        if not quota.is_live:
            return ResultCode.QUOTA_NOT_LIVE
        if quota.is_full:
            return ResultCode.QUOTA_FULL
        if quota.survey in state.taken:
            return ResultCode.SURVEY_TAKEN
        # 0 means that the code has not been computed yet.
        code = state.settled[quota.position] or _settle(panel, state, quota)
        if code == ResultCode.SUCCESS and quota.places(state.fits[quota.position]) is None:
            return ResultCode.SUB_QUOTA_FULL
        return code

    def _invite(self, panel: PanelState, state: MemberState, quota_id: int, call: ServiceCall) -> BulkItem:
        refused = call.refusal(quota_id) if call.refused else None
        if refused is not None:
            return BulkItem(quota_id, refused)
        quota = self._inventory.get(quota_id)
        if quota is None:
            return BulkItem(quota_id, ResultCode.NO_QUOTA_ID)
        code = self._code(panel, state, quota)
        if code != ResultCode.SUCCESS:
            return BulkItem(quota_id, code)
        # `places` is not None here: `_code` has just returned SUCCESS, and the lock is still held.
        quota.take(quota.places(state.fits[quota.position]) or ())
        self._inventory.moved(quota)
        state.taken.add(quota.survey)
        url = self._ledger.record_invite(
            quota,
            panel_guid=panel.panel.panel_guid,
            member_code=state.member.member_code,
            endpoint=call.endpoint,
            request_number=call.request_number,
        )
        self._outbox.invited(quota, state.member.member_code, url)
        self._outbox.moved(quota.survey)
        return BulkItem(quota_id, ResultCode.SUCCESS, _invite_to(quota.survey.survey, quota_id, url))


def _settle(panel: PanelState, state: MemberState, quota: LiveQuota) -> int:
    """Compute the result code that does not depend on the counts, and store it."""
    member, survey = state.member, quota.survey.survey
    fits = fits_of(quota.targets, member.profile)
    # As for a matcher, a survey that names no device is open to all.
    if survey.device_type_ids and member.device_type_id not in survey.device_type_ids:
        code = ResultCode.DEVICETYPE_NOT_SUPPORTED_FOR_SURVEY
    elif survey.is_survey_recontact and not panel.is_wanted(quota.quota.quota_id, member.member_code):
        code = ResultCode.NO_RECONTACT_GID
    elif any(each.excludes(past) for each in survey.survey_wave_exclusions for past in member.participations):
        code = ResultCode.EXCLUDED_SURVEY_TAKEN
    elif fits is None:
        code = ResultCode.MEMBER_DOES_NOT_MATCH_QUOTA
    else:
        code = ResultCode.SUCCESS
        state.fits[quota.position] = fits
    state.settled[quota.position] = code
    return code


def _invite_to(survey: Survey, quota_id: int, url: str) -> Invite:
    return Invite(
        survey_id=survey.survey_id,
        wave_id=survey.wave_id,
        quota_id=quota_id,
        partner_amount=survey.price.amount,
        url=url,
        loi=survey.loi,
        ir=survey.ir,
        member_amount=0.0,
    )
