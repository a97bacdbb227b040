"""Pretrained models of the Hugging Face form, in and out."""

from eejax.checkpoint.hf.families import Family, register_family
from eejax.checkpoint.hf.load import Pretrained, load_pretrained
from eejax.checkpoint.hf.save import save_pretrained

__all__ = ["Family", "Pretrained", "load_pretrained", "register_family", "save_pretrained"]
