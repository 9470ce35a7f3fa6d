import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def printed(code: str) -> str:
    """What a new process prints in the root of the repository."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_streaming_comes_without_its_example_data_sets():
    """Which import most of transformers, and these packages."""
    heavy = "{'sklearn', 'pandas', 'torchvision', 'transformers.generation.utils', 'streaming.text'}"
    opened = "import data.encoded_dataset, precompute.mds_files, precompute.file_figures"
    assert printed(f"import sys; {opened}; print({heavy} & set(sys.modules), end='')") == "set()"


def test_they_are_imported_when_they_are_used():
    used = (
        "import data, streaming; print('text' in vars(streaming), streaming.text.StreamingC4.__name__); "
        "import streaming.vision; print(streaming.vision.StreamingCIFAR10.__name__, hasattr(streaming, 'sound')); "
        "from streaming import *; print(multimodal.StreamingInsideWebVid.__name__)"
    )
    assert printed(used).split() == ["False", "StreamingC4", "StreamingCIFAR10", "False", "StreamingInsideWebVid"]


def test_their_failed_import_is_tried_again():
    code = (
        "import data, sys; from unittest import mock\n"
        "with mock.patch.dict(sys.modules, {'streaming.base': None}):\n"
        "    try: import streaming\n"
        "    except ImportError: print({'streaming', 'streaming.text'} & set(sys.modules))\n"
        "import streaming; print(streaming.MDSWriter.__name__)"
    )
    assert printed(code).splitlines() == ["set()", "MDSWriter"]
