"""Servers of Google Cloud Storage's and Azure's protocols on this machine, which trial_stores.py starts.

Both are installed apart from the environment, once: gcp-storage-emulator by uv, Azurite by npm. Clients are the ones
that users have, unchanged. Azure's have the address https://ACCOUNT.blob.core.windows.net in them, so they are given a
proxy, which leads every address to Azurite on this machine, and a certificate.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.ranks import free_port

UV = Path(sys.executable).with_name("uv")
GOOGLE = "gcp-storage-emulator==2026.7.19"
AZURE = "azurite@3.35.0"
ACCOUNT, CONTAINER = "drawings", "sets"
HOST = f"{ACCOUNT}.blob.core.windows.net"
PATIENCE = 600  # seconds until a server answers, which may have to be installed first


def why_not_google() -> str | None:
    """What is missing for `google`, in one line; None: nothing."""
    return None if UV.is_file() else f"{UV} is missing, which installs {GOOGLE}: run `make install`"


def why_not_azure() -> str | None:
    """What is missing for `azure`, in one line; None: nothing."""
    found = shutil.which("npx")
    return None if found else f"npx is missing, which installs {AZURE}: install Node.js (Debian: nodejs and npm)"


@contextlib.contextmanager
def google(folder: Path) -> Iterator[dict[str, str]]:
    """Inside, a server of Google Cloud Storage with the bucket `sets`. Gives variables of the environment for it.

    The client asks for a token first, as with a real service account, and gets one from a second server. A proxy
    on this machine refuses what it asks of other addresses.
    """
    folder.mkdir()
    port = free_port()
    words = [UV, "run", "--quiet", "--no-project", "--python", sys.executable, "--with", GOOGLE]
    words += ["gcp-storage-emulator", "--data-dir", folder / "data", "start", "--host", "127.0.0.1", "--port", port]
    tokens = ThreadingHTTPServer(("127.0.0.1", 0), _Token)
    threading.Thread(target=tokens.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{port}"
    account = {
        "type": "service_account",
        "project_id": "here",
        "private_key_id": "1",
        "private_key": _private_key().decode(),
        "client_email": "tests@here.example.com",
        "client_id": "1",
        "token_uri": f"http://127.0.0.1:{tokens.server_port}/token",
    }
    (folder / "account.json").write_text(json.dumps(account))
    try:
        with (
            _running([*words, "--default-bucket", CONTAINER], folder / "log.txt", lambda: _answers(address)),
            _proxy(None) as proxy,
        ):
            yield {
                "STORAGE_EMULATOR_HOST": address,
                "GOOGLE_APPLICATION_CREDENTIALS": str(folder / "account.json"),
                "HTTPS_PROXY": proxy,
            }
    finally:
        tokens.shutdown()
        tokens.server_close()


@contextlib.contextmanager
def azure(folder: Path) -> Iterator[dict[str, str]]:
    """Inside, a server of Azure Blob Storage with the container `sets`. Gives variables of the environment for it."""
    folder.mkdir()
    port, key = free_port(), base64.b64encode(b"key of the tests").decode()
    _write_certificate(folder)
    words = ["npx", "--yes", "--package", AZURE, "azurite-blob", "--silent", "--disableTelemetry"]
    words += ["--location", folder, "--blobHost", "127.0.0.1", "--blobPort", port, "--skipApiVersionCheck"]
    words += ["--cert", folder / "certificate.pem", "--key", folder / "key.pem"]
    own = {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{key}"}
    with _running(words, folder / "log.txt", lambda: _listens(port), own), _proxy(port) as proxy:
        yield {
            "AZURE_ACCOUNT_ACCESS_KEY": key,
            "HTTPS_PROXY": proxy,
            "REQUESTS_CA_BUNDLE": str(folder / "certificate.pem"),
        }


@contextlib.contextmanager
def _proxy(port: int | None) -> Iterator[str]:
    """Inside, a proxy leads the account's host to this port of this machine. Gives its address."""
    proxy = _Proxy(("127.0.0.1", 0), _Tunnel)
    proxy.port = port
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}"
    finally:
        proxy.shutdown()
        proxy.server_close()


@contextlib.contextmanager
def _running(words: list, log: Path, ready: Callable[[], bool], variables: dict[str, str] | None = None):
    """Inside, a process and those that it starts run, and answer."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | (variables or {}),
            cwd=log.parent,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + PATIENCE
        while not ready():
            if process.poll() is not None or time.monotonic() > end:
                said = " ".join(log.read_text(errors="replace").split())[-500:]
                raise RuntimeError(f"{Path(words[0]).name} did not start a server: {said}")
            time.sleep(0.1)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def _answers(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
        return True
    return False


class _Token(BaseHTTPRequestHandler):
    """Gives everybody a token."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"access_token": "token", "expires_in": 3600, "token_type": "Bearer"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


class _Proxy(socketserver.ThreadingTCPServer):
    daemon_threads = True
    port: int | None


class _Tunnel(socketserver.StreamRequestHandler):
    """Answers CONNECT: the account's host leads to the server on this machine, and no other address anywhere."""

    def handle(self) -> None:
        line = self.rfile.readline().split()
        while self.rfile.readline().strip():
            pass
        if self.server.port is None or line[:2] != [b"CONNECT", f"{HOST}:443".encode()]:
            self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            return
        with socket.create_connection(("127.0.0.1", self.server.port)) as there:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=_copy, args=(there, self.connection), daemon=True)
            back.start()
            _copy(self.connection, there)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while block := source.recv(1 << 16):
            target.sendall(block)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _new_key():
    from cryptography.hazmat.primitives.asymmetric import rsa

    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def _pem(key) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _private_key() -> bytes:
    return _pem(_new_key())


def _write_certificate(folder: Path) -> None:
    """key.pem and certificate.pem, which a server signed itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    key, now = _new_key(), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=7))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "key.pem").write_bytes(_pem(key))
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
