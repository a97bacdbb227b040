"""Model configurations drawn by hypothesis over all that the code knows, small enough to run."""

from hypothesis import strategies as st

from eejax.models.config import ACTIVATIONS, ExitConfig, ModelConfig
from eejax.models.rotary_config import RotaryConfig

HEADS = ((2, 1), (4, 2), (3, 3), (6, 2))


@st.composite
def configs(draw, heads=HEADS, vocab_multiples=(1, 8)):
    """heads: pairs (n_heads, n_kv_heads) to draw from."""
    n_layers = draw(st.integers(1, 4))
    n_heads, n_kv = draw(st.sampled_from(heads))
    head_dim = 8
    norm_placement = draw(st.sampled_from(["pre", "post", "pre_post", "output"]))
    residual = "sequential"
    if norm_placement == "pre":
        residual = draw(st.sampled_from(["sequential", "parallel", "parallel_one_norm"]))
    boundaries = sorted(draw(st.sets(st.integers(0, n_layers), max_size=3)))

    def make_exit(b):
        return ExitConfig(
            b,
            mlp=draw(st.booleans()),
            block=draw(st.booleans()),
            norm=draw(st.booleans()),
            head=draw(st.sampled_from(["tied", "shared", "own"])),
            temperature=draw(st.sampled_from([1.0, 0.7, 1.9])),
            router=0 if b == n_layers else draw(st.sampled_from([0, 6])),
        )

    window = draw(
        st.one_of(
            st.none(),
            st.just(3),
            st.tuples(*[st.sampled_from([None, 2, 5])] * n_layers),
        )
    )
    scaling = draw(st.sampled_from(["none", "linear", "ntk", "llama3", "yarn"]))

    def maybe(*values):
        return draw(st.sampled_from(values))

    return ModelConfig(
        vocab_size=23,
        n_layers=n_layers,
        d_model=24,
        n_heads=n_heads,
        n_kv_heads=n_kv,
        head_dim=head_dim,
        d_ff=20,
        context_length=16,
        vocab_multiple=maybe(*vocab_multiples),
        norm=maybe("rmsnorm", "layernorm"),
        norm_plus_one=maybe(True, False),
        norm_bias=maybe(True, False),
        norm_placement=norm_placement,
        final_norm=maybe(True, False),
        embedding_norm=maybe(True, False),
        residual=residual,
        position=maybe("learned", "rotary", "alibi", "none"),
        rotary=RotaryConfig(
            theta=100.0,
            fraction=maybe(1.0, 0.5),
            interleaved=maybe(True, False),
            scaling=scaling,
            factor=1.0 if scaling == "none" else 4.0,
            original_context=8 if scaling in ("llama3", "yarn") else None,
            local_theta=maybe(None, 30.0),
        ),
        qkv_bias=maybe(True, False),
        o_bias=maybe(True, False),
        qk_norm=maybe("none", "head", "full"),
        sliding_window=window,
        attention_scale=maybe(None, 0.2),
        attention_softcap=maybe(None, 2.0),
        mlp_gated=maybe(True, False),
        mlp_bias=maybe(True, False),
        activation=maybe(*ACTIVATIONS),
        head=maybe("tied", "shared", "own"),
        head_bias=maybe(True, False),
        logit_softcap=maybe(None, 3.0),
        temperature=maybe(1.0, 1.3),
        embedding_scale=maybe(1.0, 4.0),
        exits=tuple(make_exit(b) for b in boundaries),
    )
