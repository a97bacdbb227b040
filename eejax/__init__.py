"""Early-exit language models in JAX: training, tuning and serving."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eejax.interop.api import LanguageModel as LanguageModel
    from eejax.interop.api import calibrate as calibrate
    from eejax.interop.api import generate as generate
    from eejax.interop.api import grade as grade
    from eejax.interop.api import load as load
    from eejax.interop.api import own_text as own_text
    from eejax.interop.api import tune as tune

__version__ = "0.1.0"

_HERE = ("LanguageModel", "calibrate", "generate", "grade", "load", "own_text", "tune")


def __getattr__(name: str):
    """Import `eejax.load` and the like when they are used, and JAX with them."""
    if name in _HERE:
        return getattr(importlib.import_module("eejax.interop.api"), name)
    raise AttributeError(f"module 'eejax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HERE])
