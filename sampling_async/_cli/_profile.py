"""The commands about profiles: what the file has, and keys in the keyring."""

from __future__ import annotations

import os
import re
import sys
from typing import Any, Final

import typer
from attrs import asdict

from sampling_async import InvalidRequestError, OutagePolicy, RetryPolicy, Timeouts
from sampling_async._cli import _rendering as show
from sampling_async._cli._commands import CommandGroup
from sampling_async._cli._connection import asked_key, fail, names_of_profiles, somebody_is_there
from sampling_async._cli._options import JSON_LINES, argument, flag, option
from sampling_async._cli._tally import INCOMPLETE
from sampling_async._profiles.file import BEGIN, add_profile, profiles_file, read_profile, read_profiles
from sampling_async._profiles.record import CHOSEN, PanelProfile
from sampling_async._wire.address import Secret, guid_of

app: Final = CommandGroup(
    "Settings of several panels in one file, chosen with --profile NAME or SAMPLING_PROFILE. The file is "
    "SAMPLING_PROFILES, or profiles.toml in your folder of settings; it never holds a key."
)

NAME: Final = argument("NAME", "A profile.", autocompletion=names_of_profiles)


@app.takes("list", json=JSON_LINES, csv=True)
def list_profiles() -> None:
    """List the profiles of the file, where each one's key is, and what is wrong in one."""
    profiles = read_profiles()
    if not profiles:
        show.note(f"{profiles_file()} has no profiles; {BEGIN}")
    if show.as_lines():
        for name, profile in profiles.items():
            if isinstance(profile, InvalidRequestError) and show.wanted.csv:
                show.warn(str(profile))
            elif isinstance(profile, InvalidRequestError):
                show.emit_json({"Profile": name, "Error": str(profile)})
            else:
                show.emit_json(_row(profile))
        return
    table, wrong = show.new_table("Profile", "Service", "Key", ""), list[str]()
    for name, profile in profiles.items():
        chosen = "chosen" if name == os.environ.get(CHOSEN) else ""
        service, key = "cannot be used, see below", ""
        if isinstance(profile, InvalidRequestError):
            wrong.append(str(profile))
        else:
            service, key = profile.base_url, _state(profile)
        table.add_row(show.plain(name), show.plain(service), show.plain(key), chosen)
    screen = show.screen()
    screen.print(table, "")
    for reason in wrong:
        screen.print(show.plain(reason), "", soft_wrap=True)
    screen.print(show.plain(f"These profiles are in {profiles_file()}", "dim"), soft_wrap=True)


@app.takes("show", json=JSON_LINES)
def show_profile(name: str = NAME) -> None:
    """Show the settings of a profile, and whether its key is where it says."""
    profile = read_profile(name)
    if show.as_lines():
        show.emit_json(_row(profile))
    else:
        rows = {label: value for label, value in _row(profile).items() if value is not None}
        show.print_pairs((label, show.plain(str(value))) for label, value in rows.items())


@app.takes("add", quiet=True)
def add(
    name: str = argument("NAME", "The name of the new profile, such as us."),
    *,
    base_url: str | None = option("URL", "The address of the service."),
    panel: str | None = option("GUID", "The PanelGUID."),
    key_variable: str | None = option(
        "VARIABLE", "The environment variable that has the key. Default: SAMPLING_API_KEY_ and NAME."
    ),
    keyring: bool = flag("The key is in the keyring of the system.", "--keyring"),
    allow_http: bool = flag("Allow plain http, which sends the key unencrypted.", "--allow-http"),
) -> None:
    """Add a profile to the file, and make the file if there is none.

    On a terminal, the command prompts for what you do not give. The key itself is
    never in the file. What stands there stays as it is.
    """
    if keyring and key_variable is not None:
        raise InvalidRequestError("give one of --keyring and --key-variable, because the key is in one place")
    usual = f"SAMPLING_API_KEY_{re.sub(r'[^A-Z0-9]', '_', name.upper())}"
    profile = PanelProfile(
        name=name,
        base_url=_asked(base_url, "--base-url", "Address of the service"),
        panel=_asked(panel, "--panel", "PanelGUID"),
        key_variable=None
        if keyring
        else _asked(key_variable, "--key-variable", "Environment variable with the key", usual),
        keyring=keyring,
        allow_http=allow_http,
    )
    path = add_profile(profile)
    way = f"sampling-async profile set-key {name}" if keyring else f"export {profile.key_variable}=..."
    show.note(f"Profile {name} is in {path}. Next: {way}, then sampling-async doctor --profile {name}")


def _asked(given: str | None, its_option: str, question: str, default: str | None = None) -> str:
    """Return a value that was given, or ask a person for it; without one, the default."""
    if given is not None:
        return given
    if somebody_is_there():
        answer: str = typer.prompt(question, default=default, err=True)
        return answer.strip()
    if default is None:
        raise InvalidRequestError(f"give {its_option}; without a terminal, nobody can be asked")
    return default


@app.takes("set-key", quiet=True)
def set_key(name: str = NAME) -> None:
    """Store a profile's key in the keyring of the system, in place of an earlier one.

    You type the key, and it is not shown. Without a terminal, it is
    read from stdin.
    """
    profile = _with_keyring(name)
    profile.set_key(Secret.of(asked_key(profile) if somebody_is_there() else sys.stdin.readline().strip()))
    show.note(f"The keyring has the key of {profile.account}")


@app.takes("forget-key", quiet=True)
def forget_key(name: str = NAME) -> None:
    """Remove a profile's key from the keyring of the system."""
    profile = _with_keyring(name)
    if not profile.forget_key():
        fail(f"the keyring has no key of {profile.account}", INCOMPLETE)
    show.note(f"The keyring has no key of {profile.account} any more")


def _with_keyring(name: str) -> PanelProfile:
    """Return a profile whose key is in the keyring."""
    profile = read_profile(name)
    if not profile.keyring:
        raise InvalidRequestError(
            f"{profiles_file()}: the key of [{name}] is in the {profile.source_of_key}; write keyring = true "
            "there in place of key_variable"
        )
    return profile


def _row(profile: PanelProfile) -> dict[str, Any]:
    """Return a profile for people and for JSON. The Guid is not secret: the file has it too."""
    return {
        "Profile": profile.name,
        "File": str(profiles_file()),
        "BaseURL": profile.base_url,
        "PanelGUID": profile.panel,
        "Key": _state(profile),
        "Proxy": profile.proxy,
        "CAFile": profile.ca_file,
        **show.fields_of(profile, "client_cert max_concurrency idle_seconds"),
        "AllowHTTP": profile.allow_http,
        "Timeouts": _given(profile.timeouts),
        "Retry": _given(profile.retry),
        "Outage": _given(profile.outage),
    }


def _given(policy: Timeouts | RetryPolicy | OutagePolicy | None) -> dict[str, Any] | None:
    """Return what a table of the profile sets, without the values that are defaults."""
    if policy is None:
        return None
    default, values = asdict(type(policy)(), recurse=False), asdict(policy, recurse=False)
    return {
        name: sorted(value) if isinstance(value, frozenset) else value
        for name, value in values.items()
        if value != default[name]
    }


def _state(profile: PanelProfile) -> str:
    """Return where the key is, and whether it is there."""
    where = profile.source_of_key
    try:
        key = profile.key()
    except InvalidRequestError:
        return f"{where}: cannot be used"
    if key is None:
        return f"{where}: not set"
    try:
        guid_of(key, "the key")
    except InvalidRequestError:
        return f"{where}: set, but it is no Guid"
    return f"{where}: set"
