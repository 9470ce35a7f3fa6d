"""Recipes from YAML files: all files of yamls/ load, and each mistake is reported in one line."""

import copy
import dataclasses
import functools
import re
from pathlib import Path

import pytest

from precompute.config import EncodeConfig, VocabularyConfig
from precompute.texts.pack_config import PackConfig
from recipes.config import reading
from recipes.config.components import COMPONENTS
from recipes.config.reading import read_values
from recipes.config.recipe import Recipe, Training, load_config, to_yaml
from recipes.config.schema import Checker, subsections
from recipes.config.values import Component, ConfigError
from recipes.evaluation.config import Evaluation

ROOT = Path(__file__).resolve().parents[3]
YAMLS = sorted((ROOT / "yamls").glob("*.yaml"))
HEADER = ("Source", "Hardware", "Expected|Time", "Command")


def class_of(path):
    """The dataclass of a shipped YAML."""
    kinds = {"_evaluate": Evaluation, "_encode": EncodeConfig, "_tokens": EncodeConfig, "_vocabulary": VocabularyConfig}
    kinds["_pack"] = PackConfig
    return next((kind for word, kind in kinds.items() if word in path.stem), Recipe)


@pytest.fixture(params=YAMLS, ids=[path.name for path in YAMLS])
def shipped(request):
    return request.param


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A small recipe; returns a function that loads it with overrides, or gives the lines that are wrong."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "small.yaml").write_text(SMALL)

    def read(*overrides, file="small.yaml", missing=None):
        try:
            return load_config(file, list(overrides), Recipe, missing)
        except ConfigError as error:
            assert all("\n" not in line for line in error.lines)
            return error.lines

    return read


SMALL = """
run_name: small
model: {name: kl_autoencoder, channels: [8, 16]}
data:
  name: pictures
  source: {name: folder, path: pictures}
  resolution: 64
optimizer: {name: adamw, lr: 1e-4}
schedule: {name: constant, warmup: 10ba}
training: {duration: 1e2ba, global_batch: 1e1}
callbacks:
  progress: {name: progress, seconds: 5}
  export: {name: export}
""".replace("1e2ba", "100ba")


# --- the shipped recipes ---------------------------------------------------------------------------------------------


def test_a_shipped_recipe_loads(shipped):
    missing = []
    config = load_config(shipped, [], class_of(shipped), missing)
    assert all(re.match(r"[\w.]+: `[^`]+` does not exist", line) for line in missing)
    for path in (line.split("`")[1] for line in missing):
        assert path.startswith("runs/"), f"{path}: what the recipes write lies in runs/"
    if isinstance(config, Recipe):
        assert config.run_name == shipped.stem
        assert config.output == f"runs/{shipped.stem}"
        assert config.checkpoints.resumes, "a run that is killed would begin anew"
        # Examples take minutes, and some save only at their end.
        assert config.checkpoints.every is not None or shipped.stem.startswith(("openmoji", "docs"))


def test_a_shipped_recipe_opens_with_its_facts(shipped):
    header = []
    for line in shipped.read_text().splitlines():
        if not line.startswith("#"):
            break
        header.append(line.removeprefix("#").strip())
    text = "\n".join(header)
    places = [re.search(rf"^({word}):? +\S", text, re.MULTILINE) for word in HEADER]
    assert all(places), f"the header needs {', '.join(HEADER)}"
    assert [place.start() for place in places] == sorted(place.start() for place in places)
    assert f"yamls/{shipped.name}" in text[places[-1].start() :]


