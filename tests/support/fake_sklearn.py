"""A stand-in for the two functions of scikit-learn that examples/digits.py needs.

Importing the real package takes each worker more than a second. tests/docs/test_examples.py uses that.
"""

from __future__ import annotations

from pathlib import Path

FILES = {
    "__init__.py": "",
    "datasets.py": """
import numpy

def load_digits(return_X_y):
    draw = numpy.random.default_rng(0)
    return draw.integers(0, 17, (1797, 64)), draw.integers(0, 10, 1797)
""",
    "model_selection.py": """
def train_test_split(images, labels, test_size, **_):
    return images[test_size:], images[:test_size], labels[test_size:], labels[:test_size]
""",
}


def write_fake_sklearn(directory: Path) -> str:
    """Write it into ``directory``, beside a script or for PYTHONPATH; return that path."""
    package = directory / "sklearn"
    package.mkdir(parents=True)
    for name, text in FILES.items():
        (package / name).write_text(text)
    return str(directory)
