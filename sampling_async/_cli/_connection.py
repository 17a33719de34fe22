"""Code shared by all commands that call the service: options, the client, and the handling of failures."""

from __future__ import annotations

import errno
import getpass
import os
import sys
import traceback
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import anyio
import typer
from attrs import evolve, frozen

from sampling_async import (
    InvalidRequestError,
    OutagePolicy,
    RetryPolicy,
    SamplingClient,
    SamplingError,
    ServiceError,
    Timeouts,
)
from sampling_async._cli import _rendering as show
from sampling_async._cli._options import given
from sampling_async._cli._signals import INTERRUPTED, release_signals
from sampling_async._cli._tally import FAILED, FAULTY, INCOMPLETE, USAGE, exit_code_of
from sampling_async._contract.extras import install
from sampling_async._log import log_on_stderr
from sampling_async._profiles.file import chosen_profile, read_profiles, setting
from sampling_async._profiles.record import CHOSEN, PanelProfile
from sampling_async._wire.trust import context_of_files

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Generator


T = TypeVar("T")
P = TypeVar("P", Timeouts, RetryPolicy, OutagePolicy)

KEY_VARIABLE: Final = "SAMPLING_API_KEY"
_PROXY_VARIABLE: Final = "SAMPLING_PROXY"
CONNECTION: Final = "Connection"
_option: Final = partial(given, panel=CONNECTION)
_MAX_CONCURRENCY: Final = 8
_IDLE_SECONDS: Final = 4.0


def names_of_profiles(begun: str) -> list[str]:
    """Return the names of profiles that begin so, for the completion of a shell, which shows no error."""
    with suppress(InvalidRequestError):
        return [name for name in read_profiles() if name.startswith(begun)]
    return []


