"""The commands about profiles: what the file has, and keys in the keyring."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, Final

import typer

from sampling_async import InvalidRequestError
from sampling_async._cli import _rendering as show
from sampling_async._cli._connection import asked_key, fail, names_of_profiles, somebody_is_there
from sampling_async._cli._help import Command, Group
from sampling_async._cli._options import AsJSON, argument, takes
from sampling_async._cli._tally import INCOMPLETE
from sampling_async._profiles import CHOSEN, Profile, profiles_file, read_profile, read_profiles
from sampling_async._wire.address import Secret, guid_of

app: Final = typer.Typer(
    cls=Group,
    help=(
        "Settings of several panels in one file, chosen with --profile NAME or SAMPLING_PROFILE. The file is "
        "SAMPLING_PROFILES, or profiles.toml in your folder of settings; it never holds a key."
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Name = Annotated[str, argument("NAME", "A profile.", autocompletion=names_of_profiles)]


@app.command("list", cls=Command)
def list_profiles(*, as_json: AsJSON = False) -> None:
    """List the profiles of the file, and where each one's key is."""
    profiles = read_profiles()
    if show.as_lines(as_json):
        for profile in profiles.values():
            show.emit_json(_row(profile))
        return
    table = show.new_table("Profile", "Service", "Key", "")
    for name, profile in profiles.items():
        chosen = "chosen" if name == os.environ.get(CHOSEN) else ""
        table.add_row(show.plain(name), show.plain(profile.base_url), show.plain(_state(profile)), chosen)
    screen = show.screen()
    screen.print(table, "")
    screen.print(show.plain(f"These profiles are in {profiles_file()}", "dim"), soft_wrap=True)


@app.command("show", cls=Command)
def show_profile(name: Name, *, as_json: AsJSON = False) -> None:
    """Show the settings of a profile, and whether its key is where it says."""
    profile = read_profile(name)
    if show.as_lines(as_json):
        show.emit_json(_row(profile))
    else:
        rows = {label: value for label, value in _row(profile).items() if value is not None}
        show.print_pairs((label, show.plain(str(value))) for label, value in rows.items())


@app.command("set-key", cls=Command)
@takes(quietable=True)
def set_key(name: Name) -> None:
    """Store a profile's key in the keyring of the system, in place of an earlier one.

    You type the key, and it is not shown. Without a terminal, it is
    read from stdin.
    """
    profile = _with_keyring(name)
    profile.set_key(Secret.of(asked_key(profile) if somebody_is_there() else sys.stdin.readline().strip()))
    show.note(f"The keyring has the key of {profile.account}")


@app.command("forget-key", cls=Command)
@takes(quietable=True)
def forget_key(name: Name) -> None:
    """Remove a profile's key from the keyring of the system."""
    profile = _with_keyring(name)
    if not profile.forget_key():
        fail(f"the keyring has no key of {profile.account}", INCOMPLETE)
    show.note(f"The keyring has no key of {profile.account} any more")


def _with_keyring(name: str) -> Profile:
    """Return a profile whose key is in the keyring."""
    profile = read_profile(name)
    if not profile.keyring:
        raise InvalidRequestError(
            f"{profile.path}: the key of [{name}] is in the {profile.source_of_key}; write keyring = true "
            "there in place of api_key_variable"
        )
    return profile


def _row(profile: Profile) -> dict[str, Any]:
    """Return a profile for people and for JSON. The Guid is not secret: the file has it too."""
    return {
        "Profile": profile.name,
        "File": str(profile.path),
        "BaseURL": profile.base_url,
        "PanelGUID": profile.panel_guid,
        "Key": _state(profile),
        "Proxy": profile.proxy,
        "CAFile": profile.ca_file,
        **show.fields_of(profile, "client_cert max_concurrency idle_seconds"),
        "AllowHTTP": profile.allow_http,
    }


def _state(profile: Profile) -> str:
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
