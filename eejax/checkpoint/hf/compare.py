"""Comparison of a model of an unknown `model_type` with transformers.

The comparison finds what the tensors do not show. If nothing can be compared, a model is read only
if its tensors and keys determine everything that is unusual.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from eejax.checkpoint.hf.fields import Raw
from eejax.checkpoint.hf.keys import unread, words
from eejax.checkpoint.hf.layouts import Rule
from eejax.checkpoint.hf.probe import ALIBI, setting
from eejax.common.errors import CheckpointError, ConfigError
from eejax.common.trees import Tree
from eejax.models import exits, params, transformer
from eejax.models.config import ModelConfig

# Comparison with transformers: number of tokens, and its maximum; tokens at either end whose logits
# are compared; and maximum parameters of a model, which is held twice.
TOKENS, MAX_TOKENS, ROWS = 128, 1024, 16
MAX_PARAMETERS = 2 * 10**9
MAX_KEYS = 4  # maximum keys that a message names
RUNS_NOT = "transformers does not run it here"


def variants(config: ModelConfig) -> Iterator[ModelConfig]:
    """Yield models with the same tensors, the likeliest first."""
    residuals = [config.residual] + ["parallel"] * (
        config.residual == "sequential" and config.norm_placement == "pre"
    )
    turns = [False, True] if config.position == "rotary" else [False]
    scales = [1.0, config.d_model**0.5]
    for residual, plus, turned, scale in itertools.product(residuals, (False, True), turns, scales):
        yield config.replace(
            residual=residual,
            norm_plus_one=plus,
            embedding_scale=scale,
            rotary=dataclasses.replace(config.rotary, interleaved=turned),
        )


class ComparedConfig(NamedTuple):
    """A configuration after the comparison.

    Attributes:
      config: the variant that fits, or the likeliest one.
      sure: whether a comparison confirmed it.
      comparison: what was compared, for messages.
      why: the reason why nothing was compared, or "".
    """

    config: ModelConfig
    sure: bool
    comparison: str
    why: str = ""


_FOUND: dict[tuple, ComparedConfig] = {}  # of folders, by `_stamp`


def _stamp(path: pathlib.Path) -> tuple:
    """Return a key that changes with a folder's files."""
    files = sorted((f.name, f.stat().st_mtime_ns) for f in path.iterdir() if f.is_file())
    return path.resolve(), *files


def remember(path: pathlib.Path, found: ComparedConfig) -> None:
    """Keep what a comparison of a folder found for `remembered`."""
    _FOUND[_stamp(path)] = found


def remembered(path: pathlib.Path, config: ModelConfig) -> ComparedConfig | None:
    """Return what an earlier comparison found, None if there was none since the files changed.

    Its configuration has the dtype and the padding of `config`.
    """
    if (found := _FOUND.get(_stamp(path))) is None:
        return None
    same = found.config.replace(dtype=config.dtype, vocab_multiple=config.vocab_multiple)
    return found._replace(config=same)


def incomparable(path: pathlib.Path, config: ModelConfig) -> str:
    """Return why transformers cannot compute the model here, or ""."""
    if params.count(config) > MAX_PARAMETERS:
        return f"it has more than {MAX_PARAMETERS:.0e} parameters, too many to be held twice"
    try:
        import torch  # noqa: F401  # pyright: ignore[reportMissingImports]  # may be missing
        from transformers import AutoConfig  # pyright: ignore[reportMissingImports]
    except ImportError:
        return "transformers and torch are not installed"
    try:
        AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception:  # for an unknown type, or from its own validation
        return RUNS_NOT
    return ""


def require_unambiguous(raw: Raw, rules: list[Rule], why: str) -> None:
    """Raise CheckpointError if tensors and keys leave a model ambiguous.

    It is called if nothing can be compared.
    """
    reasons = ambiguities(raw)
    fused = [rule.theirs[0].format(i=0) for rule in rules if len(rule.ours) > 1]
    reasons += [f"{name}, a fused projection whose order is never guessed" for name in fused[:1]]
    if reasons:
        raise raw.refuse(
            "model_type",
            raw("model_type"),
            f"is not known, and nothing verifies what it is ({why}), while it has "
            f"{'; '.join(reasons)}. Where transformers and torch run it, it is compared with them",
        )


def ambiguities(raw: Raw) -> list[str]:
    """Return what a config.json leaves open, and its settings that nothing here reads."""
    messages = [
        f"ALiBi ({name} = true), whose slopes differ from family to family"
        for name in ALIBI
        if setting(raw, name)
    ]
    others = [(name, value) for name, value in unread(raw).items() if name not in ALIBI]
    for name, value in others[:MAX_KEYS]:
        about = f" ({words(name)})" if words(name) else ""
        messages.append(f"{name} = {value!r}{about}, which nothing here reads")
    return messages + [f"{len(others) - MAX_KEYS} such settings more"] * (len(others) > MAX_KEYS)