def test_a_resolved_recipe_is_a_recipe(shipped, tmp_path):
    config = load_config(shipped, [], class_of(shipped), [])
    (tmp_path / "resolved.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "resolved.yaml", [], class_of(shipped), []) == config


def schema_keys(config, values, path=()):
    """The place of every key that a schema knows (not labels, not free dicts), from values and the config they made."""
    if isinstance(config, Component):
        inner = config.args
        yield (*path, "name")
    elif dataclasses.is_dataclass(config):
        inner = vars(config)
    else:
        if isinstance(config, dict) and any(isinstance(item, Component) for item in config.values()):
            for label in config:
                yield from schema_keys(config[label], values[label], (*path, label))
        return
    for key in inner:
        if key in values:
            yield (*path, key)
            yield from schema_keys(inner[key], values[key], (*path, key))


def changed(values, place, change):
    """A copy of nested dicts with one key and its value replaced by the dict `change(key, value)`."""
    first, *rest = place
    copy = {}
    for key, item in values.items():
        if key != first:
            copy[key] = item
        else:
            copy |= {key: changed(item, rest, change)} if rest else change(key, item)
    return copy


def errors_of(cls, values):
    checker = Checker(COMPONENTS)
    checker.section(cls, values, "")
    return checker.errors


def places(path):
    """(class, values, places of keys) of a shipped YAML."""
    cls = class_of(path)
    values = read_values(path, [])
    found = list(schema_keys(load_config(path, [], cls, []), values))
    assert len(found) >= 5
    return cls, values, found


def test_every_misspelled_key_is_named_with_the_nearest(shipped):
    cls, values, found = places(shipped)
    for place in found:
        misspelled = f"{place[-1][:-1]}{place[-1][-1] * 2}"
        errors = errors_of(cls, changed(values, place, lambda _, item, key=misspelled: {key: item}))
        named = [line for line in errors if line.startswith(f"{'.'.join((*place[:-1], misspelled))}: unknown key")]
        assert len(named) == 1, (place, errors)
        assert named[0].endswith(f"did you mean `{place[-1]}`?"), named


def test_every_wrong_type_is_named(shipped):
    cls, values, found = places(shipped)
    for place in found:
        for wrong in ({"neither": ["this", "nor", "that"]}, None, 1.5):
            errors = errors_of(cls, changed(values, place, lambda key, _, wrong=wrong: {key: wrong}))
            own = [line for line in errors if line.startswith(".".join(place))]
            if wrong is not None and wrong != 1.5 and place[-1] != "expect":
                assert own, (place, wrong)
            assert own == errors, (place, wrong, errors)


def test_every_missing_key_is_named(shipped):
    cls, values, found = places(shipped)
    named = 0
    for place in found:
        errors = errors_of(cls, changed(values, place, lambda key, item: {}))
        # A key with a default may be needed by another key's value, which its line then says.
        assert all(line.startswith(f"{'.'.join(place)}: ") for line in errors), (place, errors)
        named += len(errors)
    assert named >= 4


# --- what a YAML and overrides may say -------------------------------------------------------------------------------


def test_numbers(small):
    config = small("optimizer.eps=1E-7", "seed=1e3", "training.grad_clip=1")
    assert config.optimizer.args == {"lr": 1e-4, "eps": 1e-7}
    assert (config.seed, config.training.global_batch) == (1000, 10)
    assert isinstance(config.seed, int) and isinstance(config.training.grad_clip, float)


def test_overrides_win(small):
    changes = ["training.duration=5ba", "callbacks.progress.seconds=1", "model.channels=[4]", "run_name=a=b=c"]
    config = small(*changes, "seed=1", "seed=2")
    assert config.training.duration == "5ba" and config.run_name == "a=b=c"
    assert config.training.global_batch == 10
    assert config.callbacks["progress"].args == {"seconds": 1.0}
    assert config.model.args == {"channels": [4]}
    assert config.seed == 2


def test_null_removes_and_a_new_label_adds(small):
    config = small("callbacks.progress=null", "callbacks.rate={name: throughput, window: 5}")
    assert list(config.callbacks) == ["export", "rate"]
    assert small("loggers.tensorboard=null").loggers == {}
    assert list(small().loggers) == ["tensorboard"]


def test_a_new_logger_is_added_to_the_default_one(small, tmp_path):
    added = small("loggers.ml={name: mlflow, experiment: a}").loggers
    assert list(added) == ["tensorboard", "ml"] and added["tensorboard"] == small().loggers["tensorboard"]
    assert small("loggers.tensorboard.flush_every=5").loggers["tensorboard"].args == {"flush_every": 5}
    assert list(small("loggers={ml: {name: mlflow, experiment: a}}").loggers) == ["ml"]
    assert small("loggers={}").loggers == {}
    (tmp_path / "second.yaml").write_text("base: small.yaml\nloggers: {ml: {name: mlflow, experiment: a}}")
    assert list(small(file="second.yaml").loggers) == ["ml"]
    assert list(small("loggers.ml.experiment=b", file="second.yaml").loggers) == ["ml"]


def test_what_no_label_is_similar_to_may_be_removed(small, tmp_path):
    assert set(small("callbacks.sample_grid=null").callbacks) == {"progress", "export"}
    (tmp_path / "second.yaml").write_text("base: small.yaml\ncallbacks: {exports: null}")
    assert small(file="second.yaml") == ["callbacks.exports: null removes nothing; did you mean `export`?"]


def test_another_name_drops_the_old_arguments(small):
    assert small("schedule.name=cosine").schedule.args == {}
    assert small("schedule.final=0.1", "schedule.name=cosine").schedule.args == {"final": 0.1}
    assert small("schedule.name=constant").schedule.args == {"warmup": "10ba"}
    assert small("schedule.final=0.1") == ["schedule.final: unknown key of schedule `constant`; allowed: warmup"]


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (["trainin.seed=1"], ["trainin: unknown key; did you mean `training`?"]),
        (["global_batch=1"], ["global_batch: unknown key; did you mean `training.global_batch`?"]),
        (
            ["training=long"],
            ["training: takes keys (engine, duration, global_batch, microbatch, precision, device, "],
        ),
        (["training.duration=0ba"], ["training.duration: `0ba`; give 1ba, 1ep or 1sp or more"]),
        (["training.duration=0.5dur"], ["training.duration: `0.5dur`; give 1ba, 1ep or 1sp or more"]),
        (["training.global_batch=0"], ["training.global_batch: 0; give 1 or more"]),
        (["training.microbatch=0"], ["training.microbatch: 0; give 1 or more"]),
        (["training.grad_clip=0"], ["training.grad_clip: 0.0; give a norm above 0, or null"]),
        (["training.eval_every=0ba"], ["training.eval_every: `0ba`; give an interval above 0"]),
        (["checkpoints.bucket=oci://bucket/run"], ["checkpoints.bucket: oci://bucket/run; give s3://BUCKET/FOLDER, gs://"]),
        (["checkpoints.bucket=azure://sets"], ["checkpoints.bucket: azure://sets; give s3://BUCKET/FOLDER, gs://"]),
        (["checkpoints.load_path=ftp://a/b"], ["checkpoints.load_path: ftp://a/b; give a path, or an address: s3:"]),
        (["checkpoints.load_path=azure://a"], ["checkpoints.load_path: azure://a; give a path, or an address: s3:"]),
        (["checkpoints.load_weights=s3://a/b"], ["checkpoints.load_weights: s3://a/b is remote; copy the folder to"]),
        (["output=s3://bucket/run"], ["output: s3://bucket/run is remote; give a local folder"]),
        (["checkpoints.minutes=0"], ["checkpoints.minutes: 0.0; give a time above 0, or null for no limit"]),
        (["checkpoints.every=0.0dur"], ["checkpoints.every: `0.0dur`; give an interval above 0"]),
        (["checkpoints.keep=0"], ["checkpoints.keep: 0; give 1 or more, or -1 for all; save: false for none"]),
        (
            ["checkpoints.load_path=pictures", "checkpoints.load_weights=pictures"],
            ["checkpoints.load_weights: load_path loads the weights too; give one of them"],
        ),
        (["training.nonfinite_limit=0"], ["training.nonfinite_limit: 0; give 1 or more"]),
        (["run_name="], ["run_name: expected str, got null"]),
        (["seed=-1"], ["seed: -1; give 0 to 2147483647"]),
        (["run_name='  '"], ["run_name: empty; it names the run's folder"]),
        (["run_name=.."], ["run_name: '..' is no folder below runs/; give a name, and another folder as output"]),
        (["run_name=."], ["run_name: '.' is no folder below runs/; "]),
        (["run_name=a/../.."], ["run_name: 'a/../..' is no folder below runs/; "]),
        (["run_name=/tmp/up", "output=run"], ["run_name: '/tmp/up' is no folder below runs/; "]),
        (['run_name="a\\0"'], ["run_name: 'a\\x00' is no folder below runs/; "]),
        (
            ["checkpoints.allow_changes=[optimizer.lrr, data, nothing]"],
            [
                "checkpoints.allow_changes: optimizer.lrr: unknown key; did you mean `lr`?",
                "checkpoints.allow_changes: nothing: unknown key; allowed: ",
            ],
        ),
        (["checkpoints.allow_changes=[seed.x]"], ["checkpoints.allow_changes: seed.x: unknown key; nothing is "]),
        (["callbacks.progres=null"], ["callbacks.progres: null removes nothing; did you mean `progress`?"]),
        (["callbacks={exprot: null}"], ["callbacks.exprot: null removes nothing; did you mean `export`?"]),
        (["training.grad_clp=null"], ["training.grad_clp: unknown key; did you mean `grad_clip`?"]),
        (["model=null"], ["model: expected model component, got null"]),
        (
            ["callbacks=null"],
            [
                "callbacks: expected dict[str, callback component], got null; to leave out one of its entries, set "
                "callbacks.LABEL to null"
            ],
        ),
        (["callbacks.new.every=1ba"], ["callbacks.new.name: missing; allowed: codebook, "]),
        (["data.source.path=nowhere"], ["data.source.path: `nowhere` does not exist (looked in "]),
        (["checkpoints.load_path=nowhere.pt"], ["checkpoints.load_path: `nowhere.pt` does not exist (looked in "]),
        (["seed=${nope}"], ["seed: Interpolation key 'nope' not found"]),
        (["seed=${training.global_batch"], ["seed=${training.global_batch: not readable as YAML: seed: "]),
        (["seed=" + "[" * 300 + "]" * 300], ["seed: nested too deeply"]),
        (["run_name=caf\udce9"], ["run_name=caf\udce9: not readable as YAML: 'utf-8' codec can't encode character"]),
        (["seed=" + "9" * 5000], ["seed=" + "9" * 5000 + ": not readable as YAML: Exceeds the limit"]),
        (["seed=[1"], ["seed=[1: not readable as YAML: while parsing a flow sequence "]),
        (["seed", "--sede=1"], ["seed: expected key=value", "--sede=1: expected key=value"]),
        (["seed=a", "training.seed=1"], ["training.seed: unknown key; allowed: ", "seed: expected int, got 'a'"]),
    ],
)
def test_what_is_wrong_is_said_in_a_line(small, overrides, lines):
    found = small(*overrides)
    assert isinstance(found, list)
    assert [line[: len(start)] for line, start in zip(found, lines, strict=True)] == lines


