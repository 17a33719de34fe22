"""Profiles: several panels in one file, never with a key, and never mixed with another panel."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import anyio
import keyring
import keyring.backend
import keyring.backends.fail
import keyring.backends.null
import pytest
import typer
from cli_kit import KEY_NAMES, at_keyboard, lines, on_terminal, run

from sampling_async import (
    InvalidRequestError,
    OutagePolicy,
    PanelProfile,
    RetryPolicy,
    SamplingClient,
    Timeouts,
)
from sampling_async._cli import _connection
from sampling_async._profiles import file as profiles
from sampling_async._profiles import record
from sampling_async._wire.address import Secret

GUID = "6f0c2b1e-3f0a-4a52-9b87-8d5a0d7a4c11"
OTHER = "6f0c2b1e-3f0a-4a52-9b87-8d5a0d7a4c12"
KEY = "0b9a4d52-7c43-4a39-8f6e-2d1f5f1c9e77"
US = f'[us]\nbase_url = "https://sampling.example"\npanel = "{GUID}"\nkey_variable = "KEY_US"\n'


class Ring(keyring.backend.KeyringBackend):
    """The library's interface over a dict."""

    priority = 1

    def __init__(self) -> None:
        super().__init__()
        self.kept = {}

    def get_password(self, service, username):
        return self.kept.get((service, username))

    def set_password(self, service, username, password):
        self.kept[service, username] = password

    def delete_password(self, service, username):
        del self.kept[service, username]


