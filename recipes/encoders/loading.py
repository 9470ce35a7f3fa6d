"""Loading models of other libraries from folders and the Hugging Face hub: what is said where that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError

from data.system.errors import one_line


def cannot_load(key: str, name: str, error: Exception, *, is_hub_id: bool = False) -> ValueError:
    """A one-line error for a model that cannot be loaded from the disk or the hub.

    Args:
        key: of the config.
        name: of the model.
        error: why it cannot be loaded.
        is_hub_id: whether the name was taken for a hub id because there is no such folder, as `data/vae` may be.

    Raises:
        MemoryError: it is the error; the model may be whole.
    """
    if isinstance(error, MemoryError):
        raise error
    reason = one_line(error)
    if isinstance(error, SafetensorError):
        reason = f"its weights are not whole ({reason}); remove the file, and copy or download it again"
    before: BaseException | None = error
    while before is not None:  # diffusers says of a hub that it cannot reach that a file does not exist there
        if isinstance(before, LocalEntryNotFoundError):
            reason = (
                "this machine cannot reach the hub and has no copy in its cache; give the folder of a copy, or the "
                "cache of a machine that has downloaded it (HF_HOME)"
            )
        before = before.__cause__ or before.__context__
    what = f"{name} is no folder in {Path.cwd()}, and as a hub id it" if is_hub_id else name
    return ValueError(f"{key}: {what} cannot be loaded: {reason}")


def of_hub(key: str, name: str, read: Callable[[], Any]) -> Any:
    """What `read` makes of the files of a hub id. Arguments and errors as of `cannot_load`."""
    try:
        return read()
    except Exception as error:  # diffusers and transformers raise nearly anything for values of other types in a config
        raise cannot_load(key, name, error, is_hub_id=True) from error
