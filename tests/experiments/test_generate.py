"""Every engine from one launcher, its flags, and a session of prompts; on a run of seconds."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys

import jax
import pytest
from absl import flags
from launchers import call, help_of

from eejax.common.errors import ConfigError
from eejax.gates.confidence import GATES
from eejax.inference import EngineOptions, Generator, PipelinedGenerator
from eejax.train.runs import open_run

SMALL = ("--max_new_tokens=40", "--cap=1", "--json")


@pytest.fixture
def generate(small_run, capsys, monkeypatch):
    """Runs the launcher: (its JSON, what it printed, what went to stderr)."""

    def run(*arguments, lines=(), terminal=io.StringIO):
        monkeypatch.setattr(sys, "stdin", terminal("".join(f"{line}\n" for line in lines)))
        capsys.readouterr()
        call("eejax.experiments.generate", f"--workdir={small_run}", *SMALL, *arguments)
        out, err = capsys.readouterr()
        return json.loads(out.splitlines()[-1]), out, err

    return run


@pytest.fixture(scope="module")
def expected(small_run):
    """Tokens and boundaries of an engine that is asked in Python."""
    model = open_run(small_run).model
    ids = model.tokenizer.encode("early exit").tolist()

    def ask(engine, **rules):
        options = EngineOptions(engine, cap=1)
        stream = Generator.make(model.params, model.config, options).stream([ids], 40, **rules)
        *_, result = stream
        return {"tokens": result.ids(0), "boundaries": result.boundaries[0].tolist()}

    return ask


EARLY = ("--prompt=early exit", "--threshold=0.5,0.3")


@pytest.mark.parametrize(
    "engine, flags, like",
    [
        pytest.param("full", (), "full", marks=pytest.mark.slow),
        pytest.param("posthoc", (), "posthoc", marks=pytest.mark.slow),
        ("recompute", (), "posthoc"),
        ("pipelined", ("--mesh.pipe=2", "--stage_layers=2,1"), "posthoc"),
        ("propagate", (), "propagate"),
        ("speculative", ("--drafts=2", "--draft_exit=2"), "full"),
    ],
)
def test_every_engine(generate, expected, engine, flags, like):
    got, out, _ = generate(*EARLY, f"--engine={engine}", *flags)
    rules = {} if like == "full" else {"threshold": [0.5, 0.3]}
    [request] = got["requests"]
    assert {k: request[k] for k in ("tokens", "boundaries")} == expected(like, **rules)
    assert got["engine"] == engine and f" with engine {engine}" in out
    assert request["text"] == bytes(request["tokens"]).decode()
    if like != "full":
        assert len(set(request["boundaries"])) > 1, "the text shows nothing"


def test_stages_are_where_the_mesh_says(generate, monkeypatch):
    made = []
    original = PipelinedGenerator.make

    def make(*a, **k):
        return made.append(original(*a, **k)) or made[-1]

    monkeypatch.setattr(PipelinedGenerator, "make", make)
    with pytest.raises(ConfigError, match=r"^prompts\[1\] = '0 tokens'"):  # nothing is compiled
        generate(
            "--prompt=a",
            "--prompt=",
            "--engine=pipelined",
            "--mesh.pipe=2",
            "--mesh.data=2",
            "--stage_layers=balanced",
        )
    stages = made[0].stages
    assert dict(stages.mesh.shape) == {"data": 2, "pipe": 2, "model": 1}
    assert sum(stages.partition.layers) == 3


def test_a_run_is_read_onto_the_mesh(generate, monkeypatch):
    seen, make = [], Generator.make
    monkeypatch.setattr(
        Generator, "make", lambda params, *a, **k: seen.append(params) or make(params, *a, **k)
    )
    generate("--prompt=early exit", "--prompt=def main(", "--mesh.data=2")
    spread = [len(a.sharding.device_set) for a in jax.tree.leaves(seen[0])]
    assert set(spread) == {2}


def test_a_prompt_file_has_one_reader(generate, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfearly\r\nexit")  # as Windows writes it
    result, *_ = generate(f"--prompt_file={tmp_path / 'a.txt'}")
    assert result["requests"][0]["prompt"] == "early\nexit"


def test_auto_says_what_it_found(generate):
    got, out, _ = generate(*EARLY, "--engine=auto", "--max_new_tokens=10")
    assert got["exits_ratio"] is None and got["exits_on"] is True
    assert "exits were left on: too few tokens to measure" in out
    # Three calls for each prompt; four pairs are sixteen.
    got, out, _ = generate(
        "--engine=auto", "--interactive", "--threshold=0", lines=["early exit"] * 7
    )
    ratio = got["exits_ratio"]
    assert ratio > 0 and got["exits_on"] == (ratio > 1)
    said = "left on" if got["exits_on"] else "turned off"
    assert re.search(rf"exits were {said}: .*{ratio:.2f} times as fast", out)


@pytest.mark.slow  # as `auto`, and `speculative` runs above
def test_auto_of_drafts(generate, expected):
    got, out, _ = generate("--prompt=early exit", "--engine=auto_speculative")
    assert got["requests"][0]["tokens"] == expected("full")["tokens"]
    assert "drafts were left on" in out or "drafts were turned off" in out


def test_flags_without_effect_are_said(generate):
    _, _, err = generate(*EARLY, "--engine=full", "--drafts=2", "--num_segments=9")
    said = "note: without effect with --engine=full: --threshold, --num_segments, --cap, --drafts\n"
    assert said in err
    _, _, err = generate(*EARLY, "--engine=recompute", "--gate=margin")
    assert "without effect" not in err


def test_help_lists_the_gates():
    assert help_of("eejax.experiments.generate", "gate").split(": ")[1] == ", ".join(GATES) + "."


def test_rules_of_the_policy(generate, expected):
    got, _, _ = generate(
        "--prompt=early exit",
        "--gate=margin",
        "--threshold=0.2",
        "--min_exit_layer=2",
        "--decay=1.5",
    )
    rules = dict(gate="margin", threshold=0.2, min_exit_layer=2, decay=1.5)
    [request] = got["requests"]
    assert {k: request[k] for k in ("tokens", "boundaries")} == expected("recompute", **rules)
    assert 2 in request["boundaries"] and 1 not in request["boundaries"]
    got, _, _ = generate("--prompt=early exit", "--num_segments=1", "--gate=fixed", "--exits=2")
    assert set(got["requests"][0]["boundaries"]) == {1}


def test_a_single_prompt_has_a_legend(generate):
    _, out, _ = generate(*EARLY, "--color=always")
    line = next(line for line in out.splitlines() if line.startswith("colors: "))
    assert re.search(r"\x1b\[38;5;196mexit 1: \d+\x1b\[0m, \x1b\[38;5;118mexit 2: ", line)
    assert re.search(r", final 3: \d+$", line)
    assert "colors:" not in generate(*EARLY, "--color=never")[1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--gate=trust"], r"^--gate = 'trust': must be one of 'max_probability'"),
        (["--gate=router"], r"^--gate = 'router': no exit of this model has a router"),
        (["--threshold=0.5,nan"], r"^--threshold = \[0.5, nan\]: must lie in \[0, 1\]"),
        (["--threshold=1,1,1"], r"^--threshold = .*: must be one number, one per early exit"),
        (["--exits=3"], r"^--exits = \[3\]: must be among this model's exit boundaries \[1, 2\]"),
        (["--min_exit_layer=-1"], r"^--min_exit_layer = -1: must be a number of layers"),
        (["--decay=-0.5"], r"^--decay = -0.5: must be finite and at least 0"),
        (["--num_segments=4"], r"^--num_segments = 4: must be at most the 3 segments"),
        (["--cap=0"], r"^--cap = 0: must be an integer of at least 1"),
        (["--engine=speculative", "--draft_exit=3"], r"^--draft_exit = 3: must be the boundary"),
        (["--top_p=0"], r"^--top_p = 0.0: "),
        (["--stop=\udcff"], r"^--stop = .*: must be text that UTF-8 can"),
        (["--decay=1e300"], r"^--decay = 1e\+300: must be finite"),
        (["--temperature=1e300"], r"^--temperature = 1e\+300: must be at least 0"),
        (["--stop="], r"^--stop = \[''\]: must be a sequence of nonempty strings"),
        (["--stop_token=999"], r"^--stop_token = \[999, 256\]: must be a sequence of token ids"),
        (["--max_new_tokens=0"], r"^--max_new_tokens = 0: must be an integer of at least 1"),
        (["--mesh.data=2"], r"^prompts = 1: must be a multiple of mesh.data"),
        (["--mesh.pipe=2"], r"^--mesh.pipe = 2: must be 1 with the engine 'recompute'"),
        (
            ["--engine=pipelined", "--mesh.pipe=3", "--mesh.model=7"],
            r"^--mesh .* needs 21 devices.*XLA_FLAGS=--xla_force_host_platform_device_count=21",
        ),
        (["--engine=pipelined", "--mesh.pipe=4"], r"^--mesh.pipe = 4: must be at most the 3"),
        (
            ["--engine=pipelined", "--mesh.pipe=2", "--stage_layers=1,1"],
            r"^--stage_layers = \(1, 1\): must add up",
        ),
        (
            ["--engine=pipelined", "--mesh.pipe=2", "--stage_layers=odd"],
            r"^--stage_layers = 'odd': must be one of 'even', 'balanced'",
        ),
        (["--engine=pipelined", "--stage_layers=2,x"], r"^--stage_layers = '2,x': must be numbers"),
        (["--engine=pipelined", "--mesh.data=2"], r"^prompts = 1: must be a multiple of mesh.data"),
        (["--interactive"], r"^--prompt: --interactive reads its prompts itself"),
    ],
)
def test_bad_values_name_their_flag(generate, arguments, message):
    with pytest.raises(ConfigError, match=message):
        generate("--prompt=x", *arguments)


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--engine=beam", "--engine=beam: value should be one of <full|posthoc|"),
        ("--mesh.pipe=0", "--mesh.pipe=0"),
        ("--mesh.pipe=two", "--mesh.pipe=two"),
        ("--mesh.pipes=2", "mesh.pipes"),
    ],
)
def test_values_that_are_none_are_refused_with_the_flags(generate, argument, message):
    with pytest.raises(flags.Error, match=re.escape(message)):
        generate("--prompt=x", argument)


PROMPTS = ["early exit", "", "x" * 200, "tokén gate"]


def test_a_session_goes_on_after_a_bad_prompt_and_compiles_once(generate):
    generate("--prompt=early exit", "--prompt=b", *EARLY[1:])  # what is compiled is this engine's
    jax.clear_caches()
    compiled = []

    def listen(event, *_, **about):
        if "backend_compile" in event:
            compiled.append((sys.stdin.tell(), about["fun_name"]))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        got, out, err = generate(
            *EARLY[1:], "--interactive", "--color=always", "--stop_token=10", lines=PROMPTS
        )
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert (0, "jit(decode)") in compiled
    assert not [name for at, name in compiled if at], "compiled after a prompt was read"
    assert [r["prompt"] for r in got["requests"]] == [PROMPTS[0], PROMPTS[3]]
    assert re.findall("^error: .*", err, re.M) == [
        "error: prompt = '0 tokens': must have at least 1 token and fewer than the context (128). "
        "Start with an end-of-document token.",
        "error: prompt = '200 tokens': must have at least 1 token and fewer than the context (128)."
        " Shorten the prompt.",
    ]
    plain = re.sub(r"\x1b\[[\d;]*m", "", out)
    lines = re.findall(
        r"^\[(\d+) tokens, ([\d.]+ tokens/s|too few tokens to time), ended by: (\w+); "
        r"exit 1: (\d+), exit 2: (\d+), final 3: (\d+)\]$",
        plain,
        re.M,
    )
    for request, (tokens, _, finish, *counts) in zip(got["requests"], lines, strict=True):
        assert int(tokens) == len(request["tokens"]) and finish == request["finish"]
        assert list(map(int, counts)) == [request["boundaries"].count(b) for b in (1, 2, 3)]
        assert request["text"] in plain
    assert "\x1b[38;5;196mexit 1: " in out


def test_a_prompt_gets_in_a_session_what_it_gets_alone(generate):
    got, _, _ = generate(*EARLY[1:], "--interactive", lines=[PROMPTS[0], PROMPTS[3]])
    for i in (0, 3):
        alone, _, _ = generate(*EARLY[1:], f"--prompt={PROMPTS[i]}")
        assert alone["requests"][0] == got["requests"][bool(i)]


@pytest.fixture
def heard():
    """Ctrl-C is heard, also where these tests run in the background, which would not hear it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Pressed(io.StringIO):
    """A terminal's output at which Ctrl-C is pressed, once a text is on it."""

    def __init__(self, after: str):
        super().__init__()
        self.after = after

    def write(self, text):
        done = super().write(text)
        if self.after and self.after in self.getvalue():
            self.after = ""
            signal.raise_signal(signal.SIGINT)
        return done


