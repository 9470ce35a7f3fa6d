"""data/openmoji.py: captions, the split, the files, and a second start."""

import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from data import openmoji
from data.openmoji import HELD_OUT_SHAPES, build, caption_of, catalogue, held_out, small, words
from data.sources.base import DecodedSample
from data.sources.filters import Filter
from data.sources.tars import TarSource

SCRIPT = Path(__file__).resolve().parents[2] / "data" / "openmoji.py"


@pytest.fixture(scope="module")
def emojis():
    return catalogue()[0]


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    out = tmp_path_factory.mktemp("openmoji") / "tars"
    return out, build(out, size=32, limit=60, shard_size=20, workers=1)


def contents(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "codes", "caption", "tones"),
    [
        ("woman_astronaut_medium_skin_tone", [0x1F469], "woman astronaut: medium skin tone", ("medium",)),
        (
            "man_medium-dark_skin_tone_red_hair",
            [0x1F468],
            "man: medium-dark skin tone, red hair",
            ("medium-dark",),
        ),
        ("woman_red_hair", [0x1F469], "woman: red hair", ()),
        ("red_hair", [0x1F9B0], "red hair", ()),
        ("man_bald", [0x1F468], "man: bald", ()),
        ("light_skin_tone", [0x1F3FB], "light skin tone", ()),
        (
            "kiss_woman_man_dark_skin_tone_light_skin_tone",
            [0x1F469],
            "kiss: woman, man, dark skin tone, light skin tone",
            ("dark", "light"),
        ),
        ("kiss_mark", [0x1F48B], "kiss mark", ()),
        ("family_man_woman_girl_boy", [0x1F468], "family: man, woman, girl, boy", ()),
        ("Côte_d’Ivoire", [0x1F1E8, 0x1F1EE], "flag: Côte d'Ivoire", ()),
        ("Scotland", [0x1F3F4, 0xE0067, 0xE007F], "flag: Scotland", ()),
        ("keycap_7", [0x37, 0xFE0F, 0x20E3], "keycap: 7", ()),
    ],
)
def test_captions_read_like_text(name, codes, caption, tones):
    assert caption_of(name, codes)[::2] == (caption, tones)


def test_catalogue(emojis):
    captions = [one.caption for one in emojis]
    assert 3_900 <= len(captions) == len(set(captions))
    assert not any("_" in caption or ":" in caption[-1] or caption != caption.strip() for caption in captions)
    assert len({one.hexcode for one in emojis}) == len(emojis)
    assert sum(catalogue()[1].values()) + len(emojis) == 4_495


def test_split_holds_out_combinations_of_known_words(emojis):
    held = held_out(emojis)
    assert 0.04 < len(held) / len(emojis) < 0.06
    train = set().union(*(words(one.caption) for one in emojis if one.hexcode not in held))
    val = [one for one in emojis if one.hexcode in held]
    assert all(words(one.caption) <= train for one in val)
    assert not any(one.caption.startswith("flag") for one in val)
    assert {len(one.tones) for one in val} == {0, 1, 2}
    assert set(HELD_OUT_SHAPES) <= {one.caption for one in val}
    assert held == held_out(emojis[::-1])


def test_small_set(emojis):
    """It has the README's prompts, holds out what the whole set holds out, and people are its lesser part."""
    chosen = small(emojis)
    held = held_out(chosen)
    assert held == held_out(emojis) & {one.hexcode for one in chosen}
    assert 0.03 < len(held) / len(chosen) < 0.08 and 300 < len(chosen) < 400
    evaluation = yaml.safe_load((SCRIPT.parents[1] / "yamls" / "openmoji_evaluate.yaml").read_text())
    documented = [
        re.search(r"images: (\d+), extractor", (SCRIPT.parents[1] / "docs" / "evaluation.md").read_text()),
        re.search(r"--number (\d+)", (SCRIPT.parents[1] / "recipes" / "evaluate.py").read_text()),
    ]
    assert all(size <= len(held) for size in (evaluation["kid_subset_size"], *(int(found[1]) for found in documented)))
    assert sum(bool(one.tones) for one in chosen) < len(chosen) / 3
    prompts = (SCRIPT.parents[1] / "docs" / "openmoji_prompts.txt").read_text().split("\n")
    captions = {one.caption: one.hexcode for one in chosen}
    unseen = [prompt for prompt in prompts if prompt and captions[prompt] in held]
    assert len(unseen) == 5


def test_small_set_names_only_images_that_exist(emojis, tmp_path, monkeypatch):
    (tmp_path / "list.txt").write_text("# a comment\n\nshapes:\nred heart; blue  haert\n")
    monkeypatch.setattr(openmoji, "SMALL_SET", tmp_path / "list.txt")
    with pytest.raises(ValueError, match="list.txt: OpenMoji has no image of this name: blue  haert"):
        small(emojis)


