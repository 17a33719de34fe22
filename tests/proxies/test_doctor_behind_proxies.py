"""`sampling-async doctor` behind real proxies."""

from __future__ import annotations

import json

import broken_services
import pytest
import real_proxies
import trustme
from cli_kit import run

from sampling_async.simulator import Simulator


def checks(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return {each["Check"]: each for each in json.loads(run("doctor").stdout)["Checks"]}


@pytest.mark.parametrize(("underscores", "verdict"), [("on", "ok"), ("off", "fail")])
def test_nginx_drops_the_header_unless_it_is_asked_not_to(underscores, verdict, monkeypatch):
    simulator = Simulator(seed=3)
    with simulator.serve() as backend, real_proxies.nginx(backend, underscores=underscores) as base_url:
        found = checks(broken_services.environment(simulator, base_url), monkeypatch)
    assert found["Key"]["Verdict"] == verdict
    assert found["Key"]["Figures"].get("ProbablyDropped", False) == (verdict == "fail")
    assert found["Service"]["Figures"]["Server"].startswith("nginx")


def test_an_nginx_that_admits_other_addresses_only_is_not_taken_for_a_wrong_key(monkeypatch):
    simulator = Simulator(seed=3)
    with simulator.serve() as backend, real_proxies.nginx(backend, location="deny all;") as base_url:
        found = checks(broken_services.environment(simulator, base_url), monkeypatch)
    assert "a page of nginx itself" in found["Key"]["Found"]


@pytest.mark.parametrize("proxy", [real_proxies.squid, real_proxies.tinyproxy])
def test_a_proxy_with_a_wrong_password_is_distinguished_from_one_that_works(proxy, tmp_path, monkeypatch):
    authority, simulator = trustme.CA(), Simulator(seed=3)
    authority.cert_pem.write_to_path(f"{tmp_path}/authority.pem")
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(f"{tmp_path}/server.pem")
    files = {"ssl_certfile": f"{tmp_path}/server.pem", "ssl_keyfile": f"{tmp_path}/server.pem"}
    with broken_services.served(simulator.app, **files) as port, proxy() as way:
        more = {"SAMPLING_CA_FILE": f"{tmp_path}/authority.pem", "SAMPLING_PROXY": way}
        environment = broken_services.environment(simulator, f"https://localhost:{port}", **more)
        works = checks(environment, monkeypatch)
        wrong = {**environment, "SAMPLING_PROXY": way.replace(real_proxies.PASSWORD, "wrong")}
        refused = checks(wrong, monkeypatch)
    assert (works["Proxy"]["Verdict"], works["Key"]["Verdict"]) == ("ok", "ok")
    assert refused["Proxy"]["Verdict"] == "fail"
    assert "check the user and password" in refused["Proxy"]["Found"]