@pytest.fixture
def ring():
    before = keyring.get_keyring()
    keyring.set_keyring(Ring())
    yield keyring.get_keyring()
    keyring.set_keyring(before)


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """Return the file of profiles; nothing else is in the environment."""
    for name in (*KEY_NAMES, "SAMPLING_PROXY", "SAMPLING_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "profiles.toml"
    path.write_text(US)
    monkeypatch.setenv("SAMPLING_PROFILES", str(path))
    monkeypatch.setenv("KEY_US", KEY)
    return path


def refusal_of(work, *arguments, **options):
    with pytest.raises(InvalidRequestError) as caught:
        work(*arguments, **options)
    return str(caught.value)


# --- The file ---------------------------------------------------------------------------------------------


def test_a_profile_is_a_table_with_the_names_of_the_clients_options(file, tmp_path):
    file.write_text(
        US + 'proxy = "http://proxy.example:3128"\nca_file = "ca.pem"\nclient_cert = "/etc/mine.pem"\n'
        "max_concurrency = 16\nidle_seconds = 30\nallow_http = true\n"
    )
    profile = profiles.read_profile("us")
    assert (profile.base_url, profile.panel) == ("https://sampling.example", GUID)
    assert (profile.max_concurrency, profile.idle_seconds, profile.allow_http) == (16, 30, True)
    assert profile.proxy == "http://proxy.example:3128"
    assert profile.ca_file == str(tmp_path / "ca.pem")  # beside the file
    assert profile.client_cert == "/etc/mine.pem"
    assert profile.source_of_key == "variable KEY_US"


@pytest.mark.parametrize("name", ["api_key", "API_AUTH_KEY", "key_password", "token", "client_secret"])
def test_a_key_in_the_file_is_refused_with_path_rule_and_way_out_and_is_not_repeated(file, name):
    file.write_text(f'{US}{name} = "{KEY}"\n')
    text = refusal_of(profiles.read_profile, "us")
    assert text.startswith(f"{file}: [us]: {name} is refused")
    assert "holds no key" in text
    assert "key_variable" in text
    assert "profile set-key" in text
    assert KEY not in text


@pytest.mark.parametrize("key", ["ca_file", "client_cert"])
def test_a_nul_is_refused_with_file_and_key(file, key):
    file.write_text(f'{US}{key} = "mine\\u0000.pem"\n')
    assert refusal_of(profiles.read_profile, "us") == (
        f"{file}: [us]: {key} has a NUL (\\u0000) in it; write it without"
    )
    assert run("doctor", "--profile", "us").exit_code == 2


@pytest.mark.parametrize("value", ["9" * 5_000, "[" * 100_000, "{a=" * 100_000])
def test_what_the_parser_cannot_take_is_an_error_of_the_file(file, value):
    file.write_text(f"{US}max_concurrency = {value}")
    text = refusal_of(profiles.read_profiles)
    assert text.startswith(
        f"{file}: a number in it has too many digits, or its brackets are too deep; it takes"
    )
    assert run("profile", "list").exit_code == 2


@pytest.mark.parametrize(
    "line",
    [
        "max_concurrency = 0x1" + "0" * 5_000,
        "idle_seconds = 1" + "0" * 4_000,
        'max_concurrency = "many"',
        "max_concurrency = []",
    ],
)
def test_what_is_no_number_or_cannot_be_printed_is_refused(file, line):
    file.write_text(f"{US}{line}\n")
    assert f"{file}: [us]: {line.split()[0]} must be a" in refusal_of(profiles.read_profile, "us")


def test_a_home_folder_that_nobody_has_is_reported_with_the_place_of_the_path(file, monkeypatch):
    file.write_text(f'{US}ca_file = "~nouser/x.pem"\n')
    assert refusal_of(profiles.read_profile, "us") == (
        f"{file}: [us]: ca_file: ~nouser/x.pem cannot be found: there is no such home folder; write "
        "the whole path without ~"
    )
    monkeypatch.setenv("SAMPLING_PROFILES", "~nouser/x")
    assert refusal_of(profiles.read_profiles).startswith("SAMPLING_PROFILES: ~nouser/x cannot be found")
    assert run("settings", "--profile", "us").exit_code == 2


def test_without_a_home_folder_the_variable_is_named(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(profiles.Path, "home", home)
    monkeypatch.delenv("SAMPLING_PROFILES")
    assert "name the file of profiles in SAMPLING_PROFILES" in refusal_of(profiles.profiles_file)


def test_a_key_above_all_profiles_is_refused_too(file):
    file.write_text(f'api_key = "{KEY}"\n{US}')
    text = refusal_of(profiles.read_profiles)
    assert "api_key is refused: a profile file holds no key" in text
    assert KEY not in text


@pytest.mark.parametrize("text", ['"{}" = 1\n', '[us]\n"{}" = 1\n', '["{}"]\n', '"{{{}}}" = 1\n'])
def test_a_key_in_place_of_a_name_is_refused_and_not_repeated(file, text):
    for key in (KEY, KEY.replace("-", "")):
        file.write_text(text.format(key))
        told = refusal_of(profiles.read_profile, "us")
        assert "a name in it looks like a key: a profile file holds no key" in told
        assert key not in told


def test_a_password_of_a_proxy_is_refused_and_not_repeated(file):
    file.write_text(US + 'proxy = "http://agent:hunter2@proxy.example:3128"\n')
    text = refusal_of(profiles.read_profile, "us")
    assert "proxy is refused with a user and password" in text
    assert "SAMPLING_PROXY" in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (US + "base_urll = 1\n", "'base_urll' is unknown; did you mean base_url?"),
        (US + "colour = 1\n", "'colour' is unknown; it takes base_url, panel,"),
        (US.replace("https", "http"), "base_url must be https"),
        (US.replace(GUID, "panel"), "panel must be a Guid"),
        (US.replace('panel = "', 'ca_file = "'), "panel missing; a profile gives both"),
        (US + "max_concurrency = 0\n", "max_concurrency must be a whole number from 1"),
        (US + "max_concurrency = true\n", "max_concurrency must be a whole number from 1"),
        (US + "idle_seconds = -1\n", "idle_seconds must be a number of seconds, at least 0"),
        (US + 'idle_seconds = "4"\n', "idle_seconds must be a number of seconds"),
        (US + "ca_file = 5\n", "ca_file must be text"),
        (US + 'proxy = "socks5://proxy.example"\n', "socks5 proxies are not supported"),
        (US + "keyring = true\n", "give one of key_variable and keyring = true"),
        (US.replace("key_variable", "ca_file"), "give one of key_variable and keyring = true"),
        ("colour = 1\n" + US, "colour is not in a profile; write it below a line like [us]"),
        (US + "x =\n", "not TOML (at line 5, column 4)"),
        (US.encode() + b'"\xff"', "not UTF-8"),
    ],
)
def test_a_broken_rule_is_named_with_the_file(file, content, words):
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    text = refusal_of(profiles.read_profile, "us")
    assert text.startswith(str(file))
    assert words in text


