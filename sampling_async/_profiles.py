"""Profiles: the settings of several panels in one TOML file, which never holds a key.

Address, panel and key say who pays whom, so a profile gives all three. An argument, an option or a variable
that names another address or panel is refused. For other settings, an argument takes precedence over the
environment, and the environment over the profile.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from difflib import get_close_matches
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from attrs import fields, frozen

from sampling_async._contract.errors import InvalidRequestError
from sampling_async._wire.address import Secret, base_url_of, guid_of, idle_seconds_of, proxy_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CHOSEN: Final = "SAMPLING_PROFILE"
FILE: Final = "SAMPLING_PROFILES"
_FOLDER: Final = "sampling-async"
_KEYRING: Final = "sampling_async"
_VARIABLE: Final = r"[A-Za-z_][A-Za-z0-9_]*"
_GUID_DIGITS: Final = r"[0-9A-Fa-f]{32}"
_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_SECRETS: Final = re.compile(r"api.?key|auth.?key|password|passwd|secret|token", re.IGNORECASE)
_NO_KEY: Final = (
    "a profile file holds no key; name the environment variable that has it, with api_key_variable, or set "
    "keyring = true and store it with `sampling-async profile set-key`"
)


@frozen(kw_only=True)
class Profile:
    """One panel of the file. The fields after `name` and `path` are the keys of its table."""

    name: str
    path: Path
    base_url: str
    panel_guid: str
    api_key_variable: str | None = None
    keyring: bool = False
    proxy: str | None = None
    ca_file: str | None = None
    client_cert: str | None = None
    max_concurrency: int | None = None
    idle_seconds: float | None = None
    allow_http: bool = False

    @property
    def account(self) -> str:
        """The name of the key in the keyring. With the host, so that a key never goes to another host."""
        return f"{self.name}@{urlsplit(self.base_url).netloc}"

    @property
    def source_of_key(self) -> str:
        return "keyring" if self.keyring else f"variable {self.api_key_variable}"

    def key(self) -> Secret | None:
        if self.keyring:
            found = in_keyring(lambda keyring: keyring.get_password(_KEYRING, self.account)) or ""
        else:
            found = os.environ.get(self.api_key_variable or "", "")
        # Without the end of a line, which tools that print a key put behind it.
        return Secret.of(found.strip()) if found.strip() else None

    def set_key(self, key: Secret) -> None:
        checked = guid_of(key, "the key")
        in_keyring(lambda keyring: keyring.set_password(_KEYRING, self.account, checked.reveal()))

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
                f"{source} gives another {name} than profile {self.name!r} of {self.path}; requests would go to"
                f" one panel with the key of another: unset {source}, or choose no profile ({CHOSEN} empty)"
            )

    def no_key(self) -> InvalidRequestError:
        way = (
            f"store it with `sampling-async profile set-key {self.name}`"
            if self.keyring
            else f"set the environment variable {self.api_key_variable}"
        )
        return InvalidRequestError(f"the key of profile {self.name!r} is missing; {way}")


def profiles_file() -> Path:
    """Return SAMPLING_PROFILES, or profiles.toml in the platform's folder of settings."""
    given = os.environ.get(FILE)
    if given:
        return _expanded(given, FILE)
    try:
        home = Path.home()
    except RuntimeError:
        raise InvalidRequestError(
            f"this user has no home folder; name the file of profiles in {FILE}, with its whole path"
        ) from None
    return _settings_folder(sys.platform, os.environ, home) / _FOLDER / "profiles.toml"


