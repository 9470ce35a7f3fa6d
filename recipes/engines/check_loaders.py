"""Finds loaders of components of one's own with which a run would go wrong."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate

from data.loading import Loading
from recipes.config.recipe import Recipe
from recipes.engines.counts import epoch_batches
from recipes.training.ranks import world_size


def check_loader(loading: Loading, recipe: Recipe, engine: str) -> None:
    """
    Args:
        loading: training batches.
        recipe: of the run.
        engine: of the run. Composer can also read batches again up to those that it had, of a loader without a state.

    Raises:
        ValueError: the loader is no DataLoader, checkpoints could not hold its position, or Composer would refuse it.
    """
    name, checkpoints = recipe.data.name, recipe.checkpoints
    loader = loading.loader
    if not isinstance(loader, DataLoader):
        raise ValueError(f"data: the loader of {name} is an instance of {type(loader).__name__}; give a DataLoader")
    kept = engine == "lightning" and (checkpoints.save or checkpoints.load_path is not None)
    if kept and not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        raise ValueError(
            f"data: the loader of {name} has no state_dict and load_state_dict, which checkpoints need; define them in "
            "a subclass of DataLoader (data/loading.py)"
        )
    if engine != "composer" or hasattr(loader, "state_dict"):
        return
    if hasattr(loader.dataset, "state_dict") and not takes_counts(loader.dataset) and checkpoints.save:
        raise ValueError(
            f"data: state_dict of {type(loader.dataset).__name__} ({name}) does not take num_samples and "
            "from_beginning, which Composer gives; define state_dict and load_state_dict in a subclass of DataLoader "
            "(data/loading.py)"
        )
    samplers = (loader.sampler, loader.batch_sampler)
    divides = isinstance(loader.dataset, IterableDataset) or any(isinstance(s, DistributedSampler) for s in samplers)
    if world_size() > 1 and not divides:
        raise ValueError(
            f"data: the loader of {name} has no state_dict and load_state_dict, and Composer cannot see that its ranks "
            "read different samples; define them in a subclass of DataLoader (data/loading.py)"
        )


def takes_counts(dataset: Dataset) -> bool:
    """Whether a data set has a position as Composer asks for it, as those of streaming do."""
    try:
        inspect.signature(dataset.state_dict).bind(0, True)
    except (AttributeError, TypeError):
        return False
    return True


def check_loaders(data: Loading, evals: Mapping[str, Loading], recipe: Recipe, engine: str, batch: int) -> None:
    """Every rank must call it.

    Args:
        data: training batches.
        evals: validation batches by label.
        recipe: of the run.
        engine: of the run.
        batch: number of samples in the batch of a rank.

    Raises:
        ValueError: batches of another size than the recipe's, a loader for two purposes, no batches at all, not equally
            many on all ranks, or an unknown number that must be known.
    """
    components = {"data": recipe.data} | {f"evals.{label}": recipe.evals[label] for label in evals}
    counts = {key: epoch_batches(one) for key, one in zip(components, (data, *evals.values()), strict=True)}
    size = data.loader.batch_size  # None of loaders with a sampler of batches; a collate_fn may also take whole ones
    if size not in (None, batch) and (size > 1 or data.loader.collate_fn is default_collate):
        raise ValueError(
            f"data: the loader of {recipe.data.name} has batches of {size}, and training.global_batch makes it {batch} "
            "on each rank; give it the batch of its placement (data/loading.py)"
        )
    shared = next((label for label, loading in evals.items() if loading.loader is data.loader), None)
    if shared is not None:
        raise ValueError(
            f"evals.{shared}: its loader is that of the training data, whose position each validation would change; "
            "make another one for each placement (data/loading.py)"
        )
    # Of a stream without end, the description of the run says so.
    epochs = data.samples is not None and recipe.training.duration.endswith("ep") and engine == "composer"
    for key in counts:
        if counts[key] is None and (key != "data" or epochs):
            # No validation that ends can be told from one of a stream without end, which would not.
            what = "Composer needs to count the epochs of training.duration" if key == "data" else "a validation needs"
            raise ValueError(
                f"{key}: the loader of {components[key].name} has no length, which {what}; define __len__ of its data "
                "set"
            )
    of_ranks = [counts] * world_size()
    if world_size() > 1:
        dist.all_gather_object(of_ranks, counts)
    divided = recipe.training.fsdp is not None or recipe.training.tensor_parallel > 1
    for key, component in components.items():
        found = [counts[key] for counts in of_ranks]
        known = key == "data" and data.samples is not None  # and compared with a batch where the run is described
        if not known and not any(count is None or count > 0 for count in found):
            raise ValueError(
                f"{key}: the loader of {component.name} has no batches; give more samples, or keep the last batch "
                "(drop_last=False)"
            )
        # Composer ends an epoch and a validation when the first rank has no batch left, and sharded models wait for
        # each other in each batch.
        if len(set(found)) > 1 and (key == "data" or engine == "composer" or divided):
            other = next(rank for rank, count in enumerate(found) if count != found[0])
            raise ValueError(
                f"{key}: the loader of {component.name} has {found[0]} batches on the first rank and {found[other]} on "
                f"rank {other}; give all ranks equally many (data/loading.py)"
            )
