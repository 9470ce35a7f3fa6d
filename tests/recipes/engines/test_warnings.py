"""What a run says on standard error is about the run: not about how a library uses another one."""

import warnings

import pytest
import torch

from tests.recipes.engines.recording import record


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_sharded_checkpoints_do_not_warn_of_what_torch_calls_itself(quick_recipe, tmp_path, engine, monkeypatch):
    monkeypatch.setattr(torch.storage, "_always_warn_typed_storage_removal", True)  # not once in a process
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        record(engine, quick_recipe(tmp_path, "training={fsdp: {}, duration: 1ba}"))
    assert list(tmp_path.glob("checkpoints/ep*/*.distcp"))
    assert not [warning for warning in warned if "TypedStorage" in str(warning.message)]
