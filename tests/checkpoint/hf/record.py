"""Records what transformers computes of the tiny models (recorded.npz beside this file), a file as
PyTorch saves it (tensors.bin), and which keys of config.json it reads (config_keys.json).

    python -P tests/checkpoint/hf/record.py

Needs the environment of `make bench-env`. Weights are not recorded: they are made anew by name.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np

from eejax.checkpoint.hf.families import FAMILIES

sys.path.append(str(pathlib.Path(__file__).parents[2] / "support"))
import hf_models  # noqa: E402


def _tensors_bin() -> None:
    """Tensors of several kinds, one of which is a view that is not contiguous, two of which share
    their numbers."""
    import torch

    a = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "whole": a,
        "view": a[1:3, ::2],
        "transposed": a.T,
        "half": a.half(),
        "brain": a.bfloat16(),
        "whole_numbers": torch.arange(5),
        "parameter": torch.nn.Parameter(a[0].clone()),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }
    torch.save(tensors, pathlib.Path(__file__).with_name("tensors.bin"))


def record_keys() -> None:
    keys = {kind: hf_models.config_keys(kind) for kind in sorted(FAMILIES)}
    text = json.dumps(keys, indent=1) + "\n"
    pathlib.Path(__file__).with_name("config_keys.json").write_text(text)


def _rounding(path: pathlib.Path, texts: np.ndarray) -> np.float32:
    """Root mean square of what bfloat16 costs transformers in the logits of texts [b, t]: of many,
    for it differs by a factor of two from text to text."""
    import torch

    half, whole = (
        hf_models.opened(path, dtype)(torch.tensor(texts)).logits.detach().float().numpy()
        for dtype in ("bfloat16", "float32")
    )
    return np.sqrt(np.mean((half - whole) ** 2))


def main() -> None:
    import transformers

    texts = np.random.default_rng(8).integers(0, hf_models.VOCAB, (16, hf_models.LENGTH))
    found = {"texts": texts.astype(np.int32)}
    for name in hf_models.MODELS:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / name
            shapes = {key: a.shape for key, a in hf_models.saved(name, path).items()}
            config = json.loads((path / "config.json").read_text())
            logits, new = hf_models.theirs(hf_models.opened(path))
            rounding = _rounding(path, texts)
        about = {"config": config, "shapes": shapes, "version": transformers.__version__}
        found[f"{name}/about"] = np.array(json.dumps(about))
        found[f"{name}/logits"] = logits
        found[f"{name}/new"] = np.array(new, np.int32)
        found[f"{name}/bfloat16"] = rounding
        print(name, logits.std(), rounding, len(set(new)))
    _tensors_bin()
    record_keys()
    np.savez_compressed(pathlib.Path(__file__).with_name("recorded.npz"), **found)


if __name__ == "__main__":
    main()
