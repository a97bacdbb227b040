"""Rotary settings of a config.json, in both of their spellings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from eejax.checkpoint.hf.fields import Raw, is_number
from eejax.common.errors import CheckpointError
from eejax.models.config import ModelConfig
from eejax.models.rotary_config import RotaryConfig

SCALINGS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
LAYERS = ("full_attention", "sliding_attention")


def read_rotary(
    raw: Raw,
    theta: float = 10000.0,
    *,
    fraction: float | None = None,
    local: float | None = None,
    names: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
    scalings: Mapping[str, str] = SCALINGS,
) -> RotaryConfig:
    """Read rotary settings from `rope_scaling` or `rope_parameters`, and the fields beside them.

    Precedence is that of transformers (modeling_rope_utils.py: convert_rope_params_to_dict,
    standardize_rope_params).

    Args:
      raw: the config.json.
      theta: the family's base.
      fraction: the family's rotated part of a head, None for families that rotate whole heads.
      local: the base of its layers with a window, None if it is the same.
      names: names of base and fraction beside the table.
      scalings: scalings of the family.

    Raises:
      CheckpointError: for settings that cannot be represented.
    """
    given, scaling = raw.table("rope_parameters"), raw.table("rope_scaling")
    where, rope = ("rope_scaling", scaling) if scaling else ("rope_parameters", given)
    sliding: Mapping[str, Any] = {}
    if local is None and _by_layer(rope):
        raise raw.refuse(where, rope, "cannot be represented: must be the same for all layers")
    if local is not None:
        if _by_layer(scaling) or (given and not _by_layer(given)):
            raise raw.refuse(
                where,
                rope,
                f"must be a rope_parameters that has an entry for each of {', '.join(LAYERS)}",
            )
        if scaling.get("type", "default") != "default" and "rope_type" not in scaling:
            raise raw.refuse(
                "rope_scaling.type",
                scaling["type"],
                f"must be called rope_type: transformers overlooks it in a {raw('model_type')}",
            )
        sliding = raw.table("rope_parameters.sliding_attention")
        rope = {**raw.table("rope_parameters.full_attention"), **scaling}
        if (kind := _kind(sliding)) != "default":
            key = "rope_parameters.sliding_attention.rope_type"
            raise raw.refuse(key, kind, "cannot be represented; must be 'default'")
    kind = _kind(rope)
    if not isinstance(kind, str) or kind not in scalings:
        raise raw.refuse(f"{where}.rope_type", kind, f"must be among {', '.join(scalings)}")
    beside = raw(names[1], None)
    turned = rope.get("partial_rotary_factor", beside)
    if fraction is None and turned not in (None, 1):
        raise raw.refuse(names[1], turned, f"must be 1: a {raw('model_type')} turns whole heads")
    values: dict[str, Any] = dict(
        theta=rope.get("rope_theta", raw(names[0], theta)),
        fraction=1.0 if fraction is None else fraction if turned is None else turned,
        scaling=SCALINGS[kind],
    )
    if local is not None:
        values["local_theta"] = sliding.get("rope_theta", raw("rope_local_base_freq", local))
    return RotaryConfig(**values | _scaling(raw, rope, kind, where, local is None))


def _by_layer(rope: Mapping[str, Any]) -> bool:
    return any(layer in rope for layer in LAYERS)


def _kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _scaling(raw: Raw, rope: Mapping[str, Any], kind: str, where: str, one: bool):
    """Return the fields of `RotaryConfig` for a scaling; `one` says that all layers have equal
    positions."""

    def needed(name: str) -> Any:
        """Return a setting that a scaling needs; with a default it would be another model."""
        if rope.get(name) is None:
            raise CheckpointError(
                f"{raw.path}: {where}.{name} is missing: rope_type {kind!r} needs it."
            )
        return rope[name]

    if kind == "default":
        return {}
    values = dict(factor=needed("factor"))
    if kind == "llama3":
        low, high = needed("low_freq_factor"), needed("high_freq_factor")
        values |= dict(low_frequency=low, high_frequency=high)
    if kind in ("llama3", "yarn"):
        within = rope.get("original_max_position_embeddings")
        beside = raw("original_max_position_embeddings", None) if one else None
        either = within if beside is None else beside
        values["original_context"] = raw("max_position_embeddings") if either is None else either
    if kind == "yarn":
        values |= dict(
            beta_fast=rope.get("beta_fast") or 32.0, beta_slow=rope.get("beta_slow") or 1.0
        )
        _usual_yarn(raw, rope, where, values["factor"])
    return values


def _usual_yarn(raw: Raw, rope: Mapping[str, Any], where: str, factor: float) -> None:
    """Refuse an attention scale other than that of Peng et al. 2023 (eq. 22), and unrounded
    ranges."""
    if rope.get("truncate", True) is not True:
        raise raw.refuse(
            f"{where}.truncate", rope["truncate"], "cannot be represented; must be true"
        )
    given = {n: rope.get(n) for n in ("factor", "attention_factor", "mscale", "mscale_all_dim")}
    for name, value in given.items():
        if value is not None and not is_number(value):
            raise raw.refuse(f"{where}.{name}", value, "must be a number")

    def scale(m):
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    name, found = "attention_factor", given["attention_factor"]
    if found is None and given["mscale"] and given["mscale_all_dim"]:
        name, found = "mscale", scale(given["mscale"]) / scale(given["mscale_all_dim"])
    if found is not None and not math.isclose(found, scale(1.0), rel_tol=1e-6):
        raise raw.refuse(
            f"{where}.{name}",
            rope[name],
            f"cannot be represented: attention is scaled by {found:.6g}, and not by the "
            f"{scale(1.0):.6g} of factor {factor}",
        )


def write_rotary(
    config: ModelConfig, fraction: str | None = None, theta: str = "rope_theta"
) -> dict[str, Any]:
    """Return the settings in the older spelling, which old and new versions read.

    `fraction` and `theta` are names beside the table.
    """
    rotary = config.rotary
    out: dict[str, Any] = {theta: rotary.theta, "rope_scaling": None}
    if fraction is not None:
        out[fraction] = rotary.fraction
    if rotary.local_theta is not None:
        out["rope_local_base_freq"] = rotary.local_theta
    kinds = {ours: theirs for theirs, ours in SCALINGS.items()}
    if rotary.scaling == "none" or rotary.scaling not in kinds:
        return out  # settings that it cannot express show when the result is read back
    scaling = {"rope_type": kinds[rotary.scaling], "factor": rotary.factor}
    if rotary.original_context is not None:
        scaling["original_max_position_embeddings"] = rotary.original_context
    if rotary.scaling == "llama3":
        scaling |= dict(
            low_freq_factor=rotary.low_frequency, high_freq_factor=rotary.high_frequency
        )
    if rotary.scaling == "yarn":
        scaling |= dict(beta_fast=rotary.beta_fast, beta_slow=rotary.beta_slow)
    return out | {"rope_scaling": scaling}
