"""What a start finds in the folder of its run: halves, checkpoints of the other engine, and damaged ones."""

import importlib
import os
import re
import resource
import shlex
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from data.system.files import atomic_write
from recipes.config.recipe import FSDP
from recipes.engines.checkpoints.plain_pickles import DamagedCheckpoint, load_plain, plain_metadata
from recipes.engines.checkpoints.same_model import Saved, saved_at
from recipes.engines.checkpoints.sharded_files import Sharded
from recipes.engines.dry_run_checks import check_on_meta
from recipes.engines.resuming import prepare_folder, remove_halves, says_what_to_remove, start_of
from recipes.exporting.checkpoints import read_checkpoint
from recipes.training.checkpoint_names import KINDS, check_engine, last_written, newest_of_all
from tests.recipes.engines.lightning.test_checkpoints import new_checkpoints, save_at
from tests.recipes.engines.recording import record

LINKS = {"composer": "latest-rank0.pt", "lightning": "latest"}


def test_halves_of_killed_processes_are_removed(quick_recipe, tmp_path):
    """Of checkpoints that were written, or fetched from a bucket; with and without autoresume."""
    left = ["ep0-ba2.ckpt", ".notes"]
    halves = [".partial.ep0-ba4.ckpt", ".ep0-ba4-rank0.pt.node-1.12", ".ep0-ba4.17", ".ep0-ba4.old.17", ".latest.3"]
    for autoresume in ("true", "false"):
        for folder in ("checkpoints", "fetched", "records"):
            for name in (*left, *halves[:2], *halves[3:]):
                (tmp_path / folder).mkdir(exist_ok=True)
                (tmp_path / folder / name).touch()
            (tmp_path / folder / halves[2]).mkdir()
        prepare_folder(quick_recipe(tmp_path, f"checkpoints.autoresume={autoresume}"), "lightning")
        for folder in ("checkpoints", "fetched", "records"):
            assert {path.name for path in (tmp_path / folder).iterdir()} - {"latest"} == set(left)


def test_halves_of_pictures_are_removed(tmp_path):
    left = ["ba0000004.png", ".notes", ".ba0000004.12", ".config.yaml", ".1.json", ".png.node.12"]
    halves = [".mlflow.db.node.2", ".mlflow.db.node.2-journal"]
    halves += [".ba0000004.png.node-1.12", ".gradient_scales.json.node.local.3", ".config.yaml.node.4"]
    with atomic_write(tmp_path / "tracked.txt") as partial:
        halves.append(partial.name)
        partial.touch()
    for folder in (tmp_path, tmp_path / "samples", tmp_path / "exponents"):
        folder.mkdir(exist_ok=True)
        for name in (*left, *halves):
            (folder / name).touch()
    remove_halves(tmp_path)
    (tmp_path / "tracked.txt").unlink()
    for folder in (tmp_path, tmp_path / "samples", tmp_path / "exponents"):
        assert {path.name for path in folder.iterdir() if path.is_file()} == set(left)


