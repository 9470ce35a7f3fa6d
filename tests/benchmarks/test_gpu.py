"""The command for a machine with a GPU, at tiny sizes without one: its steps, its records, and what ends a step."""

import multiprocessing
import os
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import adam16, gpu
from benchmarks.common.random_encoders import VAES
from benchmarks.gpu_run import device, encode_job, encoding, numbers, operators, suite, trained
from benchmarks.gpu_run.context import Context, benchmark
from benchmarks.gpu_run.items import FAMILIES, Item
from benchmarks.gpu_run.numbers import SameDraws
from benchmarks.gpu_run.page import page
from benchmarks.gpu_run.records import LOG, MARKDOWN, RECORDS, Records
from benchmarks.gpu_run.subjects import (
    BEST,
    SHIPPED,
    START,
    SUBJECTS,
    all_that_pay,
    recipe_for,
    shipped_change,
    single_changes,
    why_not_compared,
)
from precompute.config import EncodeConfig
from recipes.algorithms.sixteen_bit import adam16 as optimizer
from recipes.config.recipe import load_config
from recipes.engines.first_weights import new_task
from recipes.models.autoregressive.flex import SHORTEST

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(("resolution", "recipe"), [(256, "sd2_encode"), (512, "sd2_encode_512")])
def test_encoding_as_shipped_has_the_batch_of_the_recipe(resolution, recipe):
    """And no feature map that 32-bit indices do not reach."""
    shipped = load_config(gpu.ROOT / "yamls" / f"{recipe}.yaml", [], EncodeConfig, [])
    assert shipped.resolutions == [resolution]
    assert encoding.options(resolution, small=False)[SHIPPED] == (shipped.batch, {})
    assert shipped.batch * VAES["sd2"]["block_out_channels"][0] * resolution**2 < 2**31


def test_steps_in_this_process(tmp_path, unprepared, capsys):
    """A step of each kind that is quick; what fails is a row of its own, and the next step runs."""
    arguments = ["--small", "--device", "cpu", "--here", "--out", str(tmp_path), "--only"]
    steps = ["numbers dvae", "unet_256, st", "unet_256, without ch", "unet_512, as", "powersgd", "geglu", "training"]
    records = gpu.main([*arguments, *steps])
    ends = {line["item"]: line["state"] for line in records.lines("end")}
    assert ends == dict.fromkeys(ends, "done") and len(ends) == 7
    (start, *others) = [row["values"] for row in records.rows("U-Net at 256")]
    assert start["setting"] == START and start["images/s"] > 0 and start["TFLOP/s"] > 0
    assert others[0]["relative to start"] == pytest.approx(others[0]["images/s"] / start["images/s"], abs=1e-3)
    assert {row["values"]["result"] for row in records.rows(numbers.TABLE)} == {"passed"}
    assert records.rows("U-Net at 256, starting point: one step")
    assert (tmp_path / "trace_unet_256.json.gz").stat().st_size > 1000
    tables = {line["record"]["benchmark"]: line["record"] for line in records.lines("record")}
    assert set(tables) == {"powersgd_cost", "geglu", "divided_numbers"} and tables["powersgd_cost"]["commit"]
    assert [row["way"] for row in tables["geglu"]["rows"]] == ["PyTorch"]
    compared = {row["way"]: row["result"] for row in tables["divided_numbers"]["rows"]}
    assert compared == dict.fromkeys(compared, "passed") and {"one device, Lightning", "FULL_SHARD"} <= set(compared)
    text = (tmp_path / MARKDOWN).read_text()
    for words in ("## The machine", "## U-Net at 256\n", "## powersgd_cost, d64", "| powersgd cost | done |"):
        assert (words in text) == (words != "## The machine")
    assert "## Goals" not in text  # they are those of the published sizes
    assert "Everything is in" in capsys.readouterr().out


def test_every_step_has_its_function_and_a_limit(items):
    steps = {small: items(small) for small in (False, True)}
    for found in steps.values():
        assert len({item.name for item in found}) == len(found) > 20
        for item in found:
            module, function = item.work.split(":")
            assert callable(getattr(__import__(f"benchmarks.gpu_run.{module}", fromlist=[function]), function))
            assert 0 < item.limit <= 180
    names = [item.name for item in steps[False]]
    # Whatever compiles has the time for it, also where its recipe names the lever: of the transformer, all but one.
    limits = {item.name: item.limit for item in steps[False]}
    compiled = ("averaged every 3 batches", "microbatches of 32", "recomputed", "attention with a dense mask", "fp8")
    assert {limits[f"transformer, {name}"] for name in compiled} == {150} and limits["unet_256, compiled"] == 150
    assert limits["transformer, without compile"] == limits["unet_256, FSDP"] == 90
    assert (
        names.index("unet_256, starting point") < names.index("unet_256, compiled") < names.index(f"unet_256, {BEST}")
    )
    # A budget that does not reach all single changes has the kernels that no other step measures.
    first = next(i for i, name in enumerate(names) if name.startswith("unet_256, without"))
    assert {"tests", "attention", "norms", "adam16"} <= set(names[:first])


