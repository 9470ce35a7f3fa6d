"""Image tokens and captions as training batches: what encode.py stored, drawn anew each epoch, the same on a resume."""

import json
import random
import shutil
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from streaming import StreamingDataset

from data.encoded.sets import local_set
from data.loading import Placement
from data.tokenizers.bpe import Vocabulary
from data.tokens import sample_seed, tokens
from tests.fuzzing import other_encoding

NEEDS = {"text_positions": 40, "text_vocabulary": 280, "codes": 32, "side": 4}


@pytest.fixture
def load(token_sets):
    """tokens() over the training set, or over the folders in `sets`."""

    def make(training=True, batch=8, seed=17, requirements=NEEDS, sets=None, **arguments):
        streams = {name: local_set(path=str(path)) for name, path in (sets or {"a": token_sets / "train"}).items()}
        own = {"resolution": 32, "workers": 0, "positions": 40, "vocabulary": str(token_sets / "vocabulary.json")}
        placement = Placement(batch=batch, training=training, seed=seed)
        return tokens(placement, requirements, streams=streams, **{**own, **arguments})

    return make


@pytest.fixture(scope="module")
def stored(token_sets):
    """What encode.py wrote, by caption (each is its own), in stored order."""
    dataset = StreamingDataset(local=str(token_sets / "train"), batch_size=1, shuffle=False)
    return {sample["caption"]: sample for sample in (dataset[i] for i in range(len(dataset)))}


@pytest.fixture(scope="module")
def vocabulary(token_sets):
    return Vocabulary.read(token_sets / "vocabulary.json")


def epoch(loading):
    """(text, image) of every sample of the next epoch."""
    batches = [loading.on_device(batch) for batch in loading.loader]
    return [(t.tolist(), i.tolist()) for batch in batches for t, i in zip(batch["text"], batch["image"], strict=True)]


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_reads_everything_once_in_order(load, stored, vocabulary, workers):
    loading = load(training=False, batch=7, workers=workers, dropout=0.9, caption_dropout=0.9)
    batches = [loading.on_device(batch) for batch in loading.loader]
    assert [len(batch["text"]) for batch in batches] == [7, 7, 7, 7, 7, 5]
    samples = [pair for batch in batches for pair in zip(batch["text"], batch["image"], strict=True)]
    for (text, image), (caption, sample) in zip(samples, stored.items(), strict=True):
        assert text.shape == (40,) and image.shape == (16,) and text.dtype == image.dtype == torch.int64
        numbers = vocabulary._tokenizer.encode(caption).ids
        assert 3 < len(numbers) < 40
        assert text.tolist() == numbers + [-1] * (40 - len(numbers))
        np.testing.assert_array_equal(image, sample["tokens_32"][0])
    assert epoch(loading) == [(text.tolist(), image.tolist()) for text, image in samples]


def test_entries_of_others_stay_as_they_are(load):
    loading = load(training=False, batch=7)
    batch = next(iter(loading.loader))
    mean = torch.full((7,), 3.5)
    found = loading.on_device({**batch, "mean_of_the_batch": mean})
    assert torch.equal(found.pop("mean_of_the_batch"), mean) and set(found) == set(batch)


def test_what_a_loading_says(load, token_sets):
    loading = load()
    assert (loading.samples, loading.resolution, loading.manifest.kind) == (40, 32, "tokens")
    assert loading.null_text is None and loading.vocabulary.path == token_sets / "vocabulary.json"
    assert set(next(iter(loading.loader))) == {"text", "image"}


def test_each_epoch_draws_other_crops_and_merges(load, stored, vocabulary):
    loading = load(dropout=0.3)
    seen, crops, first = defaultdict(set), Counter(), None
    for _ in range(6):
        samples = epoch(loading)
        first = first or samples
        assert len(samples) == 40
        for text, image in samples:
            caption = vocabulary.decode(text)
            seen[caption].add(tuple(text))
            rows = stored[caption]["tokens_32"].tolist()
            assert image in rows
            if rows.count(image) == 1:  # two crops of a picture may have the same tokens
                crops[rows.index(image)] += 1
    assert seen.keys() == stored.keys() and all(len(texts) > 1 for texts in seen.values())
    assert min(crops[crop] for crop in range(3)) > 10  # of about 150
    again, other = epoch(load(dropout=0.3)), epoch(load(dropout=0.3, seed=18))
    assert again == first and sorted(other) != sorted(first)


def test_draws_depend_on_seed_epoch_and_key_alone(load):
    """Not on the order, the batch or the workers."""
    reference = sorted(epoch(load()))
    assert sorted(epoch(load(shuffle=False))) == sorted(epoch(load(batch=5))) == reference
    assert sorted(epoch(load(workers=2, drop_last=False, batch=16))) == reference
    assert sample_seed(17, 0, "a") == 6043044630661706860  # the same on every machine, for ever
    assert len({sample_seed(seed, turn, key) for seed in (1, 11) for turn in (1, 11) for key in ("1", "11")}) == 8


@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_where_it_stopped(load, workers):
    arguments = {"workers": workers, "dropout": 0.3, "caption_dropout": 0.1}
    loading = load(**arguments)
    epoch(loading)
    batches = iter(loading.loader)
    for _ in range(2):
        next(batches)
    state = loading.loader.dataset.state_dict(16, True)  # as Composer does it, at 16 samples of the second epoch
    assert loading.loader.state_dict() == state
    rest = [(t.tolist(), i.tolist()) for b in batches for t, i in zip(b["text"], b["image"], strict=True)]
    third = epoch(loading)

    resumed = load(**arguments)
    resumed.loader.dataset.load_state_dict(json.loads(json.dumps(state)))
    assert epoch(resumed) == rest and len(rest) == 24
    assert epoch(resumed) == third


