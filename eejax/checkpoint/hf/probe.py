"""Recognition of a model of an unknown `model_type` by the names and shapes of its tensors.

What tensors do not show (how residuals are joined, how rotary pairs lie, whether norms add 1) is
guessed in the usual way, and settled by comparison (`compare`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from eejax.checkpoint.hf.family import Family
from eejax.checkpoint.hf.fields import REQUIRED, Raw
from eejax.checkpoint.hf.keys import BOUNDS, unread, words
from eejax.checkpoint.hf.layouts import (
    Rule,
    by_group,
    conv1d,
    fused,
    gate_and_up,
    linear,
    one_after_another,
    positions,
    vector,
    vocabulary,
)
from eejax.checkpoint.hf.rope import read_rotary
from eejax.common.errors import CheckpointError, ConfigError
from eejax.models.rotary_config import RotaryConfig

TensorShapes = Mapping[str, tuple[int, ...]]

ALIASES = {
    "vocab_size": ("vocab_size",),
    "n_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "d_model": ("hidden_size", "n_embd", "d_model", "dim"),
    "n_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "context_length": (
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "max_seq_len",
        "seq_length",
        "max_sequence_length",
    ),
}
EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
ACTIVATION = ("hidden_act", "hidden_activation", "activation_function", "activation")
# Models that cannot be represented, by settings and by names of tensors.
REFUSED = {
    "a mixture of experts": (
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"),
        r"\bexperts?\b|\brouter\b",
    ),
    "multi-head latent attention": (("kv_lora_rank", "q_lora_rank"), r"kv_a_proj|kv_b_proj"),
    "a state-space or recurrent model": (
        ("state_size", "ssm_state_size", "mamba_d_state", "conv_kernel"),
        r"\bA_log\b|\bx_proj\b|\bdt_proj\b|\bconv1d\b|time_decay|time_mix",
    ),
    "an encoder and a decoder": (("is_encoder_decoder",), r"\bencoder\b.*\bdecoder\b|encoder_attn"),
}
ALIBI = ("alibi", "attn_config.alibi")
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
ROTARY = (("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct"))
# Settings that the names and shapes of tensors show.
TOLD = (
    "num_key_value_heads",
    "num_kv_heads",
    "multi_query",
    "head_dim",
    "kv_channels",
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "expansion_ratio",
    "tie_word_embeddings",
    "attention_bias",
    "attention_out_bias",
    "use_bias",
    "bias",
    "no_bias",
    "mlp_bias",
    "use_qkv_bias",
    "qkv_bias",
    "use_qk_norm",
    "qk_layernorm",
)
# Parts of a layer by the suffix of the tensor's name, without .weight; the first match counts.
PARTS = (
    ("attn/qkv", r"qkv(_proj)?|query_key_value|c_attn|wqkv|in_proj|att_proj"),
    ("attn/q_norm", r"q_(layer)?norm|query_norm|q_ln"),
    ("attn/k_norm", r"k_(layer)?norm|key_norm|k_ln"),
    ("attn/q", r"q_proj|query|wq|to_q|q_lin|q"),
    ("attn/k", r"k_proj|key|wk|to_k|k_lin|k"),
    ("attn/v", r"v_proj|value|wv|to_v|v_lin|v"),
    ("mlp/gate_up", r"gate_up_proj|w12|gate_and_up"),
    ("mlp/gate", r"gate_proj|w1|gate|wi_0|c_fc_0|w_gate|linear_1"),
    ("mlp/up", r"up_proj|w3|up|fc1|fc_in|c_fc|dense_h_to_4h|wi_1|c_fc_1|w_up|linear_in|wi"),
    ("mlp/down", r"down_proj|w2|down|fc2|fc_out|dense_4h_to_h|wo_mlp|w_down|linear_out|linear_2"),
    ("attn/o", r"o_proj|out_proj|wo|to_out|dense|c_proj|attn_out|out_lin|o"),
)
NORMS = (
    (
        "attn_norm",
        r"input_layernorm|ln_?1|attention_norm|attn_norm|pre_attention_layernorm|"
        r"self_attn_layer_norm|norm_?1|operator_norm|layer_norm_1",
    ),
    ("post_attention", r"post_attention_(layer)?norm"),
    (
        "mlp_norm",
        r"ln_?2|ffn_norm|mlp_norm|pre_mlp_layernorm|pre_feedforward_layernorm|norm_?2|"
        r"final_layer_norm|layer_norm_2",
    ),
    ("mlp_out_norm", r"post_(feedforward|mlp)_(layer)?norm"),
)


class Stack(NamedTuple):
    """The layers of a model.

    Attributes:
      prefix: prefix of their tensors' names.
      layers: number of layers.
      shapes: shapes of one layer's tensors by name.
    """

    prefix: str
    layers: int
    shapes: dict[str, tuple[int, ...]]


def guess(raw: Raw, shapes: TensorShapes) -> Family:
    """Return the family that a folder's tensors seem to belong to, if `refuse` does not refuse
    them.

    Raises CheckpointError, naming the part that could not be recognised.
    """
    for ours in ALIASES:
        raw.size(alias(raw, ours))
    stack = stack_of(raw, shapes)
    sizes = {alias(raw, ours): (ours, REQUIRED) for ours in ALIASES}
    d = raw(alias(raw, "d_model"))
    found = parts(raw, stack, d)
    outer, rules = ends(raw, shapes, stack, d)
    inner, more = layer_rules(raw, stack, found, d)
    act = next((n for n in ACTIVATION if raw(n, None) is not None), ACTIVATION[0])
    eps = next((n for n in EPS if raw(n, None) is not None), None)
    if eps is not None:
        sizes[eps] = ("norm_eps", REQUIRED)
    fixed = outer | inner
    if fixed["position"] == "rotary":
        try:
            fixed["rotary"] = _rotary(raw)
        except ConfigError as error:
            raise raw.refuse("model_type", raw("model_type"), f"as {error}".rstrip(".")) from error
    if raw("sliding_window", None) is not None and raw("use_sliding_window", True):
        fixed["sliding_window"] = raw.windows(None, lambda i: i >= raw("max_window_layers", 0))
    raw.fields_read.update(TOLD, ("layer_types", "max_window_layers", "use_sliding_window"))
    usual = "silu" if fixed["mlp_gated"] else "gelu_new"
    return Family(
        raw("model_type"),
        "",
        sizes,
        lambda config, _: [*rules, *more],
        fixed,
        (act, usual),
        more=lambda _: dict(head=fixed["head"]),
        prefix="",
    )


def _rotary(raw: Raw) -> RotaryConfig:
    """Return the rotary settings, under any of their names."""
    names = [next((n for n in each if raw(n, None) is not None), each[0]) for each in ROTARY]
    by_layer = "full_attention" in raw.table("rope_parameters")
    return read_rotary(
        raw, fraction=1.0, local=10000.0 if by_layer else None, names=(names[0], names[1])
    )


def refuse(raw: Raw, shapes: TensorShapes) -> None:
    """Raise CheckpointError for kinds of models that cannot be represented, by their names."""
    for name in NESTED:
        if raw(name, None):
            raise raw.refuse(
                "model_type",
                raw("model_type"),
                f"has the settings of its language model in a nested {name}: give a folder of the "
                "language model alone",
            )
    for name, value in unread(raw).items():
        if re.search(BOUNDS, name):  # logits seldom reach it, so a comparison would not show it
            raise raw.refuse(name, value, f"{words(name)}, which cannot be represented")
    for kind, (settings, names) in REFUSED.items():
        said = [n for n in settings if setting(raw, n) not in (None, False, 0)]
        seen = [n for n in shapes if re.search(names, n)]
        if said or seen:
            raise raw.refuse(
                "model_type",
                raw("model_type"),
                f"is {kind} ({said[0] if said else seen[0]}), which cannot be represented",
            )


def setting(raw: Raw, name: str) -> Any:
    """Return a setting, None if it is missing; a name a.b is field b within a."""
    *outer, last = name.split(".")
    inside = raw.values.get(outer[0]) if outer else raw.values
    return inside.get(last) if isinstance(inside, Mapping) else None


def alias(raw: Raw, ours: str) -> str:
    for name in ALIASES[ours]:
        if raw(name, None) is not None:
            return name
    raise CheckpointError(
        f"{raw.path}: says nothing of {ours}: looked for {', '.join(ALIASES[ours])}."
    )


def stack_of(raw: Raw, shapes: TensorShapes) -> Stack:
    """Return the longest numbered sequence of equal groups of tensors."""
    layers = raw(alias(raw, "n_layers"))
    rows: dict[str, dict[int, dict[str, tuple[int, ...]]]] = {}
    for name, shape in shapes.items():
        if match := re.match(r"(.*?\.)?(\d+)\.(.+)", name):
            row = rows.setdefault(match[1] or "", {})
            row.setdefault(int(match[2]), {})[match[3]] = tuple(shape)
    for prefix, row in rows.items():
        if sorted(row) == [*range(layers)]:
            if any(row[i] != row[0] for i in row):
                other = next(i for i in row if row[i] != row[0])
                raise raw.refuse(
                    "model_type",
                    raw("model_type"),
                    f"has layers that are not alike: {prefix}0 and {prefix}{other}",
                )
            return Stack(prefix, layers, row[0])
    raise raw.refuse(
        "model_type", raw("model_type"), f"has no {layers} layers numbered from 0 among its tensors"
    )


def parts(raw: Raw, stack: Stack, d: int) -> dict[str, str]:
    """Return for each part of a layer the name of its tensor, without .weight."""
    found: dict[str, str] = {}
    weights = [n.removesuffix(".weight") for n in stack.shapes if not n.endswith("bias")]
    for name in weights:
        weight = f"{name}.weight"
        shape = stack.shapes[weight if weight in stack.shapes else name]
        last = name.rsplit(".", 1)[-1]
        table = PARTS if len(shape) == 2 or "norm" in last and "attn" in name else NORMS
        if len(shape) == 1 and not re.fullmatch(PARTS[1][1] + "|" + PARTS[2][1], last):
            table = NORMS
        fits = [part for part, pattern in table if re.fullmatch(pattern, last, re.IGNORECASE)]
        if fits and fits[0] == "attn/o" and d not in shape:
            fits = []
        if fits and fits[0] == "attn/o" and re.search(r"mlp|ffn|feed_forward", name):
            fits = ["mlp/down"]
        if not fits or fits[0] in found:
            raise raw.refuse(
                "model_type",
                raw("model_type"),
                f"has {stack.prefix}0.{name} of shape {shape}, whose place is not known",
            )
        found[fits[0]] = name
    return found


def ends(raw: Raw, shapes: TensorShapes, stack: Stack, d: int) -> tuple[dict, list[Rule]]:
    """Return settings and rules of embedding, positions, final norm and head."""
    outside = {n: tuple(s) for n, s in shapes.items() if not n.startswith(stack.prefix)}
    v = raw("vocab_size")
    tables = [n for n, s in outside.items() if s == (v, d)]
    heads = [n for n in tables if re.search(r"head|output|embed_out|unembed", n)]
    tokens = [n for n in tables if n not in heads]
    if raw("tie_word_embeddings", False) is True and not tokens:  # stored under the head's name
        tokens, heads = heads, []
    norms = [n for n, s in outside.items() if s == (d,)]
    rows = [n for n, s in outside.items() if len(s) == 2 and n not in tables and s[1] == d]
    scales = [n for n in norms if not n.endswith("bias")]
    if len(tokens) != 1 or len(heads) > 1 or len(scales) > 1 or len(rows) > 1:
        raise raw.refuse(
            "model_type",
            raw("model_type"),
            f"has {[*outside.items()]} outside its layers, among which embedding, final norm and "
            "head cannot be told",
        )
    settings = dict(head="own" if heads else "tied", final_norm=bool(scales), head_bias=False)
    rules = [vocabulary(tokens[0], "embed/tokens")]
    rules += [vocabulary(heads[0], "final/head")] if heads else []
    bias = heads[0].replace("weight", "bias") if heads else None
    if bias in outside:
        settings["head_bias"] = True
        rules.append(vocabulary(bias, "final/head_bias"))
    if scales:
        rules.append(vector(scales[0], "final/norm/scale"))
        rules += [vector(n, "final/norm/bias") for n in norms if n.endswith("bias")]
    settings["position"] = "rotary"
    if rows:
        t = raw(alias(raw, "context_length"))
        settings["position"] = "learned"
        rules.append(positions(rows[0], "embed/positions", outside[rows[0]][0] - t))
    elif any(setting(raw, name) for name in ALIBI):
        settings["position"] = "alibi"
    elif not any(re.match("rope|rotary|partial_rotary|rotation", key) for key in raw.values):
        raise raw.refuse(
            "model_type",
            raw("model_type"),
            "has neither a table of positions nor settings of rotary ones or ALiBi: others "
            "(sinusoidal, or none) are not read",
        )
    return settings, rules


def layer_rules(raw: Raw, stack: Stack, found: dict[str, str], d: int) -> tuple[dict, list[Rule]]:
    """Return settings and rules of a layer."""
    shapes, at = stack.shapes, lambda name: f"{stack.prefix}{{i}}.{name}"

    def weight(name):
        return f"{name}.weight" if f"{name}.weight" in shapes else name

    def bias(name):
        return f"{name}.bias"

    def has_bias(part):
        return part in found and bias(found[part]) in shapes

    need = ("attn/o", "mlp/down")
    if missing := [p for p in need if p not in found]:
        why = f"its {' and '.join(missing)} could not be identified"
        raise raw.refuse("model_type", raw("model_type"), why)
    down = shapes[weight(found["mlp/down"])]
    product, transposed = (linear, True) if down[0] == d else (conv1d, False)
    d_ff = down[1] if transposed else down[0]

    def out(name):
        return shapes[weight(name)][0 if transposed else 1]

    n_heads = raw(alias(raw, "n_heads"))
    o = shapes[weight(found["attn/o"])]
    head_dim, rest = divmod(o[1] if transposed else o[0], n_heads)
    if rest:
        raise raw.refuse(
            alias(raw, "n_heads"), n_heads, f"must divide the size of {found['attn/o']}, {o}"
        )
    gated = "mlp/gate" in found or "mlp/gate_up" in found
    if not gated and "mlp/up" not in found:
        raise raw.refuse("model_type", raw("model_type"), "its MLP could not be identified")
    if "attn/qkv" in found:
        n_kv = (out(found["attn/qkv"]) // head_dim - n_heads) // 2
    else:
        n_kv = out(found["attn/k"]) // head_dim
    norms = [part for part in found if part.endswith("norm") or part == "post_attention"]
    if not norms:
        raise raw.refuse(
            "model_type",
            raw("model_type"),
            "has norms without weights, or none, in its layers, which cannot be represented",
        )
    placement, residual, names = norm_places({n for n in norms if "/" not in n})
    layernorm = any(bias(found[n]) in shapes for n in norms)
    named = any("layer_norm" in key for key in raw.values)  # such as layer_norm_eps
    qk = found.get("attn/q_norm")
    qk_norm = "none" if qk is None else "head" if shapes[weight(qk)] == (head_dim,) else "full"
    settings = dict(
        d_ff=d_ff,
        head_dim=head_dim,
        n_kv_heads=n_kv,
        mlp_gated=gated,
        qk_norm=qk_norm,
        norm="layernorm" if layernorm or named else "rmsnorm",
        norm_bias=layernorm,
        norm_placement=placement,
        residual=residual,
        qkv_bias=has_bias("attn/q") or has_bias("attn/qkv"),
        o_bias=has_bias("attn/o"),
        mlp_bias=has_bias("mlp/down"),
    )
    rules: list[Rule] = []
    for part, name in found.items():
        if part in ("attn/qkv", "mlp/gate_up"):
            ours, sizes = ["mlp/gate", "mlp/up"], gate_and_up
            if part == "attn/qkv":
                ours = ["attn/q", "attn/k", "attn/v"]
                mixed = "query_key_value" in name
                sizes = by_group if mixed else one_after_another
            rules.append(fused(at(weight(name)), ours, sizes, transposed))
            if bias(name) in shapes:
                rules.append(fused(at(bias(name)), [f"{o}_bias" for o in ours], sizes))
        elif part in norms:
            ours = names.get(part, part)
            rules.append(vector(at(weight(name)), f"{ours}/scale"))
            if bias(name) in shapes:
                rules.append(vector(at(bias(name)), f"{ours}/bias"))
        else:
            rules.append(product(at(weight(name)), part))
            if bias(name) in shapes:
                rules.append(vector(at(bias(name)), f"{part}_bias"))
    return settings, rules


def norm_places(norms: set[str]) -> tuple[str, str, dict[str, str]]:
    """Return the placement, the residual, and our name of each norm."""
    after = {"post_attention": "attn_out_norm"}
    if norms == {"attn_norm"}:
        return "pre", "parallel_one_norm", {}
    if norms == {"post_attention", "mlp_out_norm"}:
        return "output", "sequential", after
    if len(norms) == 4:
        return "pre_post", "sequential", after
    return "pre", "sequential", {"post_attention": "mlp_norm"}
