"""streaming without its example data sets, as long as nothing asks for them.

`import streaming` imports readers of C4, WebVid and CIFAR-10, and these most of transformers, scikit-learn, pandas and
torchvision: more than half of the CPU time of importing it, which every command that opens a set waits for.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

EXAMPLES = ("multimodal", "text", "vision")


class WithoutExamples(SourceFileLoader):
    """Imports streaming, and its example data sets when they are first used: `streaming.text` is what it always is."""

    def exec_module(self, module: ModuleType) -> None:
        names = {f"{module.__name__}.{name}": name for name in EXAMPLES}
        sys.modules.update({full: ModuleType(full) for full in names})
        try:
            super().exec_module(module)
        finally:
            for full, name in names.items():
                del sys.modules[full]
                module.__dict__.pop(name, None)

        def __getattr__(name: str) -> ModuleType:
            if name in EXAMPLES:
                return import_module(f"{module.__name__}.{name}")
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__getattr__ = __getattr__


class Finder(MetaPathFinder):
    """Finds streaming for `WithoutExamples`, and nothing else."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name) if name == "streaming" else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = WithoutExamples(name, spec.origin)
        return spec
