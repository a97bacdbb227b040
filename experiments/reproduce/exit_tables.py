"""EE-LLM's Tables 3 and 4: texts by the exit of every token, and the predictions of every exit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SHOWN = 24  # rows of Table 4 in the terminal


def text_prompts(rows: np.ndarray, mixed: Sequence[str], model, n: int) -> list[list[int]]:
    """Return every second mixed prompt, the first of held-out text.

    They are at most half a context long.
    """
    half, prompts = model.config.context_length // 2, []
    for i in range(n):
        if i % 2 == 0:
            prompts.append(rows[len(rows) * (i + 1) // (n + 1)][:half].tolist())
        else:
            text = mixed[len(mixed) * i // (n + 1)]
            prompts.append(model.tokenizer.encode(text).tolist()[-half:])
    return prompts


def pieces_of(tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text; the last token of a character has all of it."""
    stream = tokenizer.stream(prompt)
    pieces = [stream.push(i) for i in ids]
    return [*pieces[:-1], pieces[-1] + stream.flush()]


def pieces_in_place(
    tokenizer, whole: Sequence[int], begin: int, predicted: Sequence[int]
) -> list[str]:
    """Return the text of each predicted token after the tokens of `whole` before its place.

    `begin` is the index in `whole` of the first token that was predicted.
    """
    from eejax.data.streams import text_behind

    return [
        text_behind(tokenizer.decode, whole[: begin + i], [token])
        for i, token in enumerate(predicted)
    ]


def texts_of(model, prompts: list[list[int]], thresholds: Sequence[float]) -> list[dict]:
    """Return Table 3: for each prompt, the text at each threshold by tokens.

    Each token has the boundary of its exit and its confidence.
    """
    from eejax.inference import Generator

    generator = Generator.make(model.params, model.config, "recompute")
    new, found = model.config.context_length // 2 - 1, []
    for prompt in prompts:
        texts = []
        for threshold in thresholds:
            r = generator.generate([prompt], new, threshold=threshold, prefill_exit=True)
            texts.append(
                {
                    "threshold": threshold,
                    "ids": r.ids(0),
                    "pieces": pieces_of(model.tokenizer, prompt, r.ids(0)),
                    "boundaries": r.boundaries[0].tolist(),
                    "exits": r.exits[0].tolist(),
                    "confidences": r.confidences[0].tolist(),
                }
            )
        found.append({"prompt": model.tokenizer.decode(prompt), "texts": texts})
    return found


def exits_of(model, prompt: list[int]) -> dict:
    """Return Table 4: every exit's predictions for the full model's text after a prompt.

    They have their confidences, `[exits][tokens]`.
    """
    from eejax import calibration
    from eejax.inference import Generator

    tokenizer, new = model.tokenizer, model.config.context_length // 2 - 1
    full = Generator.make(model.params, model.config, "full")
    ids = full.generate([prompt], new).ids(0)
    whole = np.array(prompt + ids, np.int32)
    labels = np.where(np.arange(len(whole)) < len(prompt), -1, whole)
    batch = {"tokens": whole[None, :-1], "labels": labels[None, 1:]}
    scores = calibration.score(model.params, model.config, [batch])
    return {
        "prompt": tokenizer.decode(prompt),
        "ids": ids,
        "boundaries": model.config.exit_boundaries,
        "pieces": pieces_of(tokenizer, prompt, ids),
        "predicted": scores.tokens.tolist(),
        "predicted_pieces": [
            pieces_in_place(tokenizer, whole.tolist(), len(prompt), row.tolist())
            for row in scores.tokens
        ],
        "confidences": scores.confidences["max_probability"].tolist(),
    }


def agreeing(table: dict) -> list[dict]:
    """Return for every early exit in Table 4 its agreement with the final exit.

    Also its mean confidence in tokens that agree, and in the others (None: there are none).
    """
    *early, final = np.array(table["predicted"])

    def mean(a):
        return float(a.mean()) if len(a) else None

    return [
        {
            "boundary": stop,
            "agreement": float((tokens == final).mean()),
            "agreeing": mean(c[tokens == final]),
            "others": mean(c[tokens != final]),
        }
        for stop, tokens, c in zip(
            table["boundaries"], early, np.array(table["confidences"]), strict=False
        )
    ]


def page_of(table3: Sequence[dict], table4: dict) -> str:
    """Return both tables as a page of HTML, with colors."""
    from eejax.experiments.reproduce.exit_texts import exit_text, page, predictions

    boundaries, parts = table4["boundaries"], []
    for text in table3:
        of = {
            f"threshold {t['threshold']:g}": list(zip(t["pieces"], t["exits"], strict=True))
            for t in text["texts"]
        }
        parts.append(("Text by the exit of every token", exit_text(text["prompt"], of, boundaries)))
    predicted = [
        list(zip(tokens, confidences, strict=True))
        for tokens, confidences in zip(
            table4["predicted_pieces"], table4["confidences"], strict=True
        )
    ]
    ids = np.array(table4["predicted"])
    parts.append(
        (
            "The full model's text, and what every exit predicts with which confidence",
            predictions(table4["prompt"], table4["pieces"], predicted, ids == ids[-1], boundaries),
        )
    )
    return page("Generation with early exits", parts, boundaries)


def show(table3: Sequence[dict], table4: dict) -> None:
    from eejax import analysis
    from eejax.experiments.reproduce.exit_texts import marked, visible

    boundaries = table4["boundaries"]
    for text in table3:
        print(f"\nTable 3, after {visible(text['prompt'][-60:])}")
        for t in text["texts"]:
            pairs = list(zip(t["pieces"], t["exits"], strict=True))
            print(f"threshold {t['threshold']:g}: {marked(pairs, boundaries)}")
    print(f"\nTable 4, after {visible(table4['prompt'][-60:])}: the first tokens")
    columns = list(zip(table4["predicted_pieces"], table4["confidences"], strict=True))
    cells = [
        [visible(piece), *(f"{visible(p[i])} {c[i]:.3f}" for p, c in columns)]
        for i, piece in enumerate(table4["pieces"][:SHOWN])
    ]
    print(analysis.table(["token", *(f"after {s}" for s in boundaries)], cells))

    def number(x):
        return "-" if x is None else f"{x:.2f}"

    for row in agreeing(table4):
        print(
            f"the exit after {row['boundary']} predicts {row['agreement']:.0%} of "
            f"{len(table4['ids'])} tokens as the final one does; mean confidence "
            f"{number(row['agreeing'])} in these, {number(row['others'])} in the others"
        )
