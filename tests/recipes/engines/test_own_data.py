"""Loaders of one's own, by the interface of `data.loading.Loading` alone, in both engines."""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from data.loading import Loading
from recipes.config.values import Component
from recipes.engines import check_loaders
from recipes.engines.check_loaders import check_loader
from recipes.engines.composer.data import data_spec
from recipes.engines.parts import Place, build_parts
from recipes.training.callback import Callback

SAMPLES, BATCH = 24, 8


class Loader(DataLoader):
    """Epochs of samples with an index, in batches of a sampler; it ends an epoch when it is asked for one more."""

    def __init__(self, sample):
        self.epoch = self.done = 0
        samples = [sample | {"number": torch.tensor(number)} for number in range(SAMPLES)]
        super().__init__(samples, batch_sampler=self.order(), generator=torch.Generator())

    def order(self):
        loader = self

        class Order:
            def __len__(self):
                return SAMPLES // BATCH

            def __iter__(self):
                yield from expected(loader.epoch)[loader.done :]

        return Order()

    def __iter__(self):
        for batch in super().__iter__():
            self.done += 1
            yield batch
        self.epoch, self.done = self.epoch + 1, 0

    def state_dict(self, ahead=0):
        return {"epoch": self.epoch, "done": self.done - ahead}

    def load_state_dict(self, state):
        self.epoch, self.done = state["epoch"], state["done"]