def test_ctrl_c_ends_an_answer_and_not_the_session(generate, monkeypatch, small_run, heard):
    arguments = (*EARLY[1:], "--interactive")
    whole, _, _ = generate(*arguments, lines=["early exit", "gate"])
    text = whole["requests"][0]["text"]
    screen = Pressed(text[:20])
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stdin", io.StringIO("early exit\ngate\n"))
    try:
        call("eejax.experiments.generate", f"--workdir={small_run}", *SMALL, *arguments)
    except KeyboardInterrupt:
        pytest.fail("Ctrl-C ended the session")
    got = json.loads(screen.getvalue().splitlines()[-1])["requests"]
    assert "ended by: Ctrl-C" in screen.getvalue() and screen.after == ""
    assert 20 <= len(got[0]["tokens"]) < 40 and got[0]["finish"] is None
    assert got[1]["tokens"] == whole["requests"][1]["tokens"]


class Left(io.StringIO):
    """A terminal's input at whose end Ctrl-C is pressed."""

    def readline(self, *size):
        return super().readline(*size) or signal.raise_signal(signal.SIGINT)


def test_ctrl_c_at_the_prompt_ends_the_session(generate, heard):
    got, _, _ = generate("--interactive", lines=["early exit"], terminal=Left)
    assert [r["prompt"] for r in got["requests"]] == ["early exit"]


