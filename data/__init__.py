"""Pictures and captions on their way in: sources, checks, crops, and the encoded sets made from them."""

import sys

from data.streaming_examples import Finder

sys.meta_path.insert(0, Finder())  # before any module imports streaming
