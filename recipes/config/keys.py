"""Full paths of keys, as options that name keys of a config take them."""

from __future__ import annotations

import re

from recipes.config.entry_points import all_components
from recipes.config.schema import nearest, read_section, readable_keys, subsections


def unknown_key(section: type, path: str) -> str | None:
    """What is wrong with the full path of a key, with a hint; None if a config of this class may have the key.

    Labels are free, and a component may be any of its group: what a path names may be in another config.

    Args:
        section: the dataclass that defines the keys, such as `recipes.config.recipe.Recipe`.
        path: such as optimizer.lr, or `optimizer` for all below it.
    """
    allowed, inner = read_section(section).parameters, subsections(section)
    components = all_components()
    labels = False
    for part in path.split("."):
        if labels:
            labels = False
            continue
        if part not in allowed:
            return f"{path}: unknown key; {nearest(part, allowed)}"
        kind = allowed[part].type_text
        group = re.search(r"(\w+) component", kind)
        if part in inner:
            allowed, inner = read_section(inner[part]).parameters, subsections(inner[part])
        elif group is not None:
            labels = kind.startswith(("dict", "list"))  # or places
            builders = (readable_keys(target) for target in components[group[1]].values())
            allowed, inner = {key: parameter for keys in builders for key, parameter in keys.items()}, {}
        elif "dict" in kind:
            return None
        else:
            allowed, inner = {}, {}
    return None
