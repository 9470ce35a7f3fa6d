"""From tars to a resumed run by way of Google Cloud Storage and of Azure: `make test-stores` runs it.

Each store is a server on this machine, gcp-storage-emulator and Azurite, with the clients that users have. They are
installed apart from the environment, so this is not part of `make test`; tests/recipes/test_bucket.py does the same
with S3 there.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from data.encoded.sets import remote_set
from data.latents import latents
from data.loading import Placement
from data.remote.stores import open_store
from data.sources.tars import TarSource
from precompute.output.upload import MARKER, Copy
from recipes.config.components import COMPONENTS
from recipes.config.recipe import to_yaml
from recipes.config.values import Component
from recipes.engines.checkpoints.bucket import Bucket
from recipes.engines.checkpoints.fetched import fetch_newest
from recipes.training.checkpoint_names import newest_of_all
from tests.ranks import ROOT, launch
from tests.recipes import stores_here
from tests.recipes.engines.lightning.test_checkpoints import same
from tests.recipes.test_bucket_killed import final

SHARDS = 9  # of the set; the cache has room for fewer
BIG = 70 << 20  # bytes of a file that is uploaded in several requests to either store
EMA = "algorithms.scheduled_ema={name: scheduled_ema, decay: 0.9, start: 2ba}"
RUN = ["data.resolution=16", "training.duration=8ba", "evals.val=null", EMA]
STORING = Path(__file__).with_name("storing.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=["google", "azure"])
def store(request, tmp_path_factory):
    """The address of an empty bucket. Variables of the environment lead clients to it."""
    reason = getattr(stores_here, f"why_not_{request.param}")()
    if reason is not None:
        pytest.fail(reason, pytrace=False)
    folder = tmp_path_factory.mktemp("server") / request.param
    with pytest.MonkeyPatch.context() as patch, getattr(stores_here, request.param)(folder) as variables:
        for name, value in variables.items():
            patch.setenv(name, value)
        address = f"gs://{stores_here.CONTAINER}"
        if request.param == "azure":
            address = f"azure://{stores_here.HOST}/{stores_here.CONTAINER}"
            open_store(address)._objects.create_container()
        yield address


def names_in(address):
    return set(open_store(address).names())


def killed(word, number, *program, **variables):
    """Runs a program that is killed before its NUMBER-th request with a word; see storing.py."""
    words = [sys.executable, STORING, word, number, *program]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(
        [str(word) for word in words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == -signal.SIGKILL, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def encoded(store, drawings, latent_sets, tmp_path_factory) -> Path:
    """The set that two ranks have encoded, one of which was killed between two files; also at STORE/latents/train."""
    from precompute.encode import main

    out = tmp_path_factory.mktemp("encoded")
    urls = f"{drawings}/train/{{00000..00003}}.tar"
    if store.startswith("gs://"):
        for path in (drawings / "train").glob("*.tar"):
            open_store(f"{store}/tars").upload(path, path.name)
        urls = f"{store}/tars/{{00000..00003}}.tar"
    values = yaml.safe_load((latent_sets.parent / "encode.yaml").read_text())
    values |= {"out": str(out / "set"), "size_limit": "6kb", "resolutions": [16], "upload": f"{store}/latents"}
    values["sources"] = {"train": {"name": "tars", "urls": urls}}
    (out / "encode.yaml").write_text(yaml.safe_dump(values))

    killed("latents/train/shards", 5, "precompute/encode.py", out / "encode.yaml", RANK="1", WORLD_SIZE="2")
    before = names_in(f"{store}/latents/train")
    assert len(before) == 4 and "manifest.json" not in before
    for rank in ("1", "0"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", rank)
            patch.setenv("WORLD_SIZE", "2")
            assert "manifest.json" not in names_in(f"{store}/latents/train")
            main([str(out / "encode.yaml")])
    return out / "set" / "train"


def test_ranks_upload_what_they_finish(store, encoded, tmp_path):
    files = [path for path in encoded.rglob("*") if path.is_file() and path.name != MARKER]
    names = {path.relative_to(encoded).as_posix(): path for path in files}
    copy = open_store(f"{store}/latents/train")
    assert set(copy.names()) == set(names)
    assert sum(name.endswith(".mds") for name in names) >= SHARDS
    for name, path in names.items():
        copy.download(name, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == path.read_bytes(), name


@pytest.fixture(scope="module")
def whole(latent_sets, encoded, quick_recipe, tmp_path_factory):
    """The final checkpoint of a run that reads the set from the disk, and checkpoints there."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = quick_recipe(folder, *RUN, f"data.streams.train.path={encoded}", "checkpoints.every=3ba")
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    done = launch(1, STORING, "none", 0, "recipes/train.py", folder / "recipe.yaml")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return final(folder)