def test_a_checkpoint_whose_successor_got_no_name_comes_back(tmp_path):
    for name in ("ep0-ba2", ".partial.old.ep0-ba2", ".partial.old.ep0-ba4"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "ep0-ba2" / "rest.pt").touch()
    remove_halves(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").rglob("*")) == ["ep0-ba2", "ep0-ba4", "rest.pt"]


def folder_with(folder, files, links):
    """Checkpoints, some of them sharded ones of Lightning, and links to the newest."""
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for engine, name in links.items():
        (folder / LINKS[engine]).symlink_to(name)
    return folder


@pytest.mark.parametrize(
    ("files", "links", "engine", "other"),
    [
        (["ep0-ba2.ckpt"], {"lightning": "ep0-ba2.ckpt"}, "composer", "ep0-ba2.ckpt"),
        (["ep0-ba2.ckpt"], {}, "composer", "ep0-ba2.ckpt"),
        (["ep0-ba2/rest.pt"], {"lightning": "ep0-ba2"}, "composer", "ep0-ba2"),
        (["ep0-ba2/rest.pt"], {}, "composer", "ep0-ba2"),
        (["ep0-ba2/.metadata"], {}, "lightning", "ep0-ba2"),
        (["ep0-ba2/__0_0.distcp"], {"composer": "ep0-ba2/__0_0.distcp"}, "lightning", "ep0-ba2"),
        (["ep0-ba2-rank0.pt"], {"composer": "ep0-ba2-rank0.pt"}, "lightning", "ep0-ba2-rank0.pt"),
        (
            ["ep0-ba2-rank0.pt", "ep1-ba9.ckpt"],
            {"composer": "ep0-ba2-rank0.pt", "lightning": "ep1-ba9.ckpt"},
            "composer",
            "ep1-ba9.ckpt",
        ),
        # Converted, or of an earlier run.
        (["ep0-ba2-rank0.pt", "ep0-ba2.ckpt"], {"lightning": "ep0-ba2.ckpt"}, "composer", None),
        (["ep0-ba2-rank0.pt", "ep0-ba4.ckpt"], {"composer": "ep0-ba2-rank0.pt"}, "lightning", None),
        ([], {}, "composer", None),
    ],
)
def test_an_engine_does_not_begin_anew_beside_the_others_checkpoints(tmp_path, files, links, engine, other):
    folder = folder_with(tmp_path / "a run" / "checkpoints", files, links)
    if other is None:
        check_engine(folder, engine)
    else:
        writer = "lightning" if engine == "composer" else "composer"
        told = f"convert it .* --to {engine}`, or set training.engine={writer}$"
        said = f"{other}, was written by {writer.capitalize()}; {told}"
        with pytest.raises(ValueError, match=said) as error:
            check_engine(folder, engine)
        assert shlex.split(str(error.value).split("`")[1])[2:] == [str(folder / other), "--to", engine]


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_a_damaged_or_foreign_checkpoint_costs_one_line_that_helps(quick_recipe, tmp_path, engine):
    trainers = {name: importlib.import_module(f"recipes.engines.{name}.trainer") for name in LINKS}
    second = next(name for name in LINKS if name != engine)
    own, other = trainers[engine], trainers[second]
    changes = ["training.duration=2ba", "checkpoints={every: 1ba, autoresume: true}", "evals.val=null"]
    recipe = quick_recipe(tmp_path, *changes)
    trainer = own.build_trainer(recipe)
    trainer.fit()
    trainer.close()
    with pytest.raises(ValueError, match=f"was written by {engine.capitalize()}; convert it"):
        other.build_trainer(quick_recipe(tmp_path, *changes))
    newest = (tmp_path / "checkpoints" / LINKS[engine]).resolve()
    older = newest.with_name(newest.name.replace("ba2", "ba1"))
    changes += [f"checkpoints.load_path={newest}", "training.duration=3ba"]
    for name, change, said in (
        (engine, "model.denoiser.layers=3", r"a checkpoint of another model: \S+ is not there in it and"),
        (engine, "optimizer={name: adam16, lr: 1e-3}", rf"holds the state of AdamW, .* Adam16; .*export.py {newest} "),
        (second, "seed=1", rf"not a checkpoint of the engine {second}; .*py {newest} --to {second}`"),
    ):
        another = quick_recipe(tmp_path / "other", *changes, f"training.engine={name}", change)
        for start in (lambda recipe: trainers[recipe.training.engine].build_trainer(recipe).fit(), check_on_meta):
            with pytest.raises(ValueError, match=f"^{newest}: {said}"):
                start(another)
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    with pytest.raises(ValueError, match=f"; remove {newest}, and the next start goes on from {older}$") as error:
        own.build_trainer(recipe)
    assert "\n" not in str(error.value)
    newest.unlink()
    again = own.build_trainer(recipe)
    again.fit()
    again.close()
    assert newest.is_file() and older.is_file()


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "rest.pt"])
@pytest.mark.parametrize("damage", ["half", "empty", "gone"])
def test_a_damaged_part_of_a_sharded_checkpoint(tmp_path, file, damage):
    sharded = FSDP(checkpoints="sharded")
    checkpoints, run, _ = new_checkpoints(tmp_path, fsdp=sharded, keep=3)
    save_at(checkpoints, run, 1, 2, 3)
    newest = tmp_path / "checkpoints" / "ep0-ba3"
    content = (newest / file).read_bytes()
    (newest / file).write_bytes(content[: len(content) // 2 if damage == "half" else 0])
    if damage == "gone":
        (newest / file).unlink()
    said = f"; remove {newest}, and the next start goes on from {newest.with_name('ep0-ba2')}$"
    if (file, damage) == ("rest.pt", "gone"):
        said = "rest.pt: there is no such checkpoint" + said
    with pytest.raises(ValueError, match=said):
        new_checkpoints(tmp_path, fsdp=sharded, autoresume=True)[0].load()


def test_a_file_of_another_batch_in_a_checkpoint_is_said(tmp_path, capsys):
    """Weights of one batch were trained with the data and the counts of another, without a word."""
    sharded = FSDP(checkpoints="sharded")
    checkpoints, run, _ = new_checkpoints(tmp_path, fsdp=sharded, keep=2)
    save_at(checkpoints, run, 1, 2)
    older, newest = (tmp_path / "checkpoints" / f"ep0-ba{batch}" for batch in (1, 2))

    def said() -> str:
        capsys.readouterr()
        new_checkpoints(tmp_path, fsdp=sharded, autoresume=True)[0].load()
        captured = capsys.readouterr()
        return captured.out + captured.err

    assert "by its name" not in said()
    (newest / "rest.pt").write_bytes((older / "rest.pt").read_bytes())
    assert f"{newest} is of batch 1 by its contents and of 2 by its name; unless you renamed it" in said()


def test_under_composer_a_file_of_another_batch_is_said(quick_recipe, tmp_path, capfd):
    """Not where the name is right."""
    changes = ["loggers={}", "evals.val=null", "callbacks.throughput=null"]
    record("composer", quick_recipe(tmp_path / "a", "training.duration=2ba", "checkpoints.every=2ba", *changes))
    (file,) = (tmp_path / "a" / "checkpoints").glob("ep*-rank0.pt")
    changes += ["training.duration=3ba", "checkpoints.allow_changes=[training]", "checkpoints.save=false"]

    def said(output: str) -> str:
        capfd.readouterr()
        record("composer", quick_recipe(tmp_path / output, f"checkpoints.load_path={file}", *changes))
        return capfd.readouterr().out

    assert "by its name" not in said("b")
    file = file.rename(file.with_name(file.name.replace("ba2", "ba7")))
    assert f"{file} is of batch 2 by its contents and of 7 by its name; unless you renamed it" in said("c")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_changed_bit_outside_of_tensors_is_damage(tmp_path, sharded):
    """In the name of a weight it was a KeyError of PyTorch, and in a count nothing but another count."""
    settings = FSDP(checkpoints="sharded") if sharded else None
    checkpoints, run, _ = new_checkpoints(tmp_path, fsdp=settings)
    save_at(checkpoints, run, 1)
    newest = KINDS["lightning"].newest(tmp_path / "checkpoints")
    file = newest / "rest.pt" if sharded else newest
    content = file.read_bytes()
    for text in (b"position", b"counts", b"optimizer_name"):
        file.write_bytes(content.replace(text, text[:-1] + bytes([text[-1] ^ 1])))
        said = f"^{file}: not a checkpoint that this repository wrote: Bad CRC-32 .*; remove {newest}, and the next "
        with pytest.raises(ValueError, match=said):
            new_checkpoints(tmp_path, fsdp=settings, autoresume=True)[0].load()


def test_a_file_that_is_not_there_is_no_reason_to_remove_a_checkpoint(tmp_path):
    folder = folder_with(tmp_path, ["ep0-ba2.ckpt"], {"lightning": "ep0-ba2.ckpt"})
    config = SimpleNamespace(resumes=True, bucket=None)
    with (
        pytest.raises(FileNotFoundError, match="^weights.pt is not there$"),
        says_what_to_remove(folder, KINDS["lightning"], config),
    ):
        raise FileNotFoundError("weights.pt is not there")


@pytest.mark.parametrize("target", [".", "../../other/checkpoints/ep0-ba9.ckpt"])
def test_a_damaged_checkpoint_elsewhere_is_not_removed_but_the_link_to_it(tmp_path, target):
    folder_with(tmp_path / "other" / "checkpoints", ["ep0-ba9.ckpt"], {})
    folder = folder_with(tmp_path / "run" / "checkpoints", ["ep0-ba2.ckpt"], {"lightning": target})
    said = f"^it is cut off; remove {folder}/latest, and the next start goes on from {folder}/ep0-ba2.ckpt$"
    config = SimpleNamespace(resumes=True, bucket=None)
    with pytest.raises(ValueError, match=said), says_what_to_remove(folder, KINDS["lightning"], config):
        raise DamagedCheckpoint("it is cut off")


@pytest.mark.parametrize("sharded", [False, True])
def test_an_error_of_the_system_is_no_damage(tmp_path, sharded):
    """Missing rights, or a file server that does not answer: the checkpoint is whole, and no message must say to remove
    it. Here no file can be opened."""
    checkpoints, run, _ = new_checkpoints(tmp_path, fsdp=FSDP(checkpoints="sharded") if sharded else None)
    save_at(checkpoints, run, 1)
    newest = KINDS["lightning"].newest(tmp_path / "checkpoints")
    readers = [lambda: saved_at(newest, "lightning"), lambda: read_checkpoint(newest)]
    if sharded:
        opened = Sharded.open(newest)
        readers += [opened.values, lambda: plain_metadata(newest / ".metadata"), lambda: load_plain(newest / "rest.pt")]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for read in readers:
        read()  # which may import modules
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            raised = read()
        except Exception as error:
            raised = error
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert isinstance(raised, OSError) and "Too many open files" in str(raised)


def test_halves_are_looked_for_where_there_may_be_no_folder(tmp_path):
    remove_halves(tmp_path / "none")
    assert KINDS["composer"].newest(tmp_path / "none") is None


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_a_file_of_load_path_that_is_gone_while_the_run_has_a_bucket(quick_recipe, tmp_path, engine):
    """It is needed where the bucket has no checkpoint, of which the newest lies in the run's folder by now."""
    recipe, file = quick_recipe(tmp_path / "run"), tmp_path / "gone.ckpt"
    recipe.checkpoints.bucket, recipe.checkpoints.autoresume = "s3://runs/one", True
    said = f"^checkpoints.load_path: `{file}` does not exist, and s3://runs/one has no checkpoint to go on from$"
    with pytest.raises(FileNotFoundError, match=said):
        start_of(recipe, engine, str(file))
    fetched = tmp_path / "run" / "checkpoints" / KINDS[engine].name_of(0, 2, sharded=False)
    fetched.parent.mkdir(parents=True)
    fetched.touch()
    assert start_of(recipe, engine, str(file)) == fetched


@pytest.mark.parametrize("engine", ["composer", "lightning"])
def test_an_export_is_no_checkpoint(quick_recipe, tmp_path, engine):
    """It was taken for a sharded one without its metadata, and the advice was to convert it."""
    export = tmp_path / "export"
    export.mkdir()
    (export / "export.json").write_text("{}")
    recipe = quick_recipe(tmp_path / "run", f"checkpoints.load_path={export}", f"training.engine={engine}")
    said = f"^checkpoints.load_path: {export} is an export, .*; give it as checkpoints.load_weights$"
    with pytest.raises(ValueError, match=said):
        check_on_meta(recipe)
    (export / "export.json").unlink()
    with pytest.raises(FileNotFoundError, match=".metadata"):
        check_on_meta(recipe)


def test_the_newest_of_both_engines(tmp_path):
    """Of a folder that another run began anew under the other engine, resumption takes the last batch, an export what
    was written last; both know names where links are lost."""
    files = ["ep1-ba10-rank0.pt", "ep0-ba2.ckpt"]
    for links in ({"composer": files[0], "lightning": files[1]}, {"composer": files[0]}, {}):
        folder = folder_with(tmp_path / str(len(links)), files, links)
        os.utime(folder / files[0], (1, 1))
        assert (newest_of_all(folder).name, last_written(folder).name) == tuple(files)
    assert newest_of_all(tmp_path / "none") is last_written(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"weight": (2, 3), "bias": (2,)}, None),
        ({"weight": (2, 3)}, "bias is not there in it and (2,) in the model"),
        ({"weight": (3, 2), "bias": (2,)}, "weight is (3, 2) in it and (2, 3) in the model"),
        ({"weight": (2, 3), "bias": (2,), "gate": (2,)}, "gate is (2,) in it and not there in the model"),
    ],
)
def test_the_weights_of_a_checkpoint_are_those_of_the_model(shapes, said):
    """No more of them either: the run would go on without what it has learnt."""
    saved = Saved("a.pt", {name: torch.Size(shape) for name, shape in shapes.items()}, "AdamW")
    with nullcontext() if said is None else pytest.raises(ValueError, match=f"^a.pt: .*: {re.escape(said)}"):
        saved.check(torch.nn.Linear(3, 2, device="meta"), "AdamW")
