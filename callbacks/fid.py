"""How far a model's images are from real ones while it trains, on a small sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np
import torch

from callbacks.prompt_grid import PromptGrid
from callbacks.sample_grid import SampleGrid
from callbacks.token_grid import TokenGrid
from data.aliases import Duration
from data.cost import Cost, Plan
from data.loading import Loading
from data.ranges import check_least
from data.sources.base import Sample
from data.system.log import log
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.encoders.base import ModelPath
from recipes.models.autoregressive.task import Autoregressive
from recipes.models.latent_diffusion.task import LatentDiffusion
from recipes.models.task import Task
from recipes.scoring.extractors import Features, build_extractor
from recipes.scoring.figures import Settings, check_counts, figures
from recipes.scoring.reference import captions_of, decoded, read_reference
from recipes.training.callback import PeriodicCallback
from recipes.training.ranks import by_first_rank
from recipes.training.run import Run

GRIDS = {LatentDiffusion: SampleGrid, Autoregressive: TokenGrid}  # what draws a model's images
NOT_OF_A_SAMPLE = ("prompts", "every", "columns", "seed", "batch")  # options of a grid that `fid` sets, or has itself


class Fid(PeriodicCallback):
    """Logs `images/fid`, `images/kid` and its deviation `images/kid_std` of what the model draws for fixed captions.

    FID of few images is too large, by an amount that depends on their number (Binkowski et al. 2018), so it compares
    with runs of the same reference, number and extractor only; KID has no such bias, but a spread.
    Its subsets have half of the images or of the pictures of the reference, whichever are fewer, and at most 1000:
    those that hold all of them would all be the same, with no deviation. `recipes/evaluate.py` computes both on many
    images. All ranks draw images; the first one decodes them and computes their features while the others wait, for at
    most the 600 s after which a run takes a rank for lost. At the start it reads the reference and computes its
    features, however long that takes. The weights are the averaged ones if the run has an average.
    """

    alone = True

    def __init__(
        self,
        task: Task,
        output: str,
        loading: Loading,
        encoders: Callable[[], tuple[Any, Any]],
        average: ScheduledEMA | None,
        copies: int,
        *,
        reference: Annotated[Any, "source"],
        every: Duration | None = None,
        images: int = 256,
        reference_images: int | None = None,
        metrics: list[Literal["fid", "kid"]] = ("fid", "kid"),
        extractor: Literal["inception", "contrastive"] = "inception",
        path: ModelPath | None = None,
        sampling: dict[str, Any] | None = None,
        seed: int = 0,
        batch: int = 16,
    ) -> None:
        """
        Args:
            reference: images with captions.
            every: interval; null: only at the end of the run, when metrics are always logged.
            images: number of images, one per caption. The captions are drawn from the reference without replacement.
            reference_images: number of images of the reference, drawn without replacement; null: all.
            metrics: figures to log.
            extractor: network whose features are compared: InceptionV3, as published figures, or the image tower of a
                contrastive model.
            path: inception: local file of the weights, null to fetch them; contrastive: an open_clip folder, or
                MODEL/TAG.
            sampling: options of sample_grid, or of token_grid for a model of tokens, such as guidance or steps.
            seed: seed of the draws from the reference; image i is drawn from seed + i.
            batch: number of images that a rank draws at once.

        Raises:
            ValueError: a model that draws no images, an unknown option of sampling, fewer pictures than a metric needs.
        """
        super().__init__(every)
        check_least("fid", 0, seed=seed)
        grid = _grid_of(task, extractor, path, sampling)
        self.settings = Settings(metrics=list(metrics))
        self.extractor = extractor, path
        self.side = loading.resolution
        self.samples: list[Sample] = []
        captions = by_first_rank(lambda: self._read(reference, reference_images, images, seed))
        self.grid: PromptGrid = grid(
            task,
            output,
            loading,
            encoders,
            average,
            copies,
            prompts=captions,
            seed=seed,
            batch=batch,
            **(sampling or {}),
        )
        self.features: Features | None = None
        self.reference: np.ndarray | None = None

    @classmethod
    def cost(cls, args: dict[str, Any], plan: Plan) -> Cost:
        """Adds nothing to the cost, but refuses what can be refused without the reference; see `data.cost`."""
        check_least("fid", 0, seed=args["seed"])
        settings, images = Settings(metrics=args["metrics"]), args["images"]
        check_counts(replace(settings, kid_subset_size=2), images, images)
        grid = _grid_of(plan.task, args["extractor"], args["path"], args["sampling"])
        grid(
            plan.task, plan.output, None, None, None, 1,
            prompts=[""] * images, seed=args["seed"], batch=args["batch"], **(args["sampling"] or {}),
        )  # fmt: skip
        return Cost()

    def _read(self, source: Any, pictures: int | None, images: int, seed: int) -> list[str]:
        self.samples = read_reference(source, pictures, seed, "fid: reference_images")
        captions = captions_of(self.samples, images, seed, "fid: images")
        self._check_counts(images, len(self.samples))
        return captions

    def _check_counts(self, images: int, pictures: int) -> None:
        """Chooses the size of KID's subsets, and refuses fewer images or pictures than a metric needs."""
        size = max(2, min(images // 2, pictures // 2, 1000))
        self.settings = replace(self.settings, kid_subset_size=size)
        check_counts(self.settings, images, pictures)

    def begin(self, run: Run) -> None:
        self.grid.begin(run)
        by_first_rank(lambda: self._look(str(run.device)))

    def _look(self, device: str) -> None:
        """Computes the features of the reference."""
        with torch.random.fork_rng(devices=[]):  # networks draw initial weights before they load the real ones
            self.features = build_extractor(*self.extractor, device, "fid: path")
        parts = [self.features(pictures)["features"] for pictures in decoded(self.samples, self.side)]
        images, pictures = len(self.grid.prompts), sum(map(len, parts))
        self._check_counts(images, pictures)  # some may not decode
        self.reference = np.concatenate(parts)
        self.samples = []
        log.info(f"fid: {images} images against {pictures} pictures, {self.features.name}")

    def act(self, run: Run) -> None:
        images = self.grid.images(run)
        if images is None:
            return
        arrays = self.features(images)
        if not np.isfinite(arrays["features"]).all():
            log.warning(f"fid: batch {run.clock.batch}: features are not finite, nothing is logged")
            return
        found = figures(self.settings, arrays, self.reference)
        run.log({f"images/{name}": value for name, value in found.items()})
        log.info(f"fid: batch {run.clock.batch}: " + ", ".join(f"{name} {value:g}" for name, value in found.items()))


def _grid_of(task: Task, extractor: str, path: str | None, sampling: dict[str, Any] | None) -> type[PromptGrid]:
    """The callback that draws the images of a model; the arguments are those of `Fid`.

    Raises:
        ValueError: nothing does, or it has no such option; or the extractor has no path.
    """
    grid = next((grid for kind, grid in GRIDS.items() if isinstance(task, kind)), None)
    if grid is None:
        raise ValueError(f"fid: a {type(task).__name__} draws no images of captions; remove the callback")
    if extractor == "contrastive" and path is None:
        raise ValueError("fid: path is missing; name the contrastive model's folder")
    options = {p.name for p in inspect.signature(grid).parameters.values() if p.kind is p.KEYWORD_ONLY}
    kinds = get_type_hints(grid.__init__)
    for name, value in (sampling or {}).items():
        if name not in options or name in NOT_OF_A_SAMPLE:
            known = ", ".join(sorted(options - {*NOT_OF_A_SAMPLE}))
            raise ValueError(f"fid: sampling.{name}: no option of {type(task).__name__} models, which have {known}")
        number = isinstance(value, int) and isinstance(1.0, kinds[name])  # 3 for 3.0
        if not (number or isinstance(value, kinds[name])) or isinstance(value, bool):
            wanted = inspect.signature(grid).parameters[name].annotation
            raise ValueError(f"fid: sampling.{name}: {value!r}; give {wanted}")
    return grid