@pytest.mark.parametrize("key", [KEY, KEY.replace("-", ""), f"b{KEY.replace('-', '').upper()[1:]}"])
def test_a_key_in_place_of_its_variable_is_not_repeated(file, key):
    file.write_text(US.replace("KEY_US", key))
    text = refusal_of(profiles.read_profile, "us")
    assert "must be the name of an environment variable" in text
    assert key not in text


def test_a_byte_order_mark_of_windows_is_no_fault(file):
    file.write_bytes(b"\xef\xbb\xbf" + US.encode())
    assert list(profiles.read_profiles()) == ["us"]


def test_text_that_is_no_toml_is_not_repeated(file):
    file.write_text(f"[us]\napi_key = {KEY}\n")
    text = refusal_of(profiles.read_profiles)
    assert "not TOML (at line 2" in text
    assert KEY not in text


def test_text_that_ends_too_early_is_reported_without_a_line(file):
    file.write_text(US + "[")
    assert "not TOML" in refusal_of(profiles.read_profiles)


def test_a_missing_file_and_a_missing_profile_are_named(file):
    assert f"{file}: there is no profile 'de'; it has: us" in refusal_of(profiles.read_profile, "de")
    file.write_text("")
    assert "it has: none" in refusal_of(profiles.read_profile, "de")
    file.unlink()
    text = refusal_of(profiles.read_profile, "us")
    assert text.startswith(f"{file}: No such file")
    assert "SAMPLING_PROFILES" in text


def test_the_file_lies_where_programs_of_the_platform_keep_their_settings(monkeypatch):
    monkeypatch.delenv("SAMPLING_PROFILES")
    assert profiles.profiles_file() == Path(typer.get_app_dir("sampling-async")) / "profiles.toml"
    home = Path("/home/me")
    folder = profiles._settings_folder
    assert folder("linux", {}, home) == home / ".config"
    assert folder("linux", {"XDG_CONFIG_HOME": "/etc/me"}, home) == Path("/etc/me")
    assert folder("darwin", {}, home) == home / "Library" / "Application Support"
    assert folder("win32", {"APPDATA": "C:/Me"}, home) == Path("C:/Me")
    assert folder("win32", {}, home) == home


def test_a_profile_holds_timeouts_retry_and_outage(file):
    file.write_text(
        US + "[us.timeouts]\nread = 5\n[us.retry]\nmax_attempts = 1\nunprocessed = [429, 503]\n"
        "retry_ambiguous = true\n[us.outage]\npatience = 0\n"
    )
    profile = profiles.read_profile("us")
    assert profile.timeouts == Timeouts(read=5)
    assert profile.retry == RetryPolicy(max_attempts=1, unprocessed={429, 503}, retry_ambiguous=True)
    assert profile.outage == OutagePolicy(patience=0)
    (shown,) = lines(run("profile", "show", "us"))
    assert shown["Timeouts"] == {"read": 5}
    assert shown["Retry"] == {"max_attempts": 1, "retry_ambiguous": True, "unprocessed": [429, 503]}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("[us.timeouts]\nraed = 5", "[us.timeouts]: 'raed' is unknown; did you mean read?"),
        ("[us.retry]\ncolour = 5", "[us.retry]: 'colour' is unknown; it takes max_attempts, base,"),
        ("[us.timeouts]\nread = 0", "[us.timeouts]: Timeouts.read must be a number above 0, not 0"),
        ("[us.outage]\npatience = -1", "[us.outage]: OutagePolicy.patience must be a number, at least 0"),
        ("[us.retry]\nretry_ambiguous = 1", "[us.retry]: RetryPolicy.retry_ambiguous must be True or False"),
        ("[us.retry]\nunprocessed = [200]", "[us.retry]: RetryPolicy.unprocessed must hold HTTP statuses"),
        ("[us.retry]\nunprocessed = 429", "[us.retry]: RetryPolicy.unprocessed must be a set"),
        ("[us.outage.more]\nx = 1", "[us.outage]: 'more' is unknown"),
        (f'[us.timeouts]\nread = "{KEY}"', "[us.timeouts]: read must be a number, true, false, or a list"),
        (f'[us.retry]\nunprocessed = ["{KEY}"]', "[us.retry]: unprocessed must be a number"),
        (f'[us.retry]\n"{KEY}" = 1', "[us.retry]: a name in it looks like a key"),
        ("[us.retry]\napi_key = 1", "[us.retry]: api_key is refused: a profile file holds no key"),
        ("timeouts = 5", "[us.timeouts]: timeouts is a table; write [us.timeouts] above its values"),
    ],
)
def test_what_is_wrong_in_such_a_table_is_named_with_file_table_and_rule(file, table, words):
    file.write_text(US + table)
    text = refusal_of(SamplingClient.from_env, profile="us")
    assert text.startswith(f"{file}: {words}")
    assert KEY not in text


