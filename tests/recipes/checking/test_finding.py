"""What checks print."""

from recipes.checking.finding import Finding


def test_a_name_from_a_file_does_not_command_the_terminal():
    """doctor.py, and the checks of cluster jobs, print what they find in configs, manifests and heartbeats."""
    assert str(Finding("error", "data", "no file \x1b[2Jok")) == r"error:   data: no file \x1b[2Jok"
