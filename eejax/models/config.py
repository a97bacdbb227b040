"""Model configurations: frozen dataclasses, validated on construction, saved as JSON."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from eejax.common.errors import require, require_one_of
from eejax.models.config_checks import (
    build,
    is_number,
    is_size,
    is_size_or_zero,
    require_positive,
    require_sizes,
    require_switches,
)
from eejax.models.rotary_config import RotaryConfig

NORMS = ("rmsnorm", "layernorm")
POSITIONS = ("learned", "rotary", "alibi", "none")
ACTIVATIONS = ("gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "silu")
HeadKind = Literal["tied", "shared", "own"]
NORM_PLACEMENTS = ("pre", "post", "pre_post", "output")
RESIDUALS = ("sequential", "parallel", "parallel_one_norm")
NO_WINDOW = 2**30  # a sliding window that hides nothing
DTYPES = ("float32", "bfloat16", "float16")


class RopeKind(enum.IntEnum):
    """The rotary angles of a layer: the model's, those of sliding windows, or none."""

    GLOBAL = 0
    LOCAL = 1
    NONE = 2


@dataclasses.dataclass(frozen=True)
class ExitConfig:
    """An early exit: (mlp) -> (block) -> (norm) -> (low rank) -> head -> / temperature.

    Attributes:
      boundary: layers below the exit, 0 for the embedding (n is "post-exit at layer n" or "pre-exit
        at layer n + 1" in EE-LLM's code).
      mlp: whether it has a residual MLP with its own norm (EE-LLM, section 2, Appendix D.1).
      block: whether it has a transformer block with positions, mask and a KV cache of its own.
      norm: whether it has its own final norm.
      head: "tied" to the input embedding, "shared" with all exits that say so, or its "own".
      router: bottleneck width of the router (`gates.router`), the same for all exits; 0 for none.
      vocabulary: the exit knows the first so many token ids alone and gives no other token a
        probability (FR-Spec, Zhao et al. 2025); 0 for all. Merges of BPE number frequent tokens
        first. It makes a cheap draft, and its head cannot be trained on labels.
      acceptance: share of its drafts that are expected to be right, by which an engine decides
        whether to make the first ones, and the exit that drafts is chosen. Tuning sets it to what
        it measured; None if it is not known.
      mlp_width: width of the MLP, the same for all exits; 0 for that of the layers. A narrow one is
        an adapter (Houlsby et al. 2019): it costs a drafting exit less.
      head_rank: rank r of the projection of the state that the head reads, the same for all exits
        that have one; 0 for none. Where no devices share the model, an engine reads v r weights of
        such a head in place of v d, and the exit still knows every token.
    """

    boundary: int
    mlp: bool = False
    block: bool = False
    norm: bool = True
    head: HeadKind = "tied"
    temperature: float = 1.0
    router: int = 0
    vocabulary: int = 0
    acceptance: float | None = None
    mlp_width: int = 0
    head_rank: int = 0

    def __post_init__(self):
        require(
            isinstance(self.boundary, int) and not isinstance(self.boundary, bool),
            "ExitConfig.boundary",
            self.boundary,
            "must be an integer number of layers",
        )
        require_switches(self)
        require_one_of("ExitConfig.head", self.head, get_args(HeadKind))
        require_positive(self, "temperature")
        require(
            is_size_or_zero(self.router),
            "ExitConfig.router",
            self.router,
            "must be a positive width, or 0 for no router",
        )
        require(
            is_size_or_zero(self.vocabulary),
            "ExitConfig.vocabulary",
            self.vocabulary,
            "must be a positive number of token ids, or 0 for all",
        )
        require(
            is_size_or_zero(self.mlp_width),
            "ExitConfig.mlp_width",
            self.mlp_width,
            "must be a positive width, or 0 for that of the layers",
        )
        require(
            is_size_or_zero(self.head_rank),
            "ExitConfig.head_rank",
            self.head_rank,
            "must be a positive number of dimensions, or 0 for all",
        )
        require(
            self.mlp or not self.mlp_width,
            "ExitConfig.mlp_width",
            self.mlp_width,
            "has no effect without an MLP",
            "Set mlp = True, or leave the width out.",
        )
        share = self.acceptance
        real = isinstance(share, int | float) and not isinstance(share, bool)
        allowed = "must be a share in [0, 1], or None"
        known = share is None or real and 0 <= share <= 1
        require(known, "ExitConfig.acceptance", share, allowed)

    @property
    def name(self) -> str:
        """Key of the exit in the parameter tree; adding exits never renames another."""
        return f"exit_{self.boundary}"


