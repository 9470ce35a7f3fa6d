"""Runs with optimizers of one's own, and with muon, go on from checkpoints as if they had not ended."""

import pytest

from recipes.config.components import COMPONENTS
from recipes.engines.checkpoints.conversion import convert
from recipes.engines.dry_run_checks import check_on_meta
from tests.recipes.engines.recording import assert_bit_equal, record

OWN = {"odd_states": "OddStates", "scalars": "Scalars", "decays_apart": "DecaysApart", "of_matrices": "of_matrices"}
OWN |= {"with_hook": "with_hook"}
OF_DRY_RUNS = {name: name for name in ("of_last_layer", "by_names", "by_part", "adafactor")}
FURTHER = {"muon": ", adamw_lr: 3e-3, matrices: all"}  # keys
NAMES = {"composer": ("ep0-ba3-rank0.pt", "lightning"), "lightning": ("ep0-ba3.ckpt", "composer")}


@pytest.fixture
def own_recipe(quick_recipe, monkeypatch):
    for name, builder in (OWN | OF_DRY_RUNS).items():
        monkeypatch.setitem(COMPONENTS["optimizer"], name, f"tests.recipes.engines.own_optimizers:{builder}")

    def make(output, name, engine, *overrides):
        optimizer = f"optimizer={{name: {name}, lr: 2e-3{FURTHER.get(name, '')}}}"
        lengths = ("training.duration=6ba", "training.eval_every=3ba", "checkpoints.every=3ba", "checkpoints.keep=-1")
        average = "algorithms.scheduled_ema={name: scheduled_ema, start: 1ba, decay: 0.5}"
        return quick_recipe(output, optimizer, *lengths, average, f"training.engine={engine}", *overrides)

    return make


@pytest.mark.parametrize("engine", NAMES)
@pytest.mark.parametrize("name", [*OWN, "muon"])
def test_a_run_goes_on_in_either_engine_as_if_it_had_not_ended(tmp_path, own_recipe, name, engine):
    """PyTorch casts what is loaded to the parameters' number format, and makes a step with a learning rate of 0."""
    whole = record(engine, own_recipe(tmp_path / "whole", name, engine))
    file, other = NAMES[engine]
    checkpoint = tmp_path / "whole" / "checkpoints" / file
    for path, reader in ((checkpoint, engine), (convert(checkpoint, other), other)):
        output = tmp_path / reader
        resumed = record(reader, own_recipe(output, name, reader, f"checkpoints.load_path={path}"))
        assert len(resumed.losses) == 3
        assert_bit_equal(resumed, whole)


def test_dry_runs_give_it_matrices_and_vectors(tmp_path, own_recipe):
    """They gave it one vector, which it may refuse."""
    check_on_meta(own_recipe(tmp_path / "run", "of_matrices", "lightning"))


def test_dry_runs_refuse_what_leaves_out_parameters(tmp_path, own_recipe, monkeypatch):
    """The run refused it when all ranks had started; of one that takes the parameters by their names, neither does."""
    for name in ("by_names", "by_part"):  # some or all of the model's own
        check_on_meta(own_recipe(tmp_path / "run", name, "lightning"))
    with pytest.raises(ValueError, match="^optimizer: SGD leaves out denoiser.* more, which would not be trained"):
        check_on_meta(own_recipe(tmp_path / "run", "of_last_layer", "lightning"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="^optimizer: Adafactor of PyTorch makes other updates of sharded parameters"):
        check_on_meta(own_recipe(tmp_path / "run", "adafactor", "lightning", "training.fsdp={}"))
