"""Images per second of the encoders: VAE, text encoder, and both, without reading or writing.

    python benchmarks/encode.py                     # small networks on a CPU, Stable Diffusion 2's on a GPU
    python benchmarks/encode.py --size sd2 --batch 64

The weights are random, since the time does not depend on them. Goals for the VAE alone, on one H200 in half precision:
1,650 images/s at 256 x 256 and 400 images/s at 512 x 512.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch
from diffusers import AutoencoderKL
from safetensors.torch import save_model

from benchmarks.reporting import write_results
from data.clip_library import open_clip
from recipes.encoders.text import open_clip_text
from recipes.encoders.vae import kl_vae

# The published configurations. The image tower of the text encoder is not used, and as small as possible.
VAES = {
    "sd2": {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "norm_num_groups": 32},
    "small": {"block_out_channels": (16, 32, 32, 32), "layers_per_block": 1, "norm_num_groups": 8},
}
TEXTS = {
    "sd2": {"context_length": 77, "vocab_size": 49408, "width": 1024, "heads": 16, "layers": 24},
    "small": {"context_length": 77, "vocab_size": 49408, "width": 128, "heads": 4, "layers": 4},
}
VISION = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 32}


def write_encoders(vae: dict[str, Any], text: dict[str, Any], folder: Path) -> None:
    """Write networks with random weights to FOLDER/vae and FOLDER/text, in the formats that the encode job reads."""
    torch.manual_seed(0)
    AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        scaling_factor=0.18215,
        **vae,
    ).save_pretrained(str(folder / "vae"), safe_serialization=True)
    config = {"embed_dim": 64, "vision_cfg": VISION, "text_cfg": text}
    (folder / "text").mkdir()
    preprocess = {"mean": [0.5] * 3, "std": [0.5] * 3}
    (folder / "text" / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": config, "preprocess_cfg": preprocess})
    )
    save_model(open_clip.CLIP(**config), str(folder / "text" / "open_clip_model.safetensors"))


def rate(work, count: int, seconds: float, device: torch.device) -> float:
    """Items per second of `work`, which processes `count` items per call, after a warm-up."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        work()
    wait()
    runs, began = 0, time.perf_counter()
    while not runs or time.perf_counter() - began < seconds:
        work()
        runs += 1
        wait()
    return runs * count / (time.perf_counter() - began)


def main(arguments: list[str] | None = None) -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(VAES), default="sd2" if gpu else "small")
    parser.add_argument("--resolutions", type=int, nargs="+", default=[256, 512] if gpu else [64, 128])
    parser.add_argument("--batch", type=int, default=64 if gpu else 8, help="images per batch")
    parser.add_argument("--precision", choices=["fp16", "bf16", "fp32"], default="fp16" if gpu else "fp32")
    parser.add_argument("--seconds", type=float, default=10.0 if gpu else 3.0, help="seconds per measurement")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if gpu else "cpu")
    torch.backends.cudnn.benchmark = True  # as the encode job does
    torch.backends.cudnn.allow_tf32 = False  # likewise
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_encoders(VAES[options.size], TEXTS[options.size], Path(folder))
        images = kl_vae(path=f"{folder}/vae", precision=options.precision).to(device)
        texts = open_clip_text(path=f"{folder}/text", precision=options.precision).to(device)
    tokens = texts.tokenize(["a watercolour painting of a lighthouse in a storm"] * options.batch).to(device)
    text_rate = rate(lambda: texts.encode_tokens(tokens), options.batch, options.seconds, device)
    for resolution in options.resolutions:
        pixels = torch.randint(256, (options.batch, 3, resolution, resolution), dtype=torch.uint8, device=device)
        pixels = pixels.contiguous(memory_format=torch.channels_last)

        def both(pixels: torch.Tensor = pixels) -> None:
            images.encode(pixels)
            texts.encode_tokens(tokens)

        vae_rate = rate(lambda pixels=pixels: images.encode(pixels), options.batch, options.seconds, device)
        both_rate = rate(both, options.batch, options.seconds, device)
        rows.append(
            {
                "resolution": resolution,
                "batch": options.batch,
                "precision": images.precision,
                "vae images/s": round(vae_rate, 1),
                "text captions/s": round(text_rate, 1),
                "both images/s": round(both_rate, 1),
            }
        )
    write_results("encode", options.size, rows)


if __name__ == "__main__":
    main()
