"""Import of a pretrained model: a Hugging Face folder, a GGUF file, or its name."""

from __future__ import annotations

import difflib
import math
import os
import pathlib
import re
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from eejax.checkpoint.digest import digest, digest_of, same_model
from eejax.checkpoint.hf import compare, generation, packages, probe, sidecar
from eejax.checkpoint.hf.families import FAMILIES, Family
from eejax.checkpoint.hf.fields import Raw
from eejax.checkpoint.hf.folder import CONFIG, Folder, brief, read_json
from eejax.checkpoint.hf.gguf_folder import gguf_folder
from eejax.checkpoint.hf.layouts import Rule
from eejax.common.axes import MODEL
from eejax.common.errors import CheckpointError, require_one_of
from eejax.common.paths import expanded
from eejax.common.trees import Tree, path_name
from eejax.models import params
from eejax.models.config import DTYPES, ModelConfig
from eejax.sharding import rules as shardings
from eejax.sharding.mesh import MeshConfig, make_mesh

WANTED = ("*.json", "*.jinja", "*.model", "*.safetensors")  # of a model on the Hub
OLDER_WEIGHTS = "*.bin"  # of one without safetensors


class LeafSource(NamedTuple):
    """Reader of a leaf: one(i) returns layer i of a stack of `layers`, else one(None) the whole
    leaf."""

    one: Callable[[int | None], np.ndarray]
    layers: int | None = None

    def part(self, index: tuple[slice, ...], shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return a part of the leaf, of this shape, holding one layer at a time beside the
        result."""
        if self.layers is None:
            return np.asarray(self.one(None)[index]).astype(dtype)
        numbers = range(self.layers)[index[0]]
        sizes = (len(range(n)[cut]) for n, cut in zip(shape[1:], index[1:], strict=True))
        shape = (len(numbers), *sizes)
        whole = None
        for row, i in enumerate(numbers):
            values = self.one(i)[index[1:]]  # before allocating: files of other sizes fail here
            if whole is None:
                whole = np.empty(shape, dtype)
            whole[row] = values
        return np.empty(shape, dtype) if whole is None else whole

    def at(self, at: tuple[np.ndarray, ...]) -> np.ndarray:
        """Return values at index arrays, as they are stored. Layers are read in order."""
        if self.layers is None:
            return np.asarray(self.one(None))[at]
        rows = ((i, at[0] == i) for i in np.unique(at[0]))
        return np.concatenate([self.one(int(i))[tuple(a[on] for a in at[1:])] for i, on in rows])


class Pretrained(NamedTuple):
    """A model that `load_pretrained` read.

    Attributes:
      config: configuration.
      params: training parameters.
      family: its family.
      path: the folder.
      raw: its config.json.
      guessed: how a model of an unknown type was recognised, "" for a known family.
      generation: its generation_config.json.
    """

    config: ModelConfig
    params: Tree
    family: Family
    path: pathlib.Path
    raw: Mapping[str, Any]
    guessed: str = ""
    generation: Mapping[str, Any] = types.MappingProxyType({})

    @property
    def facts(self) -> dict[str, Any]:
        """Family and generation_config.json, which the metadata of runs made of the model keep."""
        return {"family": self.family.model_type, "generation": dict(self.generation)}


def load_pretrained(
    source: str | os.PathLike,
    *,
    mesh: Mesh | None = None,
    dtype: str = "float32",
    watch: Callable[[str], None] | None = None,
) -> Pretrained:
    """Load the model of a folder with a config.json and weights, sharded over `mesh` (or on one
    device).

    Every device's part is read separately, a layer at a time. Exits that `save_pretrained` wrote
    beside the weights are loaded with them. A vocabulary that mesh.model does not divide gets rows
    of padding (`config.vocab_multiple`).

    A `model_type` of no known family is recognised by its tensors (`probe`), and compared with
    transformers (`compare`). If nothing can be compared, a model is refused if its tensors and keys
    do not determine it, and otherwise a warning describes the guess.

    Args:
      source: the folder, a GGUF file, a name of `packages.PACKAGES`, or a name such as
        "HuggingFaceTB/SmolLM2-135M", which huggingface_hub fetches.
      mesh: mesh of devices.
      dtype: dtype of parameters and computation ("float32" to train; "bfloat16" halves the memory).
        Norm scales, biases and routers stay float32.
      watch: receives a line for each step that takes long.

    Raises:
      CheckpointError: naming file and field, if a file is missing, cut off or of another model, or
        the model cannot be represented.
    """
    require_one_of("dtype", dtype, DTYPES)
    say = watch or (lambda line: None)
    path = fetched(source)
    raw = _raw(path)
    settings = generation.read(path, raw.values)
    folder = Folder(path)
    if (kind := raw("model_type")) not in FAMILIES:
        say(f"model_type {kind!r} is not known: looking at its {len(folder.shapes)} tensors")
    family, base, tied = _recognise(raw, folder, dtype)
    if raw("tie_word_embeddings", family.tied) and not tied:
        warnings.warn(
            f"{path}: tie_word_embeddings is true, but its head is not its embedding: it is read "
            "as a head of its own, as transformers has it since version 5.",
            stacklevel=2,
        )
    table = named(family.rules(base, raw), base)
    tensors = _Tensors(folder, family, base, table, tied)  # checks what there is
    side = sidecar.open_sidecar(path, base)
    mesh = make_mesh(MeshConfig()) if mesh is None else mesh
    config = _padded(base if side is None else side.config, mesh)
    say(f"reading {params.count(base):,} parameters of {path}")
    reads = _readers(raw, tensors, table, base.replace(vocab_multiple=config.vocab_multiple))
    shapes = _shapes(config)
    if side is not None:
        if config.head == "shared" and base.head == "own":
            reads["shared_head"] = reads.pop("final/head")
        reads |= {name: _beside(side, name, shapes[name]) for name in side.shapes}
    wanted = shardings.structs(params.abstract(config), mesh)
    tree = jax.tree_util.tree_map_with_path(
        lambda p, struct, kept: _placed(struct, _whole(path_name(p), reads, path), kept.dtype),
        wanted,
        _kept(config, dtype),
    )
    if side is not None:
        if dtype == "float16":  # rounding changes the digest: read the files once more
            found = digest_of(config, shapes, lambda name, at: reads[name].at(at))
        else:
            found = digest(config, tree)
        same_model(path / sidecar.WEIGHTS, side.digest, found, str(path))
    guessed = ""
    if family.model_type not in FAMILIES:
        config, guessed = _compared(raw, config, tree, family, say)
    return Pretrained(config, tree, family, path, raw.values, guessed, settings)


def _raw(path: pathlib.Path) -> Raw:
    """Read a folder's config.json, which must name the type of a model that is not quantised."""
    raw = Raw(path / CONFIG, read_json(path / CONFIG))
    kind = raw("model_type")
    if not isinstance(kind, str):
        raise raw.refuse("model_type", kind, "must be a string, such as 'llama'")
    if (how := raw("quantization_config", None)) is not None:
        why = "quantised weights are not read: give the model that it was made of"
        raise raw.refuse("quantization_config", how, why)
    return raw


def _recognise(raw: Raw, folder: Folder | None, dtype: str) -> tuple[Family, ModelConfig, bool]:
    """Return the family of a model type, the model, and whether that has no head of its own.

    Of a known type there may be no `folder`: then a head is tied if config.json says so.
    """
    kind = raw("model_type")
    if folder is not None:
        if kind not in FAMILIES:
            probe.refuse(raw, folder.shapes)
        _check_layers(raw, folder.shapes)
    if kind in FAMILIES:
        family = FAMILIES[kind]
    else:
        assert folder is not None
        family = probe.guess(raw, folder.shapes)
    base = family.read(raw).replace(dtype=dtype)
    if kind not in FAMILIES and (why := compare.incomparable(raw.path.parent, base)):
        compare.require_unambiguous(raw, family.rules(base, raw), why)
    tied = raw("tie_word_embeddings", family.tied)
    if tied and folder is not None and _has_unlike_head(folder, family, base, raw):
        base, tied = base.replace(head="own"), False
    return family, base, tied


def _readers(
    raw: Raw, tensors: _Tensors, table: Mapping[tuple[str, ...], Rule], base: ModelConfig
) -> dict[str, LeafSource]:
    """Return the readers of a model's leaves.

    The files have a row for each token, the leaves of `base` also rows of padding.
    """
    declared, rules = _shapes(base), leaves(table)
    for leaf, (rule, _) in rules.items():
        if leaf not in declared:
            tensor = rule.theirs[0].format(i=0)
            why = f"has {tensor}, for which there is no place"
            raise raw.refuse("model_type", raw("model_type"), why)
    return {leaf: _reader(base, rule, j, tensors, declared) for leaf, (rule, j) in rules.items()}


def pretrained_config(path: pathlib.Path) -> tuple[ModelConfig, Mapping[str, Any]]:
    """Return (model, config.json) of a folder.

    Weights are read to compare a tied head with the embedding, or once a model of an unknown type
    with transformers. Raises as `load_pretrained`.
    """
    raw = _raw(path)
    known = raw("model_type") in FAMILIES
    try:
        folder = Folder(path)
    except CheckpointError:
        if not known:
            raise
        folder = None  # there are no weights to compare; who loads them is told
    base = _recognise(raw, folder, "float32")[1]
    side = sidecar.open_sidecar(path, base)
    config = base if side is None else side.config
    if known or compare.incomparable(path, base):
        return config, raw.values
    found = compare.remembered(path, config) or load_pretrained(path)
    return found.config, raw.values


def _check_layers(raw: Raw, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError for a wrong number of layers, before anything of the model's size is
    made.

    Each layer has at least one tensor; smaller differences are reported with the tensors' names.
    """
    family = FAMILIES.get(raw("model_type"))
    if family is None:
        name = probe.alias(raw, "n_layers")
    else:
        name = next((n for n, (ours, _) in family.sizes.items() if ours == "n_layers"), None)
    if name is None or raw(name, None) is None:
        return
    if raw.size(name) > len(shapes):
        rows: dict[str, set[str]] = {}
        for tensor in shapes:
            if match := re.match(r"(.*?\.)?(\d+)\.", tensor):
                rows.setdefault(match[1] or "", set()).add(match[2])
        held = max(map(len, rows.values()), default=0)
        raise raw.refuse(name, raw(name), f"must be {held}, as many layers as the weights have")


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all leaves by name."""
    found = jax.tree_util.tree_leaves_with_path(params.shapes(config))
    return {path_name(path): leaf.shape for path, leaf in found}


def _padded(config: ModelConfig, mesh: Mesh) -> ModelConfig:
    """Return the model with a vocabulary that the mesh can split."""
    shards = mesh.shape[MODEL]
    if config.padded_vocab % shards == 0:
        return config
    return config.replace(vocab_multiple=math.lcm(config.vocab_multiple, shards))


def _kept(config: ModelConfig, dtype: str) -> Tree:
    """Return structs of the dtypes in which leaves are placed.

    These are the dtypes of computation, except for routers, which stay as they were trained
    (`gates.router` rounds them when it computes).
    """
    cast = jax.eval_shape(lambda p: params.for_compute(p, dtype), params.shapes(config))
    return jax.tree_util.tree_map_with_path(
        lambda p, new, old: old if "/router/" in path_name(p) else new, cast, params.shapes(config)
    )


def _compared(raw: Raw, config: ModelConfig, tree: Tree, family: Family, say):
    """Return the configuration of a guess, and a sentence on how sure it is."""
    path = raw.path.parent
    found = compare.remembered(path, config) or compare.verified(raw, config, tree, say)
    compare.remember(path, found)
    config = found.config
    if found.why:
        compare.require_unambiguous(raw, family.rules(config, raw), found.why)
    about = f"{path}: model_type {family.model_type!r} is not known; by its tensors it"
    if found.sure:
        return config, f"{about} is a model {found.comparison}"
    message = (
        f"{about} may be one of norm {config.norm!r}, {config.norm_placement!r}, residual "
        f"{config.residual!r}, position {config.position!r}, activation {config.activation!r}: a "
        f"guess, {found.comparison}"
    )
    warnings.warn(message, stacklevel=3)
    return config, message


def fetched(source: str | os.PathLike) -> pathlib.Path:
    """Return the local folder of `source`. Raises CheckpointError."""
    path = expanded(source)
    if (path / CONFIG).is_file():
        return path
    if path.suffix == ".gguf":
        return gguf_folder(path)
    if path.exists():
        raise CheckpointError(f"{path}: is not a model: it has no {CONFIG}.")
    name = os.fspath(source)
    if (packaged := packages.find(name)) is not None:
        return gguf_folder(packaged)
    near = difflib.get_close_matches(name, packages.PACKAGES, n=1)
    known = f" Did you mean {near[0]!r}?" if near else ""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise CheckpointError(f"{name}: no such folder, and no name of a model on the Hub.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{name}: no such folder.{known} To fetch it from the Hub: pip install huggingface_hub."
        ) from error
    try:
        path = pathlib.Path(snapshot_download(name, allow_patterns=[*WANTED]))
        if not any(path.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=[OLDER_WEIGHTS])
        return path
    except Exception as error:  # from the network, the Hub, or for a bad name
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{name}: no such folder of a run or a model.{known} The Hub does not give it: {first}."
        ) from error


def named(rules: list[Rule], config: ModelConfig) -> dict[tuple[str, ...], Rule]:
    """Return rules by the names of the tensors that they read, layer by layer."""
    table = {}
    for rule in rules:
        for i in range(config.n_layers) if rule.layered else [None]:
            table[tuple(n.format(i=i) for n in rule.theirs)] = rule
    return table


def leaves(table: Mapping[tuple[str, ...], Rule]) -> dict[str, tuple[Rule, int]]:
    """Return for each leaf its rule, and which of the rule's leaves it is."""
    found = {}
    for rule in table.values():
        for j, ours in enumerate(rule.ours):
            found[f"layers/{ours}" if rule.layered else ours] = rule, j
    return found


HEADS = ("lm_head.weight", "embed_out.weight")


def _embedding(rules: list[Rule]) -> str:
    """Return the name of the token embedding."""
    return next(rule.theirs[0] for rule in rules if "embed/tokens" in rule.ours)


def _has_unlike_head(folder: Folder, family: Family, config: ModelConfig, raw: Raw) -> bool:
    """Return whether a model whose head is tied has a different one among its tensors."""
    rules = family.rules(config, raw)
    tokens = _embedding(rules)
    heads = [name for name in HEADS if name in folder.shapes]
    if any(rule.ours == ("final/head",) for rule in rules):  # read as an untied head
        return False
    own = [n for n in (tokens, tokens.removeprefix(family.prefix)) if n in folder.shapes]
    if not heads or not own or np.array_equal(folder.read(heads[0]), folder.read(own[0])):
        return False
    if config.head != "tied":  # OPT's projections
        raise raw.refuse("tie_word_embeddings", True, f"must be false: {heads[0]} is another one")
    return True


class _Tensors:
    """A folder's tensors by the names in the family's rules.

    A tied pair is one tensor, under either name or both.
    """

    def __init__(self, folder: Folder, family: Family, config: ModelConfig, table, tied: bool):
        self._folder = folder
        wanted = {name for names in table for name in names}
        self._names, unexpected = {}, []
        for name in folder.shapes:
            if name.endswith(family.skipped):
                continue
            for known in (name, f"{family.prefix}{name}", family.renamed.get(name)):
                if known in wanted:
                    self._names[known] = name
                    break
            else:
                # This includes heads that we do not tie (OPT's projections).
                if not (tied and name in HEADS):
                    unexpected.append(name)
        tokens = _embedding([*table.values()])
        heads = [name for name in HEADS if name in folder.shapes]
        if tied and heads:
            self._names.setdefault(tokens, heads[0])
        spare = (*HEADS, tokens, tokens.removeprefix(family.prefix)) if tied else ()
        folder.require_whole(spare)
        missing = sorted(wanted - set(self._names))
        if missing or unexpected:
            differ = [f"has no {brief(missing)}"] * bool(missing)
            differ += [f"has {brief(sorted(unexpected))}"] * bool(unexpected)
            raise CheckpointError(
                f"{folder.path}: is not what its {CONFIG} describes, a {family.model_type} of "
                f"{config.n_layers} layers: it {', and '.join(differ)}."
            )

    def read(self, names: tuple[str, ...]) -> tuple[np.ndarray, ...]:
        return tuple(self._folder.read(self._names[name]) for name in names)

    def error(self, error: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder.path}: {error}: the weights are not of the model that {CONFIG} "
            "describes."
        )