def test_captions_are_dropped_to_no_token_at_all(load):
    loading = load(caption_dropout=0.25, dropout=0.0)
    empty = [text == [-1] * 40 for _ in range(6) for text, _ in epoch(loading)]
    assert 0.15 < np.mean(empty) < 0.35
    assert all(text == [-1] * 40 for text, _ in epoch(load(caption_dropout=1.0)))


def test_long_captions_are_cut_and_counted(load, stored, vocabulary, capsys):
    loading = load(positions=6, requirements=NEEDS | {"text_positions": 6}, dropout=0.0)
    for text, _ in epoch(loading):
        assert len(text) == 6 and -1 not in text
        assert any(vocabulary.encode(caption)[:6] == text for caption in stored)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("tokens: 1 of 1 captions that this process read were cut to 6 tokens; the last one, of ")
    assert said[1].startswith("tokens: 10 of 10 captions") and len(said) == 2


def test_reading_draws_from_no_global_generator(load):
    random.seed(3), torch.manual_seed(3), np.random.seed(3)
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()
    epoch(load()), epoch(load(training=False))
    assert random.getstate() == states[0] and (torch.get_rng_state() == states[1]).all()
    assert np.random.get_state()[1].tolist() == states[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"resolution": 64}, r"resolution is \[32\], the recipe expects 64; train at a resolution the set has"),
        (
            {"requirements": NEEDS | {"codes": 8192}},
            "codes is 32, the recipe expects 8192; give the transformer the set",
        ),
        ({"requirements": NEEDS | {"side": 8}}, "side is 4, the recipe expects 8; train at a resolution whose grid"),
        ({"positions": 256}, "tokens: text_positions is 256, the recipe expects 40; give data.positions"),
        (
            {"requirements": NEEDS | {"text_vocabulary": 16384}},
            "vocabulary.json: text_vocabulary is 280, the recipe expects 16384",
        ),
        ({"expect": {"crops": 1}}, "crops is 3, the recipe expects 1"),
        ({"expect": {"channels": 4}}, "check of tokens knows no field channels"),
        ({"dropout": 1.5}, "dropout is a share from 0 to 1, got 1.5"),
        ({"caption_dropout": -0.1}, "caption_dropout is a share from 0 to 1, got -0.1"),
        ({"positions": 0}, "positions: 0; give 1 or more"),
    ],
)
def test_what_does_not_fit_is_named(load, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        load(**arguments)
    assert "\n" not in str(error.value)


def test_a_vocabulary_that_is_not_there(load, tmp_path):
    with pytest.raises(FileNotFoundError, match="none.json: no vocabulary; make it with precompute/vocabulary.py"):
        load(vocabulary=str(tmp_path / "none.json"))


def test_sets_of_another_kind_or_dvae_are_refused(load, token_sets, latent_sets, tmp_path):
    with pytest.raises(ValueError, match="kind is latents, the recipe expects tokens; train on a set of this kind"):
        load(sets={"a": latent_sets / "train"})
    shutil.copytree(token_sets / "val", tmp_path / "other")
    values = json.loads((tmp_path / "other" / "manifest.json").read_text())
    values["image_encoder"]["weights_hash"] = "0" * 64
    (tmp_path / "other" / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="other/manifest.json: image_weights is 000.*, the recipe expects"):
        load(sets={"a": token_sets / "train", "b": tmp_path / "other"})


def test_an_index_that_contradicts_the_manifest(load, token_sets, tmp_path):
    shutil.copytree(token_sets / "train", tmp_path / "set")
    crops = json.loads((tmp_path / "set" / "manifest.json").read_text())["crops"]
    for encoding in (f"ndarray:uint16:{16 * crops}", f"ndarray:float16:{crops},16"):
        other_encoding(tmp_path / "set", "tokens_32", encoding)
        with pytest.raises(ValueError, match="tokens has torch.*, the manifest says whole numbers"):
            load(sets={"a": tmp_path / "set"})


@pytest.mark.parametrize("workers", [0, 1])
def test_codes_that_the_dvae_does_not_have(load, token_sets, tmp_path, workers):
    """A GPU would end the process with an assertion that names no sample."""
    shutil.copytree(token_sets / "train", tmp_path / "set")
    values = json.loads((tmp_path / "set" / "manifest.json").read_text())
    values["image_encoder"]["codes"] = 2
    (tmp_path / "set" / "manifest.json").write_text(json.dumps(values))
    loading = load(sets={"a": tmp_path / "set"}, requirements={**NEEDS, "codes": 2}, workers=workers)
    with pytest.raises(ValueError, match="^tokens: .* has codes from .*, its dVAE has 2 codes from 0; encode the set"):
        epoch(loading)


def test_latents_refuse_a_set_of_tokens(token_sets):
    from data.latents import latents

    streams = {"a": local_set(path=str(token_sets / "train"))}
    with pytest.raises(ValueError, match="kind is tokens, the recipe expects latents; train on a set of this kind"):
        latents(Placement(batch=8, training=True), {"channels": 4}, streams=streams, resolution=32)