def test_one_bad_profile_blocks_no_other(file, monkeypatch):
    bad = f'[bad]\nbase_url = "https://other.example"\napi_key = "{KEY}"\n["u s"]\n'
    file.write_text(f"{bad}{US}")
    assert SamplingClient.from_env(profile="us")
    assert run("profile", "show", "us").exit_code == 0
    assert "api_key is refused" in refusal_of(SamplingClient.from_env, profile="bad")
    assert "base_url and panel missing" in refusal_of(profiles.read_profile, "u s")
    listed = run("profile", "list")
    assert listed.exit_code == 0
    bad_row, odd_row, good_row = lines(listed)
    assert bad_row["Error"].startswith(f"{file}: [bad]: api_key is refused")
    assert (odd_row["Profile"], good_row["Key"]) == ("u s", "variable KEY_US: set")
    on_terminal(monkeypatch)
    table = run("profile", "list").stdout
    assert "[bad]: api_key is refused" in table
    assert KEY not in table + listed.output
    file.write_text(US.replace("[us]", '["u s"]'))
    assert "letters, digits and -._ only" in refusal_of(profiles.read_profile, "u s")


# --- Profiles that are added --------------------------------------------------------------------------------

ADD = ("profile", "add", "de", "--base-url", "https://sampling.example", "--panel", OTHER)


def test_a_profile_is_added_and_the_rest_of_the_file_stays(file):
    before = f"# mine\n{US}# the end, without a line"
    file.write_text(before)
    file.chmod(0o640)
    added = run(*ADD)
    assert added.exit_code == 0
    assert "export SAMPLING_API_KEY_DE=..." in " ".join(added.stderr.split())
    assert file.read_text() == (
        f'{before}\n\n[de]\nbase_url = "https://sampling.example"\npanel = "{OTHER}"\n'
        'key_variable = "SAMPLING_API_KEY_DE"\n'
    )
    assert file.stat().st_mode & 0o777 == 0o640
    assert profiles.read_profile("de").panel == OTHER


def test_the_first_profile_makes_the_file_for_its_owner_only(tmp_path, monkeypatch):
    path = tmp_path / "new" / "profiles.toml"
    monkeypatch.setenv("SAMPLING_PROFILES", str(path))
    for command in (("list",), ("show", "us")):
        missing = run("profile", *command)
        assert missing.exit_code == 2
        assert "begin with `sampling-async profile add NAME`" in " ".join(missing.stderr.split())
    assert run(*ADD, "--keyring").exit_code == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().startswith("[de]\n")
    assert profiles.read_profile("de").keyring


