"""Building the objects that checked components describe. Only the modules of these components are imported."""

from __future__ import annotations

import importlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.encoded.manifest import Manifest
from data.system.errors import Outage, first_line, with_place
from recipes.config.components import BASES, NAMED
from recipes.config.entry_points import all_components
from recipes.config.schema import Checker, Component, read_signature


def build(component: Any, **context: Any) -> Any:
    """Build the object that a checked component describes, after the components nested in its arguments.

    Args:
        component: a Component, or a list or dict whose Components are built; other values are returned as they are.
        context: objects that a builder may request, by naming a parameter before its `*` like the object. For example
            the optimizer `adamw(parameters, *, lr)` requests `parameters`.

    Raises:
        ValueError: what the builder refuses, or a builder requests what it is not given, or returns something else
            than its group needs.
    """
    if isinstance(component, dict):
        return {key: build(value, **context) for key, value in component.items()}
    if isinstance(component, list | tuple):
        return type(component)(build(value, **context) for value in component)
    if not isinstance(component, Component):
        return component
    wanted = asked_for(component)
    missing = [name for name in wanted if name not in context]
    if missing:
        raise ValueError(
            f"{component.path}: {component.target} asks for {', '.join(missing)}, which no {component.group} is given; "
            "the keys of a component come after * (docs/extending.md)"
        )
    arguments = {key: build(value, **context) for key, value in component.args.items()}
    with located(component):
        built = import_builder(component)(*(context[name] for name in wanted), **arguments)
        _check_kind(component, built)
        return built


def _check_kind(component: Component, built: Any) -> None:
    """
    Raises:
        ValueError: not what the group needs, such as a lever in the place of a callback, whose hooks nothing calls, or
            a network that exports would record under another name, by which they are opened as something else.
    """
    base = BASES.get(component.group)
    if base is not None and not isinstance(built, imported(base)):
        what = "None" if built is None else f"an instance of {type(built).__name__}"
        module, _, name = base.partition(":")
        raise ValueError(
            f"{component.target} returns {what}, and the group {component.group} needs an instance of {name} "
            f"({module}); see docs/extending.md"
        )
    if component.group in ("image_encoder", "text_encoder"):
        built.check_attributes()
    if component.group == "model":
        _check_whole(built)
    if component.group not in NAMED:
        return
    name = getattr(built, "name", None)
    # A component may also be a preset of another one, which exports rightly record by that one's name.
    own_module = all_components()[component.group].get(name, "").partition(":")[0]
    if name != component.name and own_module != type(built).__module__:
        raise ValueError(
            f"the attribute `name` of {type(built).__name__} ({type(built).__module__}) is {name!r}; set it to "
            f"{component.name!r}, by which exports record it"
        )


def _check_whole(model: Any) -> None:
    """
    Raises:
        ValueError: a part of it is made when the model is first called, which the optimizer, checkpoints and the
            numbers of a plan come before.
    """
    from torch.nn.parameter import is_lazy

    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"the size of {name} of {type(model).__name__} ({type(model).__module__}) is not known before the "
                "first batch; use a layer that is given its sizes in place of a lazy one"
            )


@contextmanager
def located(component: Component) -> Iterator[None]:
    """A context in which a component is built or checked. If the text of an error begins neither with its name nor its
    key, it gets the full path of the key in front. Errors of other kinds, of which a traceback is shown, get a note."""
    try:
        yield
    except Exception as error:
        # Not by an error of its own: that would hide where a library failed. Others have no text of ours.
        if type(error) in (ValueError, FileNotFoundError, Outage) and len(error.args) == 1:
            error.args = (_with_path(str(error), component),)
        elif not isinstance(error, MemoryError):
            error.add_note(f"in {component.path}: {component.target}")
        raise


def _with_path(text: str, component: Component) -> str:
    path, group = component.path, component.group
    if text.startswith((f"{path}:", f"{path}.", f"{component.name}:")):
        return text
    if text.startswith((f"{group}:", f"{group}.")):
        return path + text.removeprefix(group)
    first = re.match(r"\w*", text)[0]
    return f"{path}.{text}" if first in read_signature(component.target).parameters else f"{path}: {text}"


def asked_for(component: Component) -> list[str]:
    """Names of the objects that a component's builder requests."""
    parameters = inspect.signature(import_builder(component)).parameters.values()
    return [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]


