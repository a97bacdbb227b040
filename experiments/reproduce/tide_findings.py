"""A `Finding` for every table, figure and quoted number of TIDE's paper."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from eejax.experiments.reproduce import tide_paper as paper
from eejax.experiments.reproduce.findings import Findings, percent

NO_GPU = "Kernels specialised for a GPU are compiled on it, and there is no GPU here."
SHOWN = 60  # characters of an answer
D, WIDTH, LAYERS, EVERY = 4096, 128, 32, 4  # of the paper's 8B model
CHANCE, CLEAR = 0.5, 0.05  # an AUC of guesses, and how far above it a router has learned
SAVED, THIRD = 1 - 56 / 96, 16 / 322  # of the layers in Figure 2; of the tokens in Section 5.1
LABELS = {"top1": "right tokens", "cosine, matched": "cosines of a lowered bound"}
FEW = 0.25  # by which numbers of unique tokens differ "hardly"


def findings(result: Mapping[str, Any], scale: str) -> list[dict]:
    """Return all findings, as dicts.

    Args:
      result: the result of `eejax reproduce tide`.
      scale: scale of everything that was run.
    """
    found = Findings("TIDE", scale)
    routed = Findings("TIDE", f"{scale}, routers that learn the full model's most likely token")
    _prefill(routed, result)
    _speeds(routed, result)
    _problem(routed, result)
    _calibration_time(routed, result)
    _convergence(found, result)
    _calibration(found, result)
    _system(found)
    return routed.to_dicts() + found.to_dicts()


def _timed(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row of the routers with which speeds are measured."""
    rows = [r for r in result["rules"] if r["rule"] == "top1" and r["recipe"] == "ours"]
    return next((r for r in rows if r["width"] == WIDTH), rows[-1])


def _prefill(found: Findings, result: Mapping[str, Any]) -> None:
    points = _timed(result)["points"]
    layers = result["layers"]
    for model, threshold, theirs in paper.TABLE_3:
        point = points.get(f"{threshold:g}")
        if point is None:
            continue
        ours = ", ".join(f"{percent(s)} at layer {n}" for n, s in point["by_exit"].items())
        found.add(
            "Table 3",
            f"Every token of a prompt finds an exit at {threshold:g}, if the last layer's counts: "
            f"{model}.",
            theirs,
            f"100 % of {point['tokens']:,} tokens: {ours}, {percent(1 - point['rate'])} at layer "
            f"{layers}; {percent(point['rate'])} save layers",
            None,
            "If the last layer counts as an exit, every token finds one in any model.",
        )
    point = next(iter(points.values()))
    third = point["by_exit"].get(result["every"], 0.0)
    found.add(
        "Section 5.1",
        "Some tokens leave after a third of the layers.",
        "5 % (16 of 322) at L11 of 32",
        f"{percent(third)} after {result['every']} of {layers} layers (at least half: "
        f"{percent(THIRD / 2)})",
        third >= THIRD / 2,
        f"Of {point['tokens']:,} tokens {percent(point['rate'])} leave before the last layer, and "
        f"{percent(third)} there.",
    )
    saved = {t: 1 - p["depth"] / layers for t, p in points.items()}
    others = "; ".join(f"at {t} {percent(p['disagreement'])}" for t, p in points.items())
    strict = next(iter(points))  # the paper's first threshold
    paper_saves = THIRD * (1 - 12 / LAYERS)
    found.add(
        "Figure 2",
        "Exits chosen by token save layers: three tokens at 8, 16 and 32 of 32.",
        "56 of 96 layers, 42 % less (an illustration)",
        "; ".join(
            f"at {t} a mean depth of {p['depth']:.2f} of {layers}, {percent(saved[t])} less"
            for t, p in points.items()
        )
        + f" (at least half at {strict}: {percent(SAVED / 2)})",
        saved[strict] >= SAVED / 2,
        f"Tokens that are not the full model's: {others}. The figure's layers are drawn, not "
        "measured: by the paper's Table 3, with 16 of 322 tokens after 12 of 32 layers and the "
        f"others after all, {percent(paper_saves)} of the layers would be saved.",
    )