def test_a_file_without_profiles_says_how_to_begin(file):
    file.write_text("")
    assert "profile add NAME" in run("profile", "show", "us").stderr
    assert "profile add NAME" in run("profile", "list").stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("us", "--base-url", "https://x.example", "--panel", GUID), "there is a profile 'us' already"),
        (("u s", "--base-url", "https://x.example", "--panel", GUID), "letters, digits and -._ only"),
        (("de", "--base-url", "http://x.example", "--panel", GUID), "base_url must be https"),
        (("de", "--base-url", "https://x.example", "--panel", "x"), "panel must be a Guid"),
        (("de", "--panel", GUID), "give --base-url; without a terminal"),
        ((*ADD[2:], "--key-variable", KEY), "must be the name of an environment variable"),
        ((*ADD[2:], "--key-variable", "KEY_DE", "--keyring"), "give one of --keyring and --key-variable"),
    ],
)
def test_what_cannot_be_added_leaves_the_file_as_it_is(file, arguments, words):
    before = file.read_text()
    result = run("profile", "add", *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert KEY not in result.output
    assert file.read_text() == before


def test_a_name_with_a_dot_is_one_name(file):
    assert run("profile", "add", "de.at", *ADD[3:]).exit_code == 0
    assert profiles.read_profile("de.at").key_variable == "SAMPLING_API_KEY_DE_AT"


def test_a_person_is_asked_for_what_is_missing(file, monkeypatch):
    monkeypatch.setattr("sampling_async._cli._profile.somebody_is_there", lambda: True)
    at_keyboard(monkeypatch)
    answers = f"https://sampling.example\n{OTHER}\n\n"
    assert run("profile", "add", "de", stdin=answers).exit_code == 0
    assert profiles.read_profile("de").key_variable == "SAMPLING_API_KEY_DE"


# --- Profiles that are kept elsewhere -----------------------------------------------------------------------


def test_a_client_is_made_from_a_profile_that_the_program_keeps(file, monkeypatch):
    file.unlink()
    read = []
    profile = PanelProfile(
        name="us",
        base_url="https://sampling.example",
        panel=GUID,
        api_key=lambda: read.append(1) or KEY,
        max_concurrency=3,
        timeouts=Timeouts(read=5),
    )
    assert KEY not in repr(profile)
    assert not read
    client = SamplingClient.from_env(profile=profile)
    assert read == [1]
    assert client.snapshot().max_concurrency == 3
    monkeypatch.setenv("SAMPLING_PANEL_GUID", OTHER)
    assert "requests would go to one panel with the key of another" in refusal_of(
        SamplingClient.from_env, profile=profile
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"api_key": KEY}, "api_key must be a function that returns the key"),
        ({"api_key": None}, "give one of key_variable and keyring = true"),
        ({"keyring": True}, "give one of key_variable and keyring = true"),
        ({"name": ""}, "a name of a profile has letters"),
        ({"name": None}, "name must be text"),
        ({"base_url": 5}, "base_url must be text"),
        ({"panel": None}, "panel must be text"),
        ({"panel": "x"}, "panel must be a Guid"),
        ({"keyring": 1}, "keyring must be true or false"),
        ({"retry": Timeouts()}, "retry must be a RetryPolicy"),
    ],
)
def test_such_a_profile_is_checked_as_one_of_the_file(changes, words):
    arguments = {"name": "us", "base_url": "https://x.example", "panel": GUID, "api_key": lambda: KEY}
    text = refusal_of(PanelProfile, **arguments | changes)
    assert words in text
    assert KEY not in text


def test_a_function_without_a_key_is_named():
    profile = PanelProfile(name="us", base_url="https://x.example", panel=GUID, api_key=lambda: "")
    assert refusal_of(SamplingClient.from_env, profile=profile) == (
        "the key of profile 'us' is missing; its function returned nothing"
    )
    assert SamplingClient.from_env(profile=profile, api_key=KEY)


def test_options_of_the_command_line_change_the_policies_of_a_profile(file):
    file.write_text(US + "[us.timeouts]\nread = 5\nconnect = 2\n[us.retry]\nmax_attempts = 7\nbase = 2\n")

    def made(**options):
        client = _connection.ServiceOptions(profile="us", **options)._client(KEY)
        return client._session.timeouts, client._retry_policy, client._outage_policy

    assert made() == (Timeouts(read=5, connect=2), RetryPolicy(max_attempts=7, base=2), OutagePolicy())
    assert made(timeout=9.0, attempts=1, patience=0.0) == (
        Timeouts(read=9, connect=2),
        RetryPolicy(max_attempts=1, base=2),
        OutagePolicy(patience=0),
    )


# --- The client -------------------------------------------------------------------------------------------


def test_a_client_is_made_from_a_profile_named_in_code_or_in_the_environment(monkeypatch):
    assert "sampling.example" in repr(SamplingClient.from_env(profile="us"))
    monkeypatch.setenv("SAMPLING_PROFILE", "us")
    assert "sampling.example" in repr(SamplingClient.from_env())
    assert "SAMPLING_BASE_URL" in refusal_of(SamplingClient.from_env, profile="")  # no profile