def differing(one, other):
    """Which parts of two checkpoints are not the same, bit by bit."""
    return {name for name in one.keys() | other.keys() if not same(one.get(name), other.get(name))}


@pytest.fixture(scope="module")
def resumed(store, encoded, quick_recipe, tmp_path_factory):
    """The address of a run's checkpoints, and its folder. The run read the set from the store, with too small a cache.

    It was killed between its second checkpoint and the name of it, and went on in an empty folder to its end.
    """
    out = tmp_path_factory.mktemp("runs")
    shards = list(encoded.rglob("*.mds"))
    largest = max(path.stat().st_size for path in shards)
    limit = 4 * largest + (encoded / "index.json").stat().st_size
    copies = f"checkpoints={{every: 3ba, keep: 2, autoresume: true, bucket: '{store}/run'}}"
    recipe = quick_recipe(out / "none", *RUN, copies, f"data.cache_limit={limit}", "data.predownload=8")

    def words(name):
        arguments = {"url": f"{store}/latents/train", "cache": str(out / name / "cache")}
        stream = Component("stream", "remote", arguments, COMPONENTS["stream"]["remote"], "data.streams.train")
        recipe.data.args["streams"] = {"train": stream}
        (out / f"{name}.yaml").write_text(to_yaml(recipe))
        return "recipes/train.py", out / f"{name}.yaml", f"output={out / name}"

    done = launch(1, STORING, "latest.json", 2, *words("first"))
    assert done.returncode == -signal.SIGKILL, done.stdout[-2000:] + done.stderr[-4000:]
    assert names_in(f"{store}/run") == {"latest.json", "ep0-ba3-rank0.pt", "ep1-ba6-rank0.pt"}
    assert json.loads(open_store(f"{store}/run").read("latest.json"))["checkpoint"] == "ep0-ba3-rank0.pt"

    done = launch(1, STORING, "none", 0, *words("second"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "fetches ep0-ba3-rank0.pt" in done.stdout
    for name in ("first", "second"):
        cached = sum(path.stat().st_size for path in (out / name / "cache").rglob("*.mds"))
        assert 0 < cached <= limit + 2 * largest < sum(path.stat().st_size for path in shards)
    return f"{store}/run", out / "second"


def test_a_killed_run_goes_on_elsewhere_with_the_same_bits(resumed, whole):
    address, folder = resumed
    assert not differing(final(folder), whole)
    assert names_in(address) == {"latest.json", "ep1-ba6-rank0.pt", "ep1-ba8-rank0.pt"}


def test_a_checkpoint_is_loaded_from_its_address(resumed, encoded, whole, quick_recipe, tmp_path):
    """Under Composer, which then has the same bits, too. See below for Lightning."""
    changes = [f"data.streams.train.path={encoded}", f"checkpoints.load_path={resumed[0]}/ep1-ba6-rank0.pt"]
    (tmp_path / "recipe.yaml").write_text(to_yaml(quick_recipe(tmp_path / "run", *RUN, *changes)))
    done = launch(1, STORING, "none", 0, "recipes/train.py", tmp_path / "recipe.yaml")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert not differing(final(tmp_path / "run"), whole)
    for _ in range(2):  # two ranks; the second start goes on from the run's own checkpoint, and is at its end
        words = ("recipes/train.py", tmp_path / "recipe.yaml", f"output={tmp_path}/two", "checkpoints.autoresume=true")
        done = launch(2, STORING, "none", 0, *words)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "already trained to 8ba" in done.stdout


def test_lightning_goes_on_from_the_bucket(store, encoded, quick_recipe, tmp_path):
    """Checkpoints of the engine lightning are copied, found in an empty folder, and loaded from an address."""
    from recipes.engines.lightning.trainer import build_trainer

    def recipe(name, *changes):
        return quick_recipe(tmp_path / name, *RUN, f"data.streams.train.path={encoded}", *changes)

    copies = f"checkpoints={{every: 3ba, keep: 2, autoresume: true, bucket: '{store}/lightning'}}"
    training = build_trainer(recipe("first", copies, "training.duration=6ba"))
    training.fit()
    training.close()  # which waits for the last copy
    assert names_in(f"{store}/lightning") == {"latest.json", "ep0-ba3.ckpt", "ep1-ba6.ckpt"}
    assert build_trainer(recipe("second", copies)).run.counts.batch == 6
    loaded = build_trainer(recipe("third", f"checkpoints.load_path={store}/lightning/ep0-ba3.ckpt"))
    assert loaded.run.counts.batch == 3


def test_a_run_that_is_killed_within_a_file_leaves_the_checkpoint_before(store, tmp_path):
    """And a folder of a sharded checkpoint is copied as one; those before it are removed."""
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for batch, size in ((2, 100), (4, BIG)):
        (checkpoints / f"ep0-ba{batch}.ckpt").write_bytes(bytes([batch]) * size)
    copies = Bucket(f"{store}/killed")
    copies.push(checkpoints / "ep0-ba2.ckpt", "latest", keep=2, record={})
    (tmp_path / "push.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path\n"
        "from recipes.engines.checkpoints.bucket import Bucket\n"
        f"Bucket({copies.address!r}).push(Path({str(checkpoints / 'ep0-ba4.ckpt')!r}), 'latest', keep=1, record={{}})\n"
    )
    killed("ep0-ba4.ckpt", 2, tmp_path / "push.py")
    assert names_in(copies.address) == {"latest.json", "ep0-ba2.ckpt"}
    fetch_newest(copies, tmp_path / "again")
    assert newest_of_all(tmp_path / "again" / "checkpoints").read_bytes() == bytes([2]) * 100

    copies.push(checkpoints / "ep0-ba4.ckpt", "latest", keep=1, record={})
    assert names_in(copies.address) == {"latest.json", "ep0-ba4.ckpt"}
    fetch_newest(copies, tmp_path / "again")
    assert newest_of_all(tmp_path / "again" / "checkpoints").read_bytes() == bytes([4]) * BIG
    folder = checkpoints / "ep0-ba6"
    folder.mkdir()
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (folder / name).write_text(f"{name} of 6")
    copies.push(folder, "latest", keep=1, record={})
    assert names_in(copies.address) == {"latest.json", *(f"ep0-ba6/{path.name}" for path in folder.iterdir())}
    fetch_newest(copies, tmp_path / "again")
    newest = newest_of_all(tmp_path / "again" / "checkpoints")
    assert newest.name == "ep0-ba6" and (newest / "__1_0.distcp").read_text() == "__1_0.distcp of 6"


def read(address, cache):
    """The number of samples of a set in the store."""
    stream = remote_set(url=address, cache=str(cache), download_retry=1)
    return sum(len(batch["seed"]) for batch in open_set(stream).loader)


def open_set(stream):
    return latents(Placement(8, training=True), {}, streams={"train": stream}, resolution=16)


def test_what_is_not_there_is_one_line(store, encoded, tmp_path):
    assert read(f"{store}/latents/train", tmp_path / "cache") == 40
    with pytest.raises(ValueError, match=r"none/manifest.json: cannot be fetched .*see whether the address") as error:
        read(f"{store}/none", tmp_path / "none")
    assert "\n" not in str(error.value)
    nowhere = store.replace(f"/{stores_here.CONTAINER}", "/nowhere")
    with pytest.raises(ValueError, match=r"nowhere/run/latest.json: cannot be read") as error:
        fetch_newest(Bucket(f"{nowhere}/run"), tmp_path / "run")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"ep0-ba1.ckpt: cannot be fetched .no such object"):
        Bucket(f"{store}/run").fetch("ep0-ba1.ckpt", tmp_path / "a")
    (tmp_path / "shard.mds").write_text("a shard")
    with pytest.raises(ValueError, match=r"nowhere/train/a cannot be written .*start the job again") as error:
        Copy(tmp_path, f"{nowhere}/train").add(tmp_path, "a", ["shard.mds"])
    assert "\n" not in str(error.value)
    if store.startswith("gs://"):
        source = TarSource(urls=f"{store}/tars/00007.tar")
        with pytest.raises((FileNotFoundError, ValueError), match="00007.tar") as error:
            list(source.read(source.shards()[0]))
        assert "\n" not in str(error.value)


def test_a_credential_that_is_refused_is_one_line(store, encoded, tmp_path, monkeypatch):
    if store.startswith("gs://"):
        pytest.skip("gcp-storage-emulator takes every credential")
    monkeypatch.setenv("AZURE_ACCOUNT_ACCESS_KEY", "b3RoZXI=")
    with pytest.raises(ValueError, match=r"manifest.json: cannot be fetched .*see whether the address") as error:
        read(f"{store}/latents/train", tmp_path / "cache")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"latest.json: cannot be read .*the credential has expired") as error:
        fetch_newest(Bucket(f"{store}/run"), tmp_path / "run")
    assert "\n" not in str(error.value)