def _speeds(found: Findings, result: Mapping[str, Any]) -> None:
    for one in result["latency"]:
        ratio = one["routed_over_full"]
        theirs = paper.TABLE_4.get(("latency", one["threshold"]))
        if theirs:
            found.add(
                "Table 4",
                f"Exits shorten a prompt's pass at {one['threshold']:g}.",
                theirs,
                f"{_interval(ratio)} times the time without exits, {one['full_ms']:.1f} ms (shorter"
                ": the interval is below 1)",
                ratio["high"] < 1,
                f"It is {_beside_one(ratio, 'longer')}. {all_layers(result)}",
            )
    for batch in dict.fromkeys(r["batch"] for r in result["throughput"]):
        theirs = paper.TABLE_4.get(("throughput", batch))
        rows = [r for r in result["throughput"] if r["batch"] == batch]
        if theirs is None:
            continue
        post, skip = ([r for r in rows if r["engine"] == e] for e in ("posthoc", "recompute"))

        def told(some):
            return ", ".join(f"{_interval(r['over_full'])} at {r['threshold']:g}" for r in some)

        skipping = f"; skipping layers {told(skip)}" if skip else ""
        claim = "Post-hoc exits raise throughput" if batch == 1 else "Post-hoc exits help one model"
        found.add(
            "Table 4",
            f"{claim} at batch size {batch}.",
            theirs,
            f"post-hoc {told(post)} times the {post[0]['full_tokens_per_s']:.0f} tok/s without "
            f"exits (more: an interval is above 1){skipping}",
            any(r["over_full"]["low"] > 1 for r in post),
            "Post-hoc it is "
            + ", ".join(
                f"{_beside_one(r['over_full'], 'less')} at {r['threshold']:g}" for r in post
            )
            + f". {all_layers(result)}",
        )
    posthoc = [r for r in result["throughput"] if r["engine"] == "posthoc"]
    skipping = [r for r in result["throughput"] if r["engine"] == "recompute"]
    found.add(
        "Section 3.3",
        "All layers run, so keys and values are complete.",
        "no missing keys",
        f"{min(r['layers_run'] for r in posthoc):g} of {result['layers']} layers run",
        all(r["layers_run"] == result["layers"] for r in posthoc),
        "A post-hoc step skipped layers.",
    )
    alone = [r for r in skipping if r["batch"] == 1] or skipping
    found.add(
        "Section 6",
        "Layers can actually be skipped once gaps in the cache are handled.",
        "future work, not tried",
        f"done by recomputing them: {min(r['layers_run'] for r in alone):.2f} of "
        f"{result['layers']} layers run, {sum(r['others'] for r in skipping)} texts differ from "
        "the post-hoc ones",
        all(r["others"] == 0 for r in skipping),
        "A text is not the post-hoc one.",
    )


def _interval(ratio: Mapping[str, float]) -> str:
    """Return the median ratio of interleaved pairs, with its interval of 95 %."""
    return f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def _beside_one(ratio: Mapping[str, float], else_: str) -> str:
    """Return the text for an interval: within noise if it has 1, else `else_`."""
    return "within noise (1 is in the interval)" if ratio["low"] <= 1 <= ratio["high"] else else_


def all_layers(result: Mapping[str, Any]) -> str:
    """Return a reason from the layers that post-hoc steps ran."""
    ran = [r["layers_run"] for r in result["throughput"] if r["engine"] == "posthoc"]
    told = f"{min(ran):g} to {max(ran):g}" if min(ran) < max(ran) else f"{ran[0]:g}"
    return (
        f"A post-hoc step ran {told} of {result['layers']} layers, and the routers in addition; "
        "the paper's section 6 says that no layer is skipped."
    )


def _problem(found: Findings, result: Mapping[str, Any]) -> None:
    solved, whole = next(
        (r["correct"], r["text"][:SHOWN]) for r in result["problem"]["rows"] if r["threshold"] == 1
    )
    for row in result["problem"]["rows"]:
        exits = ", ".join(f"{n} at layer {layer}" for layer, n in row["by_exit"].items())
        found.add(
            "Table 5",
            f"The answer to a worked problem stays right at a threshold of {row['threshold']:g}.",
            paper.TABLE_5[row["threshold"]],
            f"{percent(row['rate'])} early ({exits or 'none'}), {row['unique']} unique tokens of "
            f"{result['problem']['tokens']}, {'correct' if row['correct'] else 'not correct'}",
            row["correct"] if solved else None,
            "The full model's answer is right, and this one is not."
            if solved
            else f"The full model itself does not solve it: it writes {whole!r}.",
        )
    rows = {row["threshold"]: row for row in result["problem"]["rows"]}
    theirs = "99 without exits, 95 with them"
    most, few = rows[1.0]["unique"], {t: row["unique"] for t, row in rows.items() if t < 1}
    apart = {t: n / most - 1 for t, n in few.items()}
    widest = max(apart, key=lambda t: abs(apart[t]))
    found.add(
        "Section 5.3",
        "Exits hardly change the number of unique tokens.",
        theirs,
        f"{most} without exits, {', '.join(f'{n} at {t:g}' for t, n in few.items())} (hardly: by "
        f"less than {100 * FEW:.0f} %)",
        abs(apart[widest]) < FEW,
        f"{100 * apart[widest]:+.0f} % at {widest:g}. "
        + _characters(rows[1.0]["text"], rows[widest]["text"]),
    )
    rates = ", ".join(f"{percent(r['rate'])} at {t:g}" for t, r in rows.items() if t < 1)
    found.add(
        "Abstract",
        "Nearly all decoded tokens leave early.",
        "98 to 99 % (at L31 of 32, the last layer's own output)",
        f"{rates}, before the last layer; 100 % with the last layer",
        None,
        "All of the paper's exits are at the last layer, where nothing is saved. Counted this "
        "way, every token leaves early in any model.",
    )


