"""The command line that the scripts share: a YAML, overrides, flags, and errors of one line each.

`python SCRIPT config.yaml key.sub=value ... [--dry-run | --print-config | --help]`
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import Any

from data.system.disk_errors import disk_error, disk_line, may_pass
from data.system.errors import WrongResult, is_raised, starts_no_process, visible
from data.system.interrupts import interrupts_noted
from recipes.config.entry_points import all_components, packages
from recipes.config.recipe import load_config, to_yaml
from recipes.config.schema import Parameter, read_section, readable_keys, subsections
from recipes.config.source_code import ROOT
from recipes.config.values import ConfigError

FLAGS = ("--dry-run", "--print-config")


@dataclass(frozen=True)
class Command:
    """A command line that has been read and checked.

    Attributes:
        config: the checked config.
        dry_run: only describe what would be done.
        missing: input paths that do not exist, one line each; empty unless `dry_run`.
    """

    config: Any
    dry_run: bool
    missing: list[str]


def read_command_line(arguments: list[str], cls: type, usage: str | None) -> Command:
    """Read a YAML, overrides and flags into a checked config.

    The process ends here with --help and --print-config, which print and exit with status 0, and after mistakes, which
    are printed one line each and exit with status 2.

    Args:
        arguments: of the command line, without the name of the script.
        cls: the dataclass that defines the keys of the config.
        usage: how the script is called, for help and errors.
    """
    if "--help" in arguments or "-h" in arguments:
        try:
            print(help_text(cls, usage or ""))
        except ConfigError as error:  # in the table of components
            fail(error.lines)
        sys.exit(0)
    flags = {a for a in arguments if a in FLAGS}
    rest = [a for a in arguments if a not in FLAGS]
    # A path may have a "=" in it, such as lr=1e-4/config.yaml.
    if not rest or rest[0].startswith("-") or "=" in rest[0] and not os.path.isfile(rest[0]):
        got = f", got {rest[0]!r}" if rest else ""
        print((usage or "").strip(), file=sys.stderr)
        fail([f"expected a YAML as the first argument{got} (--help lists the keys)"])
    missing: list[str] = []
    try:
        config = load_config(rest[0], rest[1:], cls, missing if flags else None)
    except ConfigError as error:
        fail(error.lines)
    if "--print-config" in flags:
        print_once(to_yaml(config).rstrip("\n"))
        sys.exit(0)
    return Command(config, "--dry-run" in flags, missing)


def print_once(text: str) -> None:
    """Print a text on the first rank: launchers start every rank with the same command line."""
    if (os.environ.get("RANK") or "0") == "0":
        print(visible(text))


def say_each_does_all(command: str) -> None:
    """A line where a launcher has started several processes of a command that one process does as well."""
    world = os.environ.get("WORLD_SIZE") or "1"
    if world != "1" and (os.environ.get("RANK") or "0") == "0":
        said = f"{command}: each of {world} processes (WORLD_SIZE) does all of the work; start one, without a launcher"
        print(visible(said), file=sys.stderr)


def fail(lines: list[str], status: int = 2) -> None:
    """Print one line per error to standard error, and exit with a status."""
    for line in lines:
        print(f"error: {visible(line)}", file=sys.stderr)
    sys.exit(status)


def path_of(text: str) -> Path:
    """A path of the command line, as the type of its argument: shells do not expand the ~ of `--out=~/grid.png`.

    Raises:
        ArgumentTypeError: it is the address of a store, of which a folder `s3:` would be made here.
    """
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is remote; give a path on this machine, and copy from or to it")
    return Path(os.path.expanduser(text))


def check_out(path: Path) -> None:
    """Refuse as `--out`, the file that a command writes when all of its work is done, what cannot be written: a folder,
    and a name that is too long or below a file."""
    if os.path.isdir(path):
        fail([f"--out: {path} is a folder; give the name of a file"])
    try:
        above = next(folder for folder in path.absolute().parents if folder.exists())
        path.exists()
    except OSError as error:
        fail([f"--out: {path}: {error.strerror}; give another name"])
    if not above.is_dir():
        fail([f"--out: {path} is below {above}, which is a file; give another name"])
    if not os.access(above, os.W_OK | os.X_OK):
        fail([f"--out: {path}: nothing can be written into {above}; give another name"])


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Exit with one line, without a traceback, on errors that a user can correct: ValueError, FileNotFoundError,
    ConnectionError (a server that does not answer), and those of disks that are full, read-only or the like
    (`data.system.disk_errors`), and on a lack of memory or processes. Ctrl-C is one line, too, with status 130.

    An exit with status 0 from inside, such as by `sys.exit()` in a hook, is an error with a traceback: who started the
    command would take the work for done.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # paths and captions may have characters that its encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with interrupts_noted():
            yield
    except SystemExit as error:
        if error.code:
            raise
        raise RuntimeError("sys.exit() was called before the end; raise an error there that says why") from error
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except FileNotFoundError as error:
        if (error.strerror or "").startswith("No usable temporary directory"):
            fail([f"{error.strerror}: set TMPDIR to a folder that can be written"])
        of_system = error.filename is not None
        if error.errno is not None and not of_system:  # such as the socket of a worker process that has ended
            raise
        fail([f"{os.fspath(error.filename)}: there is no such file or folder" if of_system else str(error)])
    except WrongResult as error:
        fail([error.line])  # of worker processes, too
    except ConfigError as error:
        fail(error.lines)
    except (ValueError, ConnectionError) as error:
        # Python's own kinds of them, such as UnicodeDecodeError, and those that no `raise` raised are bugs.
        own = type(error) in (ValueError, ConnectionError) or type(error).__module__.startswith(("data.", "recipes."))
        if not own or _from_a_library(error) or not is_raised(error):
            raise
        # Schedulers start a job again after 1, and not after 2.
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        fail([f"{error}{notes}"], status=1 if may_pass(error) else 2)
    except MemoryError as error:
        last = (str(error).strip().splitlines() or [""])[-1]  # of the traceback of a worker process
        text = re.sub(r"^[\w.]*(MemoryError|NotEnoughMemory)(: |$)", "", last)
        where = f" ({text})" if text else ""
        fail([f"not enough memory{where}; give fewer workers or more memory, and start the same command again"])
    except Exception as error:
        if starts_no_process(error):
            fail([
                "no further process or thread can be started; raise their number (ulimit -u, or the container's limit "
                "of pids) or give fewer workers, and start the same command again"
            ])  # fmt: skip
        found = disk_error(error)
        if found is None:
            raise
        # A failed read of a component of one's own names no file.
        of_own = found.filename is None and _raised_in(error)
        fail([disk_line(found) + (f" (from {of_own})" if of_own else "")], status=1 if may_pass(found) else 2)


def _from_a_library(error: Exception) -> bool:
    """Whether the error was raised by a library, in which case its traceback is needed."""
    traceback = error.__traceback__
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    if str(traceback.tb_frame.f_globals.get("__name__")).split(".")[0] in packages():
        return False
    file = traceback.tb_frame.f_code.co_filename
    return not file.startswith(str(ROOT)) or "site-packages" in file


def _raised_in(error: Exception) -> str:
    """The last place of an error in the code of other packages of components, also in a worker process; empty where it
    was raised elsewhere."""
    tops = packages()
    places: list[tuple[str, Any]] = [(frame.filename, frame.lineno) for frame in extract_tb(error.__traceback__)]
    places += re.findall(r'File "([^"]+)", line (\d+), in ', str(error))  # the traceback of a worker process
    own = [(file, line) for file, line in places if any(top in Path(file).with_suffix("").parts for top in tops)]
    return "{}, line {}".format(*own[-1]) if own else ""


def help_text(cls: type, usage: str) -> str:
    """Every fixed key with its type, default and meaning, and the names of all components that a config may contain."""
    lines = [usage.strip(), "", "keys:"]
    lines += _section_lines(cls, "")
    lines += ["", "components ({name: ..., arguments}); docs/recipes.md lists their arguments:"]
    lines += [f"  {group + ':':16} {', '.join(names)}" for group, names in groups_of(cls).items()]
    return "\n".join(lines)


def groups_of(cls: type) -> dict[str, list[str]]:
    """The groups of components that a config of this class can contain: group -> names."""
    found: set[str] = set()
    components = all_components()

    def follow(keys: Mapping[str, Parameter]) -> None:
        for parameter in keys.values():
            for group in set(re.findall(r"(\w+) component", parameter.type_text)) - found:
                found.add(group)
                for target in components.get(group, {}).values():  # no group of a component that breaks the rules
                    follow(readable_keys(target))

    for section in (cls, *subsections(cls).values()):
        follow(read_section(section).parameters)
    return {group: list(names) for group, names in components.items() if group in found}


def _section_lines(cls: type, prefix: str) -> list[str]:
    inner = subsections(cls)
    lines = []
    for parameter in read_section(cls).parameters.values():
        if parameter.name not in inner or parameter.allows_null:
            default = "required" if parameter.required else f"default {parameter.default}"
            lines.append(f"  {prefix}{parameter.name} ({parameter.type_text}; {default})\n      {parameter.doc}")
        if parameter.name in inner:
            lines += _section_lines(inner[parameter.name], f"{prefix}{parameter.name}.")
    return lines
