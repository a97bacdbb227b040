"""Choice of model and depth while serving, against models that serve as they are.

    eejax bench helios --small=runs/mixed_small --large=runs/mixed_large \\
        --judge=runs/mixed_judge --json

All of $EEJAX_DATA/mixed_prompts, 100 tokens each, greedy, through one process on the given cores.
Every policy serves the same prompts in the same order, block by block in turn, so that a slow
machine slows all of them. Memory is the same for all: a budget that holds the whole larger model
and --slots requests of it. A policy that loads less has more slots (`inference.capacity`), at most
--max_slots. Thresholds, one for all exits of a model, let a share --early of its tokens leave by
the first exit; in the paper 74 % of OPT-1.3B's do, and 73.6 % of OPT-6.7B's (Table 5). Everything
is compiled in advance; loading, filling in and running anew are part of the times, and of the
timeline.

throughput_ratio: tokens a second of the controller (objective: throughput) over those of the
smaller model, untruncated, with exits or without, whichever is better. ttft_ratio: seconds to the
first token of that model, again the better of the two, over the controller's (objective: response
time), with as many clients, each asking one request after the other, as that model has slots.
energy_proxy_ratio: executed floating-point operations of the first pair, including those for keys
and values that are filled in later. Operations are not energy, nor are bytes, which are those of
the weights that decoding reads; all slots share those of a step. Intervals are 95 % bootstraps over
blocks. The larger model by itself, several times slower, takes part in --sampled blocks of the
first order.

Quality: tokens that are the whole model's given the same text (every --audited-th answer),
perplexity by that model, and by a third one that was trained separately. frontier: of every policy
of the controller its quality, by agreement, and its tokens a second over those of the fastest
static one that is as good. at_equal_*: over the fastest that is as good, or worse by at most a
hundredth, which samples do not distinguish. regret: over the static one that was fastest in each
block, whatever its quality.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time

import numpy as np
from absl import flags

from eejax.common.errors import require
from eejax.experiments import launch

_SMALL = flags.DEFINE_string("small", None, "A training run, or a model's folder.")
_LARGE = flags.DEFINE_string("large", None, "Another, of the same tokenizer.")
_JUDGE = flags.DEFINE_string("judge", None, "A third model, for perplexity; default: none.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")
_PROMPTS = flags.DEFINE_integer("prompts", None, "Number of prompts; default: all.", lower_bound=8)
_NEW = flags.DEFINE_integer("new", 100, "Tokens of an answer.", lower_bound=2)
_SLOTS = flags.DEFINE_integer(
    "slots", 8, "Requests that the budget holds with the larger model.", lower_bound=1
)
_MAX_SLOTS = flags.DEFINE_integer("max_slots", 32, "Maximum slots of a model.", lower_bound=1)
_EARLY = flags.DEFINE_float(
    "early",
    0.75,
    "Share of a model's tokens that may leave by its first exit.",
    lower_bound=0.0,
    upper_bound=1.0,
)
_CURVE = flags.DEFINE_list("curve", ["0.7", "0.9"], "Limits on agreement of the curve.")
_LATE = flags.DEFINE_float(
    "late",
    4.0,
    "Goodput's limit on the 99th percentile of seconds to the first token; its limit on "
    "agreement is the first of --curve.",
)
_BLOCKS = flags.DEFINE_integer(
    "blocks", 10, "Parts of the work, which policies run in turn.", lower_bound=1
)
_ORDERS = flags.DEFINE_list("orders", ["shuffled", "blocked", "drifting"], "Orders of the prompts.")
_AUDITED = flags.DEFINE_integer(
    "audited", 8, "Every so many answers one is judged again.", lower_bound=1
)
_SAMPLED = flags.DEFINE_integer(
    "sampled",
    2,
    "Blocks in which the larger model, several times slower, serves by itself.",
    lower_bound=1,
)
_CLIENTS = flags.DEFINE_integer(
    "clients",
    None,
    "Clients for ttft_ratio; default: the better policy's slots.",
    lower_bound=1,
)
flags.mark_flags_as_required(["small", "large"])

NEAR = 0.01  # tolerance of agreement, and of perplexity


def main() -> None:
    from eejax.analysis import table

    check_flags()
    result = Bench().run()
    print(table(("", ""), launch.lines(result)))
    if _JSON.value:
        print(json.dumps(result))


def check_flags() -> None:
    """Raise ConfigError for useless values, before any model is opened."""
    from eejax.experiments.helios_runs import ORDERS

    told = f"must be at least one of {', '.join(ORDERS)}"
    known = bool(_ORDERS.value) and {*_ORDERS.value} <= {*ORDERS}
    require(known, "--orders", ",".join(_ORDERS.value), told)
    curve = launch.numbers("curve", _CURVE.value)
    shares = bool(curve) and all(0 < share <= 1 for share in curve)
    told = "must be numbers in (0, 1], one at least"
    require(shares, "--curve", ",".join(_CURVE.value), told)
    told = "must be a number of seconds above 0"
    require(0 < _LATE.value < math.inf, "--late", _LATE.value, told)
    # The flag's own bounds accept NaN.
    require(0 <= _EARLY.value <= 1, "--early", _EARLY.value, "must lie in [0, 1]")


class Bench:
    """Models, their costs, and the prompts."""

    def __init__(self):
        from eejax.checkpoint.language_model import load
        from eejax.experiments.helios_runs import Judges, fitted, prompts
        from eejax.helios.build import room, warm_up
        from eejax.helios.measurements import encoded, windows
        from eejax.helios.pool import FleetMember
        from eejax.helios.profiles import measure
        from eejax.inference import capacity
        from eejax.inference.slot_engine import STEPS_PER_CALL
        from eejax.serving.fleets import check_alike
        from eejax.serving.models import batch_options

        paths = {"small": _SMALL.value, "large": _LARGE.value}
        if _JUDGE.value:
            paths["judge"] = _JUDGE.value
        opened = {name: load(path) for name, path in paths.items()}
        check_alike(opened)

        def make(m):
            return FleetMember(m.params, m.config, options=batch_options(m.config, 64)).ready()

        self.members = {name: make(model) for name, model in opened.items()}
        self.judges = Judges(
            {n: m for n, m in self.members.items() if n != "judge"}, self.members.pop("judge", None)
        )
        configs = {name: m.config for name, m in self.members.items()}
        self.context = min(c.context_length for c in configs.values())
        tokenizer, most = opened["small"].tokenizer, self.context - _NEW.value
        records = prompts()
        if _PROMPTS.value:
            picks = np.linspace(0, len(records) - 1, _PROMPTS.value).astype(int)
            records = [records[i] for i in picks]
        self.texts, self.cut = fitted(tokenizer, records, most)
        self.tasks = [r["task"] for r in records]
        large = configs["large"]
        self.budget = 1.001 * capacity.engine_bytes(
            large, self.members["large"].options, large.n_exits + 1, self.context, _SLOTS.value
        )  # more than a few bytes of bookkeeping
        self.slots = {
            name: room(member, _MAX_SLOTS.value, self.context, self.budget)
            for name, member in self.members.items()
        }
        launch.say(f"slots by depth: {self.slots}")
        own = encoded([r["prompt"] for r in records[:: max(len(records) // 64, 1)]], tokenizer)
        own = [text[-most:] for text in own]
        begin = time.perf_counter()
        self.profiles = {}
        for name, member in [*self.members.items()]:
            threshold = self.threshold(name, own)
            launch.say(f"{name}: threshold {threshold:.4f}; measuring ...")
            member = dataclasses.replace(member, rules={"threshold": threshold})
            self.members[name] = member
            self.profiles[name] = measure(
                member,
                own,
                windows(own, self.context),
                slots=self.slots[name],
                context=self.context,
                new=32,
            )
            warm_up(member, slots=self.slots[name], context=self.context, steps=STEPS_PER_CALL)
        self.compiled = time.perf_counter() - begin

    def threshold(self, name: str, texts: list) -> float:
        """Return one threshold for all exits of a model.

        A share --early of the tokens that the model generates with its first exit alone reaches it.
        """
        from eejax.experiments.helios_runs import StaticModel, drive

        first = StaticModel(name, self.members[name], 1, 1.0, **self.making(name))
        _, answers = drive(first, dict(enumerate(texts)), _NEW.value)
        sure = [token.confidence for answer in answers for token in answer.tokens]
        return float(np.quantile(sure, 1 - _EARLY.value))

    def making(self, name: str) -> dict:
        return dict(slots=self.slots[name], context=self.context)

    def statics(self) -> dict:
        """Return the policies that do not choose: (server, slots) by name."""
        from eejax.experiments.helios_runs import StaticModel

        found = {}
        for name, member in self.members.items():
            whole = member.config.n_exits + 1
            for depth in range(1, whole + 1):
                for exits in (True, False) if depth == whole else (True,):
                    part = (
                        ""
                        if depth == whole
                        else f" up to {member.config.exit_boundaries[depth - 1]}"
                    )
                    label = f"{name}{part}" + ("" if exits else " without exits")
                    found[label] = lambda n=name, m=member, d=depth, e=exits: StaticModel(
                        n, m, d, m.rules["threshold"] if e else 1.0, **self.making(n)
                    )
        return found

    def chosen(self, objective: str, limits: dict | None = None, kind=None, **options):
        from eejax.experiments.helios_runs import ControlledFleet, Stopwatch
        from eejax.helios.choices import ControllerOptions
        from eejax.helios.controller import Controller
        from eejax.helios.objectives import ServiceObjective
        from eejax.helios.repository import Repository

        repository, watch = Repository.of(self.profiles), Stopwatch()
        controller = (kind or Controller)(
            self.profiles,
            ServiceObjective.of(objective, **(limits or {})),
            repository,
            ControllerOptions(budget=self.budget, tokens=_NEW.value, **options),
            clock=watch.now,
        )
        return ControlledFleet(
            self.members, controller, watch, slots=self.slots, context=self.context
        )

    def through(self, policies: dict, order: str, blocks: int, clients: int | None = None) -> dict:
        """Run policies in turn; return {policy: [(seconds, answers) of each block]}."""
        from eejax.experiments.helios_runs import drive, ordered

        indices = ordered(self.tasks, order)
        parts = np.array_split(indices, blocks)
        self.servers = {}  # free those of the previous order first
        servers = {name: make() for name, make in policies.items()}
        found: dict[str, list] = {name: [] for name in policies}
        for b, part in enumerate(parts):
            names = [*policies]
            names = names[b % len(names) :] + names[: b % len(names)]
            for name in names:
                if name.startswith("large") and b >= _SAMPLED.value:
                    continue
                texts = {int(i): self.texts[i] for i in part}
                found[name].append(drive(servers[name], texts, _NEW.value, clients))
            done = {n: f"{sum(s for s, _ in rows):.1f}" for n, rows in found.items()}
            launch.say(f"{order}, block {b + 1} of {blocks}: seconds {done}")
        self.servers = servers
        return found

    def summary(self, name: str, rows: list) -> dict:
        """Return the result of a policy's blocks."""
        from eejax.experiments.helios_runs import answer_bytes, answer_flops, fleet_flops

        answers = [a for _, more in rows for a in more]
        seconds = sum(s for s, _ in rows)
        tokens = sum(len(a.tokens) for a in answers)
        ttft = np.array([a.ttft for a in answers])
        judged = self.judges.judge(answers[:: _AUDITED.value], self.texts)

        def prompt_len(answer):
            return len(self.texts[answer.index])

        flops = np.array(
            [sum(answer_flops(self.members, a, prompt_len(a)) for a in more) for _, more in rows]
        )
        fleet = getattr(self.servers[name], "fleet", None)
        if fleet is not None:  # its report covers all blocks
            flops += fleet_flops(self.members, fleet.pool) / len(flops)
        read = sum(answer_bytes(self.members, a, self.slots) for a in answers)
        return {
            "tokens_per_s": tokens / seconds,
            "seconds": seconds,
            "blocks": [s for s, _ in rows],
            "ttft": {
                "mean": float(ttft.mean()),
                **{f"p{p}": float(np.percentile(ttft, p)) for p in (50, 99)},
            },
            "flops_per_token": flops.sum() / tokens,
            "bytes_per_token": read / tokens,
            "flops": flops.tolist(),
            **judged.summary(),
        }

    def controlled(self, name: str) -> dict:
        """Return the decisions and changes of a fleet."""
        server = self.servers[name]
        c, fleet = server.controller, server.fleet
        ends = [*(d.time for d in c.decisions[1:]), server.watch.now()]
        return {
            "below_share": c.below_share,
            "taken_along": fleet.dispatcher.moved,
            "audited": {
                f"{m} {d} {k}": [a.count, a.share, a.high]
                for (m, d, k), a in fleet.dispatcher.audits.items()
            },
            "load_seconds": sum(x.seconds for x in fleet.changes if x.kind == "load"),
            "grow_seconds": sum(x.seconds for x in fleet.changes if x.kind == "grow"),
            "rebuild_seconds": sum(x.rebuild for x in fleet.changes),
            "narrow_seconds": sum(x.seconds for x in fleet.changes if x.kind == "narrow"),
            "shrink_seconds": sum(x.seconds for x in fleet.changes if x.kind == "shrink"),
            "timeline": [
                [
                    round(d.time, 2),
                    d.kind,
                    d.choice.model,
                    d.choice.depth,
                    self.slots[d.choice.model][d.choice.depth - 1],
                    round(end - d.time, 2),
                    d.why,
                ]
                for d, end in zip(c.decisions, ends, strict=True)
            ],
        }

    def run(self) -> dict:
        from eejax.analysis import total_ratio
        from eejax.experiments.helios_runs import RandomPolicy

        def interval(r):
            return {"ratio": r.median, "interval": [r.low, r.high]}

        def seconds(rows):
            return [s for s, _ in rows]

        result: dict = {
            "prompts": len(self.texts),
            "cut": self.cut,
            "slots": self.slots,
            "thresholds": {n: m.rules["threshold"] for n, m in self.members.items()},
            "budget_bytes": self.budget,
            "compile_and_measure_seconds": self.compiled,
            "profiles": {n: vars(p) for n, p in self.profiles.items()},
            "orders": {},
        }
        statics = self.statics()
        untruncated = [name for name in statics if "up to" not in name]
        cheap = [name for name in untruncated if not name.startswith("large")]
        for order in _ORDERS.value:
            first = order == _ORDERS.value[0]
            names = statics if first else {name: statics[name] for name in cheap}
            policies = dict(names) | {
                "helios": lambda: self.chosen("throughput"),
                "chance": lambda: self.chosen("throughput", kind=RandomPolicy),
            }
            if first:
                policies |= {
                    f"helios, agreement {y}": lambda y=y: self.chosen(
                        "throughput", {"accuracy": float(y)}
                    )
                    for y in _CURVE.value
                }
                goodput = {"ttft_p99": _LATE.value, "accuracy": float(_CURVE.value[0])}
                for name, limits in (("accuracy", {}), ("energy", {}), ("goodput", goodput)):
                    policies[f"helios, {name}"] = lambda n=name, y=limits: self.chosen(n, y)
                policies["helios, never below"] = lambda: self.chosen("throughput", greedy=False)
            found = self.through(policies, order, _BLOCKS.value)
            rows = {name: self.summary(name, rows) for name, rows in found.items()}
            for name, row in rows.items():
                if name not in statics:
                    row |= self.controlled(name)
            better = max(cheap, key=lambda n: rows[n]["tokens_per_s"])
            ratio = interval(total_ratio(seconds(found[better]), seconds(found["helios"])))
            work = total_ratio(rows[better]["flops"], rows["helios"]["flops"])
            result["orders"][order] = {
                "policies": rows,
                "better_static": better,
                "throughput_ratio": ratio,
                "energy_proxy_ratio": interval(work),
                "over_chance": interval(
                    total_ratio(seconds(found["chance"]), seconds(found["helios"]))
                ),
            }
            if first:
                rates = [seconds(found[n]) for n in statics]
                fastest = [min(r[b] for r in rates if b < len(r)) for b in range(_BLOCKS.value)]
                result["orders"][order]["regret"] = sum(seconds(found["helios"])) / sum(fastest) - 1
                result["orders"][order] |= equal(rows, [*statics])
                result["orders"][order]["frontier"] = frontier(rows, [*statics])
            launch.say(f"{order}: {json.dumps(result['orders'][order])}")
        result |= self.response(statics, untruncated)
        first = result["orders"][_ORDERS.value[0]]
        for name in ("better_static", "throughput_ratio", "energy_proxy_ratio"):
            result[name] = first[name]
        return result

    def response(self, statics: dict, untruncated: list) -> dict:
        """Return seconds to the first token where no request waits for a slot.

        They are over those of the static policy with the fewest slots.
        """
        from eejax.analysis import total_ratio

        names = [name for name in untruncated if name.startswith("small")]
        clients = _CLIENTS.value or self.slots["small"][-1]
        policies = {name: statics[name] for name in names}
        policies["helios"] = lambda: self.chosen("response_time")
        found = self.through(policies, "shuffled", _BLOCKS.value, clients)
        rows = {name: self.summary(name, rows) for name, rows in found.items()}
        rows["helios"] |= self.controlled("helios")
        better = min(names, key=lambda name: rows[name]["ttft"]["mean"])

        def waited(rows):
            return [sum(a.ttft for a in answers) for _, answers in rows]

        ratio = total_ratio(waited(found[better]), waited(found["helios"]))
        return {
            "clients": clients,
            "response": rows,
            "response_static": better,
            "ttft_ratio": {"ratio": ratio.median, "interval": [ratio.low, ratio.high]},
        }


