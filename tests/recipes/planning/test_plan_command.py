"""`recipes/plan.py` as a command: its report, and its errors."""

import re
from pathlib import Path

import pytest

from benchmarks.gpu_run.subjects import register_data
from recipes.config.recipe import Recipe, load_config
from recipes.engines.dry_run_checks import check_on_meta
from recipes.plan import main, peak_of
from recipes.planning.hardware.gpus import DEVICES

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["model.denoiser.channels=[32,32]", "model.denoiser.attention=[true,false]", "model.denoiser.heads=[1,1]"]


def report(capsys, *arguments):
    main(["yamls/sd2_base.yaml", *SMALL, "data.resolution=64", *arguments])
    return capsys.readouterr().out


def test_the_report(capsys, monkeypatch):
    """Of a recipe whose data has no streams: its shapes are Stable Diffusion's, and no set is looked for."""
    register_data()
    monkeypatch.chdir(ROOT)
    changes = ["data={name: random_latents, resolution: 64}", "evals.val=null"]
    text = report(capsys, *changes, "--gpu", "a100-40", "--gpus", "1", "8", "64", "--price", "2")
    assert "550,000 steps" in text and "0.2 MB per sample" in text
    for count in ("1 GPU", "8 GPUs", "64 GPUs"):
        line = rf"^{count} \(NVIDIA A100-SXM4-40GB, 38.7 GB usable of each\): \w+"
        assert re.search(line, text, re.MULTILINE)
    runs = re.findall(r"run +([\d.]+) hours (\d+) GPU-hours (\d+) at 2", text.replace(",", ""))
    for gpus, (hours, gpu_hours, cost) in zip((1, 8, 64), runs, strict=True):
        assert abs(float(hours) * gpus - int(gpu_hours)) <= gpus / 10 + 1
        assert abs(int(cost) - 2 * int(gpu_hours)) <= 2
    for division in ("DDP", "SHARD_GRAD_OP", "FULL_SHARD", "FULL_SHARD within machines"):
        assert f"\n  {division}, microbatch" in text


def test_the_example_in_the_docs_is_what_the_command_prints(capsys, monkeypatch):
    """Up to the numbers, of which versions of PyTorch give slightly different ones."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    shown = re.search(r"```text\n(sd2_base: .*?)\n```", page, re.DOTALL)[1]
    main(["yamls/sd2_base.yaml", "--gpu", "h200", "--gpus", "8", "512", "--price", "3.5"])
    printed = capsys.readouterr().out.strip()
    number = r"\d[\d,]*(?:\.\d+)?"
    assert re.sub(number, "#", printed) == re.sub(number, "#", shown)
    found, told = ([float(n.replace(",", "")) for n in re.findall(number, text)] for text in (printed, shown))
    assert found == pytest.approx(told, rel=0.05, abs=0.0011)  # seconds are printed with three decimal places


def test_what_a_short_run_of_a_small_model_takes(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["model.denoiser.width=32", "model.denoiser.layers=1", "training.precision=fp32"]
    main([str(ROOT / "yamls" / "openmoji_diffusion.yaml"), *small, "--gpu", "h200", "--gpus", "1", "--price", "2"])
    text = capsys.readouterr().out
    count, whole = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) (?:parameters|steps)", text))
    sizes = re.search(r"stored: ([\d.]+) MB per checkpoint, ([\d.]+) MB with the average, ([\d.]+) kB per", text)
    assert [float(size) for size in sizes.groups()[:2]] == [round(12e-6 * count, 1), round(16e-6 * count, 1)]
    assert float(sizes[3]) > 1
    step = float(re.search(r"step +([\d.]+) s", text)[1])
    hours, gpu_hours, cost = map(float, re.search(r"run +(\S+) hours, (\S+) GPU-hours, (\S+) at 2", text).groups())
    assert hours == gpu_hours == pytest.approx(whole * step / 3600, rel=0.15)
    assert cost == pytest.approx(2 * hours, rel=0.1)


@pytest.mark.parametrize(
    "levers",
    [
        ["{name: channels_last}"],
        ["{name: powersgd, rank: 8}", "{name: block_all_reduce}"],
        ["{name: cuda_graphs}", "{name: activation_checkpointing}"],
        ["{name: scheduled_ema, decay: 0.9, last: 9999ba}"],
    ],
)
def test_levers_that_a_run_refuses(capsys, tmp_path, monkeypatch, levers):
    """In the same line."""
    monkeypatch.chdir(tmp_path)
    yaml, named = ROOT / "yamls" / "openmoji_diffusion.yaml", [f"algorithms.l{i}={x}" for i, x in enumerate(levers)]
    changes = ["model.denoiser.width=32", "model.denoiser.layers=1", "algorithms.scheduled_ema=null", *named]
    with pytest.raises(ValueError) as refused:
        check_on_meta(load_config(yaml, changes, Recipe, []))
    with pytest.raises(SystemExit):
        main([str(yaml), *changes, "--gpu", "h200", "--gpus", "8"])
    assert capsys.readouterr().err == f"error: {refused.value}\n"


@pytest.mark.parametrize(
    ("yaml", "changes", "tera_flops"),
    [
        ("sd2_base", [], 312),
        ("dalle_12b", [], 312),
        ("dalle_12b", ["algorithms.resblock_grad_scaling=null"], 156),
    ],
)
def test_products_are_as_fast_as_in_their_number_format(yaml, changes, tera_flops):
    """Blocks with gradient scales compute in fp16, though the recipe says fp32."""
    recipe = load_config(ROOT / "yamls" / f"{yaml}.yaml", changes, Recipe, [])
    assert peak_of(DEVICES["a100-80"], recipe) == tera_flops * 1e12


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--gpu", "h2000", "--gpus", "8"], "give v100-16"),
        (["--gpu", "h200", "--gpus", "7"], "2048 does not divide over 7 devices; the nearest .* divide it: 4 or 8"),
        (["training.globl_batch=3", "--gpu", "h200", "--gpus", "8"], "global_batch"),
        (["--gpu", "h100", "--gpus", "8", "64", "training.globl_batch=3"], "^error: training.globl_batch: unknown key"),
        (["--gpu", "h100", "--gpus", "8", "0"], "^error: --gpus: 0; give 1 to 1000000$"),
        (["--gpu", "h100", "--gpus", "1" + "0" * 20], "^error: --gpus: 10*; give 1 to 1000000$"),
        (["--gpu", "h100", "--gpus", "8", "--machine", "-8"], "^error: --machine: -8; give 1 to 1000000$"),
        (["--gpu", "h100", "--gpus", "8", "--price", "nan"], "^error: --price: nan; give 0 or more$"),
        (["--gpu", "h100", "--gpus", "16", "--between", "0"], "^error: --between: 0; give a rate above 0$"),
    ],
)
def test_a_mistake_is_one_line(arguments, line, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        report(capsys, *arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert re.search(line, error) and error.count("\n") == 1


def test_a_name_from_a_recipe_does_not_command_the_terminal(capsys, monkeypatch):
    monkeypatch.setattr(f"{main.__module__}.plan", lambda options, recipe: "callbacks.\x1b[2J: 1 time")
    assert report(capsys, "--gpu", "h200", "--gpus", "8") == "callbacks.\\x1b[2J: 1 time\n"
