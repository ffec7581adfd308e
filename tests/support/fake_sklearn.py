"""A stand-in for scikit-learn, of which examples/digits.py needs two functions: numbers of the same shapes.

Importing the real one takes more than a second of a processor in each worker, which is most of what a test
costs that starts dozens of them. tests/docs/test_examples.py runs the examples with the real one.
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
    """Write it below ``place``; what PYTHONPATH has to say."""
    package = directory / "stand-in" / "sklearn"
    package.mkdir(parents=True)
    for name, text in FILES.items():
        (package / name).write_text(text)
    return str(package.parent)
