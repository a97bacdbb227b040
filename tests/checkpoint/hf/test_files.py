"""Files of one model in all their forms: tied pairs, and the settings of generation."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eejax
from eejax.checkpoint.hf import load_pretrained, save_pretrained
from eejax.checkpoint.hf.load import pretrained_config
from eejax.checkpoint.language_model import LanguageModel
from eejax.common.errors import CheckpointError
from eejax.data import train_bpe
from eejax.data.tokenizers import ByteTokenizer
from eejax.models import params
from eejax.models.config import ModelConfig
from eejax.train.imported import import_pretrained

CONFIG = ModelConfig(
    vocab_size=61, n_layers=1, d_model=16, n_heads=2, context_length=32, norm_eps=1e-6, head="tied"
)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, TOKENS = "lm_head.weight", "model.embed_tokens.weight"


def head_only(path, tensors):
    tensors[HEAD] = tensors.pop(TOKENS)
    save_file(tensors, path / WEIGHTS)


def both(path, tensors):
    save_file(tensors | {HEAD: tensors[TOKENS].copy()}, path / WEIGHTS)


def without_prefix(path, tensors):
    tensors = {name.removeprefix("model."): a for name, a in tensors.items()}
    save_file(tensors | {HEAD: tensors["embed_tokens.weight"].copy()}, path / WEIGHTS)


def listed(path, tensors, names=(HEAD,)):
    (path / WEIGHTS).unlink()
    save_file(tensors, path / "a.safetensors")
    where = dict.fromkeys([*tensors, *names], "a.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": where}))


def listed_head_alone(path, tensors):
    (path / WEIGHTS).unlink()
    save_file(tensors | {HEAD: tensors[TOKENS].copy()}, path / "a.safetensors")
    where = dict.fromkeys([n for n in tensors if n != TOKENS] + [HEAD], "a.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": where}))


@pytest.fixture
def tied(tmp_path):
    tree = params.init(CONFIG, jax.random.key(0))
    save_pretrained(tmp_path / "m", CONFIG, tree, family="llama")
    return tmp_path / "m", tree, load_file(tmp_path / "m" / WEIGHTS)


@pytest.mark.parametrize("store", [head_only, both, without_prefix, listed, listed_head_alone])
def test_a_tied_pair_is_read_however_it_is_stored(store, tied):
    path, tree, tensors = tied
    store(path, tensors)
    loaded = load_pretrained(path)
    assert loaded.config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, loaded.params, tree)


def test_a_head_that_is_not_the_embedding_is_a_head_of_its_own(tied):
    # As transformers has it since version 5 (modeling_utils.py, tie_weights).
    path, tree, tensors = tied
    save_file(tensors | {HEAD: 2 * tensors[TOKENS]}, path / WEIGHTS)
    with pytest.warns(UserWarning, match="its head is not its embedding"):
        loaded = load_pretrained(path)
    assert loaded.config == pretrained_config(path)[0] == CONFIG.replace(head="own")
    np.testing.assert_array_equal(loaded.params["final"]["head"], 2 * tree["embed"]["tokens"])


def test_what_is_missing_of_a_tied_model_is_told(tied):
    path, _, tensors = tied
    listed(path, tensors, [HEAD, "model.layers.0.odd"])
    with pytest.raises(CheckpointError, match=r"a.safetensors: has no .'model.layers.0.odd'"):
        load_pretrained(path)
    del tensors[TOKENS]
    save_file(tensors, path / "a.safetensors")
    with pytest.raises(CheckpointError, match="has no"):
        load_pretrained(path)


ENDS = ("<|eot_id|>", "<|eom_id|>")
DRAWN = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A model of three tokens that end a text, and settings by which texts are drawn."""
    path = tmp_path_factory.mktemp("chat") / "m"
    tokenizer = train_bpe(["some text to learn from " * 20], 280)
    n, made = tokenizer.vocab_size, json.loads(tokenizer.definition)
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    made["added_tokens"] += [dict(plain, id=n + i, content=c) for i, c in enumerate(ENDS)]
    config = CONFIG.replace(vocab_size=n + 3)
    save_pretrained(path, config, params.init(config, jax.random.key(0)), family="llama")
    ends = [tokenizer.eos_id, n, n + 1]
    settings = DRAWN | {"eos_token_id": ends, "pad_token_id": n + 2}
    (path / "tokenizer.json").write_text(json.dumps(made))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": ENDS[0]}))
    (path / "generation_config.json").write_text(json.dumps(settings))
    return path, settings


def same(found, settings):
    ids = found.pop("eos_token_id")
    assert sorted(ids) == sorted(settings["eos_token_id"])
    return found == {k: v for k, v in settings.items() if k != "eos_token_id"}


def test_settings_of_generation_come_back(chat_model, tmp_path):
    path, settings = chat_model
    eejax.load(path).save(tmp_path / "a")
    assert same(json.loads((tmp_path / "a" / "generation_config.json").read_text()), settings)
    values = json.loads((tmp_path / "a" / "config.json").read_text())
    assert sorted(values["eos_token_id"]) == sorted(settings["eos_token_id"])
    assert values["pad_token_id"] == settings["pad_token_id"]


def test_settings_of_generation_outlive_a_run(chat_model, tmp_path):
    path, settings = chat_model
    import_pretrained(path, tmp_path / "run", data={"length": 16})
    model = eejax.load(tmp_path / "run")
    assert same(dict(model.generation), settings)
    assert LanguageModel(CONFIG, {}, ByteTokenizer()).generation == {}


def test_ids_of_config_alone_come_back_and_those_beyond_the_vocabulary_do_not(tmp_path):
    tree = params.init(CONFIG, jax.random.key(0))
    save_pretrained(tmp_path / "a", CONFIG, tree, family="llama")
    values = json.loads((tmp_path / "a" / "config.json").read_text())
    values |= {"eos_token_id": [3, 99, 5], "bos_token_id": 1, "pad_token_id": 61}
    (tmp_path / "a" / "config.json").write_text(json.dumps(values))
    (tmp_path / "a" / "generation_config.json").unlink()
    loaded = load_pretrained(tmp_path / "a")
    save_pretrained(tmp_path / "b", CONFIG, tree, generation=loaded.generation)
    for file in ("config.json", "generation_config.json"):
        found = json.loads((tmp_path / "b" / file).read_text())
        assert (found["eos_token_id"], found["bos_token_id"]) == ([3, 5], 1)
        assert found.get("pad_token_id") is None


def test_settings_that_are_no_object_are_named(tied):
    path, _, _ = tied
    (path / "generation_config.json").write_text("[")
    with pytest.raises(CheckpointError, match="generation_config.json: cannot be read"):
        load_pretrained(path)
