"""Pictures and captions on their way in: sources, checks, crops, and the encoded sets made from them."""