def test_changes_are_those_of_the_recipe():
    for subject in SUBJECTS.values():
        changes = single_changes(subject, small=False)
        recipe = load_config(gpu.ROOT / "yamls" / subject.yaml, [], trained.Recipe, [])
        of_a_run = {label for label in recipe.algorithms if label != "scheduled_ema"}  # which none of these begins
        assert {f"without {label}" for label in of_a_run} <= set(changes)
        assert all(
            len(keys) == len(set(keys)) for change in changes.values() for keys in [[c.split("=")[0] for c in change]]
        )


def test_the_recipe_as_shipped_is_measured_once():
    """And counts as the change that it is."""
    unet = SUBJECTS["unet_256"]
    assert shipped_change(unet, small=False) == ["training.microbatch=64"]
    assert "microbatches of 64" not in single_changes(unet, small=False)
    assert shipped_change(SUBJECTS["transformer"], small=False) == []
    assert shipped_change(unet, small=True) == []  # where the starting point is the recipe as shipped


def test_that_nothing_pays_is_not_said_where_nothing_is_known():
    def row(setting, rate, *change):
        return {"setting": setting, "values": {"images/s": rate}, "change": list(change)}

    failed, start = row(START, "OutOfMemoryError"), row(START, 100)
    assert "starting point" in why_not_compared([row("a", 120, "x=1")], "images/s")
    assert "starting point" in why_not_compared([failed, row("a", 120, "x=1")], "images/s")
    assert "single change" in why_not_compared([start, row(SHIPPED, 90), row("a", "error", "x=1")], "images/s")
    assert why_not_compared([start, row("a", 90, "x=1")], "images/s") is None


def test_all_that_pay():
    def row(setting, rate, *change):
        return {"setting": setting, "change": list(change), "values": {"images/s": rate}}

    rows = [row(SHIPPED, 300), row(START, 100), row("a", 120, "x=1"), row("b", 130, "x=2"), row("c", 100.5, "y=1")]
    rows += [row("d", "OutOfMemoryError: no", "z=1"), row("e", 110, "u=1", "v=1")]
    assert all_that_pay(rows, "images/s") == ["x=2", "u=1", "v=1"]
    assert all_that_pay([rows[0]], "images/s") == []
    changes = SUBJECTS["unet_256"].changes  # CUDA graphs and FSDP refuse each other
    apart = [row(name, rate, *changes[name]) for name, rate in (("FSDP", 120), ("CUDA graphs", 130), ("compiled", 125))]
    assert all_that_pay([row(START, 100), *apart], "images/s") == [*changes["CUDA graphs"], *changes["compiled"]]
    apart[1] = row("CUDA graphs", 110, *changes["CUDA graphs"])
    assert all_that_pay([row(START, 100), *apart], "images/s") == [*changes["compiled"], *changes["FSDP"]]


@pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
def test_random_numbers_are_those_of_the_cpu(shape):
    """On the meta device nothing is drawn, but everything is asked for as on a GPU."""

    def draw():
        x = torch.ones(shape)
        return [
            torch.randn(shape),
            torch.rand(shape),
            torch.randint(9, shape),
            torch.randint(5, 9, shape),
            torch.randn_like(x),
            torch.rand_like(x),
            torch.empty(shape).uniform_(2, 3),
            torch.empty(shape).normal_(),
        ]

    with SameDraws(7) as one:
        first = draw()
    with SameDraws(7):
        second = draw()
    assert one.drawn == len(first)
    assert all(torch.equal(a, b) and a.shape == shape for a, b in zip(first, second, strict=True))
    assert first[6].min() >= 2 and first[6].max() < 3 and first[3].min() >= 5 and first[2].dtype == torch.int64
    with SameDraws(7), torch.device("meta"):
        assert {x.device.type for x in draw()} == {"meta"}


