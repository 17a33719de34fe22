"""The result of Get Settings, with lookups by name and typed properties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, overload
from urllib.parse import quote

from sampling_async._contract.checks import require_instance, text_of
from sampling_async._contract.errors import DecodeError
from sampling_async._contract.records import REFERENCE_DATA_KEY, Setting, first, folded
from sampling_async._contract.timing import CallResultInSlots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sampling_async._contract.checks import Text


class MemberURL(str):
    """The URL of an end page or of notifications. It may contain the placeholder `[pid]`."""

    __slots__ = ()

    def for_member(self, pid: Text) -> str:
        """Return the URL with every `[pid]` replaced by `pid`, percent-encoded."""
        code = text_of(pid)
        require_instance(code, str, "pid", "a member code")
        return self.replace("[pid]", quote(code, safe=""))


class PartnerSettings(CallResultInSlots, Sequence[Setting]):
    """The settings of a partner panel ("Setting object"): a sequence in the service's order.

    Names are compared without case and blanks. If a name occurs twice, its first setting counts. A property is
    None if the setting is absent, null or empty. The repr hides the Reference Data API Auth Key.
    """

    __slots__ = ("_by_name", "_settings")

    def __init__(self, settings: Iterable[Setting]) -> None:
        self._settings = tuple(settings)
        # Reversed, because the last of equal keys wins in a dict, and here the first setting must.
        self._by_name = {folded(setting.name): setting for setting in reversed(self._settings)}

    def __repr__(self) -> str:
        return f"PartnerSettings{first(tuple(setting.name for setting in self._settings))}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PartnerSettings):
            return NotImplemented
        return self._settings == other._settings

    def __hash__(self) -> int:
        return hash(self._settings)

    def __reduce__(self) -> tuple[type[PartnerSettings], tuple[tuple[Setting, ...]]]:
        return PartnerSettings, (self._settings,)

    def __len__(self) -> int:
        return len(self._settings)

    def __iter__(self) -> Iterator[Setting]:
        return iter(self._settings)

    @overload
    def __getitem__(self, index: int) -> Setting: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Setting, ...]: ...
    def __getitem__(self, index: int | slice) -> Setting | tuple[Setting, ...]:
        return self._settings[index]

    def get(self, name: str) -> Setting | None:
        """Return the setting with this name, or None."""
        return self._by_name.get(folded(name))

    def value(self, name: str) -> str | None:
        """Return the value of the setting with this name, or None if it is absent, null or empty."""
        setting = self.get(name)
        return (setting.value or None) if setting else None

    def _url(self, name: str) -> MemberURL | None:
        value = self.value(name)
        return None if value is None else MemberURL(value)

    @property
    def qualified_url(self) -> MemberURL | None:
        """The URL where members go after they complete a survey."""
        return self._url("Qualified URL")

    @property
    def terminate_url(self) -> MemberURL | None:
        """The URL where members go after they are terminated in a survey."""
        return self._url("Terminate URL")

    @property
    def quota_full_url(self) -> MemberURL | None:
        """The URL where members go when the quota is full."""
        return self._url("Quota Full URL")

    @property
    def fraud_terminate_url(self) -> MemberURL | None:
        """The URL where members go when they are marked as fraudulent."""
        return self._url("Fraud Terminate URL")

    @property
    def digital_finger_printing_failure_url(self) -> MemberURL | None:
        """The URL where members go when they cannot be fingerprinted."""
        return self._url("Digital Finger Printing Failure URL")

    @property
    def no_surveys_url(self) -> MemberURL | None:
        """The URL where members go when no surveys are available."""
        return self._url("No Surveys URL")

    @property
    def survey_taken_url(self) -> MemberURL | None:
        """The URL where members go when they have already taken the survey."""
        return self._url("Survey Taken URL")

    @property
    def no_cookies_url(self) -> MemberURL | None:
        """The URL where members go when cookies are disabled."""
        return self._url("No Cookies URL")

    @property
    def survey_not_available_url(self) -> MemberURL | None:
        """The URL where members go when the survey is no longer available."""
        return self._url("Survey Not Available URL")

    @property
    def not_qualified_url(self) -> MemberURL | None:
        """The URL where members go when they do not qualify."""
        return self._url("Not Qualified URL")

    @property
    def max_surveys_reached_url(self) -> MemberURL | None:
        """The URL where members go after they reach the daily maximum of surveys."""
        return self._url("Max Surveys Reached URL")

    @property
    def max_surveys_to_fetch(self) -> int | None:
        """The maximum number of surveys that a dashboard call returns.

        Raises:
            DecodeError: The value is not a whole number.
        """
        value = self.value("Max Surveys To Fetch")
        if value is None:
            return None
        text = value.strip()
        # `isdigit` alone also accepts digits of other scripts, which the service does not write.
        if not (text.isascii() and text.isdigit() and len(text) < 19):  # noqa: PLR2004  digits of 64 bits
            raise DecodeError("$['Max Surveys To Fetch'].Value", "expected a whole number")
        return int(text)

    @property
    def invite_notification_url(self) -> MemberURL | None:
        """The URL where invite notifications or requests are sent."""
        return self._url("Invite Notification URL")

    @property
    def completion_notification_url(self) -> MemberURL | None:
        """The URL where notifications of qualified completes are sent."""
        return self._url("Completion Notification URL")

    @property
    def terminate_notification_url(self) -> MemberURL | None:
        """The URL where notifications of terminates are sent."""
        return self._url("Terminate Notification URL")

    @property
    def survey_notification_url(self) -> MemberURL | None:
        """The URL where notifications of closed surveys are sent."""
        return self._url("Survey Notification URL")

    @property
    def reference_data_api_auth_key(self) -> str | None:
        """The key of the reference data interface. It is a secret: no repr shows it, so do not print it."""
        return self.value(REFERENCE_DATA_KEY)

    @property
    def panel_guid(self) -> str | None:
        """The identifier of the partner and culture."""
        return self.value("Panel GUID")

    @property
    def quota_notifications_enabled(self) -> bool | None:
        """Whether the partner receives quota notifications ("Quota Notifications Enabled").

        Raises:
            DecodeError: The value is neither true nor false.
        """
        value = self.value("Quota Notifications Enabled")
        if value is None:
            return None
        known = {"true": True, "false": False}.get(value.strip().casefold())
        if known is None:
            raise DecodeError("$['Quota Notifications Enabled'].Value", "expected True or False")
        return known

    @property
    def quota_notification_url(self) -> MemberURL | None:
        """The URL where quota status updates are sent."""
        return self._url("Quota Notification URL")

    @property
    def standard_encryption_result_parameter_name(self) -> str | None:
        """The name of the URL parameter that holds the encrypted value."""
        return self.value("Standard EncryptionResult Parameter Name")
