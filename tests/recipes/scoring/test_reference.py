"""The reference of an evaluation: what is drawn of it, and its features."""

import io

import numpy as np
import pytest
from PIL import Image

from data.sources.base import Sample
from recipes.scoring import reference
from recipes.scoring.reference import blurred, captions_of, decoded, read_reference, reference_features


def picture(number):
    """A PNG with an edge, of whose left side all values are the number."""
    image = Image.new("RGB", (8, 8), (200, 200, 200))
    image.paste((number, number, number), (0, 0, 4, 8))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


class Source:
    """Two shards, of which one has 2 and the other 3 samples of every 5."""

    def __init__(self, count):
        self.samples = [Sample(str(i), picture(i), f" caption {i}\n") for i in range(count)]

    def shards(self):
        return ["0", "1"]

    def read(self, shard):
        middle = len(self.samples) * 2 // 5
        return self.samples[:middle] if shard == "0" else self.samples[middle:]


def test_samples_and_captions_are_drawn_by_the_seed_without_replacement_in_stored_order():
    source = Source(20)
    assert read_reference(source, None, 0) == read_reference(source, 20, 5) == source.samples
    keys = [[int(sample.key) for sample in read_reference(source, 8, seed)] for seed in (3, 3, 4)]
    assert keys[0] == keys[1] != keys[2] and all(key == sorted(set(key)) and len(key) == 8 for key in keys)
    everything = [f"caption {i}" for i in range(20)]
    assert captions_of(source.samples, None, 0) == captions_of(source.samples, 20, 5) == everything
    drawn = [[everything.index(caption) for caption in captions_of(source.samples, 8, seed)] for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2] and all(key == sorted(set(key)) and len(key) == 8 for key in drawn)
    assert drawn[0] != keys[0]  # the captions are not those of the pictures that were drawn


def test_lone_surrogates_of_json_and_of_names_in_archives():
    source = Source(3)
    source.samples[1] = Sample("caf\udce9", picture(1), "a cat \ud83d on a mat")
    samples = read_reference(source, None, 0)
    assert captions_of(samples, None, 0) == ["caption 0", "a cat ? on a mat", "caption 2"]  # as a set is encoded
    assert reference.content(samples) != reference.content(read_reference(Source(3), None, 0))
    assert captions_of(read_reference(source, None, 0, pictures=False), None, 0) == captions_of(samples, None, 0)


def test_more_than_there_are():
    with pytest.raises(ValueError, match=r"^reference.images: 6 wanted, and the source has 5; give at most as many"):
        read_reference(Source(5), 6, 0)
    with pytest.raises(ValueError, match="^reference.source: empty; name pictures with captions"):
        read_reference(Source(0), None, 0)
    with pytest.raises(ValueError, match=r"^images: 6 wanted, and the reference has 5 captions; give at most as many"):
        captions_of(Source(5).samples, 6, 0)


def test_each_picture_that_decodes_is_there_once(monkeypatch, capsys):
    monkeypatch.setattr(reference, "BATCH", 2)
    samples = Source(7).samples
    for broken in (2, 3, 5):  # a whole batch, and one of another
        samples[broken] = Sample(str(broken), b"no picture", "a caption")
    parts = list(decoded(samples, 8))
    assert [part[:, 0, 0, 0].tolist() for part in parts] == [[0, 1], [4], [6]]
    assert {(part.shape[1:], part.dtype) for part in parts} == {((8, 8, 3), np.dtype(np.uint8))}
    assert "reference: 3 of 7 pictures do not decode and are left out" in capsys.readouterr().out


class Extractor:
    """The pictures themselves as features. Counts the pictures that it has seen."""

    def __init__(self, hash="one"):
        self.hash, self.seen = hash, 0

    def __call__(self, pictures):
        self.seen += len(pictures)
        return {"features": pictures.reshape(len(pictures), -1).astype(np.float32)}


def test_features_are_kept_for_each_blur_and_all_that_they_depend_on(monkeypatch, tmp_path):
    monkeypatch.setattr(reference, "BATCH", 2)
    samples, extractor = Source(5).samples, Extractor()
    found = reference_features(samples, 8, [0, 1], extractor, tmp_path)
    pictures = np.concatenate(list(decoded(samples, 8)))
    for radius in (0, 1):
        assert (found[radius] == blurred(pictures, radius).reshape(5, -1)).all()
    assert (found[0] != found[1]).any() and extractor.seen == 10
    again = reference_features(samples, 8, [1, 2, 0], extractor, tmp_path)
    assert extractor.seen == 15 and all((again[radius] == found[radius]).all() for radius in found)
    other = Extractor("two")
    changed = [Sample("0", samples[0].image, "another caption"), *samples[1:]]
    redrawn = [Sample("0", samples[0].image[:-1] + b"x", samples[0].caption), *samples[1:]]  # as large as before
    for arguments in (*[(part, 8, [0], other) for part in (samples, changed, redrawn)], (samples, 4, [0], other)):
        before = other.seen
        reference_features(*arguments, tmp_path)
        assert other.seen == before + 5


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-3], lambda data: data + b"\0"])
def test_damaged_features_are_one_line(damage, tmp_path):
    arguments = Source(3).samples, 8, [0], Extractor(), tmp_path
    reference_features(*arguments)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=rf"^{file}: not readable as an array of NumPy .*; delete it, and start"):
        reference_features(*arguments)
