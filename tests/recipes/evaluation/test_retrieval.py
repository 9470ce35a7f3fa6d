"""The pairs of an evaluation: as many as were asked for, also where a source holds images that cannot be decoded."""

import io

import numpy as np
import pytest
from PIL import Image

from data.sources.base import Sample
from recipes.evaluation.retrieval import read_pairs


class Samples:
    """A source of one shard."""

    def __init__(self, broken: set[int], count: int = 8) -> None:
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, "PNG")
        images = [b"no image" if i in broken else file.getvalue() for i in range(count)]
        self.samples = [Sample(str(i), image, f"caption {i}") for i, image in enumerate(images)]

    def shards(self):
        return ["0"]

    def read(self, shard):
        return self.samples


def test_images_that_cannot_be_decoded_are_replaced():
    order = np.random.default_rng(0).permutation(8).tolist()
    captions, images, everything = read_pairs(Samples(broken={order[1]}), 3, 0, 8)
    assert captions == [f"caption {i}" for i in sorted((order[0], order[2], order[3]))]
    assert images.shape == (3, 8, 8, 3) and len(everything) == 8
    assert len(read_pairs(Samples(broken={0}), None, 0, 8)[0]) == 7


def test_the_captions_of_images_are_among_all_captions():
    source = Samples(broken=set())
    source.samples[2] = Sample("2", source.samples[2].image, " a cat \ud83d on a mat\n")  # JSON holds such halves
    captions, _, everything = read_pairs(source, None, 0, 8)
    assert captions == everything and captions[2] == "a cat ? on a mat"


@pytest.mark.parametrize(("broken", "number"), [(range(8), 2), (range(8), None), ({0}, 8)])
def test_too_few_usable_images_are_an_error(broken, number):
    with pytest.raises(ValueError, match="--number"):
        read_pairs(Samples(set(broken)), number, 0, 8)
