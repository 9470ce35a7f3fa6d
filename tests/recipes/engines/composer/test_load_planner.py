"""Runs that load sharded checkpoints: of other runs, and of other versions of PyTorch."""

import pytest
from torch.optim.lr_scheduler import LambdaLR

from recipes.engines.composer.trainer import build_trainer
from recipes.engines.dry_run_checks import check_on_meta


@pytest.mark.parametrize("starts", [build_trainer, check_on_meta], ids=["run", "dry run"])
def test_a_sharded_checkpoint_of_another_run(sharded, quick_recipe, tmp_path, starts):
    """Without `fsdp` Composer took the folder for a damaged file, and the message said to remove it. Of a deeper model
    it read the layers that the recipe has."""
    command = r"ep0-ba1: .*convert_checkpoint.py \S+ep0-ba1 --to composer`"
    with pytest.raises(ValueError, match=f"{command}$"):  # the converted one is then the newest of the run
        starts(quick_recipe(sharded, "checkpoints.autoresume=true", "checkpoints.allow_changes=[training]"))
    with pytest.raises(ValueError, match=f"{command}, and give checkpoints.load_path that one$"):
        starts(quick_recipe(tmp_path, f"checkpoints.load_path={sharded}/checkpoints/ep0-ba1"))
    path = [f"checkpoints.load_path={sharded}/checkpoints/latest-rank0.pt", "training.fsdp={}"]
    with pytest.raises(ValueError, match=r"of another model: \S+layers.1\S+ is \(.* and not there"):
        starts(quick_recipe(tmp_path, *path, "model.denoiser.layers=1"))
    with pytest.raises(ValueError, match="ep0-ba1: holds the state of AdamW, the recipe's optimizer is Adam16; to"):
        starts(quick_recipe(tmp_path, *path, "optimizer={name: adam16, lr: 1e-3}"))
    with pytest.raises(ValueError, match="load_path: .* is a folder of checkpoints; .* such as .*ep0-ba1"):
        starts(quick_recipe(tmp_path, f"checkpoints.load_path={sharded}"))


def test_a_scheduler_with_a_value_that_the_checkpoint_lacks(sharded, quick_recipe, tmp_path, monkeypatch):
    """That of PyTorch 2.11 has one more than that of 2.7. PyTorch's loader refused the checkpoint."""
    state = LambdaLR.state_dict
    monkeypatch.setattr(LambdaLR, "state_dict", lambda self: {**state(self), "newer": 5})
    path = f"checkpoints.load_path={sharded}/checkpoints/ep0-ba1"
    trainer = build_trainer(quick_recipe(tmp_path, "training.fsdp={}", path))
    [scheduler] = trainer.state.schedulers
    assert (scheduler.last_epoch, scheduler.newer) == (1, 5)
    trainer.close()


@pytest.fixture(scope="module")
def sharded(quick_recipe, fit, tmp_path_factory):
    """The folder of a run with a sharded checkpoint."""
    output = tmp_path_factory.mktemp("sharded")
    fit(quick_recipe(output, "training.fsdp={}", "training.duration=1ba", "evals.val=null"))
    return output
