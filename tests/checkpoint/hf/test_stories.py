"""A model trained elsewhere, in the form of llama2.c, says what its authors published."""

import json
import struct

import numpy as np

from eejax.checkpoint.hf import load_pretrained
from eejax.inference import Generator

# What stories260K says without a prompt, taking the likeliest token each time: the readme of
# karpathy/tinyllamas, stories260K.
PUBLISHED = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball. She wanted to play with it, but it was too high.\n"
    "Lily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know what to do. She "
    'said, "I want to play with your ball, but I can\'t find it."\n'
    "Lily was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know what to "
    'do."\n'
    "Lily didn't want to help her mom, so she said, \"I'm sorry, mom. I didn't know what to do.\" "
    "Her mom said, \"Don't worry, Lily. We can help you."
)


def converted(file, folder):
    """A Hugging Face folder of a llama2.c checkpoint (version 0, tied embedding)."""
    from safetensors.numpy import save_file

    data = file.read_bytes()
    d, f, layers, n, k, vocab, context = struct.unpack("7i", data[:28])
    values, at = np.frombuffer(data, np.float32, offset=28), 0

    def take(*shape):
        nonlocal at
        size = int(np.prod(shape))
        at += size
        return values[at - size : at].reshape(shape)

    h = d // n

    # Rotary pairs are neighbours there, and half a head apart in the other form.
    def apart(w, heads):
        return w.reshape(heads, h // 2, 2, -1).transpose(0, 2, 1, 3).reshape(heads * h, -1)

    tensors = {"model.embed_tokens.weight": take(vocab, d)}
    shapes = {
        "input_layernorm": (d,),
        "self_attn.q_proj": (n * h, d),
        "self_attn.k_proj": (k * h, d),
        "self_attn.v_proj": (k * h, d),
        "self_attn.o_proj": (d, n * h),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (f, d),
        "mlp.down_proj": (d, f),
        "mlp.up_proj": (f, d),
    }
    for name, shape in shapes.items():
        for i, w in enumerate(take(layers, *shape)):
            heads = {"self_attn.q_proj": n, "self_attn.k_proj": k}.get(name)
            w = apart(w, heads) if heads else w
            tensors[f"model.layers.{i}.{name}.weight"] = np.ascontiguousarray(w)
    tensors["model.norm.weight"] = take(d)
    config = dict(
        model_type="llama",
        vocab_size=vocab,
        hidden_size=d,
        intermediate_size=f,
        num_hidden_layers=layers,
        num_attention_heads=n,
        num_key_value_heads=k,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        hidden_act="silu",
    )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def pieces(file) -> list[bytes]:
    """The tokens of a llama2.c tokenizer, after the length of the longest."""
    data, at, found = file.read_bytes(), 4, []
    while at < len(data):
        _, size = struct.unpack_from("fi", data, at)
        found.append(data[at + 8 : at + 8 + size])
        at += 8 + size

    def byte(p):
        return bytes([int(p[3:5], 16)]) if p[:3] == b"<0x" and len(p) == 6 else p

    return [byte(p) for p in found]


def test_stories260k_says_what_was_published(eejax_data, tmp_path):
    folder = eejax_data / "models" / "stories260K"
    converted(folder / "stories260K.bin", tmp_path / "hf")
    model = load_pretrained(tmp_path / "hf")
    result = Generator.make(model.params, model.config, "full").generate([[1]], 256)
    said = pieces(folder / "tok512.bin")
    text = b"".join(said[i] for i in result.ids(0)).decode().removeprefix(" ")
    assert text.startswith(PUBLISHED)
