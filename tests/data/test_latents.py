"""Encoded sets as training batches: what encode.py stored, drawn anew each time, in an order that resumes exactly."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from streaming import StreamingDataset

from data.encoded.dataset import key_seed
from data.encoded.sets import EncodedSet, local_set, remote_set
from data.latents import LatentTransform, latents
from data.loading import Placement
from data.random_numbers import seeds_of
from tests.fuzzing import other_encoding

NEEDS = {"channels": 4, "text_width": 16}


@pytest.fixture
def load(latent_sets):
    """latents() over the training set, or over the folders in `sets`."""

    def make(training=True, batch=8, seed=17, requirements=NEEDS, sets=None, streams=None, **arguments):
        if streams is None:
            streams = {name: local_set(path=str(path)) for name, path in (sets or {"a": latent_sets / "train"}).items()}
        arguments = {"resolution": 16, "workers": 0, **arguments}
        return latents(Placement(batch=batch, training=training, seed=seed), requirements, streams=streams, **arguments)

    return make


@pytest.fixture(scope="module")
def stored(latent_sets):
    """What encode.py wrote, by the seed that training makes of the key, in stored order."""
    dataset = StreamingDataset(local=str(latent_sets / "train"), batch_size=1, shuffle=False)
    return {key_seed(sample["key"]): sample for sample in (dataset[i] for i in range(len(dataset)))}


def seeds(loading):
    return [int(seed) for batch in loading.loader for seed in batch["seed"]]


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_reads_everything_once_in_order_at_its_mean(load, stored, workers):
    loading = load(training=False, batch=7, workers=workers, caption_dropout=0.9, flip=0.9, shuffle_algo="py2s")
    batches = list(loading.loader)
    assert [len(batch["seed"]) for batch in batches] == [7, 7, 7, 7, 7, 5]
    assert [int(seed) for batch in batches for seed in batch["seed"]] == list(stored)
    state = torch.get_rng_state()
    for batch in map(loading.on_device, batches):
        assert set(batch) == {"latents", "text", "seed", "weight"} and (batch["weight"] == 1).all()
        assert batch["latents"].dtype == batch["text"].dtype == torch.float32
        for i, seed in enumerate(batch["seed"].tolist()):
            np.testing.assert_array_equal(batch["latents"][i], stored[seed]["mean_16"].astype(np.float32))
            np.testing.assert_array_equal(batch["text"][i], stored[seed]["text"].astype(np.float32))
    assert (torch.get_rng_state() == state).all()
    assert seeds(loading) == list(stored)  # and again at the next validation
    part = load(training=False, workers=workers, epoch_size=11)
    assert seeds(part) == seeds(part) and len(set(seeds(part))) == 11


def test_what_a_loading_says(load, latent_sets):
    loading = load(resolution=32)
    assert (loading.samples, loading.resolution, loading.manifest.samples) == (40, 32, 40)
    assert loading.null_text.dtype == torch.float16
    np.testing.assert_array_equal(loading.null_text, np.load(latent_sets / "train" / "null_text.npy"))
    assert next(iter(loading.loader))["mean"].shape == (8, 4, 16, 16)


def test_a_null_caption_of_another_shape_than_the_texts(load, latent_sets, tmp_path):
    """Training would end in a traceback when the first caption is dropped."""
    shutil.copytree(latent_sets / "train", tmp_path / "set")
    np.save(tmp_path / "set" / "null_text.npy", np.zeros((3, 3), np.float16))
    with pytest.raises(ValueError, match=r"null_text.npy: not readable .*expected \d+ x \d+ numbers.*copy it again"):
        load(sets={"a": tmp_path / "set"})


@pytest.mark.parametrize(
    ("column", "encoding", "what"),
    [
        ("mean_32", "ndarray:float16:4,8,32", r"mean has torch.float16 \(4, 8, 32\)"),
        ("std_32", "ndarray:float16:1024", r"std has torch.float16 \(1024,\)"),
        ("mean_32", "ndarray:int16:4,16,16", r"mean has torch.int16 \(4, 16, 16\)"),
        ("text", "ndarray:float16:16,12", r"text has torch.float16 \(16, 12\)"),
    ],
)
def test_an_index_that_contradicts_the_manifest(load, latent_sets, tmp_path, column, encoding, what):
    """Training would end in a traceback, or go on with values that mean something else."""
    shutil.copytree(latent_sets / "train", tmp_path / "set")
    other_encoding(tmp_path / "set", column, encoding)
    with pytest.raises(ValueError, match=f"{what}, the manifest says floating-point numbers .*; copy the set again"):
        load(resolution=32, sets={"a": tmp_path / "set"})


def test_training_goes_through_the_set_in_another_order_each_epoch(load, stored):
    loading = load()
    first, second = seeds(loading), seeds(loading)
    assert sorted(first) == sorted(second) == sorted(stored)
    assert first != second and first != list(stored) and second != list(stored)
    assert seeds(load()) == first and seeds(load(seed=18)) != first
    assert seeds(load(shuffle=False)) == list(stored)
    part = load(epoch_size=16)
    assert set(seeds(part)) != set(seeds(part))  # or the others would never be read


def test_the_last_batch_of_an_epoch_may_be_left_out(load):
    assert len(seeds(load(batch=16))) == 32
    assert len(seeds(load(batch=16, drop_last=False))) == 40


def test_iterating_leaves_the_noise_as_it_is(load):
    loading, evaluation = load(), load(training=False)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    list(loading.loader), list(evaluation.loader)
    assert (torch.get_rng_state() == state).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_where_it_stopped(load, workers):
    loading = load(workers=workers)
    first = seeds(loading)
    batches = iter(loading.loader)
    seen = [int(seed) for _ in range(2) for seed in next(batches)["seed"]]
    state = loading.loader.dataset.state_dict(16, True)  # as Composer does it, at 16 samples of the second epoch
    assert loading.loader.state_dict() == state
    rest = [int(seed) for batch in batches for seed in batch["seed"]]
    third = seeds(loading)
    assert sorted(seen + rest) == sorted(first) and len(rest) == 24

    resumed = load(workers=workers)
    resumed.loader.dataset.load_state_dict(json.loads(json.dumps(state)))
    assert seeds(resumed) == rest
    assert seeds(resumed) == third


def transform(count=4000, **changes):
    """A transform's output for the same sample many times: latents (N, 1, 2, 2), text (N, 1, 2)."""
    arguments = {"caption_dropout": 0.0, "sample_posterior": True, "flip": 0.0} | changes
    null = torch.tensor([[9.0, -9.0]], dtype=torch.float16)
    batch = {
        "mean": torch.tensor([[[1.0, 2.0], [3.0, -4.0]]], dtype=torch.float16).repeat(count, 1, 1, 1),
        "std": torch.tensor([[[0.5, 2.0], [0.0, 1.0]]], dtype=torch.float16).repeat(count, 1, 1, 1),
        "text": torch.tensor([[0.25, 0.5]], dtype=torch.float16).repeat(count, 1, 1),
        "seed": torch.arange(count),
    }
    torch.manual_seed(0)
    return LatentTransform(null, **arguments)(batch)