@pytest.fixture
def launch(repo_root, one_device):
    """Runs the launcher in a process of its own: (exit status, standard output, errors)."""

    def run(*arguments, text=""):
        process = subprocess.run(
            [sys.executable, "-P", "-m", "eejax.experiments.generate", *arguments],
            cwd=repo_root,
            capture_output=True,
            text=True,
            input=text,
            timeout=600,
            env=os.environ | {"XLA_FLAGS": one_device},
        )
        return process.returncode, process.stdout, process.stderr

    return run


def test_a_session_by_pipe_in_a_process_of_its_own(launch, small_run):
    code, out, err = launch(f"--workdir={small_run}", *SMALL, "--interactive", text="early\n\nexit")
    assert code == 0, err
    assert [r["prompt"] for r in json.loads(out.splitlines()[-1])["requests"]] == ["early", "exit"]
    assert err.count("error: prompt = '0 tokens'") == 1 and "> " not in out


def test_a_mesh_without_devices_says_in_a_line_how_to_get_some(launch, small_run):
    code, _, err = launch(
        f"--workdir={small_run}", "--engine=pipelined", "--mesh.pipe=2", "--prompt=x"
    )
    assert code == 1 and err.startswith("error: --mesh (data, pipe, model) = (1, 2, 1) needs 2")
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=2" in err and err.count("\n") == 1


def test_an_old_name_of_a_flag_names_the_new_one(launch):
    code, _, err = launch("--workdir=runs/mine", "--max_depth=1", "--prompt=x")
    assert (code, err) == (1, "error: --max_depth: is now called --num_segments.\n")