def expected(epoch):
    """The numbers of the samples of each batch."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
    return [numbers.tolist() for numbers in order.split(BATCH)]


class Numbers(Callback):
    def __init__(self):
        self.found = []

    def batch_start(self, run):
        self.found.append((run.clock.epoch, run.batch["number"].tolist()))


@pytest.mark.parametrize("durations", [("5ba", "6ba", "8ba"), ("1ep", "2ep")])  # of 3 batches
@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_a_loader_of_ones_own_goes_on_in_its_order(quick_recipe, tmp_path, engine, durations):
    """With Composer it went on from the beginning of its data, and each epoch was counted twice."""
    numbers = Numbers()

    def change(parts):
        batch = next(iter(parts.data.loader))
        parts.end_workers()
        sample = {name: tensor[0] for name, tensor in batch.items()}
        parts.data = replace(parts.data, loader=Loader(sample), samples=SAMPLES)
        val = DataLoader([sample] * 4, batch_sampler=[[0, 1], [2, 3]], generator=torch.Generator())
        parts.evals = {"val": replace(parts.data, loader=val)}
        parts.callbacks["numbers"] = numbers

    train = importlib.import_module(f"recipes.engines.{engine}.trainer")
    for duration in durations:
        settings = f"training={{engine: {engine}, global_batch: {BATCH}, microbatch: null, duration: {duration}}}"
        recipe = quick_recipe(tmp_path, settings, "checkpoints={every: 1ep, autoresume: true}")
        training = train.build_trainer(recipe, change=change)
        training.fit()
        training.close()
    total = 8 if "8ba" in durations else 6
    assert numbers.found == [(number // 3, expected(number // 3)[number % 3]) for number in range(total)]


class Counts(Loader):
    def state_dict(self, ahead=0):
        return {"epoch": self.epoch, "done": np.int64(self.done - ahead)}


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_a_position_that_no_run_could_load_ends_the_run_at_its_first_checkpoint(quick_recipe, tmp_path, engine):
    def change(parts):
        sample = {name: tensor[0] for name, tensor in next(iter(parts.data.loader)).items()}
        parts.end_workers()
        parts.data = replace(parts.data, loader=Counts(sample), samples=SAMPLES)

    settings = f"training={{engine: {engine}, global_batch: {BATCH}, microbatch: null, duration: 2ba}}"
    train = importlib.import_module(f"recipes.engines.{engine}.trainer")
    training = train.build_trainer(
        quick_recipe(tmp_path, settings, "evals={val: null}", "checkpoints.every=1ba"), change=change
    )
    with pytest.raises(
        ValueError, match="^data: the loader: state_dict returns 'done' with a value that is not loaded"
    ):
        training.fit()
    training.close()
    assert not [*tmp_path.glob("checkpoints/*ba*")]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class Positioned(IterableDataset):
    """With methods that others call without arguments."""

    def __iter__(self):
        return iter([{"x": torch.zeros(2)}])

    def state_dict(self):
        return {"of": "data set"}

    def load_state_dict(self, state):
        raise AssertionError("not Composer's")


class PositionedLoader(DataLoader):
    def state_dict(self, ahead=0):
        return {"of": "loader"}

    def load_state_dict(self, state):
        self.loaded = state


class DistributedBatches(DistributedSampler):
    def __iter__(self):
        yield from ([index] for index in super().__iter__())


def test_composer_takes_the_position_of_a_data_set_only_if_it_gives_it_to_composer(monkeypatch):
    """Composer gives it two arguments: it was a TypeError when the first checkpoint was due."""
    loader = PositionedLoader(Positioned())
    dataset = data_spec(Loading(loader), batch_in_epoch=lambda: 0).dataloader.dataset
    assert dataset.state_dict(3, True) == {"of": "loader"}
    recipe = SimpleNamespace(
        data=SimpleNamespace(name="my.data"), checkpoints=SimpleNamespace(save=True, load_path=None)
    )
    check_loader(Loading(loader), recipe, "composer")
    with pytest.raises(ValueError, match=r"^data: state_dict of Positioned \(my.data\) does not take num_samples and"):
        check_loader(Loading(DataLoader(Positioned())), recipe, "composer")
    monkeypatch.setattr(check_loaders, "world_size", lambda: 2)
    sampler, batches = (kind([1, 2], 2, 0) for kind in (DistributedSampler, DistributedBatches))
    for given in (DataLoader(Stream()), DataLoader([1, 2], sampler=sampler), DataLoader([1, 2], batch_sampler=batches)):
        check_loader(Loading(given), recipe, "composer")
    with pytest.raises(
        ValueError, match=r"^data: the loader of my.data has no state_dict and load_state_dict, and Comp"
    ):
        check_loader(Loading(DataLoader([1, 2])), recipe, "composer")


def test_a_loader_that_a_run_could_not_use_is_refused_at_the_start():
    """It was an error of Python, with Lightning only when the first checkpoint was due."""
    plain, saves = DataLoader([1, 2]), SimpleNamespace(save=True, load_path=None)
    recipe = SimpleNamespace(data=SimpleNamespace(name="my.data"), checkpoints=saves)
    check_loader(Loading(plain), recipe, "composer")
    refused = r"^data: the loader of my.data has no state_dict and load_state_dict, which"
    with pytest.raises(ValueError, match=refused):
        check_loader(Loading(plain), recipe, "lightning")
    for engine in ("composer", "lightning"):
        with pytest.raises(ValueError, match=r"^data: the loader of my.data is an instance of list; give a DataLoader"):
            check_loader(Loading([1, 2]), recipe, engine)
        check_loader(Loading(Loader({})), recipe, engine)
    recipe.checkpoints.save = False  # and nothing is read
    check_loader(Loading(plain), recipe, "lightning")
    recipe.checkpoints.load_path = "checkpoint"
    with pytest.raises(ValueError, match=refused):
        check_loader(Loading(plain), recipe, "lightning")


class Losses(Callback):
    def __init__(self):
        self.found = []

    def step_end(self, run):
        self.found.append(run.loss)

    def eval_end(self, run):
        self.found.append(dict(run.eval_figures))


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_on_device_may_add_entries_for_a_microbatch_as_a_whole(quick_recipe, tmp_path, engine):
    """Composer counts the samples of what `on_device` returns, of which such entries were refused."""
    added = {"mask": torch.ones(1, 5), "rows": torch.ones(1), "columns": torch.ones(1)}

    def extended(loading):
        return replace(loading, on_device=lambda batch: loading.on_device(batch) | added)

    def extend(parts):
        parts.data = extended(parts.data)
        parts.evals = {label: extended(loading) for label, loading in parts.evals.items()}

    train = importlib.import_module(f"recipes.engines.{engine}.trainer")
    settings = f"training={{engine: {engine}, global_batch: 8, microbatch: 3, duration: 2ba, eval_every: 2ba}}"
    losses = []
    for change in (lambda parts: None, extend):
        recipe = quick_recipe(tmp_path / str(len(losses)), settings, "checkpoints.save=false")
        losses.append(Losses())

        def give(parts, change=change):
            change(parts)
            parts.callbacks["losses"] = losses[-1]

        training = train.build_trainer(recipe, change=give)
        training.fit()
        training.close()
    assert losses[0].found == losses[1].found and len(losses[0].found) == 3


@pytest.mark.parametrize("begins", [False, True])
def test_workers_leave_signals_to_the_run(quick_recipe, tmp_path, begins):
    """SIGUSR1 to all processes of a job killed those of a loader without `leave_signals`, and the run ended with an
    error in place of a checkpoint."""
    own = Component("data", "signalled", {"begins": begins}, "tests.recipes.engines.own_loaders:signalled", "data")
    recipe = replace(quick_recipe(tmp_path), data=own, evals={})
    loader = build_parts(recipe, Place(False, "fp32", local_world_size=1), "composer").data.loader
    assert next(iter(loader))["begun"].tolist() == [begins] * BATCH