@pytest.mark.parametrize(
    "key",
    ["model", "training.fsdp.parameters", "algorithms.gone", "algorithms.gone.decay", "model.objective.prediction"]
    + ["data.streams.gone.path", "data.source.source.scores", "data.expect.scaling_factor", "optimizer.betas"],
)
def test_keys_that_some_recipe_has_may_change(small, key):
    assert small(f"checkpoints.allow_changes=[{key}]").checkpoints.allow_changes == [key]


def test_missing_paths_are_collected_for_a_dry_run(small):
    missing = []
    config = small("data.source.path=nowhere", "checkpoints.load_weights=nothing", missing=missing)
    assert config.data.args["source"].args["path"] == "nowhere"
    assert [line.split(":")[0] for line in missing] == ["data.source.path", "checkpoints.load_weights"]


def test_weights_that_a_run_which_goes_on_does_not_read_may_be_gone(small, tmp_path):
    """With checkpoints in its folder, or perhaps in its bucket."""
    changes = ["checkpoints.load_weights=nothing", f"output={tmp_path}"]
    gone = [f"checkpoints.load_weights: `nothing` does not exist (looked in {tmp_path})"]
    assert small(*changes) == gone
    bucket = "checkpoints.bucket=s3://runs/one"
    assert small(*changes, bucket).checkpoints.load_weights == "nothing"
    small(*changes, bucket, missing=(missing := []))  # a dry run does not ask the bucket
    assert missing == gone
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "ep0-ba2.ckpt").touch()
    assert small(*changes, missing=(missing := [])).checkpoints.load_weights == "nothing" and not missing
    assert small(*changes).goes_on()
    assert small(*changes, "checkpoints.autoresume=false") == gone
    path = ["checkpoints.load_path=gone.ckpt", f"output={tmp_path}"]
    assert small(*path).checkpoints.load_path == "gone.ckpt"
    other = f"output={tmp_path}/other"
    assert small(*path, other) == [f"checkpoints.load_path: `gone.ckpt`{gone[0][35:]}"]
    assert small(*path, other, bucket).checkpoints.load_path == "gone.ckpt"


