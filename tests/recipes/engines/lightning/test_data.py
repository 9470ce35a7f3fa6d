"""A run's batches as one long epoch of Lightning's: every batch once, epochs counted when they end."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from data.loading import Loading
from recipes.engines.counts import Counts, epoch_batches
from recipes.engines.lightning.data import EvalBatches, RunBatches
from recipes.engines.lightning.module import TaskModule
from recipes.engines.lightning.run import LightningRun
from recipes.engines.logs.loggers import RunLoggers
from recipes.training.microbatches import split


class Loader:
    """Epochs of numbered batches of 2 samples, the last of them of `last`; it goes on from a position."""

    def __init__(self, batches=3, sized=True, given=None, last=2):
        self.batches, self.given, self.last = batches, batches if given is None else given, last
        self.begin, self.sized = 0, sized

    def __len__(self):
        if not self.sized:
            raise TypeError("no length")
        return self.batches

    def __iter__(self):
        begin, self.begin = self.begin, 0
        for number in range(begin, self.given):
            yield {"x": torch.full((self.last if number + 1 == self.given else 2,), number)}

    def load_state_dict(self, state):
        self.begin = state["batch"]


def new_run(duration, loader, **counts):
    run = LightningRun(
        torch.nn.Linear(1, 1),
        device=torch.device("cpu"),
        precision="fp32",
        duration=duration,
        epoch_batches=epoch_batches(Loading(loader)),
        microbatch=None,
        loggers=RunLoggers([]),
    )
    run.counts = Counts(**counts)
    return run


def train(run, loader, samples=None):
    """What a trainer sees: numbers of batches, and "end" for each epoch that ends."""
    seen = []

    def end_epoch():
        run.epoch_done()
        seen.append("end")

    loading = Loading(loader, samples=samples)
    batches = RunBatches(
        loading, run, before_data=lambda: seen.append("wait"), end_epoch=end_epoch, global_batch=2
    )
    length = len(batches)
    for batch in batches:
        seen.append(int(batch["x"][0]))
        run.step_done(len(batch["x"]))
        if run.epoch_is_complete:
            end_epoch()
        if run.clock.ended:
            break
    return seen, length


@pytest.mark.parametrize(
    ("duration", "epochs", "length"), [("7ba", 2, 7), ("2ep", 2, 6), ("14sp", 2, 9), ("12sp", 2, 6), ("1ba", 0, 1)]
)
def test_a_run_has_its_length_whatever_the_unit(duration, epochs, length):
    loader = Loader()
    seen, most = train(new_run(duration, loader), loader, samples=6)
    batches = [entry for entry in seen if isinstance(entry, int)]
    assert most == length >= len(batches) and seen.count("end") == epochs
    assert batches == [number % 3 for number in range(len(batches))]
    assert len(batches) == {"7ba": 7, "2ep": 6, "14sp": 7, "12sp": 6, "1ba": 1}[duration]


def test_samples_that_epochs_leave_out_do_not_end_a_run_early():
    loader = Loader()  # 6 of 7 samples, as 7 do not divide by 2
    seen, most = train(new_run("35sp", loader), loader, samples=7)
    batches = [entry for entry in seen if isinstance(entry, int)]
    assert most >= len(batches) == 18 and seen.count("end") == 6


def test_incomplete_batches_do_not_end_a_run_early():
    loader = Loader(last=1)
    run = new_run("30sp", loader)
    seen, most = train(run, loader, samples=5)
    assert most == len([entry for entry in seen if isinstance(entry, int)]) == 18 and run.clock.ended
    # A batch of another size left 5 of 6 samples of the present epoch, in as many batches as a whole epoch has.
    run = new_run("7sp", loader, batch=1, sample=1, sample_in_epoch=1)
    seen, most = train(run, loader, samples=6)
    assert most >= len([entry for entry in seen if isinstance(entry, int)]) == 4 and run.clock.ended


def test_a_run_whose_epochs_have_become_shorter_trains_all_that_are_left():
    # Two epochs of 5 batches are done; with another number of ranks, or larger batches, an epoch has 3.
    for duration in ("4ep", "32sp"):
        loader = Loader()
        seen, most = train(new_run(duration, loader, batch=10, sample=20, epoch=2), loader, samples=6)
        batches = [entry for entry in seen if isinstance(entry, int)]
        assert most == len(batches) == 6 and seen.count("end") == 2


def test_a_batch_is_waited_for_before_it_comes():
    loader = Loader()
    seen, _ = train(new_run("4ba", loader), loader)
    assert seen == ["wait", 0, "wait", 1, "wait", 2, "end", "wait", 0]


@pytest.mark.parametrize("given", [3, 5])
def test_a_run_goes_on_in_the_middle_of_an_epoch(given):
    """Which ends with its length, also where the loader has more."""
    loader = Loader(given=given)
    loader.load_state_dict({"batch": 2})
    seen, length = train(new_run("8ba", loader, batch=5, epoch=1, batch_in_epoch=2), loader)
    assert [entry for entry in seen if entry != "wait"] == [2, "end", 0, 1] and length == 3
    loader.load_state_dict({"batch": 2})
    assert train(new_run("3ep", loader, batch=5, epoch=1, batch_in_epoch=2), loader)[1] == 4


def test_a_run_that_was_saved_right_at_the_end_of_an_epoch_begins_by_ending_it():
    loader = Loader()  # as its `load_state_dict` leaves it there: the next epoch is read
    seen, _ = train(new_run("5ba", loader, batch=3, batch_in_epoch=3), loader)
    assert [entry for entry in seen if entry != "wait"] == ["end", 0, 1]
    loader = Loader(sized=False, given=3)  # which says that the epoch is complete by giving nothing
    loader.load_state_dict({"batch": 3})
    seen, _ = train(new_run("5ba", loader, batch=3, batch_in_epoch=3), loader)
    assert [entry for entry in seen if entry != "wait"] == ["end", 0, 1]


def test_an_epoch_that_is_shorter_than_its_length_ends_too():
    loader = Loader(batches=3, given=2)
    seen, _ = train(new_run("4ba", loader), loader)
    assert [entry for entry in seen if entry != "wait"] == [0, 1, "end", 0, 1]


def test_data_without_a_length():
    loader = Loader(sized=False, given=100)
    assert epoch_batches(Loading(loader)) is None
    seen, length = train(new_run("10sp", loader), loader)
    assert [entry for entry in seen if entry != "wait"] == [0, 1, 2, 3, 4] and length == 5


@pytest.mark.parametrize("sized", [True, False])
def test_data_without_a_batch_is_an_error(sized):
    loader = Loader(batches=0, sized=sized)
    with pytest.raises(ValueError, match="^data: an epoch has no batches"):
        train(new_run("4ba", loader), loader)


def test_lightning_may_make_an_iterator_that_it_does_not_use():
    loader = Loader()
    run = new_run("2ba", loader)
    batches = RunBatches(Loading(loader), run, before_data=lambda: None, end_epoch=lambda: None, global_batch=2)
    loader.load_state_dict({"batch": 1})
    iter(batches)
    assert int(next(iter(batches))["x"][0]) == 1


def test_a_validation_set_is_read_from_the_start_each_time():
    batches = EvalBatches(Loading(Loader()), lambda batch: batch)
    assert len(batches) == 3
    for _ in range(2):
        assert [int(batch["x"][0]) for batch in batches] == [0, 1, 2]


def test_a_validation_set_is_transformed_as_its_own_loading_says():
    seen, cpu = [], torch.device("cpu")
    evals = {name: Loading(None, on_device=lambda batch, name=name: batch | {"of": name}) for name in ("a", "b")}
    module = SimpleNamespace(_parts=SimpleNamespace(evals=evals), _between=SimpleNamespace(evaluate=seen.append))
    module._run = SimpleNamespace(device=cpu, microbatch=2)
    module._on_device = partial(TaskModule._on_device, module)
    for number in (0, 1):
        TaskModule.validation_step(module, {"x": torch.arange(3)}, 0, number)
    assert [(part["of"], part["x"].tolist()) for part in seen] == [
        ("a", [0, 1]), ("a", [2]), ("b", [0, 1]), ("b", [2])
    ]  # fmt: skip


def test_microbatches():
    batch = {"x": torch.arange(8), "y": torch.arange(8)}
    assert [part["x"].tolist() for part in split(batch, 3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [len(part["y"]) for part in split(batch, None)] == [8] and len(split(batch, 9)) == 1