def test_the_profile_sets_what_no_argument_sets(file):
    file.write_text(US + "max_concurrency = 3\nidle_seconds = 9\n")
    assert SamplingClient.from_env(profile="us").snapshot().max_concurrency == 3
    assert SamplingClient.from_env(profile="us", max_concurrency=5).snapshot().max_concurrency == 5
    file.write_text(US + "[us.timeouts]\nread = 5\n[us.outage]\npatience = 0\n")
    client = SamplingClient.from_env(profile="us")
    assert client._session.timeouts.read == 5
    assert client._outage_policy.patience == 0
    assert SamplingClient.from_env(profile="us", timeouts=Timeouts())._session.timeouts.read is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('ca_file = "missing.pem"', "missing.pem, which cannot be used"),
        ('client_cert = "missing.pem"', "missing.pem, which cannot be used"),
        ('proxy = "http://proxy.example"', "base_url must be https with this proxy"),
    ],
)
def test_the_profile_sets_the_way_to_the_service(file, line, said):
    file.write_text(US.replace("https://sampling.example", "http://localhost") + f"{line}\n")
    assert said in refusal_of(SamplingClient.from_env, profile="us")


@pytest.mark.parametrize(("name", "other"), [("base_url", "https://other.example"), ("panel_guid", OTHER)])
def test_nothing_is_mixed_from_two_panels(monkeypatch, name, other):
    """Invites cost money: they must not be asked for with the address of one panel and the Guid of another."""
    word = "panel" if name == "panel_guid" else name
    assert f"{name} gives another {word} than profile 'us'" in refusal_of(
        SamplingClient.from_env, profile="us", **{name: other}
    )
    variable = f"SAMPLING_{name.upper()}"
    monkeypatch.setenv(variable, other)
    text = refusal_of(SamplingClient.from_env, profile="us")
    assert f"unset {variable}, or choose no profile (SAMPLING_PROFILE empty)" in text


@pytest.mark.skipif(os.name != "posix", reason="files have no modes")
@pytest.mark.parametrize(
    ("mode", "owner", "said"),
    [
        (0o646, None, "can be changed by others (mode 0646): chmod go-w"),
        (0o664, None, "can be changed by others (mode 0664): chmod go-w"),
        (0o644, 12345, "belongs to another user (uid 12345), who can change it"),
        (0o644, None, None),
    ],
)
def test_a_file_that_others_can_change_is_refused(file, mode, owner, said):
    """Who can change the address in it gets the key."""
    file.chmod(mode)
    if owner is not None:
        if os.geteuid() != 0:
            pytest.skip("only root can give files to others")
        os.chown(file, owner, owner)
    if said is None:
        assert profiles.read_profile("us").panel == GUID
    else:
        assert said in refusal_of(profiles.read_profile, "us")
        assert run("profile", "list").exit_code == 2
    assert stat.S_IMODE(file.stat().st_mode) == mode


def test_the_same_panel_from_two_places_is_no_mixture(monkeypatch):
    monkeypatch.setenv("SAMPLING_BASE_URL", "HTTPS://Sampling.Example:443/")
    monkeypatch.setenv("SAMPLING_PANEL_GUID", GUID.upper())
    assert SamplingClient.from_env(profile="us")


def test_the_key_comes_from_where_the_profile_says_and_from_nowhere_else(monkeypatch):
    monkeypatch.delenv("KEY_US")
    monkeypatch.setenv("SAMPLING_API_KEY", OTHER)
    text = refusal_of(SamplingClient.from_env, profile="us")
    assert text == "the key of profile 'us' is missing; set the environment variable KEY_US"
    assert SamplingClient.from_env(profile="us", api_key=KEY)


def test_the_environments_proxy_counts_over_the_profiles(file, monkeypatch):
    file.write_text(US + 'proxy = "socks5h"\n'.replace("socks5h", "http://proxy.example:3128"))
    profile = profiles.read_profile("us")
    assert profiles.proxy_setting(profile).reveal() == "http://proxy.example:3128"
    monkeypatch.setenv("SAMPLING_PROXY", "http://agent:hunter2@nearer.example")
    assert profiles.proxy_setting(profile).reveal() == "http://agent:hunter2@nearer.example"
    monkeypatch.delenv("SAMPLING_PROXY")
    assert profiles.proxy_setting(None) is None


