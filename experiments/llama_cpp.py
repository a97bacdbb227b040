"""llama.cpp beside eejax: a GGUF file's model with weights of another type, and greedy texts."""

from __future__ import annotations

import json
import pathlib
import urllib.request
from collections.abc import Callable

from eejax.common.errors import ConfigError

KINDS = ("F32", "BF16", "Q8_0")
"""Types of weights that eejax is timed beside."""

TIMEOUT = 600.0  # seconds that an answer may take


def write_as(source: pathlib.Path, target: pathlib.Path, kind: str) -> None:
    """Write a GGUF file's model to another file, its matrices dequantised and stored as `kind`.

    Vectors such as those of norms become float32. Metadata stays as it is, without the type of the
    file, which would no longer be true.
    """
    import gguf

    reader, stored = gguf.GGUFReader(source), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    writer.data_alignment = reader.alignment  # "general.alignment" says so, if there is one
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue  # the first two are the writer's own
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=element)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        values = values.reshape(tensor.shape.tolist()[::-1]).astype("float32")
        if values.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quantize(values, stored), raw_dtype=stored)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def generator(
    path: pathlib.Path, threads: int, context: int, cache: str = "F16"
) -> Callable[[list[int], int], list[int]]:
    """Return llama.cpp's greedy generation with a GGUF file, on a CPU, through its own server.

    It takes the token ids of a prompt and the number of tokens to return. Tokens that end a text
    are never among them.

    Args:
      context: most tokens of a prompt and its continuation.
      cache: type of keys and values, by default llama.cpp's.

    Raises:
      ConfigError: the package xllamacpp is not installed.
    """
    xllamacpp = _package()
    params = xllamacpp.CommonParams()
    params.model.path, params.verbosity = str(path), 0
    params.n_ctx, params.n_parallel, params.n_gpu_layers = context, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache}")
    server = xllamacpp.Server(params)
    rules = dict(temperature=0.0, ignore_eos=True, cache_prompt=False, return_tokens=True)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # past any proxy

    def generate(ids: list[int], new: int) -> list[int]:
        body = json.dumps(dict(prompt=ids, n_predict=new, **rules)).encode()
        address = f"{server.listening_address}/completion"
        asked = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with direct.open(asked, timeout=TIMEOUT) as answer:
            return json.load(answer)["tokens"]

    generate(list(range(8)), 8)
    return generate


def described() -> str:
    """Name the version and the instruction sets of a CPU that it was compiled for."""
    xllamacpp = _package()
    return f"xllamacpp {xllamacpp.__version__}, {xllamacpp.get_system_info().strip(' |')}"


def _package():
    try:
        import xllamacpp
    except ImportError as error:
        raise ConfigError(
            "llama.cpp needs the package xllamacpp: run `make bench-env`, or add --nopeer."
        ) from error
    return xllamacpp