@frozen(kw_only=True)
class ServiceOptions:
    """The options of a command that say how to call the service."""

    profile: str | None = _option(
        "NAME",
        "The panel of the file of profiles to use, in place of --base-url and --panel.",
        envvar=CHOSEN,
        autocompletion=names_of_profiles,
    )
    base_url: str | None = _option("URL", "The address of the service.", envvar="SAMPLING_BASE_URL")
    panel: str | None = _option("GUID", "The PanelGUID.", "--panel", envvar="SAMPLING_PANEL_GUID")
    max_concurrency: int | None = _option(
        "N", f"The maximum of requests at the same time. Default: {_MAX_CONCURRENCY}.", min=1
    )
    timeout: float | None = _option(
        "SECONDS", "Seconds to wait for a response. Default: depends on the endpoint.", min=0.001
    )
    attempts: int | None = _option(
        "N", "The maximum of attempts of a call, where repeating is safe. Default: 3.", min=1
    )
    patience: float | None = _option(
        "SECONDS", "Seconds that bulk invites wait for a service that is away. Default: 600.", min=0.0
    )
    allow_http: bool = _option(
        "", "Allow plain http, which sends the key unencrypted.", "--allow-http", default=False
    )
    proxy: str | None = _option(
        "URL", "An HTTP proxy, such as http://host:3128. Give user and password only in SAMPLING_PROXY."
    )
    ca_file: str | None = _option(
        "FILE", "A PEM file of the only certificate authorities to trust.", envvar="SAMPLING_CA_FILE"
    )
    client_cert: str | None = _option(
        "FILE", "A PEM file with a client certificate and its key.", envvar="SAMPLING_CLIENT_CERT"
    )
    debug: bool = _option("", "Log every attempt on stderr.", "--debug", default=False)

    def call(self, work: Callable[[SamplingClient], Awaitable[T]]) -> T:
        """Run `work` with a client."""
        key = self.key  # before the event loop: it may be typed

        async def run() -> T:
            async with self._client(key) as client:
                return await work(client)

        with log_on_stderr() if self.debug else nullcontext():
            return anyio.run(run)

    def get_ready(self) -> None:
        """Check address and panel and ask for the key, for commands that do other work before they call."""
        self.whereto()
        _ = self.key

    @cached_property
    def chosen(self) -> PanelProfile | None:
        """The profile of the panel, if one is chosen."""
        return chosen_profile(self.profile or "")

    def whereto(self) -> tuple[str, str]:
        """Return the address and the panel, as they were given."""
        if self.chosen is None:
            return (
                _given(self.base_url, "--base-url", "SAMPLING_BASE_URL"),
                _given(self.panel, "--panel", "SAMPLING_PANEL_GUID"),
            )
        if self.base_url:
            self.chosen.must_agree("base_url", self.base_url, "--base-url (SAMPLING_BASE_URL)")
        if self.panel:
            self.chosen.must_agree("panel", self.panel, "--panel (SAMPLING_PANEL_GUID)")
        return self.chosen.base_url, self.chosen.panel

    def _client(self, key: str) -> SamplingClient:
        base_url, panel_guid = self.whereto()
        profile = self.chosen
        idle = None if profile is None else profile.idle_seconds
        return SamplingClient(
            base_url,
            panel_guid=panel_guid,
            api_key=key,
            max_concurrency=self.max_concurrency or (profile and profile.max_concurrency) or _MAX_CONCURRENCY,
            timeouts=_changed((profile and profile.timeouts) or Timeouts(), read=self.timeout),
            retry=_changed((profile and profile.retry) or RetryPolicy(), max_attempts=self.attempts),
            outage=_changed((profile and profile.outage) or OutagePolicy(), patience=self.patience),
            allow_http=self.may_be_http,
            proxy=self.proxy_address(),
            ssl_context=self.tls_context(),
            idle_seconds=_IDLE_SECONDS if idle is None else idle,
            name=None if profile is None else profile.name,
        )

    @property
    def may_be_http(self) -> bool:
        return self.allow_http or (self.chosen is not None and self.chosen.allow_http)

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS settings, or None for the default."""
        return context_of_files(
            self.ca_file or setting(self.chosen, "ca_file"),
            self.client_cert or setting(self.chosen, "client_cert"),
        )

    def proxy_address(self) -> str | None:
        """Return the proxy, which may hold a password, or None."""
        # A user and password are secrets, as the key is, so they are never arguments either.
        if "@" in (self.proxy or ""):
            raise InvalidRequestError(
                f"other users can see --proxy in `ps`; give user and password in {_PROXY_VARIABLE}"
            )
        return self.proxy or setting(self.chosen, "proxy")

    @cached_property
    def key(self) -> str:
        """The key; a person is asked for it once."""
        key = self.known_key()
        if not key and self.chosen is not None:
            raise self.chosen.no_key()
        if not key:
            fail(f"the API key is missing; set the environment variable {KEY_VARIABLE}", USAGE)
        return key

    def known_key(self) -> str:
        """Return the key from its place or a hidden prompt, or ""; an argument would be visible in `ps`."""
        if self.chosen is None:
            return os.environ.get(KEY_VARIABLE, "").strip() or asked_key(None)
        found = self.chosen.key()
        return asked_key(self.chosen) if found is None else found.reveal()


def _changed(policy: P, **options: object) -> P:
    """Return a policy with the options that were given."""
    changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    return evolve(policy, **changes)


def asked_key(profile: PanelProfile | None) -> str:
    """Ask a person for the key, without an echo; return "" if there is nobody, or no answer."""
    if not somebody_is_there():
        return ""
    release_signals()  # so that Ctrl-C works
    with suppress(EOFError):
        where = f"{KEY_VARIABLE} is not set" if profile is None else f"profile {profile.name!r}"
        return getpass.getpass(f"API key (not shown; {where}): ", stream=sys.stderr).strip()
    return ""


def ended_by_failure(work: Callable[[], T]) -> T:
    """Run `work`, and turn a failure into one line on stderr and an exit code."""
    try:
        return work()
    except SamplingError as exc:
        text = str(exc).replace("allow_http=True", "--allow-http")
        if exc.endpoint == "generate_invite" and exc.delivery == "unknown":
            text += " (an invite may exist: asking again may make a second one)"
        if exc.request_id is not None and not show.wanted.errors_as_json:
            text += f" (request ID {exc.request_id})"
        code = exc.result_code if isinstance(exc, ServiceError) else None
        fail(text, exit_code_of(exc), RequestID=exc.request_id, ResultCode=code)
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader has read enough, as with `| head`: no message.
        silence_stdout()
        raise typer.Exit(INCOMPLETE) from None
    except OSError as exc:
        drop_unwritten()
        about = f"{exc.filename}: " if isinstance(exc.filename, str | os.PathLike) else ""
        hint = "; --port takes another port" if exc.errno == errno.EADDRINUSE else ""
        fail(f"{about}{exc.strerror or type(exc).__name__}{hint}", FAILED)
    except Exception as exc:
        # Those of typer and of click within it say what the user did wrong, or how the command has ended.
        if any(each.__module__.split(".")[0] in {"typer", "click"} for each in type(exc).__mro__):
            raise
        if sys.flags.dev_mode or "--debug" in sys.argv:
            traceback.print_exc()
        # Its text may hold anything, such as a row of a panel.
        where = traceback.extract_tb(exc.__traceback__)[-1]
        fail(
            f"a fault of this program: {type(exc).__name__} in {Path(where.filename).name}, line "
            f"{where.lineno}; with the environment variable PYTHONDEVMODE=1 it shows where it comes from",
            FAULTY,
        )


def fail(message: str, code: int, **known: object) -> NoReturn:
    """Print one line on stderr that says what went wrong, and end with an exit code."""
    show.print_error(message, code, **known)
    raise typer.Exit(code) from None


@contextmanager
def needs(what: str) -> Generator[None]:
    """End the program, with a line that says what to install, if a module of the extra `panel` is missing."""
    try:
        yield
    except ModuleNotFoundError as exc:
        fail(f"{what} needs {exc.name}: {install('panel')}", USAGE)


def loaded(command: str, module: str, *needed: str) -> Any:
    """Return the module that does the work of a command: with the extra `panel`, and `needed` modules of it."""
    with needs(command):
        for name in needed:
            import_module(name)
        return import_module(f"sampling_async._cli.{module}")


def drop_unwritten() -> None:
    """Drop what stdout cannot take, as on a full disk. Python would try again at exit, and end with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        silence_stdout()


def silence_stdout() -> None:
    """Redirect stdout to the null device: its reader is gone, but the interpreter flushes it at exit."""
    # On the level of file descriptors, because the interpreter's buffer writes to the descriptor.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def somebody_is_there() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _given(value: str | None, option: str, variable: str) -> str:
    if not value:
        raise InvalidRequestError(f"give {option}, or set the environment variable {variable}")
    return value
