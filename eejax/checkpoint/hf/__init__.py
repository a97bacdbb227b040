"""Import and export of pretrained models in the Hugging Face format."""

from eejax.checkpoint.hf.families import Family, register_family
from eejax.checkpoint.hf.load import Pretrained, load_pretrained
from eejax.checkpoint.hf.save import save_pretrained

__all__ = ["Family", "Pretrained", "load_pretrained", "register_family", "save_pretrained"]