def _characters(full: str, early: str) -> str:
    """Return a reason for different numbers of unique tokens, which are characters here."""
    lost, new = sorted(set(full) - set(early)), sorted(set(early) - set(full))
    capitals = sum(c.isupper() for c in lost)
    return (
        f"Tokens are bytes, and both texts repeat a few words: of {len(set(full))} characters "
        f"{len(lost)} do not occur with exits, {capitals} of them capitals as in a speaker's "
        f"name, and {len(new)} are new."
    )


def _convergence(found: Findings, result: Mapping[str, Any]) -> None:
    rows = result["convergence"]
    inner = [r for r in rows if r["boundary"] % result["every"] == 0]
    near = ", ".join(f"{r['near']:.2%} at layer {r['boundary']}" for r in inner)
    found.add(
        "Section 5.5",
        "Every token converges (cosine 0.98) at the penultimate checkpoint.",
        paper.CONVERGED,
        f"100 % at layer {result['layers']}, whose cosine is taken with itself; {near}",
        min(r["near"] for r in inner[-1:]) > 0.99,
        "L31 of 32, L35 of 36 and L11 of 12, counted from 0, are the last layers, whose states "
        f"the cosine is taken with. At layer {inner[-1]['boundary']} of {result['layers']}, "
        f"{inner[-1]['near']:.2%} of the tokens reach this cosine.",
    )
    lower = [(bound, inner[-1]["nearer_than"][bound]) for bound in inner[-1]["nearer_than"]]
    found.add(
        "Section 5.5",
        "A lower bound labels more tokens as converged at earlier layers.",
        "0.95 or 0.90, not measured",
        f"{percent(inner[-1]['near'])} at 0.98, "
        + ", ".join(f"{percent(s)} at {b}" for b, s in lower)
        + f" (layer {inner[-1]['boundary']} of {result['layers']})",
        lower[-1][1] > inner[-1]["near"],
        "No more tokens are within 0.90 than within 0.98.",
    )


def _calibration_time(found: Findings, result: Mapping[str, Any]) -> None:
    own = _timed(result)
    found.add(
        "Section 3.1",
        "Calibration takes under three minutes (also the abstract).",
        "170 s for 339,853 tokens of 2,000 texts, 8B parameters, A100",
        f"{own['seconds']:.0f} s for {result['tokens']:,} tokens of {result['windows']} windows",
        None,
        "The paper's time is that of an 8B model on an A100; ours is that of a small model.",
    )


def _calibration(found: Findings, result: Mapping[str, Any]) -> None:
    rows = [r for r in result["rules"] if "refused" not in r]
    recipe = [r for r in rows if r["recipe"] == "paper"]
    same = [(r, next(o for o in rows if o["recipe"] == "ours" and _alike(o, r))) for r in recipe]

    def told(r):
        return f"{', '.join(f'{a:.2f}' for a in r['auc_right'])} in {r['seconds']:.0f} s"

    none = any("refused" in r for r in result["rules"] if r["rule"] == "cosine")
    untrained = "; too few tokens have cosines of 0.98 to train on these" if none else ""
    found.add(
        "Section 3.1",
        "Adam at 1e-3 for 100 epochs trains the routers.",
        "100 epochs, binary cross-entropy",
        "AUC of right tokens, "
        + "; ".join(
            f"labels by {LABELS[r['rule']]}, {r['width']} wide: {told(r)} (our 12 epochs of AdamW: "
            f"{told(o)})"
            for r, o in same
        )
        + f"; trained: at least {CHANCE + CLEAR:.2f}, by chance {CHANCE:.2f}{untrained}",
        all(a >= CHANCE + CLEAR for r in recipe for a in r["auc_right"]),
        f"A router of its recipe tells right tokens by less than {CLEAR:.2f} over chance.",
    )
    for one in recipe:
        _beside_entropy(found, one)
    _sizes(found)