def import_builder(component: Component) -> Callable[..., Any]:
    """The function or class that a component's target names.

    Raises:
        ValueError: its module, which is one of another package, needs a module that is not there, or ends the program.
    """
    try:
        return imported(component.target)
    except ImportError as error:
        if "." not in component.name:
            raise
        raise ValueError(
            f"{component.path}.name: {component.group} `{component.name}` is {component.target}, which cannot be "
            f"imported: {with_place(error)}; install what its package needs, or correct its imports"
        ) from error
    except SystemExit as error:  # of which Python says nothing where the status is a number
        raise ValueError(
            f"{component.path}.name: {component.group} `{component.name}` is {component.target}, whose import ends the "
            f"program: sys.exit({error.code!r}); raise an error there, or move what is a script to another module"
        ) from error


def imported(target: str) -> Any:
    """The object that "module:name" names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def build_on_meta(component: Component, **context: Any) -> Any:
    """As `build`, on the meta device: weights have shapes and take no memory."""
    import torch  # here, so that building a source or a filter does not wait for it

    _import_all(component)  # modules imported while meta is the default device would keep meta tensors, or fail
    what = (
        f"{component.path}: {component.target} cannot be built on PyTorch's meta device, where tensors have no values, "
        "as it is in dry runs, with FSDP and for exports"
    )
    with without_values(what, 'give what needs values device="cpu" (docs/extending.md)'), torch.device("meta"):
        return build(component, **context)


@contextmanager
def without_values(what: str, advice: str) -> Iterator[None]:
    """A context in which code of a model meets tensors on the meta device.

    Args:
        what: beginning of the message of an error.
        advice: its end.

    Raises:
        ValueError: the code asks for the value of a tensor.
    """
    try:
        yield
    except (RuntimeError, TypeError) as error:
        text = first_line(error)
        if "meta" not in text.lower():
            raise
        inside = ("/torch/", "/recipes/planning/tracing/")
        frames = traceback.extract_tb(error.__traceback__)
        last = [frame for frame in frames if not any(part in frame.filename for part in inside)][-1]
        raise ValueError(f"{what}: {text.rstrip('.')} ({last.filename}, line {last.lineno}); {advice}") from error


def _import_all(value: Any) -> None:
    if isinstance(value, Component):
        import_builder(value)
        _import_all(value.args)
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            _import_all(item)


def _records(manifest: Manifest) -> tuple[tuple[str, dict[str, Any] | None], ...]:
    return ("image_encoder", manifest.image_encoder), ("text_encoder", manifest.text_encoder)


def encoder_components(manifest: Manifest, bundle: Path | None = None) -> dict[str, Component | None]:
    """The image encoder and the text encoder of an encoded set, not yet built. Arguments as of `encoders_of`.

    Raises:
        ValueError: the manifest names encoders that do not exist, or folders that are not here.
    """
    found: dict[str, Component | None] = {}
    for group, record in _records(manifest):
        if record is None:
            found[group] = None
            continue
        values = dict(record["component"])
        if bundle is not None and (bundle / group).is_dir():
            weights = bundle / group / Path(str(values.get("pretrained") or "")).name
            values |= {"pretrained": str(weights)} if weights.is_file() else {"path": str(bundle / group)}
        checker = Checker(all_components())
        found[group] = checker.component(group, values, f"manifest.{group}")
        if checker.errors or checker.missing:
            copies = [f"nor is a copy in {bundle / group}"] if checker.missing and bundle is not None else []
            raise ValueError("; ".join(checker.errors + checker.missing + copies))
    return found


def encoders_of(manifest: Manifest, bundle: Path | None = None) -> tuple[Any, Any]:
    """Build the image encoder and the text encoder of an encoded set from its manifest.

    Args:
        manifest: of the set.
        bundle: folder that may contain copies of local encoders, as `image_encoder` and `text_encoder`.

    Returns:
        The image encoder, and the text encoder or None for a set of tokens.

    Raises:
        ValueError: the manifest names encoders that do not exist, or whose weights, or what else the
            manifest says of them, have changed.
    """
    built = []
    for group, component in encoder_components(manifest, bundle).items():
        encoder = build(component)
        built.append(encoder)
        expected = None if encoder is None else getattr(manifest, group)["weights_hash"]
        if encoder is not None and encoder.weights_hash != expected:
            raise ValueError(
                f"manifest.{group}: the weights of {encoder.id} are not those that encoded the set "
                f"(sha256 {encoder.weights_hash[:12]}, expected {expected[:12]}); encode it again"
            )
    # Of an encoder's config or code, not of its weights: latents would be decoded by another factor, and captions have
    # other embeddings than those of the training data.
    for (group, recorded), encoder in zip(_records(manifest), built, strict=True):
        for name, value in () if encoder is None else encoder.facts().items():
            if recorded.get(name, value) != value:
                raise ValueError(
                    f"manifest.{group}: {encoder.id} has {name} {value}, and the set was encoded with "
                    f"{recorded[name]}; restore its config, or encode the set again"
                )
    return built[0], built[1]
