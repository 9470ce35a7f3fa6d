"""Training batches of precomputed latents and text embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from data.cost import Cost, Plan, with_cost
from data.encoded.column_reader import StoredSample
from data.encoded.dataset import EncodedDataset, copy_rows, dataset_arguments, key_seed, open_loader
from data.encoded.epoch_size import encoded_samples, epoch_of
from data.encoded.sets import first_manifest
from data.encoded.shared_batches import Specs
from data.loading import Batch, Loading, Placement
from data.random_numbers import draws_of
from data.ranges import check_reading, check_shares


def latents_cost(args: dict[str, Any], plan: Plan) -> Cost:
    """The size of an epoch, see `data.cost`."""
    check_shares("latents", caption_dropout=args["caption_dropout"], flip=args["flip"])
    check_reading("latents", **args)
    stored = partial(encoded_samples, "latents", args, plan.task.requirements())
    return Cost(epoch=epoch_of("latents", plan.build(args["streams"]), args, stored))


@with_cost(latents_cost)
def latents(
    placement: Placement,
    requirements: dict[str, Any],
    *,
    streams: dict[str, Annotated[Any, "stream"]],
    resolution: int,
    text: str = "text",
    expect: dict[str, Any] | None = None,
    caption_dropout: float = 0.0,
    sample_posterior: bool = True,
    flip: float = 0.0,
    workers: int = 2,
    shuffle: bool = True,
    shuffle_algo: Literal["py1e", "py1s", "py1br", "py2s", "naive"] = "py1e",
    shuffle_block: int | None = None,
    predownload: int | None = None,
    cache_limit: str | None = None,
    epoch_size: int | None = None,
    drop_last: bool = True,
) -> Loading:
    """Reads latents that `precompute/encode.py` wrote. mosaicml-streaming shuffles, shards and resumes.

    A validation set is read once in stored order, with the posterior's mean and without caption dropout.

    Args:
        streams: encoded sets by label. If one of them has a proportion, all must have one.
        resolution: the encoded resolution that is read, in pixels.
        text: column of the text embedding.
        expect: values that the manifest must have, such as {scaling_factor: 0.18215}, in addition to those that the
            model needs.
        caption_dropout: share of captions that are replaced by the null caption's embedding, drawn in every step.
        sample_posterior: sample latents from the posterior in every step; false takes its mean.
        flip: share of latents that are flipped horizontally. This is close to encoding the flipped image, not equal.
        workers: number of worker processes that read.
        shuffle: shuffle the samples in each epoch (training only).
        shuffle_algo: streaming's shuffling algorithm; py1s and py2s repeat up to 16 samples of an epoch per machine,
            and leave out as many.
        shuffle_block: number of samples within which parts of shards are shuffled; null: streaming's default.
        predownload: number of samples that each worker fetches ahead; null: streaming's default.
        cache_limit: local disk space for remote shards, such as 100gb; null: no limit.
        epoch_size: number of samples per epoch; null: all.
        drop_last: leave out an incomplete last batch of an epoch (training only).

    Raises:
        FileNotFoundError: a stream has no manifest.
        ValueError: a field of a manifest does not fit the recipe.
    """
    check_shares("latents", caption_dropout=caption_dropout, flip=flip)
    manifest = first_manifest("latents", streams, epoch_size, resolution, requirements, expect)
    dataset = LatentDataset(
        resolution=resolution,
        text=text,
        **dataset_arguments(
            "latents",
            streams,
            placement,
            workers,
            shuffle=shuffle,
            shuffle_algo=shuffle_algo,
            shuffle_block=shuffle_block,
            predownload=predownload,
            cache_limit=cache_limit,
            epoch_size=epoch_size,
        ),
    )
    shape = manifest.latent_shape(resolution)
    dataset.check_shapes(whole=False, mean=shape, std=shape, text=manifest.text_shape)
    null_text = next(iter(streams.values())).null_text(manifest.text_shape)
    if placement.training:
        on_device = LatentTransform(null_text, caption_dropout, sample_posterior, flip)
    else:
        on_device = LatentTransform(null_text, 0.0, sample_posterior=False, flip=0.0)
    return Loading(
        open_loader(dataset, placement, workers, drop_last),
        on_device,
        samples=int(dataset.epoch_size),
        images=int(dataset.num_samples),
        manifest=manifest,
        resolution=resolution,
        null_text=null_text,
    )


class LatentDataset(EncodedDataset):
    """Posteriors and text embeddings as they are stored.

    Args:
        resolution: the encoded resolution that is read, in pixels.
        text: column of the text embedding.
        arguments: of `EncodedDataset`.
    """

    def __init__(self, *, resolution: int, text: str, **arguments: Any) -> None:
        columns = {"mean": f"mean_{resolution}", "std": f"std_{resolution}", "text": text}
        super().__init__(columns=columns, **arguments)

    def specs(self, samples: int) -> Specs:
        """See `EncodedDataset.specs`."""
        specs = {name: ((samples, *array.shape), array.dtype) for name, array in self.arrays.items()}
        return {**specs, "seed": ((samples,), torch.int64)}

    def collate(self, samples: Sequence[StoredSample]) -> Batch:
        """See `EncodedDataset.collate`.

        Returns:
            `mean` and `std` (B, C, h, w) and `text` (B, L, D) as stored (float16), and `seed` (B,) int64, a function
            of the sample's key.
        """
        batch = self.new_batch(samples)
        copy_rows(samples, {name: batch[name] for name in self.arrays})
        seeds = batch["seed"].numpy()
        for row, sample in enumerate(samples):
            (key,) = sample.texts
            seeds[row] = key_seed(key)
        return batch


class LatentTransform:
    """Makes latents and text of a batch as it was stored; runs on the device.

    It draws from the device's global generator, unless the batch has numbers for its samples
    (`data.random_numbers`). Checkpoints hold the generators of each rank, so the random numbers continue exactly after
    a resume. They differ between ranks because the seeds do.

    Args:
        null_text: (L, D), the embedding of the empty caption.
        caption_dropout: share of captions that are replaced by it.
        sample_posterior: sample from the posterior, or take its mean.
        flip: share of latents that are flipped horizontally.
    """

    def __init__(self, null_text: Tensor, caption_dropout: float, sample_posterior: bool, flip: float) -> None:
        self.null_text = null_text
        self.caption_dropout = caption_dropout
        self.sample_posterior = sample_posterior
        self.flip = flip

    def __call__(self, batch: Batch) -> Batch:
        """Transforms one batch.

        Args:
            batch: as `LatentDataset.collate` makes it, perhaps with further entries.

        Returns:
            `latents` (B, C, h, w) float32, `text` (B, L, D) float32, `seed` (B,) int64, and the further entries.
        """
        draws = draws_of(batch, 0)
        latents, text = batch["mean"].float(), batch["text"].float()
        if self.sample_posterior:
            latents = latents + batch["std"].float() * draws.normal_like(latents)
        if self.flip:
            mirrored = draws.uniform(latents) < self.flip
            latents = torch.where(mirrored[:, None, None, None], latents.flip(-1), latents)
        if self.caption_dropout:
            dropped = draws.uniform(text) < self.caption_dropout
            self.null_text = self.null_text.to(text)  # moved once
            text = torch.where(dropped[:, None, None], self.null_text, text)
        others = {name: tensor for name, tensor in batch.items() if name not in ("mean", "std")}
        return {"latents": latents, **others, "text": text}