def frontier(rows: dict, statics: list) -> list[dict]:
    """Return gain against quality for every policy that chooses, by falling agreement.

    The gain is the ratio of its tokens a second to those of the fastest static policy of no less
    agreement; None where there is none.
    """
    found = []
    for name in [name for name in rows if name not in statics]:
        own = rows[name]
        good = [n for n in statics if rows[n]["agreement"] >= own["agreement"] - NEAR]
        best = max(good, key=lambda n: rows[n]["tokens_per_s"], default=None)
        ratio = None if best is None else own["tokens_per_s"] / rows[best]["tokens_per_s"]
        point = dict(policy=name, agreement=own["agreement"], tokens_per_s=own["tokens_per_s"])
        found.append(point | dict(static=best, ratio=ratio))
    return sorted(found, key=lambda point: -point["agreement"])


def equal(rows: dict, statics: list) -> dict:
    """Return tokens a second over those of static policies of equal quality.

    They are the fastest with the same agreement with its whole model, and the fastest whose text is
    as likely to the judge; None where there is none.
    """
    from eejax.analysis import total_ratio

    own, found = rows["helios"], {}
    enough = {
        "agreement": lambda row: row["agreement"] >= own["agreement"] - NEAR,
        "judge": lambda row: row["judge_perplexity"] <= own["judge_perplexity"] * (1 + NEAR),
    }
    for kind, is_enough in enough.items():
        rates = {n: rows[n]["tokens_per_s"] for n in statics if is_enough(rows[n])}
        best = max(rates, key=lambda n: rates[n], default=None)
        if best is None:
            found[f"at_equal_{kind}"] = None
            continue
        n = len(rows[best]["blocks"])  # the larger model serves in fewer
        ratio = total_ratio(rows[best]["blocks"], own["blocks"][:n])
        found[f"at_equal_{kind}"] = {
            "static": best,
            "ratio": ratio.median,
            "interval": [ratio.low, ratio.high],
        }
    return found


if __name__ == "__main__":
    launch.run(main)
