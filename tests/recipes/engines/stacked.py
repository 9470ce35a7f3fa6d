"""Checkpoints as an earlier version wrote them, in which queries, keys and values were rows of one matrix."""

import re

import torch

SEPARATE = re.compile(r"(.*\bbranch\.)([qkv])\.(weight|bias)")


def stacked(value):
    """A checkpoint, or a part of it, with the parameters of that version: the reverse of `upgraded`."""
    if isinstance(value, dict):
        found = {}
        for name, part in value.items():
            names = old_name(name) and [name.replace(".q.", f".{letter}.") for letter in "qkv"]
            if names is None:
                found[name] = stacked(part)
            elif names:
                found[old_name(name)] = joined([value[one] for one in names])
        return found
    if isinstance(value, list):
        return [old_name(part) or part if isinstance(part, str) else stacked(part) for part in value if kept(part)]
    return tuple(map(stacked, value)) if type(value) is tuple else value


def old_name(name):
    """The stacked parameter's name of its first part, "" of the other parts, None of all other parameters."""
    match = SEPARATE.fullmatch(name) if isinstance(name, str) else None
    return match and (f"{match[1]}qkv.{match[3]}" if match[2] == "q" else "")


def kept(value):
    return old_name(value) != ""


def joined(parts):
    """Matrices, biases, and what an optimizer keeps of them."""
    if isinstance(parts[0], dict):
        return {name: joined([part[name] for part in parts]) for name in parts[0]}
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].ndim else parts[0]
