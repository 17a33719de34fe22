"""Real proxies, as packaged by Debian: nginx, Varnish, and the forward proxies squid and tinyproxy."""

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
from wire import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

    import trustme

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
  underscores_in_headers {underscores};
  {http}
  server {{
    listen 127.0.0.1:{port}{tls};
    {server}
    location / {{
      proxy_pass {backend};
      {location}
    }}
  }}
}}
"""
_TLS = """
    ssl_certificate {folder}/server.pem;
    ssl_certificate_key {folder}/server.pem;
    ssl_client_certificate {folder}/authority.pem;
    ssl_verify_client on;
"""
_SQUID = """
http_port 127.0.0.1:{port}
auth_param basic program {folder}/knows
auth_param basic children 1
acl known proxy_auth REQUIRED
http_access allow known
http_access deny all
cache deny all
access_log none
cache_log /dev/null
cache_store_log none
pid_filename none
pinger_enable off
shutdown_lifetime 0 seconds
"""
_KNOWS = """#!/bin/sh
while read -r line; do if [ "$line" = "{user} {password}" ]; then echo OK; else echo ERR; fi; done
"""
_TINYPROXY = """
Listen 127.0.0.1
Port {port}
Timeout 60
MaxClients 200
LogLevel Critical
BasicAuth {user} {password}
"""
USER, PASSWORD = "agent", "hunter2"
_VARNISH = """
vcl 4.1;
backend service {{ .host = "127.0.0.1"; .port = "{backend}"; }}
sub vcl_recv {{ return (pass); }}
"""


def installed(program: str) -> str | None:
    """Return the path of a program, or None."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")


def needs(program: str) -> str:
    """Return the path of a program; skip the test if it is not installed."""
    found = installed(program)
    if found is None:
        pytest.skip(f"{program} is not installed (a Debian package)")
    return found


@contextmanager
def nginx(
    backend: str, *, location: str = "", http: str = "", server: str = "", underscores: str = "on"
) -> Iterator[str]:
    """Run nginx in front of a service; gives its address. By its own default, `underscores` would be off."""
    with tempfile.TemporaryDirectory() as folder:
        values = {"location": location, "http": http, "tls": "", "server": server, "underscores": underscores}
        with _nginx(folder, backend, values) as port:
            yield f"http://127.0.0.1:{port}"


@contextmanager
def nginx_that_asks_who(backend: str, authority: trustme.CA, *, location: str = "") -> Iterator[str]:
    """Run nginx with TLS that requires client certificates of an authority; gives its address."""
    with tempfile.TemporaryDirectory() as folder:
        issued = authority.issue_cert("localhost").private_key_and_cert_chain_pem
        issued.write_to_path(f"{folder}/server.pem")
        authority.cert_pem.write_to_path(f"{folder}/authority.pem")
        server = _TLS.format(folder=folder)
        values = {"location": location, "http": "", "tls": " ssl", "server": server, "underscores": "on"}
        with _nginx(folder, backend, values) as port:
            yield f"https://localhost:{port}"


@contextmanager
def _nginx(folder: str, backend: str, values: dict[str, str]) -> Iterator[int]:
    program, port = needs("nginx"), free_port()
    config = Path(folder) / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, port=port, backend=backend, **values))
    with _running([program, "-p", folder, "-c", str(config)], port):
        yield port


@contextmanager
def squid() -> Iterator[str]:
    """Run squid, which requires credentials; gives its address with them."""
    program, port = needs("squid"), free_port()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # squid drops its privileges before it reads the folder
        knows, config = Path(folder) / "knows", Path(folder) / "squid.conf"
        knows.write_text(_KNOWS.format(user=USER, password=PASSWORD))
        knows.chmod(0o755)
        config.write_text(_SQUID.format(folder=folder, port=port))
        with _running([program, "-N", "-f", str(config)], port):
            yield f"http://{USER}:{PASSWORD}@127.0.0.1:{port}"


@contextmanager
def tinyproxy() -> Iterator[str]:
    """Run tinyproxy, which requires credentials; gives its address with them."""
    program, port = needs("tinyproxy"), free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "tinyproxy.conf"
        config.write_text(_TINYPROXY.format(port=port, user=USER, password=PASSWORD))
        with _running([program, "-d", "-c", str(config)], port):
            yield f"http://{USER}:{PASSWORD}@127.0.0.1:{port}"


@contextmanager
def varnish(backend: str) -> Iterator[str]:
    """Run Varnish without caching in front of a service; gives its address."""
    program, port = needs("varnishd"), free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "pass.vcl"
        config.write_text(_VARNISH.format(backend=backend.rpartition(":")[2]))
        storage = ["-s", "malloc,16m", "-s", "Transient=malloc,16m"]
        command = [program, "-F", "-j", "none", "-n", folder, "-a", f"127.0.0.1:{port}", "-f", str(config)]
        with _running([*command, *storage], port):
            yield f"http://127.0.0.1:{port}"


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
