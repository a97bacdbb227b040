"""A model trained elsewhere, in the form of llama2.c, says what its authors published."""

import json
import struct

import numpy as np

import eejax

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

KINDS = "NORMAL", "UNKNOWN", "CONTROL", "BYTE"


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


def tokenizer_model(file) -> bytes:
    """The SentencePiece model of a llama2.c tokenizer: a length, then scores and pieces."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    data, at, model = file.read_bytes(), 4, ModelProto()
    normal, unknown, control, byte = (ModelProto.SentencePiece.Type.Value(k) for k in KINDS)
    special = {0: ("<unk>", unknown), 1: ("<s>", control), 2: ("</s>", control)}
    while at < len(data):
        score, size = struct.unpack_from("fi", data, at)
        own = data[at + 8 : at + 8 + size].decode().replace(" ", "\u2581")
        own = own, byte if own[:3] == "<0x" and len(own) == 6 else normal
        piece, kind = special.get(len(model.pieces), own)
        model.pieces.add(piece=piece, score=score, type=kind)
        at += 8 + size
    model.trainer_spec.model_type = 2  # byte pairs
    model.trainer_spec.vocab_size = len(model.pieces)
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.remove_extra_whitespaces = False
    return model.SerializeToString()


def test_stories260k_says_what_was_published(eejax_data, tmp_path):
    source, folder = eejax_data / "models" / "stories260K", tmp_path / "hf"
    converted(source / "stories260K.bin", folder)
    (folder / "tokenizer.model").write_bytes(tokenizer_model(source / "tok512.bin"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    model = eejax.load(folder, dtype="float32")
    text, _ = model.generate("", 256, engine="full")
    assert text.removeprefix(" ").startswith(PUBLISHED)
