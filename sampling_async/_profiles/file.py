"""The file of profiles: settings of several panels in TOML, which never holds a key; and which one is used.

Address, panel and key say who pays whom, so a profile gives all three. An argument, an option or a variable
that names another address or panel is refused. For other settings, an argument takes precedence over the
environment, and the environment over the profile.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import asdict, fields

from sampling_async._contract.checks import text_of
from sampling_async._contract.errors import InvalidRequestError
from sampling_async._private_files import require_unchanged_by_others
from sampling_async._profiles.record import CHOSEN, GUID_DIGITS, POLICIES, PanelProfile
from sampling_async._wire.address import Secret

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

FILE: Final = "SAMPLING_PROFILES"
_FOLDER: Final = "sampling-async"
_SECRETS: Final = re.compile(r"api.?key|auth.?key|password|passwd|secret|token", re.IGNORECASE)
BEGIN: Final = f"begin with `sampling-async profile add NAME`, or name the file of your profiles in {FILE}"
_TAKES: Final = "it takes tables such as [us] with base_url and panel"
_NO_KEY: Final = (
    "a profile file holds no key; name the environment variable that has it, with key_variable, or set "
    "keyring = true and store it with `sampling-async profile set-key`"
)

_KEYS: Final = tuple(each.name for each in fields(PanelProfile) if each.name not in {"name", "api_key"})
"""What a table of the file may have."""


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


def read_profiles(path: Path | None = None) -> dict[str, PanelProfile | InvalidRequestError]:
    """Return the profiles of the file by their names; for one that breaks a rule, the error of using it.

    Errors repeat no value that may be a secret.
    """
    path = path or profiles_file()
    return {name: _profile(path, name, table) for name, table in _tables(path, _read(path)).items()}


def read_profile(name: str) -> PanelProfile:
    """Return a profile of the file; others may be wrong."""
    profiles = read_profiles()
    found = profiles.get(name)
    if found is None:
        known = ", ".join(profiles) or f"none; {BEGIN}"
        raise InvalidRequestError(f"{profiles_file()}: there is no profile {name!r:.60}; it has: {known}")
    if isinstance(found, InvalidRequestError):
        raise found
    return found


def add_profile(profile: PanelProfile) -> Path:
    """Append a profile to the file, which is made if it is not there, and return its path. The rest stays.

    Raises:
        InvalidRequestError: The file has a profile of this name, or cannot be read.
    """
    path = profiles_file()
    before = _read(path) if path.exists() else ""
    if profile.name in _tables(path, before):
        raise InvalidRequestError(f"{path}: there is a profile {profile.name!r} already; change it in the file")
    added = toml_of(profile)
    if before:
        added = f"\n{added}" if before.endswith("\n") else f"\n\n{added}"
    if _profile(path, profile.name, _tables(path, before + added)[profile.name]) != profile:
        raise InvalidRequestError(f"{path}: a profile cannot be appended to it; add it yourself:\n{added}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Appended, so that comments, links and owner stay. The mode is that of a new file.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with open(file, "ab") as appended:  # noqa: PTH123  a descriptor
        appended.write(added.encode())
    return path


def toml_of(profile: PanelProfile) -> str:
    """Return the table of a profile that has texts and flags only, as TOML."""
    name = f'"{profile.name}"' if "." in profile.name else profile.name
    lines = [
        # Texts in JSON are texts in TOML, and so are true and false.
        f"{key} = {json.dumps(value, ensure_ascii=False)}"
        for key, value in asdict(profile, recurse=False).items()
        if key in _KEYS and value not in {None, False}
    ]
    return "\n".join([f"[{name}]", *lines, ""])


def _read(path: Path) -> str:
    problem = "not UTF-8"
    try:
        require_unchanged_by_others(path)
        # Editors of Windows put a byte order mark before it.
        return path.read_text("utf-8-sig")
    except FileNotFoundError as exc:
        problem = f"{exc.strerror}; {BEGIN}"
    except OSError as exc:
        problem = f"{exc.strerror}; this file holds the profiles, see {FILE} and the guide on profiles"
    except UnicodeDecodeError:
        problem = f"not UTF-8; {_TAKES}"
    raise InvalidRequestError(f"{path}: {problem}")


def _tables(path: Path, text: str) -> dict[str, dict[str, Any]]:
    """Return the tables of the file, and refuse what is in none of them."""
    problem = ""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        # The parser's text may quote a value, which may be a key. Its end says the place.
        place = re.search(r"\(at [^()]*\)$", str(exc))
        problem = f"not TOML {place[0]}" if place else "not TOML"
    except (ValueError, RecursionError):  # the parser lets these of Python through
        problem = "a number in it has too many digits, or its brackets are too deep"
    else:
        for name, table in tables.items():
            if _is_key(name):
                raise InvalidRequestError(f"{path}: a name in it looks like a key: {_NO_KEY}")
            if not isinstance(table, dict):
                if _SECRETS.search(name):
                    raise InvalidRequestError(f"{path}: {name:.60} is refused: {_NO_KEY}")
                raise InvalidRequestError(
                    f"{path}: {name:.60} is not in a profile; write it below a line like [us]"
                )
        return tables
    raise InvalidRequestError(f"{path}: {problem}; {_TAKES}")


def _profile(path: Path, name: str, table: dict[str, Any]) -> PanelProfile | InvalidRequestError:
    """Return the profile of a table, or the error that says what is wrong in it."""
    try:
        return _made(path, name, table)
    except InvalidRequestError as exc:
        return exc.with_traceback(None)


def _made(path: Path, name: str, table: dict[str, Any]) -> PanelProfile:
    where = f"{path}: [{name:.60}]"
    _check_names(where, table, _KEYS)
    missing = [key for key in ("base_url", "panel") if not table.get(key)]
    if missing:
        raise InvalidRequestError(f"{where}: {' and '.join(missing)} missing; a profile gives both")
    values = {key: _policy_of(f"{where[:-1]}.{key}]", key, value) for key, value in table.items()}
    for key in ("ca_file", "client_cert"):
        if isinstance(values.get(key), str):  # relative to the file, so that it may lie beside them
            values[key] = str(path.absolute().parent / _expanded(values[key], f"{where}: {key}"))
    with _named(where):
        return PanelProfile(name=name, **values)


def _policy_of(where: str, key: str, value: Any) -> Any:
    """Return a value, or the record of the table that it is."""
    kind = POLICIES.get(key)
    if kind is None:
        return value
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"{where}: {key} is a table; write {where.rpartition(' ')[2]} above its values"
        )
    _check_names(where, value, tuple(each.name for each in fields(kind)))
    for name, given in value.items():
        # Texts are not repeated, as the rules of these records would do: one may be a key.
        if not all(isinstance(each, int | float) for each in (given if isinstance(given, list) else [given])):
            raise InvalidRequestError(f"{where}: {name} must be a number, true, false, or a list of numbers")
    with _named(where):
        return kind(**value)


@contextmanager
def _named(where: str) -> Generator[None]:
    """Name the place in errors of a block."""
    try:
        yield
    except InvalidRequestError as exc:
        raise InvalidRequestError(f"{where}: {exc}") from None


def _check_names(where: str, table: dict[str, Any], known: tuple[str, ...]) -> None:
    for key in table:
        if _is_key(key):  # a pasted line may have the key on the left
            raise InvalidRequestError(f"{where}: a name in it looks like a key: {_NO_KEY}")
        if key in known:
            continue
        if _SECRETS.search(key):
            raise InvalidRequestError(f"{where}: {key:.60} is refused: {_NO_KEY}")
        similar = get_close_matches(key, known, n=1)
        hint = f"did you mean {similar[0]}?" if similar else f"it takes {', '.join(known)}"
        raise InvalidRequestError(f"{where}: {key!r:.60} is unknown; {hint}")


def _is_key(name: str) -> bool:
    return re.fullmatch(GUID_DIGITS, re.sub(r"[\W_]", "", name)) is not None


def chosen_profile(chosen: str | PanelProfile | None = None) -> PanelProfile | None:
    """Return a profile, the one of a name, or the one that SAMPLING_PROFILE names; None for an empty name."""
    if isinstance(chosen, PanelProfile):
        return chosen
    name = os.environ.get(CHOSEN) if chosen is None else chosen
    return read_profile(name) if name else None


def completed(chosen: str | PanelProfile | None, given: dict[str, Any]) -> PanelProfile | None:
    """Complete arguments of a client in place with a profile, if one is chosen, and return it."""
    profile = chosen_profile(chosen)
    if profile is None:
        return None
    # Both sources are compared, although the argument would win: a variable of another panel that is left over
    # in a shell is what makes invites for the wrong one.
    for name, word in (("base_url", "base_url"), ("panel_guid", "panel")):
        variable = f"SAMPLING_{name.upper()}"
        for source, value in ((name, given.get(name)), (variable, os.environ.get(variable))):
            if value:
                profile.must_agree(word, str(text_of(value)), source)
        given[name] = getattr(profile, word)
    if not given.get("api_key"):
        given["api_key"] = profile.key()
        if given["api_key"] is None:
            raise profile.no_key()
    for name in ("max_concurrency", "idle_seconds", *POLICIES):
        if getattr(profile, name) is not None:
            given.setdefault(name, getattr(profile, name))
    given.setdefault("allow_http", profile.allow_http)
    given.setdefault("name", profile.name)
    return profile


def setting(profile: PanelProfile | None, name: str) -> str | None:
    """Return a setting of the environment, or of the profile if the environment has none."""
    return os.environ.get(f"SAMPLING_{name.upper()}") or getattr(profile, name, None)


def proxy_setting(profile: PanelProfile | None) -> Secret | None:
    """Return the proxy of the environment or the profile, as a secret: it may hold a password."""
    return Secret.of(setting(profile, "proxy")) if setting(profile, "proxy") else None