if TYPE_CHECKING:

    class _Derived:
        """A field that accepts None and then reads as a number derived from other fields."""

        def __get__(self, config: object, owner: object) -> int: ...

        def __set__(self, config: object, value: int | None) -> None: ...


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with early exits.

    `dtype` is that of computation. Parameters are float32 while training, and norms, softmax,
    losses and residual statistics are always computed in float32.

    Attributes:
      head_dim: by default d_model / n_heads.
      n_kv_heads: key and value heads; by default as many as query heads. 1 is multi-query.
      d_ff: width of the MLP; by default 4 d_model, or 8/3 d_model if gated, rounded up to a
        multiple of 8 (of 64 from d_model 1024 on).
      vocab_multiple: pads the rows of embedding and heads; padding is masked everywhere.
      norm_plus_one: whether the scale is 1 + w (Gemma).
      norm_bias: whether a LayerNorm adds a bias; an RMSNorm never does.
      norm_placement: "pre" x + f(norm(x)); "post" norm(x + f(x)), the original transformer;
        "pre_post" x + norm(f(norm(x))), Gemma 2; "output" x + norm(f(x)), OLMo 2.
      residual: "sequential", attention then MLP; "parallel", both from the same x with two norms
        (GPT-NeoX); "parallel_one_norm", both with one norm (GPT-J, Phi, Falcon).
      qk_norm: "none", "head" (each head, Qwen 3) or "full" (all heads together, OLMo 2).
      sliding_window: one window for all layers or one entry per layer, None for full attention. A
        query at t sees keys t - window < s <= t.
      no_rope_layers: layers without rotary positions (SmolLM 3).
      attention_scale: replaces 1/sqrt(head_dim).
      attention_softcap, logit_softcap: cap in cap * tanh(x / cap) (Gemma 2).
      head: the final exit's: "tied" to the input embedding, "shared" with exits, or its "own".
      embedding_scale: multiplies embeddings (Gemma: sqrt(d_model)).
    """

    vocab_size: int
    n_layers: int
    d_model: int
    n_heads: int
    context_length: int
    if TYPE_CHECKING:
        n_kv_heads: _Derived = _Derived()
        head_dim: _Derived = _Derived()
        d_ff: _Derived = _Derived()
    else:  # `__post_init__` derives the fields that are None
        n_kv_heads: int | None = None
        head_dim: int | None = None
        d_ff: int | None = None
    vocab_multiple: int = 1

    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    norm_plus_one: bool = False
    norm_bias: bool = True
    norm_placement: str = "pre"
    final_norm: bool = True
    embedding_norm: bool = False
    residual: str = "sequential"

    position: str = "rotary"
    rotary: RotaryConfig = RotaryConfig()
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str = "none"
    sliding_window: int | tuple[int | None, ...] | None = None
    no_rope_layers: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float | None = None

    mlp_gated: bool = True
    mlp_bias: bool = False
    activation: str = "silu"

    head: HeadKind = "own"
    head_bias: bool = False
    logit_softcap: float | None = None
    temperature: float = 1.0
    embedding_scale: float = 1.0
    dropout: float = 0.0
    dtype: str = "float32"
    exits: tuple[ExitConfig, ...] = ()

    def __post_init__(self):
        def set_(name, value):
            return object.__setattr__(self, name, value)

        if self.n_kv_heads is None:
            set_("n_kv_heads", self.n_heads)
        require_sizes(
            self,
            "vocab_size",
            "n_layers",
            "d_model",
            "n_heads",
            "n_kv_heads",
            "context_length",
            "vocab_multiple",
        )
        require_switches(self)
        self._derive_sizes(set_)
        require_one_of("ModelConfig.norm", self.norm, NORMS)
        require_positive(self, "norm_eps", "temperature")
        require_one_of("ModelConfig.norm_placement", self.norm_placement, NORM_PLACEMENTS)
        require_one_of("ModelConfig.residual", self.residual, RESIDUALS)
        require(
            self.residual == "sequential" or self.norm_placement == "pre",
            "ModelConfig.norm_placement",
            self.norm_placement,
            f"must be 'pre' with residual = {self.residual!r}",
        )
        require_one_of("ModelConfig.position", self.position, POSITIONS)
        self._check_rotary()
        require_one_of("ModelConfig.qk_norm", self.qk_norm, ("none", "head", "full"))
        self._check_window(set_)
        self._check_no_rope(set_)
        for name in ("attention_scale", "attention_softcap", "logit_softcap"):
            if getattr(self, name) is not None:
                require_positive(self, name)
        require_one_of("ModelConfig.activation", self.activation, ACTIVATIONS)
        require_one_of("ModelConfig.head", self.head, get_args(HeadKind))
        require(
            is_number(self.embedding_scale) and self.embedding_scale != 0,
            "ModelConfig.embedding_scale",
            self.embedding_scale,
            "must be finite and not 0",
        )
        require(
            is_number(self.dropout) and 0 <= self.dropout < 1,
            "ModelConfig.dropout",
            self.dropout,
            "must be in [0, 1)",
        )
        require_one_of("ModelConfig.dtype", self.dtype, DTYPES)
        self._check_exits(set_)

    def _derive_sizes(self, set_):
        """Check the heads, and set `head_dim` and `d_ff` where they are None."""
        require(
            self.n_heads % self.n_kv_heads == 0,
            "ModelConfig.n_kv_heads",
            self.n_kv_heads,
            f"must divide n_heads ({self.n_heads})",
        )
        if self.head_dim is None:
            require(
                self.d_model % self.n_heads == 0,
                "ModelConfig.n_heads",
                self.n_heads,
                f"must divide d_model ({self.d_model})",
                "Or set head_dim.",
            )
            set_("head_dim", self.d_model // self.n_heads)
        if self.d_ff is None:
            # On a GPU, XLA pads widths that are not multiples of 64, by a copy of the weights each
            # time. Small models keep the finer multiple.
            multiple = 64 if self.d_model >= 1024 else 8
            third = -(-8 * self.d_model // (3 * multiple)) * multiple
            set_("d_ff", third if self.mlp_gated else 4 * self.d_model)
        require_sizes(self, "head_dim", "d_ff")

    def _check_rotary(self):
        require(
            isinstance(self.rotary, RotaryConfig),
            "ModelConfig.rotary",
            self.rotary,
            "must be a RotaryConfig",
            "ModelConfig.from_dict takes a dict.",
        )
        if self.position == "rotary":
            require(
                self.rotary_dims >= 2 and self.rotary_dims % 2 == 0,
                "ModelConfig.rotary.fraction",
                self.rotary.fraction,
                f"must leave an even number of rotated dimensions of head_dim {self.head_dim}"
                f" (it leaves {self.rotary_dims})",
            )
            require(
                self.rotary.scaling != "ntk" or self.rotary_dims > 2,
                "ModelConfig.rotary.scaling",
                self.rotary.scaling,
                "needs more than 2 rotated dimensions of each head",
            )

    def _check_window(self, set_):
        window = self.sliding_window
        if isinstance(window, list):
            set_("sliding_window", window := tuple(window))
        entries = window if isinstance(window, tuple) else (window,)
        for w in entries:
            require(
                w is None or is_size(w),
                "ModelConfig.sliding_window",
                w,
                "must be a positive number of positions, or None",
            )
        if isinstance(window, tuple):
            require(
                len(window) == self.n_layers,
                "ModelConfig.sliding_window",
                window,
                f"must have one entry for each of the {self.n_layers} layers",
            )

    def _check_no_rope(self, set_):
        field, layers = "ModelConfig.no_rope_layers", self.no_rope_layers
        ok = isinstance(layers, list | tuple) and all(i in range(self.n_layers) for i in layers)
        require(
            ok and list(layers) == sorted({*layers}),
            field,
            layers,
            f"must be layers in 0..{self.n_layers - 1}, sorted and each once",
        )
        require(not layers or self.position == "rotary", field, layers, "needs position = 'rotary'")
        set_("no_rope_layers", tuple(layers))

    def _check_exits(self, set_):
        field = "ModelConfig.exits"
        require(
            isinstance(self.exits, list | tuple)
            and all(isinstance(e, ExitConfig) for e in self.exits),
            field,
            self.exits,
            "must be a sequence of ExitConfig",
            "ModelConfig.from_dict takes dicts.",
        )
        set_("exits", tuple(self.exits))
        boundaries = [e.boundary for e in self.exits]
        for n in boundaries:
            require(
                0 <= n <= self.n_layers,
                field,
                boundaries,
                f"must lie in 0..{self.n_layers} (boundary n is the state after n layers)",
            )
        require(
            len(set(boundaries)) == len(boundaries), field, boundaries, "must not repeat a boundary"
        )
        require(
            boundaries == sorted(boundaries),
            field,
            boundaries,
            "must be sorted by boundary",
            f"Write them as {sorted(boundaries)}.",
        )
        for e in self.exits:
            require(
                e.vocabulary <= self.vocab_size,
                f"{field}.vocabulary",
                e.vocabulary,
                f"must be at most vocab_size ({self.vocab_size}), or 0 for all",
            )
            require(
                not e.vocabulary or e.boundary < self.n_layers,
                f"{field}.vocabulary",
                e.vocabulary,
                "must be 0 at the last boundary, where tokens of all kinds leave",
            )
        # Stages of a pipeline hold the MLPs of their exits in one stack.
        mlps = sorted({e.mlp_width or self.d_ff for e in self.exits if e.mlp})
        require(
            len(mlps) <= 1,
            f"{field}.mlp_width",
            mlps,
            "must be one width for all exits with an MLP",
            f"Give each the same mlp_width; without one it is that of the layers ({self.d_ff}).",
        )
        require(
            all(w <= self.d_ff for w in mlps),
            f"{field}.mlp_width",
            mlps,
            f"must be at most d_ff ({self.d_ff}), the width of the layers",
        )
        ranks = sorted({e.head_rank for e in self.exits if e.head_rank})
        allowed = "must be the same for all exits that have one"
        require(len(ranks) <= 1, f"{field}.head_rank", ranks, allowed)
        require(
            all(r < self.d_model for r in ranks),
            f"{field}.head_rank",
            ranks,
            f"must be less than d_model ({self.d_model}), or 0 for all dimensions",
        )
        widths = sorted({e.router for e in self.exits if e.router})
        require(len(widths) <= 1, f"{field}.router", widths, "must be the same for all exits")
        require(
            not any(e.router for e in self.exits if e.boundary == self.n_layers),
            f"{field}.router",
            widths,
            "must be 0 at the last boundary, where all tokens leave",
        )

    @property
    def padded_vocab(self) -> int:
        """Number of rows of embedding and heads: vocab_size rounded up to vocab_multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def rotary_dims(self) -> int:
        """Number of rotated dimensions of each head."""
        return int(self.head_dim * self.rotary.fraction)

    @property
    def n_exits(self) -> int:
        """Number of early exits; the final exit is one more."""
        return len(self.exits)

    @property
    def exit_boundaries(self) -> tuple[int, ...]:
        """Boundary of every exit, the final one (n_layers) last."""
        return (*(e.boundary for e in self.exits), self.n_layers)

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """First and end layer of each segment; segment e, which may be empty, ends at exit e."""
        boundaries = self.exit_boundaries
        return tuple(zip((0, *boundaries[:-1]), boundaries, strict=True))

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer, or None for full attention."""
        if isinstance(self.sliding_window, tuple):
            return self.sliding_window[layer]
        return self.sliding_window

    def rope(self, layer: int) -> RopeKind:
        """Return the kind of rotary angles of a layer."""
        if layer in self.no_rope_layers:
            return RopeKind.NONE
        return RopeKind.GLOBAL if self.window(layer) is None else RopeKind.LOCAL

    def above(self, e: int) -> int:
        """Return the layer that exit e's block is built like: the one above it, or the last
        layer."""
        return min(self.exit_boundaries[e], self.n_layers - 1)

    def exit_window(self, e: int) -> int | None:
        """Return the sliding window of exit e's block."""
        return self.window(self.above(e))

    def exit_rope(self, e: int) -> RopeKind:
        """Return the kind of rotary angles of exit e's block."""
        return self.rope(self.above(e))

    def replace(self, **changes: Any) -> ModelConfig:
        """Return a copy with changed fields, validated again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, which a round trip through JSON leaves equal."""
        values = dataclasses.asdict(self)
        values["exits"] = list(values["exits"])
        if isinstance(self.sliding_window, tuple):
            values["sliding_window"] = list(self.sliding_window)
        values["no_rope_layers"] = list(self.no_rope_layers)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Build a config from `to_dict` or a config file; unknown fields raise `ConfigError`."""
        values = dict(values)
        if isinstance(values.get("rotary"), Mapping):
            values["rotary"] = build(RotaryConfig, values["rotary"])
        if isinstance(values.get("exits"), list | tuple):
            values["exits"] = tuple(
                build(ExitConfig, e) if isinstance(e, Mapping) else e for e in values["exits"]
            )
        return build(cls, values)