def test_the_posterior_is_sampled():
    drawn = transform()["latents"]
    torch.testing.assert_close(drawn.mean(0)[0], torch.tensor([[1.0, 2.0], [3.0, -4.0]]), rtol=0, atol=0.1)
    torch.testing.assert_close(drawn.std(0)[0], torch.tensor([[0.5, 2.0], [0.0, 1.0]]), rtol=0.05, atol=0)
    correlation = torch.corrcoef(drawn[:, 0].reshape(-1, 4)[:, [0, 1, 3]].T)
    assert (correlation - torch.eye(3)).abs().max() < 0.06  # each number by itself
    plain = transform(sample_posterior=False)["latents"]
    assert (plain == plain[:1]).all() and plain[0].tolist() == [[[1.0, 2.0], [3.0, -4.0]]]


def test_captions_are_dropped_to_the_null_caption():
    text = transform(caption_dropout=0.1)["text"][:, 0]
    dropped = text[:, 0] == 9
    assert text[dropped].unique(dim=0).tolist() == [[9.0, -9.0]]
    assert text[~dropped].unique(dim=0).tolist() == [[0.25, 0.5]]
    assert 0.08 < dropped.float().mean() < 0.12
    assert (transform()["text"] == torch.tensor([[0.25, 0.5]])).all()
    assert (transform(count=50, caption_dropout=1.0)["text"] == torch.tensor([[9.0, -9.0]])).all()


def test_latents_are_mirrored():
    made = transform(flip=0.25, sample_posterior=False)["latents"][:, 0]
    mirrored = made[:, 0, 0] == 2
    assert made[mirrored].unique(dim=0).tolist() == [[[2.0, 1.0], [-4.0, 3.0]]]
    assert made[~mirrored].unique(dim=0).tolist() == [[[1.0, 2.0], [3.0, -4.0]]]
    assert 0.22 < mirrored.float().mean() < 0.28