@pytest.mark.parametrize("limit", [1, 25, 100, 700])
def test_split_of_a_part(emojis, limit):
    part = emojis[:limit]
    held = held_out(part)
    train = set().union(*(words(one.caption) for one in part if one.hexcode not in held))
    assert all(words(one.caption) <= train for one in part if one.hexcode in held)


def test_files(tars):
    out, done = tars
    assert sum(done["pictures"].values()) == 60 and done["pictures"]["val"] > 0
    assert sorted(done["files"]) == ["train/00000.tar", "train/00001.tar", "train/00002.tar", "val/00000.tar"]
    with tarfile.open(out / "train" / "00000.tar") as tar:
        members = {info.name: tar.extractfile(info).read() for info in tar}
    assert len(members) == 60
    key = next(iter(members)).split(".")[0]
    about = json.loads(members[f"{key}.json"])
    assert about["caption"] == members[f"{key}.txt"].decode() and about["hexcode"] == key
    assert (about["width"], about["height"], about["licence"]) == (32, 32, "CC BY-SA 4.0")
    image = Image.open(io.BytesIO(members[f"{key}.png"]))
    assert image.mode == "RGB" and image.size == (32, 32)


def test_pictures_are_drawn_on_white(tars):
    out, done = tars
    source = TarSource(urls=f"{out}/{{train,val}}/*.tar")
    rows = [Filter().decode(sample) for shard in source.shards() for sample in source.read(shard)]
    assert len(rows) == 60 and all(isinstance(row, DecodedSample) for row in rows)
    arrays = np.stack([np.asarray(row.image) for row in rows])
    assert (arrays[:, 0, 0] == 255).all()  # corners are background
    assert (arrays.reshape(60, -1).std(1) > 5).all()  # and something is drawn


def test_same_bytes_at_every_run(tars, tmp_path):
    out, _ = tars
    build(tmp_path / "again", size=32, limit=60, shard_size=20, workers=1)
    assert contents(tmp_path / "again") == contents(out)


def test_second_start(tmp_path, capsys):
    out = tmp_path / "tars"
    arguments = {"size": 16, "limit": 5, "workers": 1}
    build(out, **arguments)
    first = {path: path.stat().st_mtime_ns for path in out.rglob("*.tar")}
    capsys.readouterr()
    build(out, **arguments)
    assert "is complete: 5 train images, 0 val images; nothing to do" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.tar")} == first
    (out / "train" / "00000.tar").unlink()
    build(out, **arguments)
    assert (out / "train" / "00000.tar").is_file()
    assert build(out, **arguments | {"size": 20})["size"] == 20
    assert build(out, **arguments | {"choice": "small"})["set"] == "small"
    assert [path.name for path in tmp_path.iterdir()] == ["tars"]


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for content in (None, '{"done": true}'):
        if content:
            (tmp_path / "mine" / "done.json").write_text(content)
        with pytest.raises(ValueError, match="not written by this script"):
            build(tmp_path / "mine", limit=1)
    assert (tmp_path / "mine" / "thesis.txt").is_file()


@pytest.mark.parametrize(
    "arguments",
    [{"size": 8}, {"limit": 0}, {"shard_size": 0}, {"workers": 0}, {"choice": "x"}, {"out": "s3://bucket/tars"}],
)
def test_arguments_are_checked(arguments, tmp_path):
    with pytest.raises(ValueError, match=f"--{next(iter(arguments)).replace('_', '-').replace('choice', 'set')} is"):
        build(**({"out": tmp_path / "out"} | arguments))


def test_as_a_script(tmp_path):
    """From any folder (its own too), errors in one line, without torch."""

    def run(*arguments: str, cwd: Path = tmp_path) -> subprocess.CompletedProcess:
        command = [sys.executable, "-X", "importtime", str(SCRIPT), *arguments]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)

    def said(done: subprocess.CompletedProcess) -> list[str]:
        return [line for line in done.stderr.splitlines() if not line.startswith("import time:")]

    done = run("--out", "tars", "--limit", "3", "--size", "16")
    assert done.returncode == 0 and (tmp_path / "tars" / "train" / "00000.tar").is_file()
    assert "torch" not in done.stderr
    assert said(done)[-1].startswith("openmoji: wrote tars: 3 train images")
    done = run("--out", "tars", "--size", "3", cwd=SCRIPT.parent)
    assert done.returncode == 2 and said(done) == ["openmoji.py: --size is 3: give 16 to 2,048"]
    done = run("--out", "tars", "--siez", "3")
    assert done.returncode == 2 and len(said(done)) == 1 and "--siez" in said(done)[0]


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupted(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr(openmoji, "build", interrupted)
    monkeypatch.setattr(sys, "argv", ["openmoji.py", "--out", "tars"])
    with pytest.raises(SystemExit) as left:
        openmoji.main()
    assert (left.value.code, capsys.readouterr().err) == (130, "openmoji.py: interrupted\n")
