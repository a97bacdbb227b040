"""Keys of a config.json that change no logits, and keys that nothing has read."""

from __future__ import annotations

import re
from typing import Any

from eejax.checkpoint.hf.fields import Raw

# Training, tokens and their generation, bookkeeping, other heads than that of a language model.
_IDLE = re.compile(
    r"""
    .*dropout.* | .*_pdrop | layerdrop | .*_token_ids? | token_type_ids | .*_token_index
    | vocab_file | initializer_.* | init_std | .*loss.* | .*gradient_checkpointing | ep_size
    | use_cache | cache_implementation | use_flash_attn.* | _?attn_implementation.*
    | _?experts_implementation.* | reorder_and_upcast_attn | pretraining_tp
    | chunk_size_feed_forward
    | (torch_)?dtype | architectures | auto_map | transformers_version | .*_version | _?name_or_path
    | _commit_hash | model_type | tokenizer_class | task_specific_params
    | id2label | label2id | num_labels | problem_type | finetuning_task | summary_.* | classifier_.*
    | return_dict.* | use_return_dict | output_.* | pruned_heads | torchscript | is_decoder
    | is_encoder_decoder | cross_attention_hidden_size | tie_encoder_decoder
    | tie_last_hidden_states
    | max_length | min_length | do_sample | early_stopping | num_beam.* | diversity_penalty
    | temperature | top_k | top_p | typical_p | repetition_penalty | length_penalty
    | .*no_repeat_ngram_size | bad_words_ids | num_return_sequences | remove_invalid_values
    | exponential_decay_length_penalty | suppress_tokens | begin_suppress_tokens | prefix
    | unsloth_.* | _sliding_window_pattern | ignore_keys_at_rope_validation
    """,
    re.VERBOSE,
)
BOUNDS = "clip|softcap|soft_cap|logit_cap"
_WORDS = (
    ("alibi", "ALiBi"),
    ("clip", "clipped queries, keys and values"),
    (BOUNDS, "a soft cap"),
    ("scal|multiplier", "a scale"),
)


def is_idle(name: str) -> bool:
    """Return whether a key changes no logits, whatever its value."""
    return _IDLE.fullmatch(name) is not None


def unread(raw: Raw) -> dict[str, Any]:
    """Return keys that nothing has read and that may change logits; keys within an object as
    a.b."""
    found = {}
    for name, value in raw.values.items():
        if name in raw.fields_read or is_idle(name):
            continue
        inner = value if isinstance(value, dict) else {}
        found |= {f"{name}.{k}": v for k, v in inner.items()} if inner else {name: value}
    return {name: value for name, value in found.items() if not _neutral(name, value)}


def words(name: str) -> str:
    """Return a description of a key, or "" if its name shows none."""
    found = [word for pattern, word in _WORDS if re.search(pattern, name)]
    return found[0] if found else ""


def _neutral(name: str, value: Any) -> bool:
    one = value == 1 and value is not True and re.search("scal|multiplier", name) is not None
    return value is None or value in (False, 0, "", [], {}) or one