def test_draws_follow_the_generator(load, stored):
    loading = load(caption_dropout=0.5, flip=0.5)
    batch = next(iter(loading.loader))

    def drawn(seed):
        torch.manual_seed(seed)
        return loading.on_device(batch)

    one, again, other = drawn(1), drawn(1), drawn(2)
    assert (one["latents"] == again["latents"]).all() and (one["text"] == again["text"]).all()
    assert (one["latents"] != other["latents"]).any() and (one["seed"] == other["seed"]).all()
    null = loading.null_text.float()
    for text, seed in zip(one["text"], one["seed"].tolist(), strict=True):
        own = torch.tensor(stored[seed]["text"].astype(np.float32))
        assert (text == null).all() or (text == own).all()


def test_draws_may_belong_to_samples(load):
    """Then a sample's do not depend on the batch that it is in, nor on the generator."""
    loading = load(caption_dropout=0.5, flip=0.5)
    batch = next(iter(loading.loader))
    batch["draws"] = seeds_of(batch["seed"], seed=1, batch=2)
    whole = loading.on_device(batch)
    parts = [loading.on_device({name: tensor[rows] for name, tensor in batch.items()}) for rows in ([0], [2, 1])]
    for part, rows in zip(parts, ([0], [2, 1]), strict=True):
        for name in ("latents", "text", "seed", "draws"):
            torch.testing.assert_close(part[name], whole[name][rows], rtol=1e-5, atol=1e-6)
    assert 0 < (whole["text"] == loading.null_text.float()).flatten(1).all(1).float().mean() < 1


def test_streams_mix_by_their_proportions(latent_sets, load, stored):
    streams = {
        "many": local_set(path=str(latent_sets / "train"), proportion=0.25),
        "few": local_set(path=str(latent_sets / "val"), proportion=0.75),
    }
    loading = load(streams=streams, epoch_size=80)
    assert loading.samples == 80
    for _ in range(2):
        found = seeds(loading)
        assert len(found) == 80 and sum(seed in stored for seed in found) == 20
    repeated = load(streams={"twice": local_set(path=str(latent_sets / "val"), repeat=2.0)}, batch=4)
    counts = np.unique(seeds(repeated), return_counts=True)[1]
    assert counts.tolist() == [2] * 6 and repeated.samples == 12