def test_interpolation(small):
    config = small("callbacks.export.every=${training.duration}", r"run_name=a\${b}")
    assert config.callbacks["export"].args["every"] == "100ba"
    assert config.run_name == "a${b}"
    (line,) = small("seed=${training.global_batch}", "training.global_batch=${seed}")
    assert "Recursive interpolation" in line


def test_nothing_is_resolved_where_nothing_refers_to_anything(small, tmp_path, monkeypatch):
    """It took nine tenths of the time of reading a recipe. What is read may be changed all the same."""
    path = tmp_path / "plain.yaml"
    path.write_text(to_yaml(small()))
    given = ["seed=3", "data.workers=3"]
    wanted = copy.deepcopy(read_values(path, given))
    monkeypatch.setattr(reading.OmegaConf, "create", None)
    for _ in range(2):
        found = read_values(path, given)
        assert found == wanted
        found["model"].clear()
        found["data"]["workers"] = None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1,\nb: 2", "not readable as YAML: while parsing a flow sequence at line 1, column 4 "),
        ("a: 1\na: 2", "not readable as YAML: while constructing a mapping"),
        ("\ta: 1", "not readable as YAML: while scanning"),
        ("a: !!python/object/apply:os.getcwd []", "not readable as YAML: could not determine a constructor"),
        ("a: ${", "not readable as YAML: a: no viable alternative at input '${'; a text that contains ${ is written "),
        ("- 1", "expected keys and values at the top level"),
        ("~: 1", "not readable as YAML: Incompatible key type 'NoneType'"),
        ("\x00", "not readable as YAML: unacceptable character"),
        ("base: [a]", "base: expected the path of a YAML, from this one's folder, got ['a']"),
        (
            "base: smal.yaml",
            "BASE/smal.yaml: no such YAML file (the base of broken.yaml); did you mean BASE/small.yaml?",
        ),
        ("a: " + "[" * 300 + "]" * 300, "not readable as YAML: nested too deeply"),
        ("a: " + "[" * 100_000, "not readable as YAML: nested too deeply"),  # the process ended by a signal
        ("base: broken.yaml", "is its own base, through broken.yaml"),
        ("base: other/circle.yaml", "is its own base, through broken.yaml, circle.yaml"),
    ],
)
def test_a_broken_yaml_is_said_in_a_line(small, tmp_path, text, message):
    (tmp_path / "broken.yaml").write_text(text)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "circle.yaml").write_text("base: ../broken.yaml")
    (line,) = small(file=f"{tmp_path}/broken.yaml")
    assert message.replace("BASE", str(tmp_path)) in line


