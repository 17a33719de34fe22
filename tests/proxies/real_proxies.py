"""Real proxies in front of the fault server: nginx and Varnish, as Debian ships them."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

_NGINX = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  underscores_in_headers on;
  {http}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass {backend};
      {location}
    }}
  }}
}}
"""
_VARNISH = """
vcl 4.1;
backend service {{ .host = "127.0.0.1"; .port = "{backend}"; }}
sub vcl_recv {{ return (pass); }}
"""


def needs(program: str) -> str:
    """Return where a program is; skip the test where it is not installed."""
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip(f"{program} is not installed (a Debian package)")
    return found


@contextmanager
def nginx(backend: str, *, location: str = "", http: str = "") -> Iterator[str]:
    """Run nginx in front of a service; gives its address."""
    program, port = needs("nginx"), _free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "nginx.conf"
        config.write_text(
            _NGINX.format(folder=folder, port=port, backend=backend, location=location, http=http)
        )
        with _running([program, "-p", folder, "-c", str(config)], port):
            yield f"http://127.0.0.1:{port}"


@contextmanager
def varnish(backend: str) -> Iterator[str]:
    """Run Varnish, which passes everything on, in front of a service; gives its address."""
    program, port = needs("varnishd"), _free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "pass.vcl"
        config.write_text(_VARNISH.format(backend=backend.rpartition(":")[2]))
        storage = ["-s", "malloc,16m", "-s", "Transient=malloc,16m"]
        command = [program, "-F", "-j", "none", "-n", folder, "-a", f"127.0.0.1:{port}", "-f", str(config)]
        with _running([*command, *storage], port):
            yield f"http://127.0.0.1:{port}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            _wait_for(process, port, log)
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(process: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until and process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    log.seek(0)
    pytest.fail(f"{process.args[0]} did not start: {log.read().decode(errors='replace')}")