def test_a_difference_beyond_the_tolerance_fails(tmp_path, monkeypatch):
    exact = numbers.gradients

    def wrong(task, batch, device, autocast):
        loss, vector = exact(task, batch, device, autocast)
        return loss, vector if not calls.append(1) and len(calls) == 1 else vector * 1.01

    calls = []
    monkeypatch.setattr(numbers, "gradients", wrong)
    with pytest.raises(ArithmeticError, match="contrastive_text: beyond the tolerance: fp32$"):
        numbers.compare(Context(tmp_path, True), family="contrastive_text")
    assert Records(tmp_path / RECORDS).rows(numbers.TABLE)[0]["values"]["result"] == "FAILED"


@pytest.mark.parametrize("family", ["unet", "autoregressive", "language"])
def test_numbers_of_a_family(family, tmp_path, monkeypatch):
    """What has no draws, and the norms of the U-Net; the other families run in other tests."""
    ways = numbers.ways(family)
    chosen = {name: way for name, way in ways.items() if family != "unet" or name not in ("fp32", "bf16")}
    assert list(chosen) == (["fused norms"] if family == "unet" else ["fp32", "bf16"])
    monkeypatch.setattr(numbers, "SAMPLES", 1)
    monkeypatch.setattr(numbers, "ways", lambda family: chosen)
    numbers.compare(Context(tmp_path, True), family=family)
    rows = [row["values"] for row in Records(tmp_path / RECORDS).rows(numbers.TABLE)]
    assert {row["way"]: row["result"] for row in rows} == dict.fromkeys(chosen, "passed")


def test_families_that_are_compared():
    """Each is a step, and the transformer has the positions from which on a GPU takes FlexAttention."""
    assert set(numbers.RECIPES) == set(FAMILIES) and set(numbers.FUSED) <= set(FAMILIES)
    name, changes = numbers.RECIPES["autoregressive"]
    sizes = load_config(gpu.ROOT / "yamls" / f"{name}.yaml", changes, trained.Recipe, []).model.args
    assert sizes["text_positions"] + sizes["side"] ** 2 >= SHORTEST


def test_how_busy_a_gpu_is():
    """Three kernels and a span around them: 10 us, then 20 us of which 10 overlap, then a gap of 10 us before 10 us."""

    def event(name, start, end, device=DeviceType.CUDA, **more):
        times = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        return SimpleNamespace(name=name, time_range=times, device_type=device, **more)

    events = [
        event("sm90_xmma_gemm_bf16", 0, 20),
        event("flash_fwd_kernel", 10, 30),
        event("void at::native::vectorized_elementwise_kernel", 40, 50),
        event("Optimizer.step#AdamW.step", 0, 50, is_user_annotation=True),
        event("## Call CompiledFxGraph", 0, 50),
        event("aten::mm", 0, 50, DeviceType.CPU),
    ]
    found = operators.kernels_of(SimpleNamespace(events=lambda: events))
    assert (found.count, found.length, found.covered) == (3, 50, 40)
    text = operators.busy(found)
    assert text.startswith("kernels: 3, ") and "GPU computes: 80.0%" in text
    assert "matrix product: 0.02 ms" in text and "attention: 0.02 ms" in text
    assert operators.kernels_of(SimpleNamespace(events=lambda: events[-1:])) is None
    assert operators.kind_of("cudnn_fprop_implicit_gemm") == "convolution"
    assert operators.kind_of("_group_norm_backward") == "norm" and operators.kind_of("mystery") == "other"
    assert operators.kind_of("_geglu_backward") == "elementwise and reductions"
    # Inductor's names are of all operations around; its templates multiply.
    assert operators.kind_of("triton_poi_fused_add_convolution_mul_3") == "elementwise and reductions"
    assert operators.kind_of("triton_per_fused_native_group_norm_convolution_1") == "norm"
    assert operators.kind_of("triton_tem_fused_flex_attention_0") == "attention"


@pytest.mark.parametrize(
    ("kinds", "seconds", "rate", "words"),
    [
        ({"convolution": 700, "norm": 300}, 1e-3, 2e12, "products: 70% of the kernels' time, at 50% of"),
        ({"matrix product": 1000}, 1e-3, None, "products: 100% of the kernels' time"),
        ({"matrix product": 300, "norm": 400, "optimizer": 300}, 1e-3, 2e12, "memory: 70% of the kernels' time"),
        ({"matrix product": 400, "norm": 200, "other": 400}, 1e-3, 2e12, "no one thing: products 40%, memory 20%"),
        ({"matrix product": 1000}, 1.25e-3, 2e12, "host: the GPU computes 80% of the time"),
    ],
    ids=["products", "unknown rate", "memory", "neither", "host"],
)
def test_what_a_step_is_bound_by(kinds, seconds, rate, words):
    """A step of 0.7 GFLOP whose kernels take 1 ms, however long the profiler makes it."""
    kernels = operators.Kernels(9, 5000, 1000, kinds)
    assert operators.bound_by(kernels, seconds, 7e8, rate).startswith(words)


