"""What a run says on standard error is about the run: not about how a library uses another one."""

import math
import warnings

import pytest
import torch

from tests.recipes.engines.recording import Recorder, record


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_sharded_checkpoints_do_not_warn_of_what_torch_calls_itself(quick_recipe, tmp_path, engine, monkeypatch):
    monkeypatch.setattr(torch.storage, "_always_warn_typed_storage_removal", True)  # not once in a process
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        record(engine, quick_recipe(tmp_path, "training={fsdp: {}, duration: 1ba}"))
    assert list(tmp_path.glob("checkpoints/ep*/*.distcp"))
    assert not [warning for warning in warned if "TypedStorage" in str(warning.message)]


class Overflow(Recorder):
    """Makes the gradients of the first batch overflow, as a scale of amp_fp16 that is too large at first does."""

    def after_backward(self, run):
        if run.clock.batch == 0:
            next(parameter for parameter in run.task.parameters() if parameter.grad is not None).grad.fill_(math.inf)


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_a_skipped_first_update_does_not_warn_of_the_order_of_steps(quick_recipe, tmp_path, engine):
    recipe = quick_recipe(tmp_path, "training={precision: amp_fp16, duration: 2ba}", "optimizer.fused=false")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        skipped = record(engine, recipe, Overflow())
    assert {moment.item() for name, moment in skipped.moments.items() if name.endswith(": step")} == {1}
    assert not [warning for warning in warned if "lr_scheduler.step()" in str(warning.message)]


def test_a_model_that_levers_shard_does_not_warn_of_what_keeps_composer_from_it(quick_recipe, tmp_path):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        record("composer", quick_recipe(tmp_path, "training={fsdp: {}, duration: 1ba}"))
    assert not [warning for warning in warned if "_fsdp_wrap" in str(warning.message)]