def _beside_entropy(found: Findings, one: Mapping[str, Any]) -> None:
    """Compare the routers of one label with the entropy of the exits' softmax."""
    pairs = list(zip(one["boundaries"], one["auc_right"], one["auc_right_entropy"], strict=True))
    told = "; ".join(f"at layer {n}: {a:.2f}, by entropy {b:.2f}" for n, a, b in pairs)
    no_better = [str(n) for n, a, b in pairs if a < b + CLEAR]
    found.add(
        "Section 1",
        "A router predicts which tokens may leave better than the softmax's entropy does.",
        "claimed, not measured",
        f"labels by {LABELS[one['rule']]}, the paper's recipe: AUC of right tokens {told} (better: "
        f"by at least {CLEAR:.2f})",
        not no_better,
        f"Not at layer {', '.join(no_better)}"
        + (
            "."
            if one["rule"] == "top1"
            else ": these routers learn cosines, which predict right tokens less well than labels "
            "of right tokens do."
        ),
    )


def _alike(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return (a["rule"], a["width"]) == (b["rule"], b["width"])


def _sizes(found: Findings) -> None:
    shapes = "shapes alone, d = 4096"
    each = router_parameters(D, WIDTH)
    found.add(
        "Section 1",
        "A router has d x 128 + 128 parameters.",
        "524,416 for d = 4,096",
        f"{each - D - 1:,}, and a norm's {D:,} and a bias",
        each - D - 1 == D * WIDTH + WIDTH,
        "Our router has another shape.",
        shapes,
    )
    count = LAYERS // EVERY
    megabytes = count * each * 4 / 1e6
    found.add(
        "Abstract",
        "The routers of a model are a file of about 4 MB.",
        "~4 MB",
        f"{count} routers (32 layers, c = 4) of {each:,} parameters: {megabytes:.1f} MB in float32",
        abs(megabytes / 4 - 1) < 0.25,
        "In float32 two routers of the paper's size take 4.2 MB, and its interval of 4 gives "
        "eight routers; the paper does not say how many its file has.",
        shapes,
    )


def router_parameters(d: int, width: int) -> int:
    """Return the number of parameters of one of our routers, with its norm and bias."""
    import jax

    from eejax.models import params
    from eejax.models.config import ModelConfig

    config = ModelConfig(vocab_size=32, n_layers=2, d_model=d, n_heads=32, context_length=32)
    declared = params.map_params(lambda p: math.prod(p.shape), params.router(config, width))
    return sum(jax.tree.leaves(declared))


def _system(found: Findings) -> None:
    from eejax.checkpoint.hf.families import FAMILIES

    here = "what this project has"
    found.add(
        "Table 1",
        "TIDE alone is for decoders, trained afterwards, per token, with kernels, and universal.",
        "; ".join(f"{name}: {row}" for name, row in paper.TABLE_1.items()),
        "yes, yes (exits may also be trained along), yes, Triton in place of CUDA, "
        f"{len(FAMILIES)} families",
        None,
        "The other systems of the table are not run here.",
        here,
    )
    names = {name.lower().replace("-", "").replace("_", "") for name in FAMILIES}
    missing = [
        family
        for family in paper.FAMILIES
        if not any(name.startswith(family.lower().replace("-", "")) for name in names)
    ]
    found.add(
        "Section 3.2",
        "One adapter reads models of many families, which users can extend.",
        ", ".join(paper.FAMILIES) + "; 17 attribute paths, register_adapter()",
        f"{len(FAMILIES)} families by the names of their tensors, register_family(); an unknown "
        "one by its tensors, compared with transformers",
        not missing,
        f"Not read: {', '.join(missing)}.",
        here,
    )
    pairs = ", ".join(f"{d} x {width}" for d, width in paper.TABLE_2)
    found.add(
        "Table 2",
        "Kernels are specialised for eight pairs of dimensions.",
        pairs,
        f"compiled for the dimensions that are used, {most_width()} wide at most",
        None,
        NO_GPU,
        here,
    )


def most_width() -> int:
    from eejax.kernels.norm_router.api import MAX_WIDTH

    return MAX_WIDTH