def test_a_profiled_setting_says_what_it_is_bound_by(tmp_path, monkeypatch):
    """With kernels that take all the time of a step, which a CPU does not have."""
    context = Context(tmp_path, True)
    seconds = []

    def bound_by(kernels, step, flops, rate):
        seconds.append((step, flops, rate))
        return "products"

    monkeypatch.setattr(trained, "kernels_of", lambda profiler: operators.Kernels(1, 10, 10, {"norm": 10}))
    monkeypatch.setattr(trained, "bound_by", bound_by)
    monkeypatch.setattr(trained, "measured_rate", lambda context, number_format: 7.0)
    trained.setting(context, subject="unet_256", name=START, profiled=True)
    (row,) = (line["values"] for line in context.records.rows("U-Net at 256"))
    ((step, flops, rate),) = seconds
    assert row["bound by"] == "products" and rate == 7.0
    assert step == pytest.approx(4 / row["images/s"])  # the small batch, not the published one
    assert flops == pytest.approx(row["TFLOP/s"] * 1e12 * step)
    assert "norm: 0.01 ms" in page(context.records)


def test_both_engines_are_measured(tmp_path):
    context = Context(tmp_path, True)
    for name in (START, "Lightning"):
        trained.setting(context, subject="unet_256_of_128", name=name)
    composer, lightning = (line["values"] for line in context.records.rows("U-Net at 256, 16 images per GPU"))
    assert composer["loss"] == lightning["loss"] and lightning["images/s"] > 0
    assert lightning["s to the second step"] > 0


def test_first_weights_are_made_on_the_device(tmp_path):
    recipe = recipe_for(SUBJECTS["unet_256"], [], True, tmp_path)
    with trained.made_on(torch.device("meta")):
        task = new_task(recipe, sent=False)
    assert {parameter.device.type for parameter in task.parameters()} == {"meta"}
    assert {parameter.device.type for parameter in new_task(recipe, sent=False).parameters()} == {"cpu"}


def test_every_kind_of_kernel_counts_as_something():
    """Communication waits for other GPUs, and is of neither."""
    assert {kind for kind, _ in operators.KINDS} - {*operators.PRODUCTS, *operators.MEMORY} == {"communication"}


def test_the_rate_of_a_large_product_is_the_last_measured_here(tmp_path):
    context = Context(tmp_path, True)
    assert device.measured_rate(context, "bf16") is None
    device.machine(context)
    assert device.measured_rate(context, "bf16") > 0 and device.measured_rate(context, "tf32") is None


def test_optimizers_are_measured_one_after_the_other(tmp_path, monkeypatch):
    """At no time are there the parameters of two; one that fails is a row, and each row is kept at once."""
    alive, made = [], adam16.parameters
    monkeypatch.setattr(optimizer, "_compiled_update", lambda: optimizer.adamw_update)

    def counted(*sizes):
        assert all(parameter() is None for parameter in alive)
        found = made(*sizes)
        alive[:] = [weakref.ref(parameter) for parameter in found]
        return found

    def failing(self, *groups, compiled, **options):
        if not compiled:
            raise torch.OutOfMemoryError("CUDA out of memory")
        make(self, *groups, compiled=compiled, **options)

    make = optimizer.Adam16.__init__
    monkeypatch.setattr(optimizer.Adam16, "__init__", failing)
    monkeypatch.setattr(adam16, "parameters", counted)
    words = ["--width", "16", "--layers", "1", "--rounds", "1"]
    benchmark(Context(tmp_path, True), module="adam16", arguments=[], small=words)
    records = Records(tmp_path / RECORDS)
    found = [line["record"]["rows"] for line in records.lines("record")]
    assert [len(rows) for rows in found] == [1, 2, 3, 4, 5, 5]
    failed = [row["optimizer"] for row in found[-1] if not isinstance(row["ms per step"], float)]
    assert failed == ["adam16"] and found[-1][3]["ms per step"].startswith("OutOfMemoryError: CUDA out")
    assert page(records).count("## adam16, d16") == 1


# --- processes, which a step cannot take with it -----------------------------------------------