def test_a_profile_with_plain_http_says_so(file):
    base_url = "http://service.example"
    file.write_text(US.replace("https://sampling.example", base_url) + "allow_http = true\n")
    assert SamplingClient.from_env(profile="us")
    assert "base_url must be https" in refusal_of(SamplingClient.from_env, profile="us", allow_http=False)


# --- The keyring ------------------------------------------------------------------------------------------

RINGED = US.replace('key_variable = "KEY_US"', "keyring = true")


def test_a_key_in_the_keyring_belongs_to_the_profile_and_its_host(file, ring):
    file.write_text(RINGED)
    profile = profiles.read_profile("us")
    assert profile.key() is None
    assert "sampling-async profile set-key us" in refusal_of(SamplingClient.from_env, profile="us")
    profile.set_key(Secret.of(KEY))
    assert ring.kept == {("sampling_async", "us@sampling.example"): KEY}
    assert SamplingClient.from_env(profile="us")
    file.write_text(RINGED.replace("sampling.example", "elsewhere.example"))
    assert profiles.read_profile("us").key() is None
    file.write_text(RINGED)
    assert profile.forget_key()
    assert not profile.forget_key()


def test_what_is_no_key_is_not_stored_and_not_repeated(file, ring):
    file.write_text(RINGED)
    text = refusal_of(profiles.read_profile("us").set_key, Secret.of("hunter2"))
    assert "the key must be a Guid" in text
    assert "hunter2" not in text
    assert not ring.kept


def test_a_system_without_a_keyring_is_given_what_to_do(file, ring):
    file.write_text(RINGED)
    keyring.set_keyring(keyring.backends.fail.Keyring())
    text = refusal_of(SamplingClient.from_env, profile="us")
    assert "cannot be used (NoKeyringError)" in text
    assert "key_variable" in text


@pytest.mark.parametrize("raised", [RuntimeError, ValueError, ModuleNotFoundError, OSError(5, "io")])
def test_a_backend_of_the_keyring_may_raise_anything(file, ring, monkeypatch, raised):
    file.write_text(RINGED)

    def get_password(*_):
        raise raised

    monkeypatch.setattr(ring, "get_password", get_password)
    name = raised.__name__ if isinstance(raised, type) else type(raised).__name__
    text = refusal_of(SamplingClient.from_env, profile="us")
    assert f"cannot be used ({name})" in text
    assert "Key" in lines(run("profile", "list"))[0]


def test_a_backend_that_cannot_be_loaded_is_not_taken_for_a_missing_library(file, monkeypatch):
    file.write_text(RINGED)
    missing = ModuleNotFoundError("no.such", name="no")
    monkeypatch.setattr(record, "import_module", lambda _: (_ for _ in ()).throw(missing))
    assert "cannot be used (ModuleNotFoundError)" in refusal_of(SamplingClient.from_env, profile="us")


def test_blanks_around_a_key_in_the_keyring_do_not_count(file, ring):
    file.write_text(RINGED)
    place = ("sampling_async", "us@sampling.example")
    ring.kept[place] = f" {KEY}\n"
    assert SamplingClient.from_env(profile="us")
    for kept, state in ((f"{KEY}\n", "set"), ("\n", "not set"), ("hunter2", "set, but it is no Guid")):
        ring.kept[place] = kept
        assert lines(run("profile", "list"))[0]["Key"] == f"keyring: {state}"


def test_the_library_is_needed_for_the_keyring_only(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "keyring", None)
    assert SamplingClient.from_env(profile="us")
    file.write_text(RINGED)
    assert 'pip install "sampling-async[keyring]"' in refusal_of(SamplingClient.from_env, profile="us")


# --- The command line -------------------------------------------------------------------------------------


@pytest.fixture
def served_profile(sim, file, monkeypatch):
    """Return a simulator that only the profile knows."""
    base_url = _connection.os.environ["SAMPLING_BASE_URL"]
    for name in KEY_NAMES:
        monkeypatch.delenv(name)
    file.write_text(US.replace("https://sampling.example", base_url).replace(GUID, sim.panel_guid))
    monkeypatch.setenv("KEY_US", sim.api_key)
    return sim