def _reader(config: ModelConfig, rule: Rule, j: int, tensors: _Tensors, declared) -> LeafSource:
    """Return the reader of a rule's j-th leaf; `declared` has the shapes of all leaves by name."""
    full = [f"layers/{o}" if rule.layered else o for o in rule.ours]
    shapes = tuple(declared[f][1:] if rule.layered else declared[f] for f in full)

    def one(i: int | None) -> np.ndarray:
        try:
            return rule.read(
                config, tensors.read(tuple(n.format(i=i) for n in rule.theirs)), shapes
            )[j]
        except ValueError as error:
            raise tensors.error(str(error).replace("{i}", str(i))) from error

    return LeafSource(one, config.n_layers if rule.layered else None)


def _beside(side: sidecar.Sidecar, name: str, shape: tuple[int, ...]) -> LeafSource:
    """Return the reader of a leaf in the side file, padded with 0 if the vocabulary has more
    padding."""

    def one(_: int | None) -> np.ndarray:
        a = np.asarray(side.reader(name)(()))
        if a.shape == shape:
            return a
        return np.pad(a, [(0, n - m) for n, m in zip(shape, a.shape, strict=True)])

    return LeafSource(one)


def _whole(name: str, reads: Mapping[str, LeafSource], path: pathlib.Path) -> LeafSource:
    try:
        return reads[name]
    except KeyError:
        raise CheckpointError(
            f"{path}: has no tensor that is {name}, which a model of its config.json has."
        ) from None


def _placed(struct: jax.ShapeDtypeStruct, leaf: LeafSource, dtype: Any) -> jax.Array:
    """Place a leaf, reading each part once for all devices that hold it."""
    held: dict[str, np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        key = str(index)
        if key not in held:
            whole = (slice(None),) * len(struct.shape)
            held[key] = leaf.part(whole if index is None else index, struct.shape, dtype)
        return held[key]

    return jax.make_array_from_callback(struct.shape, struct.sharding, part, dtype=dtype)