def hang(context):
    context.records.row("before", {"found": 1})
    print("hangs now")
    time.sleep(100)


def break_off(context):
    raise ValueError("two\nlines")


def die(context):
    os._exit(9)


def call(item, folder, small):
    globals()[item.work](Context(folder, small))


def test_a_step_that_hangs_fails_or_dies_ends_alone(tmp_path):
    """By plain forks, which need no server; the steps are functions of this file."""
    records = Records(tmp_path / RECORDS)
    runner = gpu.Isolated(tmp_path, True, records, tmp_path / MARKDOWN)
    runner.context = multiprocessing.get_context("fork")
    runner.perform = call
    steps = [Item(name, name, limit) for name, limit in (("hang", 2.0), ("break_off", 20.0), ("die", 20.0))]
    said = []
    gpu.run_all(steps, runner, records, time.monotonic() + 60, said.append)
    ends = {line["item"]: line["state"] for line in records.lines("end")}
    assert ends == {
        "hang": "FAILED: ended after 2 s",
        "break_off": "FAILED: ValueError: two lines",
        "die": "FAILED: exit code 9",
    }
    assert records.rows("before")[0]["values"] == {"found": 1}
    assert "hangs now" in (tmp_path / LOG).read_text() and "two\nlines" in (tmp_path / LOG).read_text()
    assert "| break_off | FAILED: ValueError: two lines |" in page(records)
    assert len(said) == 3
    gpu.run_all(steps, runner, records, time.monotonic(), said.append)
    assert records.lines("end")[-1]["state"].startswith("left out")


def test_results_of_tests_are_rows(tmp_path, pytester):
    context = Context(tmp_path, True)
    pytester.makepyfile(
        """
        import pytest
        def test_good(): pass
        def test_bad(): assert 1 == 2
        @pytest.mark.skip(reason="no GPU")
        def test_none(): pass
        """
    )
    pytester.inline_run(plugins=[suite.Rows(context)])
    rows = {row["values"]["test"].split("::")[1]: row["values"] for row in context.records.rows(suite.TABLE)}
    assert {name: row["result"] for name, row in rows.items()} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_none": "skipped",
    }
    assert rows["test_bad"]["reason"].startswith("assert 1 == 2") and "no GPU" in rows["test_none"]["reason"]
    assert "tests/recipes/models/kernels/test_group_norm_silu.py" in suite.files_with("gpu")


@pytest.mark.parametrize(("cores", "threads"), [(16, "4"), (2, "1")])
def test_tests_share_the_cores_for_compiling(tmp_path, monkeypatch, cores, threads):
    seen = []
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    monkeypatch.setattr(suite.os, "cpu_count", lambda: cores)
    run = lambda *_, **__: seen.append(os.environ["TORCHINDUCTOR_COMPILE_THREADS"]) or 0  # noqa: E731
    monkeypatch.setattr(suite.pytest, "main", run)
    suite.marked_tests(Context(tmp_path, True), processes=4)
    assert seen == [threads]


def test_what_is_not_there_is_refused(unprepared, capsys):
    for arguments, words in (
        (["--device", "cpu"], "add --small"),
        (["--small", "--device", "cpu", "--only", "nothing"], "no step begins with 'nothing'"),
    ):
        with pytest.raises(SystemExit):
            gpu.main(arguments)
        assert words in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            gpu.main(["--here"])
        assert "PyTorch sees no GPU" in capsys.readouterr().err


def test_paths_that_are_mistakes_are_refused_in_one_line(unprepared, tmp_path, capsys):
    (tmp_path / "file").touch()
    for arguments, words in (
        (
            ["--small", "--device", "cpu", "--out", f"{tmp_path}/file"],
            f"--out: {tmp_path}/file is a file; give a folder",
        ),
        (["--place", f"{tmp_path}/none/gpu.jsonl"], f"--place: there is no file {tmp_path}/none/gpu.jsonl"),
    ):
        with pytest.raises(SystemExit):
            gpu.main(arguments)
        assert words in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_the_second_half_of_a_whole_encode_job_is_measured(tmp_path):
    context = Context(tmp_path, True)
    encode_job.rates(context, resolution=64, sizes=[(96, 72)], images=8)
    (row,) = context.records.lines("row")
    assert row["values"]["image"] == "96x72" and row["values"]["images"] == 8 and row["values"]["images/s"] > 0
    assert encode_job._rate([(0.0, 2), (1.0, 4), (2.0, 8), (4.0, 16)]) == {"images": 16, "images/s": 4.0}
