"""The server's certificate, checked before anything is loaded."""

from __future__ import annotations

import ssl
from pathlib import Path

from sonar_engine.errors import ConfigError
from sonar_engine.server.config import ServerConfig


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """TLS 1.2 or later with the configured files; None without a certificate.

    With `tls_ca_certs` clients must show a certificate that one of these has signed. Raises ConfigError naming the
    file that is missing, unreadable, or does not belong to the others.
    """
    certificate, key, authorities = config.tls_certfile, config.tls_keyfile, config.tls_ca_certs
    if certificate is None:
        for option, file in (("--tls-keyfile", key), ("--tls-ca-certs", authorities)):
            if file is not None:
                raise ConfigError(f"{option} needs a certificate; add --tls-certfile FILE")
        return None
    for option, file in (("--tls-certfile", certificate), ("--tls-keyfile", key), ("--tls-ca-certs", authorities)):
        if file is not None:
            _check_readable(option, file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_pair(context, certificate, key)
    if authorities is not None:
        try:
            context.load_verify_locations(authorities)
        except ssl.SSLError as error:
            raise ConfigError(f"--tls-ca-certs {authorities}: no certificates in PEM ({_reason(error)})") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_readable(option: str, file: Path) -> None:
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {file}: {error.strerror}; give a readable PEM file") from error


def _load_pair(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    key_place = f"--tls-keyfile {key}" if key is not None else f"--tls-certfile {certificate}"

    def refuse() -> str:
        raise ConfigError(f"{key_place}: the private key is encrypted; give one without a passphrase")

    try:
        context.load_cert_chain(certificate, key, refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{key_place}: the key does not belong to the certificate {certificate}") from error
        shown = f"--tls-certfile {certificate}" + ("" if key is None else f", {key_place}")
        hint = "; or give the key with --tls-keyfile" if key is None else ""
        raise ConfigError(f"{shown}: no certificate and private key in PEM ({_reason(error)}){hint}") from error


def _reason(error: ssl.SSLError) -> str:
    return error.reason or str(error)
