"""Panels: their settings, their members, and the service's state of each member."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Final
from uuid import NAMESPACE_URL, UUID, uuid5

from attrs import field, frozen

from sampling_async._contract.records import REFERENCE_DATA_KEY, Setting
from sampling_async.simulator._members import SimulatedMember

if TYPE_CHECKING:
    from sampling_async.simulator._eligibility import Fit

RECONTACT_SHARE: Final = 0.3
"""The share of a panel's members on the list of a recontact quota, unless the list is replaced."""


@frozen
class SimulatedPanel:
    """A panel of the simulator: the Guid and key that a client needs, and its members by code."""

    panel_guid: str
    api_key: str = field(repr=False)
    members: Mapping[str, SimulatedMember] = field(repr=lambda members: f"<{len(members)} members>")


class MemberState:
    """The service's state of a member: the surveys with an invite, and the quotas that the member fits.

    A result code that does not depend on the counts is computed once for each quota, and kept in one byte.
    """

    __slots__ = ("fits", "member", "settled", "taken")

    def __init__(self, member: SimulatedMember, quotas: int) -> None:
        self.member = member
        self.taken: set[int] = set()
        # One byte for every quota, at the quota's position; 0 means that the code is not known yet.
        self.settled = bytearray(quotas)
        self.fits: dict[int, tuple[Fit, ...]] = {}

    def unsettle(self) -> None:
        """Forget the kept codes, because something they depend on has changed."""
        self.settled = bytearray(len(self.settled))
        self.fits.clear()


class PanelState:
    """A panel inside the service: the states of its members and its recontact lists."""

    def __init__(
        self, panel: SimulatedPanel, *, quotas: int, recontacts: Iterable[int], seed: int | str
    ) -> None:
        self.panel = panel
        self._quotas = quotas
        self._states: dict[str, MemberState] = {}
        self._codes: dict[int, tuple[str, ...]] = {}
        self._wanted: dict[int, frozenset[str]] = {}
        for quota_id in recontacts:
            random = Random(f"{seed}/recontact/{panel.panel_guid}/{quota_id}")  # noqa: S311  no secret
            self.set_recontact(quota_id, (c for c in panel.members if random.random() < RECONTACT_SHARE))

    def state(self, member_code: str) -> MemberState | None:
        """Return the state of a member, or None if no member has this code."""
        state = self._states.get(member_code)
        if state is None and member_code in self.panel.members:
            state = self._states[member_code] = MemberState(self.panel.members[member_code], self._quotas)
        return state

    def recontact_codes(self, quota_id: int) -> tuple[str, ...] | None:
        """Return the recontact list of a quota, sorted by code point, or None if the quota has no list."""
        return self._codes.get(quota_id)

    def is_wanted(self, quota_id: int, member_code: str) -> bool:
        """Return whether a member is on the recontact list of a quota."""
        return member_code in self._wanted.get(quota_id, ())

    def set_recontact(self, quota_id: int, member_codes: Iterable[str]) -> None:
        """Replace the recontact list of a quota. The codes need not belong to members."""
        self._wanted[quota_id] = frozenset(member_codes)
        self._codes[quota_id] = tuple(sorted(self._wanted[quota_id]))
        # Kept result codes may depend on the old list.
        for state in self._states.values():
            state.unsettle()


def new_panel(seed: int | str, number: int, members: Iterable[SimulatedMember]) -> SimulatedPanel:
    """Return a panel whose Guid and key follow from the seed and the panel's number.

    Raises:
        ValueError: A member code occurs twice.
    """
    random = Random(f"{seed}/panel/{number}")  # noqa: S311  no secret
    by_code: dict[str, SimulatedMember] = {}
    for member in members:
        if by_code.setdefault(member.member_code, member) is not member:
            raise ValueError("a member code occurs twice; it must be unique in its panel")
    return SimulatedPanel(
        panel_guid=str(UUID(int=random.getrandbits(128), version=4)),
        api_key=str(UUID(int=random.getrandbits(128), version=4)),
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
    """Return all settings of the contract. Some are unset; some descriptions end in a blank.

    Args:
        panel_guid: The panel.
        urls: The URLs of notifications by kind; made-up ones by default.
    """
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