def verified(
    raw: Raw,
    config: ModelConfig,
    tree: Tree,
    say=lambda line: None,
    tolerance: float = 1e-3,
) -> ComparedConfig:
    """Return the variant that computes the same as transformers, if that can be compared.

    Both compute in float32, with parameters that are rounded alike.

    Args:
      raw: the config.json.
      config: the likeliest variant.
      tree: the parameters.
      say: receives a line for each step.
      tolerance: allowed difference, relative to the largest logit.

    Raises:
      CheckpointError: if no variant is within the tolerance.
    """
    path = raw.path.parent
    if why := incomparable(path, config):
        return ComparedConfig(config, False, f"which nothing was compared with ({why})", why)
    import torch  # pyright: ignore[reportMissingImports]  # `incomparable` imported them
    import transformers  # pyright: ignore[reportMissingImports]

    say("opening it with transformers, to compare")
    try:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=False
        ).eval()
    except (ImportError, ValueError, OSError, KeyError, RuntimeError):
        # It may fail for many reasons: another version, custom code, other tensors.
        return ComparedConfig(
            config, False, f"which nothing was compared with ({RUNS_NOT})", RUNS_NOT
        )
    reach = reach_of(config)
    length = min(config.context_length, max(TOKENS, reach + ROWS), MAX_TOKENS)
    asked = np.random.default_rng(0).integers(0, config.vocab_size, (1, length)).astype(np.int32)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if p.ndim > 1 and "norm" not in name:  # rounded like ours (`params.for_compute`)
                p.copy_(p.to(getattr(torch, config.dtype)))
        want = theirs(torch.tensor(asked.astype(np.int64))).logits[0].numpy()
    # Few tokens distinguish most variants; the last of many show windows and scaled positions.
    start, end = slice(0, ROWS), slice(max(0, length - ROWS), length)
    most, far = tolerance * float(np.abs(want[start]).max()), []
    say(f"comparing the logits of {length} tokens")
    for n, model in enumerate(variants(config.replace(dtype="float32"))):
        try:
            say(f"comparing variant {n + 1}: {_variant(model)}")
            off = _distance(tree, model, asked[:, :ROWS], start, want)
            if off <= most:
                off = max(off, _distance(tree, model, asked, end, want))
        except ConfigError:
            continue
        if off <= most:
            message = f"computes what transformers does over {length} tokens, to {off:.1e}"
            sure = length > reach or length == config.context_length
            if not sure:
                message += (
                    f", but has a window or a scaling that only more than {reach} tokens tell"
                )
            return ComparedConfig(model.replace(dtype=config.dtype), sure, f"which {message}")
        far.append(off)
    suspects = ambiguities(raw)
    cause = f" It has {'; '.join(suspects)}." if suspects else ""
    raise CheckpointError(
        f"{path}: was recognised by its tensors, but computes something else than transformers: "
        f"its logits are off by {min(far):.3g} at least.{cause} It cannot be represented, or needs "
        "a Family."
    )


def _variant(config: ModelConfig) -> str:
    pairs = "neighbouring" if config.rotary.interleaved else "distant"
    plus = ", norms of 1 + w" * config.norm_plus_one
    scale = f", embedding times {config.embedding_scale:.4g}" * (config.embedding_scale != 1)
    return f"residual {config.residual}, {pairs} rotary pairs{plus}{scale}"


def reach_of(config: ModelConfig) -> int:
    """Return the number of tokens within which a wrong window or position scaling may not show.

    It is 0 for a model with neither.
    """
    marks = [w for i in range(config.n_layers) if (w := config.window(i)) is not None]
    if config.position == "rotary" and config.rotary.original_context is not None:
        marks.append(config.rotary.original_context)
    return max(marks, default=0)


def _distance(
    tree: Tree, config: ModelConfig, asked: np.ndarray, rows: slice, want: np.ndarray
) -> float:
    """Return the distance of some rows' logits from the expected ones, [t, v] of the whole text."""

    @jax.jit
    def run(tree, asked):
        tree = jax.tree.map(lambda a: a.astype(np.float32), tree)
        states = transformer.exit_states(tree, config, asked, which=(config.n_exits,))
        return exits.logits(exits.head(tree, config, config.n_exits), states[-1][0, rows])

    got = np.asarray(run(tree, asked))[:, : config.vocab_size]
    return float(np.abs(got - want[rows]).max())
