"""What a checkpoint of the engine `lightning` holds. It needs neither Lightning nor Composer, and unpickles no code.

A full checkpoint `ep<epoch>-ba<batch>.ckpt` holds, as `torch.save` writes it:

    format          version of this list
    counts          batch, sample, epoch, batch_in_epoch, sample_in_epoch
    weights         tensors by name, as the task's `state_dict` names them
    optimizer_name  class of the optimizer
    optimizer       its `state` by names of parameters, and its `param_groups`
    scaler          state of the gradient scaler, under amp_fp16
    data            position in the data
    levers          states by class
    callbacks       states by class, and by label where the run has several of a class
    generators      states of random number generators, by rank

A sharded checkpoint is a folder `ep<epoch>-ba<batch>`: `weights`, `optimizer` and the sharded tensors in `levers`, as
torch.distributed.checkpoint writes them, and a file `rest.pt` with everything else. `latest` is a link to the newest
checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.engines.checkpoints.plain_pickles import load_plain
from recipes.training.checkpoint_names import conversion

FORMAT = 1


def read_file(path: Path, lazily: bool = False) -> dict[str, Any]:
    """The file of a full checkpoint, or `rest.pt` of a sharded one.

    Args:
        path: of the file.
        lazily: leave tensors on disk until they are used. The file must not change as long as there are any.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a checkpoint of this engine.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such checkpoint")
    state = load_plain(path, lazily=lazily)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(
            f"{path}: not a checkpoint of the engine lightning; one of Composer's is converted by "
            f"{conversion(path, 'lightning')} into one beside it; give that"
        )
    return state
