"""Networks that turn pictures into features: InceptionV3, which FID is defined by, and contrastive picture towers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch

from data.system.errors import one_line
from data.system.log import log
from recipes.encoders.base import weights_hash
from recipes.models.weights import read_tensors
from recipes.scoring.reranking import Reranker

BATCH = 64  # pictures at once; a constant, so that features do not depend on any setting


@dataclass(frozen=True)
class Features:
    """An extractor of features.

    Attributes:
        name: what reports call it.
        resize: how it brings pictures to its input size.
        hash: sha256 of its weights, see `weights_hash` and `Reranker.hash`.
        network: for uint8 pictures (N, H, W, 3), features (N, D) and, where it has classes, logits (N, K).
    """

    name: str
    resize: str
    hash: str
    network: Any

    @torch.no_grad()
    def __call__(self, pictures: np.ndarray) -> dict[str, np.ndarray]:
        """`features` (N, D) float32 of pictures (N, H, W, 3) uint8; `logits` (N, K) if it has classes."""
        with _without_tf32():
            parts = [self.network(pictures[start : start + BATCH]) for start in range(0, len(pictures), BATCH)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Compute fp32 in fp32 on any device: neither training, which allows TF32, nor the kind of GPU changes features."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def build_extractor(
    kind: Literal["inception", "contrastive"], path: str | None, device: str, key: str = "extractor.path"
) -> Features:
    """An extractor by its kind.

    Args:
        kind: InceptionV3 as FID defines it, or the picture tower of a contrastive model.
        path: file of InceptionV3's weights, None to fetch them; or the contrastive model, see `Reranker`.
        device: of the network.
        key: of the config that has the path, for messages.

    Raises:
        FileNotFoundError, ValueError: it cannot be loaded.
    """
    if kind == "inception":
        return inception(path, device, key)
    model = Reranker(path, device, key)
    size = "x".join(map(str, model.size))
    return Features(
        name=f"picture tower of the contrastive model {path}",
        resize=f"{model.filter} to {size}, antialiased (none at that size)",
        hash=model.hash(),
        network=lambda pictures: {"features": model.embed_images(pictures)},
    )


def inception(path: str | None, device: str, key: str = "extractor.path") -> Features:
    """InceptionV3 with the weights and the resizing of the original FID (Heusel et al. 2017), by torch-fidelity.

    Raises:
        FileNotFoundError: no such file.
        ValueError: weights of another network, or none from the hub.
    """
    from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3, FeatureExtractorInceptionV3

    if path is None:
        file = Path(torch.hub.get_dir(), "checkpoints", URL_INCEPTION_V3.rpartition("/")[2])
        if not file.is_file():
            log.info(f"extractor: fetches {URL_INCEPTION_V3}")
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                prefix = file.stem.rpartition("-")[2]
                torch.hub.download_url_to_file(URL_INCEPTION_V3, str(file), hash_prefix=prefix, progress=False)
            except (OSError, RuntimeError) as error:  # no network; a file that was cut, or another one
                raise ValueError(
                    f"{key}: {URL_INCEPTION_V3} cannot be fetched ({one_line(error)}); fetch it on another machine, "
                    "and give the path of the file"
                ) from error
    else:
        file = Path(path).expanduser()
        if not file.is_file():
            raise FileNotFoundError(f"{key}: no file {file}; give InceptionV3's weights, or null to fetch them")
    tensors = read_tensors(file)
    with TemporaryDirectory() as folder:
        # torch-fidelity would unpickle the file without restriction; this one holds the tensors and nothing else.
        torch.save(tensors, Path(folder, "weights.pth"))
        try:
            network = FeatureExtractorInceptionV3(
                "inception-v3-compat", ["2048", "logits_unbiased"], str(Path(folder, "weights.pth"))
            )
        except RuntimeError as error:
            raise ValueError(f"{key}: {file} does not fit InceptionV3: {str(error).splitlines()[0]}") from None
    network = network.to(device).eval()

    def run(pictures: np.ndarray) -> dict[str, np.ndarray]:
        pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous().to(device)
        features, logits = network(pixels)
        return {"features": features.float().cpu().numpy(), "logits": logits.float().cpu().numpy()}

    return Features("InceptionV3 (torch-fidelity)", "bilinear to 299x299, TensorFlow 1", weights_hash(network), run)
