"""Table 5 of TIDE: one worked problem, decoded at several thresholds."""

from __future__ import annotations

import re

from eejax.experiments.reproduce.tide_paper import PROBLEM, TABLE_5

NEW = 256  # tokens of the paper's answers
ANSWER = {"apples": 6, "oranges": 4}


def solve(model, found, engine: str = "posthoc") -> dict:
    """Measure exit rate, unique tokens and correctness of the problem's answer, by threshold.

    Args:
      model: `eejax.LanguageModel` of bytes.
      found: the same model with routers.
      engine: an engine that runs all layers as in the paper, or "recompute", which skips them.

    Returns:
      `tokens`: the number that the context has room for, at most `NEW`; `rows`: by threshold.
    """
    from eejax.inference import Generator

    ids = list(PROBLEM.encode())
    new = min(NEW, model.config.context_length - len(ids))
    generator = Generator.make(found.params, found.config, engine)
    rows = []
    for threshold in TABLE_5:
        made = generator.generate([ids], new, gate="router", threshold=threshold)
        tokens = made.ids(0)
        left = made.boundaries[0, 1 : len(tokens)]
        early = left[left < model.config.n_layers].tolist()
        text = model.tokenizer.decode(tokens)
        row = {
            "threshold": threshold,
            "rate": len(early) / len(left),
            "unique": len(set(tokens)),
            "correct": correct(text),
            "by_exit": {str(n): early.count(n) for n in sorted(set(early))},
            "text": text,
        }
        rows.append(row)
    return {"tokens": new, "rows": rows}


def correct(text: str) -> bool:
    """Return whether a text names the right number of each fruit: "6 apples", or "oranges: 4"."""

    def says(fruit, n):
        return re.search(rf"\b{n}\s+{fruit}\b", text, re.I) or re.search(
            rf"\b{fruit}\b\W*(?:is|are)?\W*\b{n}\b(?! +\w+s\b)", text, re.I
        )

    return all(says(fruit, n) for fruit, n in ANSWER.items())


def show(result: dict) -> str:
    from eejax.analysis import table

    cells = [
        [
            f"{r['threshold']:g}",
            f"{r['rate']:.1%}",
            str(r["unique"]),
            "yes" if r["correct"] else "no",
            ", ".join(f"{n}: {count}" for n, count in r["by_exit"].items()) or "-",
        ]
        for r in result["rows"]
    ]
    header = ["threshold", "exit rate", "unique tokens", "correct", "tokens by layer of exit"]
    told = f"\nTable 5: a worked problem, {result['tokens']} tokens behind it"
    return f"{told}\n{table(header, cells)}\n"