def _expanded(path: str, where: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InvalidRequestError(
            f"{where}: {path} cannot be found: there is no such home folder; write the whole path without ~"
        ) from None


def _settings_folder(platform: str, environment: Mapping[str, str], home: Path) -> Path:
    if platform == "win32":
        return Path(environment.get("APPDATA") or home)
    if platform == "darwin":
        return home / "Library" / "Application Support"
    return Path(environment.get("XDG_CONFIG_HOME") or home / ".config")


def read_profiles(path: Path | None = None) -> dict[str, Profile]:
    """Return all profiles of the file by their names. Errors repeat no value that may be a secret."""
    path = path or profiles_file()
    try:
        # Editors of Windows put a byte order mark before it.
        tables = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as exc:
        raise InvalidRequestError(
            f"{path}: {exc.strerror}; this file holds the profiles, see {FILE} and the guide on profiles"
        ) from None
    except UnicodeDecodeError:
        problem = "not UTF-8"
    except tomllib.TOMLDecodeError as exc:
        # The parser's text may quote a value, which may be a key. Its end says the place.
        place = re.search(r"\(at [^()]*\)$", str(exc))
        problem = f"not TOML {place[0]}" if place else "not TOML"
    except (ValueError, RecursionError):  # the parser lets these of Python through
        problem = "a number in it has too many digits, or its brackets are too deep"
    else:
        # A pasted line may have the key on the left.
        names = [*tables, *chain.from_iterable(each for each in tables.values() if isinstance(each, dict))]
        if not any(re.fullmatch(_GUID_DIGITS, re.sub(r"[\W_]", "", name)) for name in names):
            return {name: _profile(path, name, table) for name, table in tables.items()}
        raise InvalidRequestError(f"{path}: a name in it looks like a key: {_NO_KEY}")
    raise InvalidRequestError(f"{path}: {problem}; it takes tables such as [us] with base_url and panel_guid")


def read_profile(name: str) -> Profile:
    profiles = read_profiles()
    if name not in profiles:
        known = ", ".join(profiles) or "none"
        raise InvalidRequestError(f"{profiles_file()}: there is no profile {name!r:.60}; it has: {known}")
    return profiles[name]


def chosen_profile(name: str | None = None) -> Profile | None:
    """Return the profile of a name, or the one that SAMPLING_PROFILE names; None for an empty name."""
    name = os.environ.get(CHOSEN) if name is None else name
    return read_profile(name) if name else None


def completed(name: str | None, given: dict[str, Any]) -> Profile | None:
    """Complete arguments of a client in place with a profile, if one is chosen, and return it."""
    profile = chosen_profile(name)
    if profile is None:
        return None
    # Both sources are compared, although the argument would win: a variable of another panel that is left over
    # in a shell is what makes invites for the wrong one.
    for field in ("base_url", "panel_guid"):
        variable = f"SAMPLING_{field.upper()}"
        for source, value in ((field, given.get(field)), (variable, os.environ.get(variable))):
            if value:
                profile.must_agree(field, str(value), source)
        given[field] = getattr(profile, field)
    if not given.get("api_key"):
        given["api_key"] = profile.key()
        if given["api_key"] is None:
            raise profile.no_key()
    for field in ("max_concurrency", "idle_seconds"):
        if getattr(profile, field) is not None:
            given.setdefault(field, getattr(profile, field))
    given.setdefault("allow_http", profile.allow_http)
    return profile


def setting(profile: Profile | None, name: str) -> str | None:
    """Return a setting of the environment, or of the profile if the environment has none."""
    return os.environ.get(f"SAMPLING_{name.upper()}") or getattr(profile, name, None)


def proxy_setting(profile: Profile | None) -> Secret | None:
    """Return the proxy of the environment or the profile, as a secret: it may hold a password."""
    return Secret.of(setting(profile, "proxy")) if setting(profile, "proxy") else None


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
            'the keyring needs the library keyring: pip install "sampling-async[keyring]"; or give '
            "api_key_variable in the profile"
        )
    raise InvalidRequestError(
        f"the keyring of this system cannot be used ({problem}); unlock it, or give api_key_variable in the "
        "profile"
    )


# --- The rules of a profile ---------------------------------------------------------------------------------

