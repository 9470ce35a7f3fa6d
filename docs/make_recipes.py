"""Write docs/recipes.md from the code: every section and component with its keys.

python docs/make_recipes.py --out docs/recipes.md
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from precompute.config import EncodeConfig, VocabularyConfig
from recipes.config.command_line import groups_of, signatures
from recipes.config.components import COMPONENTS
from recipes.config.recipe import Recipe
from recipes.config.schema import Signature, read_section, subsections

INTRODUCTION = """\
# Recipes

*Made from the code by `make docs`: edit the docstrings, or the first part in `docs/make_recipes.py`.*

## How a config works

A recipe is a YAML. Its fixed keys are listed below, with their defaults. Its components (the model, the data, a
callback) are written `{name: ..., arguments}`:

```yaml
optimizer: {name: adamw, lr: 1e-4}
callbacks:
  progress: {name: progress, seconds: 30}
```

A run takes a YAML, and `key.sub=value` to change it. What follows `=` is read as YAML:

```bash
composer recipes/train.py yamls/openmoji_vae.yaml training.duration=1200ba optimizer.lr=1e-3
composer -n 8 recipes/train.py yamls/sd2_base.yaml 'callbacks.sample_grid.prompts=[a red fox, a blue cube]'
```

- `--help` lists the keys; `--dry-run` builds the model without memory for its weights, and prints its size, the
  arithmetic of batches, and what would be written:

  ```bash
  python recipes/train.py --help
  python recipes/train.py yamls/sd2_base.yaml --dry-run
  ```

- Every key is checked before anything is built. A misspelled one is named with its full path and the nearest that
  there is; all errors are reported at once, each on a line.
- Given another name, a component starts without the arguments of the one it replaces; the order on the command line
  does not matter:

  ```bash
  composer recipes/train.py yamls/openmoji_vae.yaml schedule.name=constant schedule.warmup=100ba
  ```

- Callbacks, algorithms, loggers, validation sets and sources have labels, which a YAML chooses. `null` removes one,
  a new label adds one:

  ```bash
  composer recipes/train.py yamls/openmoji_vae.yaml callbacks.reconstructions=null \\
      'loggers.wandb={name: wandb, project: precompose}'
  ```

- `base: other.yaml`, a path from this YAML's folder, starts from that one and overrides its keys. Lists are replaced
  whole.
- `${training.duration}` repeats the value of another key. A text that holds `${` itself is written `\\${`.
- A *duration* is a number and a unit: `500ba` batches, `2ep` epochs, `1000sp` samples, `0.25dur` a share of the run.
- An *existing path* is checked before the run starts; relative ones begin in the folder that the command runs in. A
  *hub id* has the form `owner/name`.
- The resolved config is printed and saved as `config.yaml` in the run's folder. It is a recipe itself.
"""


def document() -> str:
    """The whole file."""
    parts = [INTRODUCTION]
    parts += [f"## {title(cls)}: `{script}`\n\n{section_tables(cls)}" for cls, script in SCRIPTS.items()]
    parts.append(f"## Components\n\n{group_list()}")
    for group, components in signatures().items():
        parts.append(f"### {group}\n")
        parts += [component_text(COMPONENTS[group][name], name, signature) for name, signature in components.items()]
    return "\n".join(parts)


SCRIPTS = {
    Recipe: "recipes/train.py",
    EncodeConfig: "precompute/encode.py",
    VocabularyConfig: "precompute/vocabulary.py",
}


def title(cls: type) -> str:
    """A section's description as a heading: "A training run"."""
    return read_section(cls).doc.split(":")[0].rstrip(".")


def section_tables(cls: type) -> str:
    """A table of a config's own keys, and one for each of its sections."""
    signature = read_section(cls)
    inner = subsections(cls)
    own = {name: p for name, p in signature.parameters.items() if name not in inner}
    doc = "" if signature.doc == f"{title(cls)}." else f"{signature.doc}\n\n"
    parts = [f"{doc}{table(Signature(own, ''), 'key')}"]
    parts += [
        f"`{name}`: {read_section(c).doc}\n\n{table(read_section(c), 'key', f'{name}.')}" for name, c in inner.items()
    ]
    return "\n".join(parts)


def group_list() -> str:
    """Every group, linked, with the names in it and the script that takes it."""
    lines = []
    for group, names in COMPONENTS.items():
        scripts = ", ".join(f"`{script}`" for cls, script in SCRIPTS.items() if group in groups_of(cls))
        lines.append(f"- [{group}](#{group}) ({scripts}): {', '.join(f'`{name}`' for name in names)}")
    return "\n".join(lines) + "\n"


def component_text(target: str, name: str, signature: Signature) -> str:
    """A component's description and its arguments."""
    file = target.split(":")[0].replace(".", "/") + ".py"
    arguments = table(signature, "argument") if signature.parameters else "No arguments.\n"
    return f"#### `{name}`\n\n{escaped(signature.doc)} ([source](../{file}))\n\n{arguments}"


def table(signature: Signature, first: str, prefix: str = "") -> str:
    """Keys with type, default and meaning."""
    rows = [f"| {first} | type | default | meaning |", "| --- | --- | --- | --- |"]
    for p in signature.parameters.values():
        default = "required" if p.required else f"`{p.default}`"
        cells = (f"`{prefix}{p.name}`", f"`{p.type_text}`", default, escaped(p.doc))
        cells = (cell.replace("|", r"\|") for cell in cells)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def escaped(text: str) -> str:
    """Text whose <names>, outside of backticks, Markdown would take for HTML."""
    parts = text.split("`")
    return "`".join(part if number % 2 else part.replace("<", r"\<") for number, part in enumerate(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/recipes.md from the code.")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    out = parser.parse_args().out
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    partial.write_text(document(), encoding="utf-8")
    partial.replace(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
