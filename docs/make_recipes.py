"""Write docs/recipes.md from the code: every section and every component with its keys.

python docs/make_recipes.py --out docs/recipes.md
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.files import write_text
from precompute.config import EncodeConfig, VocabularyConfig
from precompute.texts.pack_config import PackConfig
from recipes.config.command_line import groups_of, path_of
from recipes.config.components import COMPONENTS
from recipes.config.recipe import Recipe
from recipes.config.schema import Signature, read_section, read_signature, subsections
from recipes.evaluation.config import Evaluation

INTRODUCTION = """\
# Recipes

*This page is generated from the code by `make docs`. To change it, edit the docstrings, or the first section in
`docs/make_recipes.py`.*

## How a config works

A recipe is a YAML file. Its fixed keys are listed below with their defaults. A component, such as the model, the data
or a callback, is written as `{name: ..., <arguments>}`:

```yaml
optimizer: {name: adamw, lr: 1e-4}
callbacks:
  progress: {name: progress, seconds: 30}
```

A command takes a YAML file and, optionally, overrides of the form `key.sub=value`, where the value is YAML:

```bash
composer recipes/train.py yamls/openmoji_vae.yaml training.duration=1200ba optimizer.lr=1e-2
composer -n 8 recipes/train.py yamls/sd2_base.yaml 'callbacks.sample_grid.prompts=[a red fox, a blue cube]'
```

- `--help` lists the keys. `--print-config` prints the config as the run would use it. `--dry-run` builds the model
  without allocating memory for its weights, and prints its size, the memory per device, how batches are divided, how
  much is sent between devices, and which files would be written:

  ```bash
  python recipes/train.py --help
  python recipes/train.py yamls/sd2_base.yaml --print-config
  python recipes/train.py yamls/sd2_base.yaml --dry-run
  ```

- All keys are checked before anything is built. All errors are reported at once, one line each; the message for a
  misspelled key gives its full path and the most similar allowed key.
- If an override gives a component another name, the arguments of the replaced component are removed. The order of
  overrides on the command line does not matter:

  ```bash
  composer recipes/train.py yamls/openmoji_vae.yaml schedule.name=constant schedule.warmup=100ba
  ```

- Callbacks, algorithms, loggers, validation sets and sources have labels. In the YAML files of this repository, the
  label of a component is its name, unless a recipe has two components of the same name. `null` removes a label, and a
  new label adds a component:

  ```bash
  composer recipes/train.py yamls/openmoji_vae.yaml callbacks.reconstructions=null \\
      'loggers.wandb={name: wandb, project: precompose}'
  ```

- `base: other.yaml` inherits all keys of another YAML file, so a recipe of your own can be short. The path is relative
  to your file. The keys of your file override those of the other file; lists are replaced as a whole:

  ```yaml
  base: sd2_base.yaml
  run_name: mine
  training: {global_batch: 256, duration: 10000ba}
  schedule: {warmup: 500ba}
  algorithms:
    scheduled_ema: {name: scheduled_ema, decay: 0.999, last: 2000ba}
  ```

- `${training.duration}` inserts the value of another key. Write `\\${` for a literal `${`.
- A *duration* is a number and a unit: `500ba` batches, `2ep` epochs, `1000sp` samples, `0.25dur` a fraction of the run.
  Numbers of batches, epochs and samples are whole.
- An *existing path* is checked before the run starts. Relative paths start in the folder in which the command is run. A
  *hub id* has the form `owner/name`.
- At its start, a run prints ten lines about its model, data, batch sizes, precision, optimizer, algorithms, length and
  checkpoints. It saves the config as `config.yaml` in its output folder. This file is itself a valid recipe.

## Objectives

`model.objective` of a `latent_diffusion` model determines what the denoiser learns to predict, at which noise levels,
and how latents are sampled:

| objective | the denoiser predicts | noise levels in training | samplers |
| --- | --- | --- | --- |
| `ddpm` ([Ho et al. 2020](https://arxiv.org/abs/2006.11239)) | the noise (`prediction: epsilon`) or the velocity \
(`v_prediction`, [Salimans and Ho 2022](https://arxiv.org/abs/2202.00512)) | uniform; \
`min_snr_gamma` weights them ([Hang et al. 2023](https://arxiv.org/abs/2303.09556)) | `dpm++` (the default), `ddim` |
| `rectified_flow` ([Liu et al. 2022](https://arxiv.org/abs/2209.03003)) | the velocity (noise - data) along \
a straight path | logit-normal ([Esser et al. 2024](https://arxiv.org/abs/2403.03206)) or uniform, \
and moved by `shift` | `euler` |

```bash
composer recipes/train.py yamls/openmoji_unet.yaml run_name=openmoji_unet_flow model.objective.name=rectified_flow
python recipes/generate.py runs/openmoji_unet_flow/export --prompts "red heart" --sampler euler --steps 50
```

`shift` of `rectified_flow` moves the times of training and sampling towards noise, which larger images need: twice the
side needs twice the shift (Esser et al. 2024, section 5.3.2).

An export contains its objective and the configuration of its sampler, so `recipes/generate.py` needs no options for
these.
"""


def document() -> str:
    """The whole file."""
    parts = [INTRODUCTION]
    parts += [f"## {title(cls)}: `{script}`\n\n{section_tables(cls)}" for cls, script in SCRIPTS.items()]
    parts.append(f"## Components\n\n{group_list()}")
    for group, components in COMPONENTS.items():
        parts.append(f"### {group}\n")
        parts += [component_text(target, name) for name, target in components.items()]
    return "\n".join(parts)


SCRIPTS = {
    Recipe: "recipes/train.py",
    EncodeConfig: "precompute/encode.py",
    VocabularyConfig: "precompute/vocabulary.py",
    PackConfig: "precompute/pack.py",
    Evaluation: "recipes/evaluate.py",
}


def title(cls: type) -> str:
    """The description of a config as a heading: "A training run"."""
    return read_section(cls).doc.split(":")[0].rstrip(".")


def section_tables(cls: type) -> str:
    """One table of the config's own keys, and one per section."""
    doc = read_section(cls).doc
    return ("" if doc == f"{title(cls)}." else f"{doc}\n\n") + "\n".join(key_tables(cls, ""))


def key_tables(cls: type, prefix: str) -> Iterator[str]:
    """The table of a section's own keys, then the tables of the sections inside it."""
    inner = subsections(cls)
    parameters = read_section(cls).parameters
    own = {name: p for name, p in parameters.items() if name not in inner or p.allows_null}
    yield table(Signature(own, ""), "key", prefix)
    for name, section in inner.items():
        first, *rest = key_tables(section, f"{prefix}{name}.")
        yield f"`{prefix}{name}`: {read_section(section).doc}\n\n{first}"
        yield from rest


def group_list() -> str:
    """One line per group of components: a link, the scripts that use the group, and the names of its components."""
    lines = []
    for group, names in COMPONENTS.items():
        scripts = ", ".join(f"`{script}`" for cls, script in SCRIPTS.items() if group in groups_of(cls))
        lines.append(f"- [{group}](#{group}) ({scripts}): {', '.join(f'`{name}`' for name in names)}")
    return "\n".join(lines) + "\n"


def component_text(target: str, name: str) -> str:
    """The description of a component and a table of its arguments."""
    signature, file = read_signature(target), target.split(":")[0].replace(".", "/") + ".py"
    arguments = table(signature, "argument") if signature.parameters else "No arguments.\n"
    return f"#### `{name}`\n\n{escaped(signature.doc)} ([source](../{file}))\n\n{arguments}"


def table(signature: Signature, first: str, prefix: str = "") -> str:
    """A table of keys with their types, defaults and meanings."""
    rows = [f"| {first} | type | default | meaning |", "| --- | --- | --- | --- |"]
    for p in signature.parameters.values():
        default = "required" if p.required else f"`{p.default}`"
        cells = (f"`{prefix}{p.name}`", f"`{p.type_text}`", default, escaped(p.doc))
        cells = (cell.replace("|", r"\|") for cell in cells)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def escaped(text: str) -> str:
    """Escape <names> outside of backticks, which Markdown would take for HTML."""
    parts = text.split("`")
    return "`".join(part if number % 2 else part.replace("<", r"\<") for number, part in enumerate(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/recipes.md from the code.")
    parser.add_argument("--out", type=path_of, required=True, help="the file to write")
    out = parser.parse_args().out
    write_text(out, document())
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
