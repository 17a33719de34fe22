"""The settings of one panel, and where its key is: in the environment or the keyring, or behind a function."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from attrs import field, frozen

from sampling_async._calls.retry import RetryPolicy
from sampling_async._contract.checks import Text, is_whole, text_of
from sampling_async._contract.errors import InvalidRequestError
from sampling_async._contract.extras import install
from sampling_async._pacing.patience import OutagePolicy
from sampling_async._wire.address import Secret, base_url_of, comparable, guid_of, idle_seconds_of, proxy_of
from sampling_async._wire.session import Timeouts

if TYPE_CHECKING:
    from attrs import Attribute


CHOSEN: Final = "SAMPLING_PROFILE"
_KEYRING: Final = "sampling_async"
_VARIABLE: Final = r"[A-Za-z_][A-Za-z0-9_]*"
GUID_DIGITS: Final = r"[0-9A-Fa-f]{32}"
_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]*"

POLICIES: Final[Mapping[str, type[Any]]] = {
    "timeouts": Timeouts,
    "retry": RetryPolicy,
    "outage": OutagePolicy,
}


def _text(_: object, attribute: Attribute[Any], value: object) -> None:
    if value is None and attribute.default is None:
        return
    if not isinstance(value, str):
        raise InvalidRequestError(f"{attribute.name} must be text")
    if "\0" in value:
        raise InvalidRequestError(f"{attribute.name} has a NUL (\\u0000) in it; write it without")


def _flag(_: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{attribute.name} must be true or false")


def _whole(_: object, attribute: Attribute[Any], value: object) -> None:
    if value is not None and not (is_whole(value) and 1 <= value <= sys.maxsize):
        raise InvalidRequestError(f"{attribute.name} must be a whole number from 1")


def _seconds(_: object, attribute: Attribute[Any], value: float | None) -> None:
    if isinstance(value, str):  # not repeated: a pasted value may be secret
        raise InvalidRequestError(f"{attribute.name} must be a number of seconds")
    if value is not None:
        idle_seconds_of(value)


def _policy(_: object, attribute: Attribute[Any], value: object) -> None:
    kind = POLICIES[attribute.name]
    if not isinstance(value, kind | None):
        raise InvalidRequestError(f"{attribute.name} must be a {kind.__name__}")


@frozen(kw_only=True)
class PanelProfile:
    """The settings of one panel, for `SamplingClient.from_env(profile=...)`.

    A file of profiles has one as a table for each panel. Make them yourself if you keep them elsewhere, such as
    in a database or a vault:

        us = PanelProfile(
            name="us", base_url="https://sampling.example", panel=guid, api_key=lambda: vault.read("us")
        )
        async with SamplingClient.from_env(profile=us) as client: ...

    Give one of `api_key`, `key_variable` and `keyring`: a profile says where the key is, and does not hold
    it.

    Attributes:
        name: Letters, digits and -._ only.
        base_url: As for `SamplingClient`.
        panel: The PanelGUID: `panel_guid` of `SamplingClient`.
        api_key: A function that returns the key, called for each client. A file cannot have one.
        key_variable: The environment variable that has the key.
        keyring: Whether the key is in the keyring of the system, under the profile's name and host.
        proxy: An HTTP proxy, without user and password. SAMPLING_PROXY replaces it.
        ca_file: A PEM file of the authorities to trust. SAMPLING_CA_FILE replaces it.
        client_cert: A PEM file with a client certificate and its key. SAMPLING_CLIENT_CERT replaces it.
        max_concurrency: As for `SamplingClient`; None for its default, here and below.
        idle_seconds: As for `SamplingClient`.
        allow_http: As for `SamplingClient`.
        timeouts: As for `SamplingClient`; in a file, a table such as [us.timeouts], with the names of
            `Timeouts`.
        retry: The same, with the names of `RetryPolicy`.
        outage: The same, with the names of `OutagePolicy`.

    Raises:
        InvalidRequestError: A value breaks a rule. The message repeats no value that may be secret.
    """

    name: str = field(converter=text_of, validator=_text)
    base_url: str = field(converter=text_of, validator=_text)
    panel: str = field(converter=text_of, validator=_text)
    api_key: Callable[[], Text] | None = field(default=None, repr=False)
    key_variable: str | None = field(default=None, converter=text_of, validator=_text)
    keyring: bool = field(default=False, validator=_flag)
    proxy: str | None = field(default=None, converter=text_of, validator=_text)
    ca_file: str | None = field(default=None, converter=text_of, validator=_text)
    client_cert: str | None = field(default=None, converter=text_of, validator=_text)
    max_concurrency: int | None = field(default=None, validator=_whole)
    idle_seconds: float | None = field(default=None, validator=_seconds)
    allow_http: bool = field(default=False, validator=_flag)
    timeouts: Timeouts | None = field(default=None, validator=_policy)
    retry: RetryPolicy | None = field(default=None, validator=_policy)
    outage: OutagePolicy | None = field(default=None, validator=_policy)

    def __attrs_post_init__(self) -> None:
        """Check the rules that a field alone cannot break, and those of the client."""
        if not re.fullmatch(_NAME, self.name):
            raise InvalidRequestError("a name of a profile has letters, digits and -._ only")
        if self.api_key is not None and not callable(self.api_key):
            raise InvalidRequestError(
                "api_key must be a function that returns the key, such as lambda: vault.read(name)"
            )
        if [self.api_key is not None, bool(self.key_variable), self.keyring].count(True) != 1:
            raise InvalidRequestError(
                "give one of key_variable and keyring = true, to say where the key is; "
                "in Python, api_key is a third way"
            )
        variable = self.key_variable or "_"
        if not re.fullmatch(_VARIABLE, variable) or re.fullmatch(GUID_DIGITS, variable):
            # Not repeated: it may be the key itself, perhaps without its dashes.
            raise InvalidRequestError(
                "key_variable must be the name of an environment variable, such as SAMPLING_API_KEY_US"
            )
        if "@" in (self.proxy or ""):
            raise InvalidRequestError(
                "proxy is refused with a user and password, which are secrets; give the whole address in the "
                "environment variable SAMPLING_PROXY, which counts over the profile"
            )
        base_url_of(self.base_url, allow_http=self.allow_http)
        guid_of(self.panel, "panel")
        if self.proxy is not None:
            proxy_of(self.proxy)

    @property
    def account(self) -> str:
        """The name of the key in the keyring. With the host, so that a key never goes to another host."""
        return f"{self.name}@{urlsplit(comparable(self.base_url)).netloc}"

    @property
    def source_of_key(self) -> str:
        """Where the key is, in words."""
        return "function" if self.api_key else "keyring" if self.keyring else f"variable {self.key_variable}"

    def key(self) -> Secret | None:
        """Return the key from where it is; None if it is not there."""
        if self.api_key is not None:
            found = str(text_of(self.api_key() or ""))
        elif self.keyring:
            found = in_keyring(lambda keyring: keyring.get_password(_KEYRING, self.account)) or ""
        else:
            found = os.environ.get(self.key_variable or "", "")
        # Without the end of a line, which tools that print a key put behind it.
        return Secret.of(found.strip()) if found.strip() else None

    def set_key(self, key: Secret) -> None:
        """Store the key in the keyring."""
        checked = guid_of(key, "the key")
        in_keyring(lambda keyring: keyring.set_password(_KEYRING, self.account, checked.reveal()))
        if in_keyring(lambda keyring: keyring.get_password(_KEYRING, self.account)) != checked.reveal():
            raise InvalidRequestError(
                "the keyring of this system has not kept the key (keyring.backends.null keeps nothing); choose "
                "another backend, or give key_variable in the profile"
            )

    def forget_key(self) -> bool:
        """Remove the key from the keyring; return whether it was there."""

        def forget(keyring: Any) -> bool:
            if keyring.get_password(_KEYRING, self.account) is None:
                return False
            keyring.delete_password(_KEYRING, self.account)
            return True

        return bool(in_keyring(forget))

    def must_agree(self, name: str, value: str, source: str) -> None:
        """Refuse an address or panel from elsewhere, its `source`, that is not the profile's."""
        if _comparable(name, value) != _comparable(name, getattr(self, name)):
            raise InvalidRequestError(
                f"{source} gives another {name} than profile {self.name!r}; requests would go to"
                f" one panel with the key of another: unset {source}, or choose no profile ({CHOSEN} empty)"
            )

    def no_key(self) -> InvalidRequestError:
        """Return the error of a key that is not where it should be."""
        way = f"set the environment variable {self.key_variable}"
        if self.keyring:
            way = f"store it with `sampling-async profile set-key {self.name}`"
        elif self.api_key is not None:
            way = "its function returned nothing"
        return InvalidRequestError(f"the key of profile {self.name!r} is missing; {way}")


def in_keyring(use: Callable[[Any], Any]) -> Any:
    missing = ""
    try:
        return use(import_module("keyring"))
    except Exception as exc:  # noqa: BLE001  of backends, which are plug-ins and may raise anything
        problem = type(exc).__name__
        missing = exc.name or "" if isinstance(exc, ModuleNotFoundError) else ""
    # Raised outside of the handler: the frames of the library's error may hold the key.
    if missing == "keyring":
        raise InvalidRequestError(
            f"the keyring needs the library keyring: {install('keyring')}; or give key_variable in the profile"
        )
    raise InvalidRequestError(
        f"the keyring of this system cannot be used ({problem}); unlock it, or give key_variable in the profile"
    )


# Guids are the same in both cases and with braces, and the client drops a slash at the end of an address.
def _comparable(name: str, value: str) -> str:
    return value.strip("{}").lower() if name == "panel" else comparable(value.rstrip("/"))
