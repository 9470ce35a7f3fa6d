"""The error of checkpoints that cannot be read. `recipes.engines.resuming` says what to do."""


class DamagedCheckpoint(ValueError):
    """The bytes of a checkpoint are not what was written, or not what this repository writes."""