_KEYS: Final = tuple(field.name for field in fields(Profile) if field.name not in {"name", "path"})
_TYPES: Final[Mapping[str, tuple[type, str]]] = {
    "keyring": (bool, "true or false"),
    "allow_http": (bool, "true or false"),
    "max_concurrency": (int, "a whole number from 1"),
    "idle_seconds": (float, "a number of seconds"),
}


def _profile(path: Path, name: str, table: Any) -> Profile:
    where = f"{path}: [{name:.60}]"
    if _SECRETS.search(name) and not isinstance(table, dict):
        raise InvalidRequestError(f"{path}: {name:.60} is refused: {_NO_KEY}")
    if not isinstance(table, dict):
        raise InvalidRequestError(f"{path}: {name:.60} is not in a profile; write it below a line like [us]")
    if not re.fullmatch(_NAME, name):
        raise InvalidRequestError(f"{where}: a name of a profile has letters, digits and -._ only")
    for key in table:
        _check_key(where, key)
    missing = [key for key in ("base_url", "panel_guid") if not table.get(key)]
    if missing:
        raise InvalidRequestError(f"{where}: {' and '.join(missing)} missing; a profile gives both")
    values = {key: _value(where, key, value) for key, value in table.items()}
    for key in ("ca_file", "client_cert"):
        if key in values:  # paths are relative to the file, so that it may lie beside them
            values[key] = str(path.absolute().parent / _expanded(values[key], f"{where}: {key}"))
    if bool(values.get("api_key_variable")) == bool(values.get("keyring")):
        raise InvalidRequestError(
            f"{where}: give one of api_key_variable and keyring = true, to say where the key is"
        )
    profile = Profile(name=name, path=path, **values)
    _check_values(where, profile)
    return profile


def _check_key(where: str, key: str) -> None:
    if key in _KEYS:
        return
    if _SECRETS.search(key):
        raise InvalidRequestError(f"{where}: {key:.60} is refused: {_NO_KEY}")
    similar = get_close_matches(key, _KEYS, n=1)
    hint = f"did you mean {similar[0]}?" if similar else f"a profile takes {', '.join(_KEYS)}"
    raise InvalidRequestError(f"{where}: {key!r:.60} is unknown; {hint}")


def _value(where: str, key: str, value: Any) -> Any:
    kind, rule = _TYPES.get(key, (str, "text"))
    is_number = kind is float and isinstance(value, int) and not isinstance(value, bool)
    is_right = type(value) is kind or is_number
    is_countable = key != "max_concurrency" or (isinstance(value, int) and 1 <= value <= sys.maxsize)
    if not is_right or not is_countable:
        raise InvalidRequestError(f"{where}: {key} must be {rule}")
    if isinstance(value, str) and "\0" in value:
        raise InvalidRequestError(f"{where}: {key} has a NUL (\\u0000) in it; write it without")
    return value


def _check_values(where: str, profile: Profile) -> None:
    variable = profile.api_key_variable
    if variable is not None and (not re.fullmatch(_VARIABLE, variable) or re.fullmatch(_GUID_DIGITS, variable)):
        # Not repeated: it may be the key itself, perhaps without its dashes.
        raise InvalidRequestError(
            f"{where}: api_key_variable must be the name of an environment variable, such as "
            "SAMPLING_API_KEY_US"
        )
    if "@" in (profile.proxy or ""):
        raise InvalidRequestError(
            f"{where}: proxy is refused with a user and password, which are secrets; give the whole address in "
            "the environment variable SAMPLING_PROXY, which counts over the profile"
        )
    try:
        base_url_of(profile.base_url, allow_http=profile.allow_http)
        guid_of(profile.panel_guid, "panel_guid")
        idle_seconds_of(profile.idle_seconds or 0.0)
        if profile.proxy is not None:
            proxy_of(profile.proxy)
    except InvalidRequestError as exc:
        raise InvalidRequestError(f"{where}: {exc}") from None


# Guids are the same in both cases and with braces, and the client drops a slash at the end of an address.
def _comparable(name: str, value: str) -> str:
    return value.strip("{}").lower() if name == "panel_guid" else value.rstrip("/")
