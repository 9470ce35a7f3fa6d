"""Ids that a model does not have, in batches of a loader of one's own."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from data.loading import Loading
from data.tokens import widen
from recipes.algorithms.resilience import token_ids
from recipes.algorithms.resilience.token_ids import TokenIds
from recipes.engines import parts


def start(**batch):
    run = SimpleNamespace(clock=SimpleNamespace(batch=7), batch=batch)
    TokenIds({"text": range(-1, 10), "image": range(4)}).batch_start(run)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint16, torch.uint8])
def test_ids_that_the_model_does_not_have(dtype):
    """A GPU would end the process with an assertion that names no batch."""
    start(image=torch.tensor([[0, 3], [3, 0]], dtype=dtype), other=torch.tensor([[99]]))
    line = (
        "^data: the entry `image` of batch 7 on rank 0 has the token 4 in its sample 1, and the model has those "
        "from 0 to 3; correct the data, or give the model more$"
    )
    with pytest.raises(ValueError, match=line):
        start(image=torch.tensor([[0, 3], [0, 4]], dtype=dtype))


def test_ids_below_the_first():
    start(text=torch.tensor([[3, -1]]))
    with pytest.raises(ValueError, match="has the token -2 in its sample 0, and the model has those from -1 to 9"):
        start(text=torch.tensor([[3, -2]]))


def test_what_is_no_id_is_left_to_the_model():
    start(image=torch.rand(2, 4) + 10, text=torch.empty(2, 0, dtype=torch.int64))


MODEL = "model={layers: 1, width: 32, heads: 2, text_positions: 16, text_vocabulary: 280, side: 4, codes: 32}"
SMALL = [MODEL, "model.kernel=3", "data={resolution: 32, positions: 16, workers: 0}", "callbacks.export=null"]


@pytest.mark.parametrize(("on_device", "looks"), [(None, True), (widen, True), (lambda batch: batch, False)])
def test_a_run_looks_at_batches_of_loaders_of_ones_own(token_recipe, tmp_path, monkeypatch, on_device, looks):
    """Not at those of encoded sets, which do so themselves, nor at what is changed on the device."""
    small = [*SMALL, "evals={val: null}", "training.device=cpu", "training.global_batch=8"]
    recipe = token_recipe(tmp_path, *small)

    def levers():
        built = parts.build_parts(recipe, parts.Place.of(recipe, 1), "lightning").levers
        return [lever for lever in built._first if isinstance(lever, TokenIds)]

    assert not levers()
    theirs = parts.build

    def build(component, **context):
        built = theirs(component, **context)
        if component is not recipe.data:
            return built
        monkeypatch.setattr(token_ids, "EncodedDataset", SimpleNamespace)
        return type(built)(**vars(built) | {"on_device": on_device})

    monkeypatch.setattr(parts, "build", build)
    assert bool(levers()) == looks


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_ids_of_a_validation_set_that_the_model_does_not_have(token_recipe, tmp_path, engine):
    """They were looked for in training alone."""
    settings = f"training={{engine: {engine}, device: cpu, global_batch: 8, duration: 1ba}}"
    recipe = token_recipe(tmp_path, *SMALL, settings, "checkpoints.save=false", "algorithms.scheduled_ema=null")
    wrong = {"text": torch.zeros(16, dtype=torch.int64), "image": torch.tensor([0] * 15 + [32])}

    def change(built):
        built.evals["val"] = Loading(DataLoader([wrong] * 4, batch_size=2, generator=torch.Generator()))

    training = importlib.import_module(f"recipes.engines.{engine}.trainer").build_trainer(recipe, change=change)
    with pytest.raises(ValueError, match="^evals.val: the entry `image` of a batch on rank 0 has the token 32 in its"):
        training.fit()
    training.close()
