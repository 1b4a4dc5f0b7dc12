"""Pages of other origins, and HTTPS."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError
from server_harness import CHAT, HELLO, server_process, serving
from sonar_engine.errors import ConfigError
from sonar_engine.server.config import ServerConfig
from sonar_engine.server.tls import tls_context

PAGE = "https://chat.example.org"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl program is not installed")


async def test_a_page_of_an_allowed_origin_asks_first_without_a_key_and_then_reads_answers_and_errors() -> None:
    config = ServerConfig(cors_origins=(PAGE,), api_keys=("key",))
    async with serving(server=config) as served:
        asked = await served.http.options(CHAT, headers={"Origin": PAGE, **PREFLIGHT})
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert "POST" in asked.headers["access-control-allow-methods"]
        for key, status in (("key", 200), ("wrong", 401)):
            headers = {"Origin": PAGE, "Authorization": f"Bearer {key}"}
            body = {"messages": HELLO, "max_tokens": 3, "stream": True}
            answer = await served.http.post(CHAT, json=body, headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        other = await served.http.options(CHAT, headers={"Origin": "https://other.example.org", **PREFLIGHT})
        assert "access-control-allow-origin" not in other.headers


async def test_without_the_option_no_page_of_another_origin_is_answered_and_with_a_star_every_one() -> None:
    async with serving() as served:
        answer = await served.http.get("/v1/models", headers={"Origin": PAGE})
        assert "access-control-allow-origin" not in answer.headers
    async with serving(server=ServerConfig(cors_origins=("*",))) as served:
        answer = await served.http.get("/v1/models", headers={"Origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("origin", ["chat.example.org", "https://chat.example.org/path", ""])
def test_an_origin_is_a_scheme_and_a_host(origin: str) -> None:
    with pytest.raises(ValidationError):
        ServerConfig(cors_origins=(origin,))


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@needs_openssl
def test_https_with_client_certificates(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "server")
    client, client_key = make_certificate(tmp_path, "client")
    options = {"tls_certfile": certificate, "tls_keyfile": key, "tls_ca_certs": client}
    with server_process(**options) as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=certificate)
        with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
            httpx.get(f"{server.url}/v1/models", verify=trusting)
        trusting.load_cert_chain(client, client_key)
        assert httpx.get(f"{server.url}/v1/models", verify=trusting).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/v1/models")


@needs_openssl
def test_files_that_cannot_serve_are_named_at_the_start(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "one")
    _, other = make_certificate(tmp_path, "two")
    missing, text = tmp_path / "missing.pem", tmp_path / "text.pem"
    text.write_text("no certificate", encoding="utf-8")
    faults = [
        ({"tls_certfile": missing}, "missing.pem"),
        ({"tls_certfile": certificate, "tls_keyfile": missing}, "tls-keyfile"),
        ({"tls_certfile": certificate, "tls_keyfile": other}, "does not belong"),
        ({"tls_certfile": certificate}, "tls-keyfile"),
        ({"tls_certfile": text, "tls_keyfile": key}, "PEM"),
        ({"tls_certfile": certificate, "tls_keyfile": key, "tls_ca_certs": text}, "tls-ca-certs"),
        ({"tls_keyfile": key}, "tls-certfile"),
    ]
    for fields, words in faults:
        with pytest.raises(ConfigError, match=words):
            tls_context(ServerConfig(**fields))
    assert tls_context(ServerConfig()) is None
    assert tls_context(ServerConfig(tls_certfile=certificate, tls_keyfile=key)) is not None
