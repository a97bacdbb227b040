"""Profiles of the models of a fleet, measured at its start or read from a repository."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import os
import platform
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import eejax
from eejax.checkpoint.digest import digest, digest_of
from eejax.common.errors import DataError
from eejax.common.progress import LOG
from eejax.common.trees import Tree, path_name
from eejax.data.tokenizers import Tokenizer
from eejax.helios.choices import ModelProfile
from eejax.helios.conditions import MeasurementConditions
from eejax.helios.pool import FleetMember
from eejax.helios.profiles import generate_answers, measure
from eejax.helios.quality import BenchmarkScore, JudgedAnswer, QualitySource, with_verdicts
from eejax.helios.repository import (
    Repository,
    RepositoryLockedError,
    StoredEvaluation,
)
from eejax.helios.verifier import ReferenceJudge
from eejax.inference.partial import PartialModel
from eejax.inference.request import EngineRequest
from eejax.inference.sampling import SamplingParams
from eejax.models.config import ModelConfig

log = logging.getLogger(LOG)

TEXTS = 64  # maximum number of texts that models are measured on
JUDGED = 16  # number of them whose answers are judged
SAMPLES, SAMPLED = 16, 96  # texts that the largest model writes if there are none, tokens of each
WINDOW, ROWS, BATCHES = 128, 8, 8  # tokens of a window, windows of a batch, number of batches


@dataclasses.dataclass(frozen=True)
class MeasurementSetup:
    """Setting in which models are measured.

    Attributes:
      slots: by model, the number at each depth.
      prompts: texts; if empty, the largest model writes some.
      reference: the model that judges answers, if one does.
    """

    members: Mapping[str, FleetMember]
    slots: Mapping[str, Sequence[int]]
    context: int
    tokenizer: Tokenizer
    prompts: tuple[str, ...]
    reference: ReferenceJudge | None

    def conditions(self, name: str, source: QualitySource, counted: str) -> MeasurementConditions:
        """Return the conditions of a member's profile; `counted` is the unit of energy."""
        member, device, quality = self.members[name], jax.devices()[0], source.kind
        if self.reference is not None:
            quality = f"{quality} {parameters(self.reference.host, self.reference.config)}"
        texts = hashlib.sha256("\0".join(self.prompts).encode()).hexdigest()[:16]
        of = self.members[largest(self.members)]
        serving = dict(
            slots=[*self.slots[name]],
            context=self.context,
            rules={k: np.asarray(v).tolist() for k, v in sorted(member.rules.items())},
            options=dataclasses.asdict(member.options),
            texts=texts if self.prompts else f"written by {parameters(of.params, of.config)}",
            quality=quality,
            energy=counted,
            dtype=str(member.config.dtype),
        )
        kind = device.device_kind
        if device.platform == "cpu":
            kind = f"{platform.machine()} {os.cpu_count()} cores"
        return MeasurementConditions(
            parameters(member.params, member.config),
            kind,
            jax.__version__,
            eejax.__version__,
            json.dumps(serving, sort_keys=True),
        )

    def texts(self) -> list[list[int]]:
        """Return the ids of the texts, cut so that there is room to continue."""
        if self.prompts:
            texts = encoded(self.prompts, self.tokenizer)
        else:
            name = largest(self.members)
            log.info("%s: writing texts to measure models on", name)
            member, slots = self.members[name], self.slots[name]
            texts = sampled(member, self.tokenizer, slots=slots, context=self.context)
        return [text[: self.context // 2] for text in texts]


def largest(members: Mapping[str, FleetMember]) -> str:
    """Return the name of the member with the most parameters, whatever their dtypes."""
    size = {
        name: sum(leaf.size for leaf in jax.tree.leaves(member.params))
        for name, member in members.items()
    }
    return max(size, key=size.__getitem__)


def parameters(params: Tree, config: ModelConfig) -> str:
    """Return the digest of a model with its exits, which `checkpoint.digest` leaves out."""
    leaves = jax.tree_util.tree_leaves_with_path({k: v for k, v in params.items() if k == "exits"})
    found = {f"own {path_name(path)}": leaf for path, leaf in leaves}
    shapes = {name: leaf.shape for name, leaf in found.items()}
    exits = digest_of(config, shapes, lambda name, at: found[name][at])
    about = json.dumps(config.to_dict(), sort_keys=True)
    text = f"{digest(config, params)} {exits} {about}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def measure_members(
    setup: MeasurementSetup, repository: Repository, source: QualitySource, counted: str
) -> dict[str, ModelProfile]:
    """Return profiles of the members, and log where each comes from.

    A profile comes from the repository if it has one under the same conditions. Otherwise it is
    measured and stored there.
    """
    found, missing = {}, {}
    for name in setup.members:
        conditions = setup.conditions(name, source, counted)
        try:
            found[name], why = repository.profile(name, conditions)
        except DataError as error:
            warnings.warn(f"a measurement is not used: {error}", stacklevel=2)
            found[name], why = None, "its measurement cannot be read"
        if found[name] is None:
            missing[name] = why
        else:
            log.info("%s: as measured at %s", name, why)
    if not missing:
        return found
    texts = setup.texts()
    batches = windows(texts, setup.context)
    new = max(min(32, setup.context // 8), 1)
    for i, (name, why) in enumerate(missing.items(), 1):
        member, reference = setup.members[name], setup.reference
        slots, context = setup.slots[name], setup.context
        at = f"{name}, model {i} of {len(missing)}"
        log.info("%s: measuring it at %d depths, as %s", at, len(slots), why)
        try:
            profile = measure(member, texts, batches, slots=slots, context=context, new=new)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        if reference is not None:
            own = generate_answers(member, texts[:JUDGED], slots=slots, context=context, new=new)
            answers = []
            for depth, texts_of in own.items():
                agreement = 1.0 if depth == profile.exits else profile.agrees[depth - 1]
                answers += [
                    JudgedAnswer(agreement, reference.verifier.judge(None, prompt, ids))
                    for prompt, ids in texts_of
                ]
            judged = with_verdicts(profile, answers)
            own_judge = reference.name == name
            quality = ((1.0, 1.0),) if own_judge else judged.quality
            profile = dataclasses.replace(judged, quality=quality)
        found[name] = profile
        try:
            repository.keep(name, profile, time.time())
        except DataError as error:
            warnings.warn(f"a measurement is not kept: {error}", stacklevel=2)
    return found


def judged_by(
    conditions: MeasurementConditions,
    profile: ModelProfile,
    source: QualitySource,
    scores: Sequence[BenchmarkScore],
    reference: ReferenceJudge | None,
) -> MeasurementConditions:
    """Return the conditions of a member's evaluations.

    They are those of its profile, with what the quality of its answers is compared with.

    Args:
      conditions: conditions of the profile.
      profile: the profile as it is served, with the quality of benchmarks or of a judge.
      source: source of the quality.
      scores: scores of all models, of which those count that `source` takes.
      reference: the model that judges answers, if one does.
    """
    chosen = [s for s in scores if not source.names or s.task in source.names]
    benchmark = source.kind == "benchmark"
    return conditions.judged_by(
        tasks=[*source.names] if benchmark else [],
        scores=_short([*map(tuple, chosen)]) if benchmark else "",
        lowest_perplexity=None if reference is None else reference.least,
        profile_quality=_short((profile.quality, profile.perplexity, profile.ceiling)),
    )


def _short(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def earlier_evaluations(
    repository: Repository,
    profiles: Mapping[str, ModelProfile],
    source: QualitySource,
    scores: Sequence[BenchmarkScore],
    reference: ReferenceJudge | None,
) -> dict[str, StoredEvaluation]:
    """Return earlier evaluations that still hold, by model, and log which hold and which do not.

    From now on evaluations are stored with what their quality is compared with (`judged_by`).
    """
    found = {}
    for name, profile in profiles.items():
        conditions = repository.conditions[name]
        repository.judged[name] = judged_by(conditions, profile, source, scores, reference)
        try:
            row, why = repository.evaluated(name)
        except DataError as error:
            log.warning("%s: evaluated again: %s", name, error)
            continue
        if row is not None:
            log.info("%s: not evaluated again, as it was at %s", name, why)
            found[name] = row
        elif why:
            log.info("%s: evaluated again, as %s", name, why)
    return found


def with_profiles(repository: Repository, profiles: Mapping[str, ModelProfile]) -> Repository:
    """Write the benchmarks of profiles, by which candidates are chosen, and return the repository.

    If it cannot be written, one in memory takes its place, as serving does not depend on it. One
    that is only in use now stores later writes.
    """
    for name, profile in profiles.items():
        try:
            repository.put(name, profile.benchmark())
        except RepositoryLockedError as error:
            log.warning("%s: its benchmark is not kept: %s", name, error)
        except DataError as error:
            log.warning("measurements are not kept: %s", error)
            repository.close()
            return Repository.of(profiles)
    return repository


def open_repository(path: str | os.PathLike) -> Repository:
    """Open the repository in a file, or one in memory if the file cannot be used now.

    Serving does not depend on it.
    """
    try:
        repository = Repository(path)
        repository.check()
    except DataError as error:
        warnings.warn(f"measurements are not kept: {error}", stacklevel=2)
        return Repository()
    return repository


def encoded(prompts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of the first texts. Raises DataError if they are empty."""
    texts = [tokenizer.encode(text).tolist() for text in prompts[:TEXTS]]
    texts = [ids for ids in texts if ids]
    if not texts:
        raise DataError("prompts: have no text to measure models on.")
    return texts


def sampled(
    member: FleetMember, tokenizer: Tokenizer, *, slots: Sequence[int], context: int
) -> list[list[int]]:
    """Sample texts from a model at temperature 1, each from its beginning."""
    starts = (tokenizer.bos_id, tokenizer.eos_id, 0)
    start = next(token for token in starts if token is not None)
    part = PartialModel(
        member.params,
        member.config,
        member.options,
        slots=slots,
        context=context,
        depth=member.config.n_exits + 1,
    )
    texts = [[start] for _ in range(SAMPLES)]
    for seed in range(SAMPLES):
        drawn = SamplingParams.make(1, 1.0, seed=seed)
        most = min(SAMPLED, context - 1)
        part.scheduler.add_request(EngineRequest(str(seed), (start,), most, sampling=drawn))
    for id_, tokens, _ in part.run():
        texts[int(id_)] += [token.id for token in tokens]
    return texts


def windows(texts: Sequence[Sequence[int]], context: int) -> list[dict[str, np.ndarray]]:
    """Return texts, one after the other, as batches of `calibration.score`.

    Raises DataError for fewer than two tokens.
    """
    ids = np.fromiter(itertools.chain.from_iterable(texts), np.int32)
    if len(ids) < 2:
        raise DataError(f"prompts: have {len(ids)} tokens to measure models on, which is too few.")
    width = min(WINDOW, context, len(ids) - 1)
    rows = ids[: len(ids) // (width + 1) * (width + 1)].reshape(-1, width + 1)[: ROWS * BATCHES]
    # All batches of one shape, for which one program is compiled.
    count = len(rows) // ROWS * ROWS or len(rows)
    batches = np.split(rows[:count], max(count // ROWS, 1))
    return [dict(tokens=b[:, :-1], labels=b[:, 1:]) for b in batches]
