"""An S3 server that takes every object and keeps none, for measurements of what uploads.

    python benchmarks/discarding_store.py        # prints its address, and serves until its input ends
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BLOCK = 1 << 20
STARTED = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
COMPLETE = b'<CompleteMultipartUploadResult><ETag>"1"</ETag></CompleteMultipartUploadResult>'
NONE = b"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>"


class Discard(BaseHTTPRequestHandler):
    """Answers boto3's requests for an upload."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:  # whether an object is there
        self.send_response(404)
        self.end_headers()

    def do_GET(self) -> None:
        self._answer(NONE)

    def do_PUT(self) -> None:
        block = memoryview(bytearray(BLOCK))
        if "Content-Length" in self.headers:
            self._discard(int(self.headers["Content-Length"]), block)
        else:  # chunks, the last of which is empty and has a checksum after it
            while size := int(self.rfile.readline().split(b";")[0], 16):
                self._discard(size, block)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
        self._answer(b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(STARTED if "uploads" in self.path else COMPLETE)

    def _discard(self, size: int, block: memoryview) -> None:
        while size:
            size -= self.rfile.readinto(block[: min(size, BLOCK)])

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def discarding_store() -> Iterator[dict[str, str]]:
    """A context with such a server in a process of its own; gives the variables by which clients find it."""
    command, pipe = [sys.executable, str(Path(__file__).resolve())], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        address = server.stdout.readline().strip()
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
        try:
            yield {"S3_ENDPOINT_URL": address, **keys}
        finally:
            server.terminate()


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Discard)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