def test_every_command_that_connects_takes_a_profile(served_profile, monkeypatch):
    assert run("settings", "--profile", "us").exit_code == 0
    monkeypatch.setenv("SAMPLING_PROFILE", "us")
    assert run("quotas").exit_code == 0
    assert anyio.run(_settings_of_env)
    none = run("quotas", "--profile", "")
    assert none.exit_code == 2
    assert "SAMPLING_API_KEY" in none.stderr


async def _settings_of_env():
    async with SamplingClient.from_env() as client:
        return await client.get_settings()


def test_an_option_for_another_panel_than_the_profiles_is_refused(served_profile):
    before = len(served_profile.ledger.requests())
    for option, other in (("--panel", OTHER), ("--base-url", "https://other.example")):
        result = run("settings", "--profile", "us", option, other)
        assert result.exit_code == 2
        assert "requests would go to one panel with the key of another" in " ".join(result.stderr.split())
    assert len(served_profile.ledger.requests()) == before


def test_a_missing_key_of_a_profile_is_named_or_requested(served_profile, monkeypatch):
    monkeypatch.delenv("KEY_US")
    result = run("settings", "--profile", "us")
    assert result.exit_code == 2
    assert "set the environment variable KEY_US" in result.stderr
    at_keyboard(monkeypatch)
    monkeypatch.setattr("getpass.getpass", lambda *_, **__: served_profile.api_key)
    assert run("settings", "--profile", "us").exit_code == 0


def test_profiles_are_listed_and_shown_without_keys(file, ring, monkeypatch):
    file.write_text(US + RINGED.replace("[us]", "[de]"))
    listed = run("profile", "list")
    assert [(each["Profile"], each["Key"]) for each in lines(listed)] == [
        ("us", "variable KEY_US: set"),
        ("de", "keyring: not set"),
    ]
    assert KEY not in listed.output
    (shown,) = lines(run("profile", "show", "de"))
    assert shown["BaseURL"] == "https://sampling.example"
    on_terminal(monkeypatch)
    monkeypatch.setenv("SAMPLING_PROFILE", "us")
    monkeypatch.setenv("COLUMNS", "80")
    table = run("profile", "list").stdout
    assert "chosen" in table
    assert "keyring: not set" in run("profile", "show", "de").stdout
    keyring.set_keyring(keyring.backends.fail.Keyring())
    assert "keyring: cannot be used" in run("profile", "show", "de").stdout


def test_a_key_is_stored_from_a_prompt_or_a_pipe_and_removed(file, ring, monkeypatch):
    file.write_text(RINGED)
    stored = run("profile", "set-key", "us", stdin=f"{KEY}\n")
    assert stored.exit_code == 0
    assert KEY not in stored.output
    assert profiles.read_profile("us").key().reveal() == KEY
    assert run("profile", "forget-key", "us").exit_code == 0
    assert run("profile", "forget-key", "us").exit_code == 1
    monkeypatch.setattr("sampling_async._cli._profile.somebody_is_there", lambda: True)
    at_keyboard(monkeypatch)
    monkeypatch.setattr("getpass.getpass", lambda *_, **__: KEY)
    assert run("profile", "set-key", "us").exit_code == 0
    assert run("profile", "set-key", "us", KEY).exit_code == 2  # never an argument


def test_a_key_is_stored_only_for_profiles_that_look_for_it_there(ring):
    result = run("profile", "set-key", "us", stdin=f"{KEY}\n")
    assert result.exit_code == 2
    assert "write keyring = true there" in " ".join(result.stderr.split())
    assert not ring.kept


def test_a_shell_completes_names_of_profiles_and_is_quiet_about_errors(file):
    assert _connection.names_of_profiles("u") == ["us"]
    assert _connection.names_of_profiles("x") == []
    file.unlink()
    assert _connection.names_of_profiles("u") == []


def test_a_keyring_that_keeps_nothing_is_told(file, ring):
    file.write_text(RINGED)
    keyring.set_keyring(keyring.backends.null.Keyring())
    assert "has not kept the key" in refusal_of(profiles.read_profile("us").set_key, Secret.of(KEY))