def test_bytes_that_are_no_text(small, tmp_path):
    (tmp_path / "broken.yaml").write_bytes(b"a: \xff\xfe")
    (line,) = small(file="broken.yaml")
    assert line.startswith("broken.yaml: not readable as YAML: ")


def test_an_empty_yaml_misses_every_required_key(small, tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    missing = [line.split(":")[0] for line in small(file="empty.yaml")]
    assert missing == ["run_name", "model", "data", "optimizer", "schedule", "training"]


@pytest.mark.parametrize(("yaml", "cls"), [("sd2_encode", Recipe), ("openmoji_vae", EncodeConfig)])
def test_the_yaml_of_another_command_is_one_line(yaml, cls):
    with pytest.raises(ConfigError) as error:
        load_config(ROOT / "yamls" / f"{yaml}.yaml", ["device=cpu"], cls)
    (line,) = error.value.lines
    assert line.startswith(f"{ROOT}/yamls/{yaml}.yaml: is for another command, which has ")


def test_keys_that_are_numbers(tmp_path):
    (tmp_path / "mixed.yaml").write_text("1: a\nb: c")
    with pytest.raises(ConfigError, match="is for another command, which has 1, b; "):
        load_config(tmp_path / "mixed.yaml", [], EncodeConfig)


def test_a_file_that_is_not_there(small, tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    assert small(file="folder.yaml") == ["folder.yaml: a folder; give a YAML file"]
    assert small(file="smal.yaml") == ["smal.yaml: no such YAML file; did you mean small.yaml?"]
    (line,) = small(file="sd2_bse.yaml")
    assert line == f"sd2_bse.yaml: no such YAML file; did you mean {ROOT}/yamls/sd2_base.yaml?"
    assert small(file="zzz/0000000000.yaml") == ["zzz/0000000000.yaml: no such YAML file"]


def test_base_is_inherited(small, tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "second.yaml").write_text("base: ../small.yaml\nrun_name: second\ncallbacks: {export: null}")
    (tmp_path / "third.yaml").write_text("base: inner/second.yaml\nseed: 3\nschedule: {name: linear}")
    config = small("training.duration=7ba", file="third.yaml")
    assert (config.run_name, config.seed, config.training.duration) == ("second", 3, "7ba")
    assert list(config.callbacks) == ["progress"]
    assert (config.schedule.name, config.schedule.args) == ("linear", {})
    assert config.model.args == {"channels": [8, 16]}
    monkeypatch.setenv("HOME", str(tmp_path / "inner"))
    (tmp_path / "fourth.yaml").write_text("base: ~/second.yaml")
    assert small(file="fourth.yaml").run_name == "second"


def test_device_batch(small):
    training = small().training
    assert training.device_batch(5) == 2
    with pytest.raises(ValueError, match="training.global_batch: 10 does not divide over 4 devices"):
        training.device_batch(4)


def test_sections_are_found():
    assert list(subsections(Recipe)) == ["training", "checkpoints"]
    assert list(subsections(Training)) == ["fsdp"]
    assert subsections(EncodeConfig) == {}


ODD = ["0123", "1e3", "yes", "True", "12:30:00", "1_000", "1.50", "0x1F", "true", "7", "+5", ".5"]


@pytest.mark.parametrize("text", ODD)
def test_a_text_is_what_was_typed(tmp_path, text):
    """On the command line and in a YAML, though YAML takes some of these for other numbers, or for booleans."""
    yaml_file = tmp_path / "typed.yaml"
    grid = f"{{name: sample_grid, prompts: [{text}, a cat]}}"
    shipped = ROOT / "yamls" / "openmoji_diffusion.yaml"
    yaml_file.write_text(f"base: {shipped}\nrun_name: {text}\ncallbacks: {{grid: {grid}}}\n")
    for overrides in ([f"run_name={text}", f"callbacks.grid={grid}"], []):
        recipe = load_config(shipped if overrides else yaml_file, overrides, Recipe, [])
        assert recipe.run_name == text
        assert recipe.callbacks["grid"].args["prompts"] == [text, "a cat"]
        saved = tmp_path / "saved.yaml"
        saved.write_text(to_yaml(recipe))
        assert load_config(saved, [], Recipe, []) == recipe


def test_numbers_and_booleans_of_any_spelling():
    """What YAML reads as a number or boolean is one, where a field takes it; but not what looks octal."""
    read = functools.partial(load_config, ROOT / "yamls" / "openmoji_diffusion.yaml", cls=Recipe, missing=[])
    spelled = ["training.global_batch=1_024", "optimizer.lr=1e-4", "training.progress_bar=Yes", "seed=+5"]
    recipe = read(overrides=spelled)
    assert recipe.training.global_batch == 1024 and recipe.optimizer.args["lr"] == 1e-4
    assert recipe.training.progress_bar is True and recipe.seed == 5
    with pytest.raises(ConfigError, match="^seed: expected int, got '0123'$"):
        read(overrides=["seed=0123"])