def test_a_stream_of_which_nothing_would_be_read_is_refused(latent_sets, load):
    few = local_set(path=str(latent_sets / "val"), repeat=0.1)
    with pytest.raises(ValueError, match=r"^data: .*/val: none of its samples would ever be read, as its part "):
        load(streams={"many": local_set(path=str(latent_sets / "train")), "few": few})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"resolution": 64}, r"resolution is \[16, 32\], the recipe expects 64; train at a resolution the set has"),
        ({"requirements": NEEDS | {"channels": 16}}, "channels is 4, the recipe expects 16"),
        ({"requirements": NEEDS | {"text_width": 1024}}, "text_width is 16, the recipe expects 1024"),
        ({"expect": {"scaling_factor": 0.18215}}, "scaling_factor is 0.5, the recipe expects 0.18215; the latents are"),
        ({"expect": {"text_length": 77}}, "text_length is 12, the recipe expects 77"),
        ({"expect": {"text_lenght": 12}}, "knows no field text_lenght: did you mean text_length"),
        ({"streams": {}}, "streams is empty; name at least one encoded set"),
        (
            {"streams": {"a": EncodedSet("sets/a", None, {}), "b": EncodedSet("sets/a/", None, {})}},
            "latents: streams.a and streams.b have the same folder, sets/a/; give each set once",
        ),
        (
            {"streams": {"a": EncodedSet("", None, {"repeat": 2.0})}, "epoch_size": 9},
            "latents: epoch_size and streams.a.repeat contradict each other; give proportions",
        ),
        ({"caption_dropout": 1.5}, "caption_dropout is a share from 0 to 1, got 1.5"),
        ({"flip": -0.1}, "flip is a share from 0 to 1, got -0.1"),
        ({"shuffle_block": 1}, "latents: shuffle_block: 1; give 2 or more"),
    ],
)
def test_what_does_not_fit_is_named(load, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        load(**arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("encoder", "name", "value", "field"),
    [
        ("image_encoder", "weights_hash", "0" * 64, "image_weights"),
        ("image_encoder", "scaling_factor", 0.13, "scaling_factor"),
        ("image_encoder", "shift_factor", 0.1, "shift_factor"),
        ("text_encoder", "weights_hash", "0" * 64, "text_weights"),
        ("text_encoder", "layer", "last", "text_layer"),
        ("text_encoder", "tokenizer", "another", "tokenizer"),
    ],
)
def test_streams_of_different_encoders_do_not_mix(load, latent_sets, tmp_path, encoder, name, value, field):
    """Nor do those that were normalised in other ways, or of other layers."""
    other = tmp_path / "other"
    shutil.copytree(latent_sets / "val", other)
    values = json.loads((other / "manifest.json").read_text())
    values[encoder][name] = value
    (other / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"other/manifest.json: {field} is {value}, the recipe expects .*; .*encode"):
        load(sets={"a": latent_sets / "train", "b": other})


def test_sets_of_an_encoder_of_ones_own_with_other_arguments_are_told(load, latent_sets, tmp_path, capsys):
    """They have equal weights, and were mixed without a word. Places may differ, and so may the precision."""
    own = {"a": {"path": "here"}, "b": {"path": "there", "precision": "fp16"}, "c": {"scale": 2}}
    for name, arguments in own.items():
        shutil.copytree(latent_sets / "val", tmp_path / name)
        values = json.loads((tmp_path / name / "manifest.json").read_text())
        values["text_encoder"]["component"] = {"name": "my-package.text"} | arguments
        (tmp_path / name / "manifest.json").write_text(json.dumps(values))
    load(sets={"a": tmp_path / "a", "b": tmp_path / "b"})
    assert not capsys.readouterr().out
    load(sets={"a": tmp_path / "a", "c": tmp_path / "c"})
    assert "equal weights and other arguments: text_encoder.scale is 2 and not given; if" in capsys.readouterr().out


def test_what_the_model_needs_may_be_expected_as_well(load):
    load(expect={"channels": 4, "resolution": 16, "side": 8, "scaling_factor": 0.5})


def test_a_set_that_is_not_there_or_not_finished(load, latent_sets, tmp_path):
    with pytest.raises(FileNotFoundError, match="manifest.json"):
        load(sets={"a": tmp_path / "none"})
    shutil.copytree(latent_sets / "val", tmp_path / "part", ignore=shutil.ignore_patterns("null_text.npy"))
    with pytest.raises(FileNotFoundError, match="null_text.npy: not there; write the set first"):
        load(sets={"a": tmp_path / "part"})


def remote(latent_sets, tmp_path, **options):
    return remote_set(url=str(latent_sets / "train"), cache=str(tmp_path / "cache"), **options)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_remote_set_is_fetched_as_it_is_read(load, latent_sets, stored, tmp_path, workers):
    """A folder stands for the object store: the library's downloader copies from it."""
    loading = load(streams={"a": remote(latent_sets, tmp_path)}, training=False, workers=workers)
    cache = tmp_path / "cache"
    files = {file.name for file in cache.iterdir() if file.is_file() and not file.name.startswith(".lock-")}
    assert files == {"index.json", "manifest.json", "null_text.npy"}
    assert not list(cache.rglob("*.mds"))
    for batch in map(loading.on_device, loading.loader):
        for latent, seed in zip(batch["latents"], batch["seed"].tolist(), strict=True):
            np.testing.assert_array_equal(latent, stored[seed]["mean_16"].astype(np.float32))
    assert len(list(cache.rglob("*.mds"))) == 4
    assert (loading.null_text == load().null_text).all()


def test_ranks_fetch_at_the_same_moment(latent_sets, tmp_path):
    encoded = remote(latent_sets, tmp_path)
    with ThreadPoolExecutor(16) as pool:
        manifests = list(pool.map(lambda _: encoded.manifest(), range(48)))
        nulls = list(pool.map(lambda _: encoded.null_text(manifests[0].text_shape), range(48)))
    assert all(manifest == manifests[0] for manifest in manifests) and all((n == nulls[0]).all() for n in nulls)
    assert {file.name for file in (tmp_path / "cache").iterdir()} == {"manifest.json", "null_text.npy"}


def test_a_cache_of_another_set_is_an_error(latent_sets, tmp_path):
    remote(latent_sets, tmp_path).manifest()
    other = EncodedSet(str(tmp_path / "cache"), str(latent_sets / "val"), {})
    with pytest.raises(ValueError, match="cache/manifest.json is not the one at .*val: the cache is of another set"):
        other.manifest()


def test_a_remote_set_that_is_not_there(tmp_path):
    encoded = remote_set(url=str(tmp_path / "none"), cache=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="none/manifest.json: cannot be fetched .*No such file"):
        encoded.manifest()


def test_seeds_of_keys():
    assert key_seed("00000_0001") == key_seed("00000_0001") != key_seed("00000_0002")
    found = [key_seed(str(i)) for i in range(1000)]
    assert len(set(found)) == 1000 and min(found) >= 0 and max(found) < 2**63
    assert key_seed("a") == 1702698405120146464  # the same on every machine, for ever
