"""Workers ask a store on connections of their own. moto's server closes a connection after each answer; S3 keeps it."""

import http.server
import threading
from collections import defaultdict

import pytest
from streaming import MDSWriter, StreamingDataLoader

from data.encoded.fetching import FetchingDataset, WholeStream
from data.encoded.shared_names import own_names
from tests.data.remote.bucket import CREDENTIALS

SAMPLES = 60


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A folder whose files are the objects of buckets, and the names that each connection was asked for."""
    folder, asked = tmp_path / "store", defaultdict(set)

    class Server(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            file = folder / self.path.split("?")[0].lstrip("/")
            asked[self.client_address].add(file.name)
            content = file.read_bytes()
            self.send_response(200)
            for name, value in (("Content-Length", len(content)), ("ETag", '"0"')):
                self.send_header(name, value)
            self.send_header("Last-Modified", "Tue, 01 Dec 2020 00:00:00 GMT")
            self.end_headers()
            self.wfile.write(content if self.command == "GET" else b"")

        do_HEAD = do_GET

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.daemon_threads = True  # connections stay open
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {**CREDENTIALS, "S3_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}.items():
        monkeypatch.setenv(name, value)
    yield folder, asked
    server.shutdown()
    server.server_close()


def test_no_worker_asks_on_the_connection_of_its_parent(store, tmp_path):
    """Each would read answers to the requests of others, and keep one shard under the name of another."""
    folder, asked = store
    columns = {"number": "int", "filler": "bytes"}
    with MDSWriter(out=str(folder / "bucket" / "set"), columns=columns, size_limit=1500) as writer:
        for number in range(SAMPLES):
            writer.write({"number": number, "filler": bytes(300)})
    with own_names():
        stream = WholeStream(local=str(tmp_path / "cache"), remote="s3://bucket/set", download_timeout=5)
        dataset = FetchingDataset(streams=[stream], batch_size=4)
    (parents,) = asked  # the index was fetched, and the connection is kept
    loader = StreamingDataLoader(dataset, batch_size=4, num_workers=3)
    found = [number for batch in loader for number in batch["number"].tolist()]
    assert asked[parents] == {"index.json"} and len(asked) > 3
    assert sorted(found) == list(range(SAMPLES))
    for file in (tmp_path / "cache").glob("*.mds"):
        assert file.read_bytes() == (folder / "bucket" / "set" / file.name).read_bytes()
