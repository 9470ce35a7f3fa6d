"""The scripts as processes: help and mistakes are answered in lines, from any folder, without importing torch."""

import argparse
import errno
import io
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from data.system.errors import WrongResult, noted
from data.system.files import write_text
from precompute.config import EncodeConfig
from recipes.checking.machine import temporary_files
from recipes.config.command_line import groups_of, help_text, path_of, read_command_line, user_errors
from recipes.config.recipe import Recipe, load_config
from recipes.training.stop import StartAgain
from tests.disks import small_files

ROOT = Path(__file__).resolve().parents[3]
TRAIN, ENCODE = "recipes/train.py", "precompute/encode.py"
VAE, OPENMOJI = f"{ROOT}/yamls/openmoji_vae.yaml", f"{ROOT}/yamls/openmoji_encode.yaml"


def run(script, *arguments, folder):
    """(status, output, errors) of a script started in a folder; it must not show a traceback."""
    command = [sys.executable, str(ROOT / script), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_an_address_is_no_path(capsys):
    """A folder `s3:` below the current one would take what is meant for a store."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=path_of)
    with pytest.raises(SystemExit):
        parser.parse_args(["--out", "s3://bucket/grid.png"])
    assert "--out: s3://bucket/grid.png is remote; give a path on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (TRAIN, ["training.global_batch (int; required)", "{tensorboard: {name: tensorboard}}", "latent_diffusion"]),
        (ENCODE, ["resolutions (list[int]; required)", "kl_vae"]),
    ],
)
def test_help(script, words, tmp_path):
    status, output, errors = run(script, "--help", folder=tmp_path)
    assert (status, errors) == (0, "")
    assert f"python {script}" in output
    for word in words:
        assert word in output


@pytest.mark.parametrize(
    ("script", "arguments", "line"),
    [
        (
            TRAIN,
            [VAE, "data.resolutoin=32"],
            "data.resolutoin: unknown key of data `pictures`; did you mean `resolution`?",
        ),
        (TRAIN, [VAE, "training.global_batch=many"], "training.global_batch: expected int, got 'many'"),
        (TRAIN, ["openmoji_vea.yaml"], "openmoji_vea.yaml: no such YAML file; did you mean "),
        (TRAIN, [], "expected a YAML as the first argument (--help lists the keys)"),
        (TRAIN, ["--dryrun"], "expected a YAML as the first argument, got '--dryrun'"),
        (
            TRAIN,
            [f"{ROOT}/yamls/sd2_base.yaml"],
            "data.streams.train.path: `runs/sd2/latents_256/train` does not exist",
        ),
        (
            ENCODE,
            [OPENMOJI, "image_encoder.pth=x"],
            "image_encoder.pth: unknown key of image_encoder `kl_vae`; did you ",
        ),
    ],
    ids=["key", "type", "file", "nothing", "flag", "path", "encode"],
)
def test_a_mistake_is_answered_in_one_line(script, arguments, line, tmp_path):
    status, output, errors = run(script, *arguments, folder=tmp_path)
    assert (status, output) == (2, "")
    assert f"error: {line}" in errors
    if line.startswith("expected a YAML"):
        assert f"python {script}" in errors  # how it is called
    else:
        assert all(text.startswith("error: ") for text in errors.splitlines())


@pytest.mark.parametrize(("script", "yaml"), [(TRAIN, VAE), (ENCODE, OPENMOJI)])
def test_torch_is_not_imported_to_check_a_config(script, yaml, tmp_path):
    heavy = "torch", "composer", "diffusers", "streaming", "numpy"
    code = (
        f"import runpy, sys\nsys.argv = ['x', {yaml!r}, 'seed=a']\n"
        f"try: runpy.run_path({str(ROOT / script)!r}, run_name='__main__')\n"
        f"except SystemExit as error: print(error.code, [name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "2 []", done.stderr


def test_dry_run_collects_missing_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = read_command_line([f"{ROOT}/yamls/sd2_base.yaml", "--dry-run", "seed=3"], Recipe, "")
    assert command.dry_run and command.config.seed == 3
    assert [line.split(":")[0] for line in command.missing] == [
        "data.streams.train.path",
        "evals.val.streams.val.path",
    ]


def test_the_path_of_a_config_may_have_an_equals_sign(tmp_path):
    file = tmp_path / "lr=1e-4" / "recipe.yaml"
    file.parent.mkdir()
    file.write_text(f"base: {ROOT}/yamls/sd2_base.yaml\nseed: 3\n")
    assert read_command_line([str(file), "--dry-run"], Recipe, "").config.seed == 3


def test_training_does_not_begin_with_variables_that_another_job_has_left(tmp_path, monkeypatch):
    (tmp_path / "a.tar").touch()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    inputs = [f"{part}.source.urls={tmp_path}/a.tar" for part in ("data", "evals.val")]
    status, _, errors = run(TRAIN, VAE, *inputs, folder=tmp_path)
    assert status == 2 and errors.startswith("error: launcher: LOCAL_RANK=1 in the environment, without RANK, ")


def test_the_resolved_config_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = [f"{ROOT}/yamls/sd2_base.yaml", "--print-config", "seed=3"]
    with pytest.raises(SystemExit) as left:
        read_command_line(arguments, Recipe, "")
    assert left.value.code == 0
    output = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(output)
    assert load_config(tmp_path / "printed.yaml", [], Recipe, []) == load_config(arguments[0], ["seed=3"], Recipe, [])
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        read_command_line(arguments, Recipe, "")
    assert capsys.readouterr().out == ""


def test_help_shows_yaml():
    text = help_text(Recipe, "Usage.")
    assert "loggers (dict[str, logger component]; default {tensorboard: {name: tensorboard}})" in text
    assert 'microbatch (int | "auto" | null; default null)' in text
    assert "Component(" not in text and "None" not in text


def test_help_lists_what_a_config_can_hold():
    assert list(groups_of(EncodeConfig)) == ["source", "filter", "image_encoder", "text_encoder"]
    assert {"denoiser", "stream", "source"} < set(groups_of(Recipe))
    assert "image_encoder" not in groups_of(Recipe)


def test_a_terminal_that_lacks_the_characters_of_a_path(monkeypatch):
    """With PYTHONIOENCODING=ascii, or in a locale of another encoding."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with user_errors():
        print("wrote /\u8d64/grid.png", flush=True)
    assert written.getvalue() == b"wrote /\\u8d64/grid.png\n"


def test_without_a_folder_for_temporary_files(monkeypatch, capsys):
    """As in containers whose root is read-only."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/self", "/sys"])
    with pytest.raises(SystemExit) as left, user_errors():
        tempfile.gettempdir()
    text = "No usable temporary directory found in ['/proc/self', '/sys']: set TMPDIR to a folder that can be written"
    assert (left.value.code, capsys.readouterr().err) == (2, f"error: {text}\n")
    assert str(temporary_files()).endswith(f"temporary files: {text}") and temporary_files().level == "error"


def test_errors_that_a_user_can_mend_have_no_traceback(tmp_path, capsys):
    import data.encoded.manifest

    with pytest.raises(SystemExit) as left, user_errors():
        data.encoded.manifest.Manifest.parse("{", "x/manifest.json")
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("error: x/manifest.json: not JSON")

    with pytest.raises(SystemExit), user_errors():
        raise FileNotFoundError("no file a")
    with pytest.raises(SystemExit), user_errors():
        (tmp_path / "b").read_text()
    assert capsys.readouterr().err == f"error: no file a\nerror: {tmp_path}/b: there is no such file or folder\n"

    with pytest.raises(SystemExit) as left, user_errors():
        raise ConnectionError("cannot fetch http://a/0.tar: no answer; start again when the server answers")
    assert left.value.code == 1
    assert capsys.readouterr().err.startswith("error: cannot fetch http://a/0.tar: no answer; ")
    for number, status in ((errno.ESTALE, 1), (errno.ETIMEDOUT, 1), (errno.EIO, 2), (errno.EACCES, 2)):
        with pytest.raises(SystemExit) as left, user_errors():  # a cluster starts again where a mount is lost
            raise OSError(number, os.strerror(number), "/mnt/a")
        assert left.value.code == status
        assert capsys.readouterr().err.startswith(f"error: /mnt/a: {os.strerror(number)}; ")
    with pytest.raises(SystemExit), user_errors():
        raise OSError(errno.EIO, "Input/output error")
    assert "(from" not in capsys.readouterr().err
    with pytest.raises(SystemExit) as left, user_errors():
        raise KeyboardInterrupt
    assert (left.value.code, capsys.readouterr().err) == (130, "interrupted\n")

    with pytest.raises(SystemExit) as left, user_errors():  # as from a worker process
        raise WrongResult("Caught\nTraceback:\n  frame\ndata.system.errors.WrongResult: Mine.read() yields None\n")
    assert (left.value.code, capsys.readouterr().err) == (2, "error: Mine.read() yields None\n")

    with pytest.raises(SystemExit), user_errors(), noted("Mine.decode() of the sample 'k'"):
        raise ValueError("mine: a score of 11")
    assert capsys.readouterr().err == "error: mine: a score of 11 (Mine.decode() of the sample 'k')\n"

    with pytest.raises(ValueError, match="unpack"), user_errors():  # which says nothing without its line
        one, other = "abc"

    with pytest.raises(FileNotFoundError), user_errors(), socket.socket(socket.AF_UNIX) as own:
        own.connect(str(tmp_path / "gone"))  # as of a worker process that has ended: the error names no file

    with pytest.raises(BrokenPipeError), user_errors():
        raise BrokenPipeError(32, "Broken pipe")

    for code in (None, 0):
        with pytest.raises(RuntimeError, match=r"sys\.exit\(\) was called before the end"), user_errors():
            sys.exit(code)
    with pytest.raises(SystemExit, match="85"), user_errors():
        raise StartAgain

    with small_files(1), pytest.raises(SystemExit) as left, user_errors():
        write_text(tmp_path / "a.json", "long")
    assert left.value.code == 2 and not list(tmp_path.iterdir())
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {tmp_path}/a.json: File too large; raise the ")

    class OtherError(ValueError):
        pass

    with pytest.raises(OtherError), user_errors():
        raise OtherError("a bug")
    with pytest.raises(ValueError, match="'unknown' is not a valid"), user_errors():
        import enum  # a library's error keeps its traceback

        enum.Enum("Known", ["known"])("unknown")


def test_a_failed_read_of_a_component_of_ones_own_says_where_it_was(monkeypatch, capsys, tmp_path):
    """It names no file. From a worker process it comes without its number and its place, which are in its text."""
    monkeypatch.setattr("recipes.config.command_line.packages", lambda: {"mine"})
    code = compile("import errno\nraise OSError(errno.EIO, 'Input/output error')", f"{tmp_path}/mine/sets.py", "exec")
    with pytest.raises(SystemExit), user_errors():
        exec(code)
    assert capsys.readouterr().err.endswith(f"start the same command again (from {tmp_path}/mine/sets.py, line 2)\n")
    text = f'Caught OSError\n  File "{tmp_path}/mine/sets.py", line 7, in __iter__\n  File "os.py", line 1, in read\n'
    with pytest.raises(SystemExit), user_errors():
        raise OSError(f"{text}OSError: [Errno 5] Input/output error")
    assert capsys.readouterr().err.endswith(f"(from {tmp_path}/mine/sets.py, line 7)\n")
