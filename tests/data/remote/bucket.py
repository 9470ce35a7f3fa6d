"""A real S3 server on this machine, moto's, in front of which faults can be switched on."""

import threading
from contextlib import contextmanager
from urllib.parse import parse_qs
from urllib.request import Request, urlopen

import pytest

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Bucket:
    """The bucket `sets`, and how its server answers.

    Attributes:
        failing: number of requests that are still answered with status 500.
        expired: whether the credential is refused, as S3 refuses one that has expired.
        refused: end of the names of objects that may not be written; None: all may.
        removes: whether objects may be removed.
        seconds: that each answer takes longer.
        lost: called with the name of each object that arrives, and the number of the part that it is of a large one, or
            None. Whether it is lost on the way; None: all are kept.
        asked: number of requests.
    """

    def __init__(self, app):
        self.app = app
        self.failing, self.expired, self.seconds, self.asked = 0, False, 0.0, 0
        self.refused = self.lost = None
        self.removes = True
        self.lock = threading.Lock()

    def __call__(self, environ, start_response):
        with self.lock:
            self.asked += 1
            fails = self.failing > 0
            self.failing -= fails
        threading.Event().wait(self.seconds)
        if fails:
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        if self.lost is not None and environ["REQUEST_METHOD"] == "PUT":
            (part,) = parse_qs(environ["QUERY_STRING"]).get("partNumber", [None])
            if self.lost(environ["PATH_INFO"].removeprefix("/sets/"), part and int(part)):
                start_response("500 Internal Server Error", [("Content-Length", "0")])
                return [b""]
        writes = environ["REQUEST_METHOD"] in ("PUT", "POST")
        refused = self.refused is not None and writes and environ["PATH_INFO"].endswith(self.refused)
        if refused or (environ["REQUEST_METHOD"] == "DELETE" and not self.removes):
            start_response("403 Forbidden", [("Content-Length", "0")])
            return [b""]
        if self.expired:  # S3 says why in the body, which answers to HEAD requests do not have
            signed = "HTTP_AUTHORIZATION" in environ
            start_response("400 Bad Request" if signed else "403 Forbidden", [("Content-Length", "0")])
            return [b""]
        return self.app(environ, start_response)

    def names(self, prefix):
        """The names of all objects below a prefix, without it."""
        found = self.client.list_objects_v2(Bucket="sets", Prefix=f"{prefix}/").get("Contents", [])
        return [item["Key"].removeprefix(f"{prefix}/") for item in found]

    def unfinished(self, prefix):
        """The names of objects whose uploads were begun and not finished, in order."""
        uploads = self.client.list_multipart_uploads(Bucket="sets", Prefix=prefix).get("Uploads", [])
        return sorted(upload["Key"] for upload in uploads)

    def upload(self, folder, prefix):
        """Put all files below a folder into the bucket."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.client.upload_file(str(path), "sets", f"{prefix}/{path.relative_to(folder).as_posix()}")


@contextmanager
def serve(monkeypatch):
    """Inside, the variables of the environment name a server on this machine; gives its `Bucket`."""
    pytest.importorskip("moto", reason="moto, an S3 server for tests, is not installed: run `make install`")
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_):
            pass

    bucket = Bucket(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, bucket, threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    for name, value in {**CREDENTIALS, "S3_ENDPOINT_URL": address, "AWS_ENDPOINT_URL": address}.items():
        monkeypatch.setenv(name, value)
    try:
        bucket.client = boto3.client("s3", endpoint_url=address)
        # moto keeps the objects of all servers of a process in one place: those of earlier tests would be there.
        urlopen(Request(f"{address}/moto-api/reset", method="POST")).close()
        bucket.client.create_bucket(Bucket="sets")
        yield bucket
    finally:
        server.shutdown()
        server.server_close()
