"""Loaders of one's own whose numbers of batches and samples are not what a run needs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader, IterableDataset

from data.loading import Loading
from recipes.engines import check_loaders as module
from recipes.engines import parts
from recipes.engines.check_loaders import check_loaders


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class OfLength(Stream):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


class Unknown(Stream):
    def __len__(self):
        raise NotImplementedError


def of(length, batch=4, **options):
    return Loading(DataLoader(OfLength(length), batch_size=batch, **options))


def check(data, val, engine="composer", duration="2ba", fsdp=None, batch=4):
    training = SimpleNamespace(duration=duration, fsdp=fsdp, tensor_parallel=1)
    mine = SimpleNamespace(name="my.data")
    check_loaders(data, {"val": val}, SimpleNamespace(data=mine, evals={"val": mine}, training=training), engine, batch)


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_batches_are_of_the_recipes_size_and_there_are_some(engine):
    """A loader with a size of its own trained with it, and said the recipe's; a validation without a batch was NaN with
    Composer and nothing with Lightning."""
    check(of(8), of(3, batch=2), engine)  # validation may have another size
    whole = Loading(DataLoader(OfLength(8), collate_fn=lambda samples: samples[0]))
    for loading in (whole, Loading(DataLoader(OfLength(8), batch_size=None)), Loading(DataLoader(Stream(), 4))):
        check(loading, of(1), engine)
    for wrong in (of(8, batch=32), of(8, batch=1)):
        with pytest.raises(
            ValueError, match=r"^data: the loader of my.data has batches of (32|1), and training.global_b"
        ):
            check(wrong, of(1), engine)
    for empty in (of(0), of(3, drop_last=True)):
        with pytest.raises(
            ValueError, match=r"^evals.val: the loader of my.data has no batches; give more samples, or"
        ):
            check(of(8), empty, engine)


def test_validation_does_not_take_the_batches_of_training():
    """After each validation, training went on with other samples."""
    one = of(8)
    with pytest.raises(ValueError, match="^evals.val: its loader is that of the training data, whose position each "):
        check(one, replace(one))


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_a_validation_has_a_length(engine):
    """That of a stream without end did not end with Lightning, where nothing said why there was no further batch. With
    Composer it was a traceback about eval_subset_num_batches."""
    for val in (DataLoader(Stream(), 4), DataLoader(Unknown(), 4)):
        with pytest.raises(
            ValueError, match=r"^evals.val: the loader of my.data has no length, which a validation needs; define"
        ):
            check(of(4), Loading(val), engine)


def test_composer_is_given_the_length_by_which_it_counts_epochs():
    stream = Loading(DataLoader(Stream(), 4))
    check(stream, of(4), "lightning", "2ep")
    check(stream, of(4), "composer", "2ba")
    check(stream, of(4), duration="2ep")  # without end, which has a line of its own
    with pytest.raises(ValueError, match=r"^data: the loader of my.data has no length, which Composer needs to count"):
        check(replace(stream, samples=9), of(4), duration="2ep")


def test_ranks_have_equally_many_batches(monkeypatch):
    """Composer left out the batches after the first rank that had no more, in training and in validation, and with
    Lightning ranks were in different epochs."""
    monkeypatch.setattr(module, "world_size", lambda: 2)

    def gathers(other):
        def all_gather_object(found, own):
            found[:] = [own, own | other]

        monkeypatch.setattr(module.dist, "all_gather_object", all_gather_object)

    for engine in ("composer", "lightning"):
        gathers({})
        check(of(8), of(8), engine)
        gathers({"data": 1})
        with pytest.raises(
            ValueError, match="^data: the loader of my.data has 2 batches on the first rank and 1 on rank 1"
        ):
            check(of(8), of(8), engine)
    gathers({"evals.val": 3})
    check(of(8), of(8), "lightning")  # which evaluates each rank's alone, if it has the whole model
    for engine, fsdp in (("composer", None), ("lightning", {})):
        with pytest.raises(
            ValueError, match="^evals.val: the loader of my.data has 2 batches on the first rank and 3 on"
        ):
            check(of(8), of(8), engine, fsdp=fsdp)
    gathers({"evals.val": 0})
    check(of(8), of(8), "lightning")


def test_a_run_checks_its_loaders(quick_recipe, tmp_path, monkeypatch):
    given = []

    def refuse(data, evals, recipe, engine, batch):
        given.extend([data.loader.batch_size, list(evals), engine, batch])
        raise ValueError("refused")

    monkeypatch.setattr(parts, "check_loaders", refuse)
    recipe = quick_recipe(tmp_path, "training={global_batch: 8, microbatch: null, device: cpu}")
    with pytest.raises(ValueError, match="^refused$"):
        parts.build_parts(recipe, parts.Place.of(recipe, 1), "lightning")
    assert given == [8, ["val"], "lightning", 8]
