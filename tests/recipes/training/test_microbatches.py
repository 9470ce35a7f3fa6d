"""Batches in parts, and what the parts are told about the whole."""

import pytest
import torch

from recipes.models.task import Task
from recipes.training import microbatches
from recipes.training.microbatches import samples_of, split, with_batch_means
from recipes.training.transfer import sent


class Means(Task):
    def batch_means(self, batch):
        return {"mean_length": batch["length"], "long": batch["length"] > 2}


BATCH = {"length": torch.tensor([1, 2, 3, 6, 8]), "image": torch.arange(10).view(5, 2)}


@pytest.mark.parametrize(("size", "sizes"), [(None, [5]), (5, [5]), (7, [5]), (2, [2, 2, 1]), (1, [1] * 5)])
def test_parts_are_the_batch_in_its_order(size, sizes):
    parts = split(BATCH, size)
    assert [samples_of(part) for part in parts] == sizes
    for name, value in BATCH.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value)


def test_means_are_those_of_the_whole_batch_in_every_part():
    batch = with_batch_means(BATCH, Means(), torch.device("cpu"))
    for part in split(batch, 2):
        assert (part["mean_length"] == 4).all() and torch.allclose(part["long"], torch.tensor(0.6))
        assert part["long"].dtype == torch.float32 and len(part["long"]) == samples_of(part)
    assert torch.equal(batch["length"], BATCH["length"])


def test_means_are_sent_from_page_locked_memory(monkeypatch):
    """A copy from ordinary memory would make the host wait for all that a GPU was given before."""
    copies = []
    monkeypatch.setattr(microbatches, "sent", lambda *arguments: copies.append(arguments) or sent(*arguments))
    with_batch_means(BATCH, Means(), torch.device("cpu"))
    assert copies == [([20.0, 3.0, 5], torch.float64, torch.device("cpu"))]


def test_tasks_that_ask_for_nothing_get_the_batch_as_it_is():
    assert with_batch_means(BATCH, Task(), torch.device("cpu")) is BATCH


@pytest.mark.parametrize(
    ("other", "refused"),
    [
        ({"mask": torch.ones(1, 2)}, r"'mask' of a batch is a tensor of shape \(1, 2\) and dtype float32"),
        ({"scale": torch.tensor(2.0)}, r"'scale' of a batch is a tensor of shape \(\)"),
        ({"table": torch.ones(7, 2)}, r"'table' of a batch is a tensor of shape \(7, 2\)"),
        ({"captions": ["a"] * 5}, "'captions' of a batch is an instance of list"),
        ({"nothing": None}, "'nothing' of a batch is nothing"),
    ],
)
def test_entries_that_cannot_be_divided_are_refused(other, refused):
    """By a mask (1, L) in front, a run trained on the first sample of each batch alone, and of a table each microbatch
    got other rows; what is no tensor was an error of Python."""
    for batch in (other | BATCH, BATCH | other):
        for divide in (samples_of, lambda batch: split(batch, 2), lambda batch: with_batch_means(batch, Task(), "cpu")):
            with pytest.raises(ValueError, match=f"^data: the entry {refused}.*first dimension is the sample, here 5$"):
                divide(batch)
    for batch in ({}, torch.ones(5), None):
        with pytest.raises(ValueError, match="^data: a batch is .*; give a dict of tensors, with the sample first$"):
            samples_of(batch)
