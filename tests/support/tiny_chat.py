"""A model over bytes with a chat template and random weights, which ends its messages by chance."""

from __future__ import annotations

import jax
from chats import TEMPLATES

import eejax
from eejax.data.tokenizers import ByteTokenizer
from eejax.models import params
from eejax.models.config import ModelConfig


def tiny_chat(**change) -> eejax.LanguageModel:
    """Its context has room for the questions of the quickstart."""
    config = ModelConfig(
        vocab_size=257, n_layers=4, d_model=16, n_heads=2, context_length=512, head="tied", exits=()
    ).replace(**change)
    tokenizer = ByteTokenizer(chat=TEMPLATES["chatml"])
    return eejax.LanguageModel(config, params.init(config, jax.random.key(1)), tokenizer)
