"""Command `eejax`: `eejax train --config=demo ...` runs the launcher of that name.

Only the named launcher is imported, so `eejax --help` needs no JAX.
"""

from __future__ import annotations

import difflib
import importlib.util
import sys

import eejax
from eejax.experiments import closed_output, interrupts

# The module in eejax.experiments and its line of `eejax --help`, by command.
COMMANDS = {
    "quickstart": ("quickstart", "Grade, tune and time a real model, and chat with it."),
    "train-demo": ("train_demo", "Train a small model in minutes and show what early exits save."),
    "train": ("train", "Train an early-exit model, or resume a run."),
    "tune": ("tune_exits", "Tune early exits for a trained model, which stays as it is."),
    "calibrate": ("calibrate", "Train routers for a trained or imported model."),
    "evaluate": ("evaluate", "Measure loss, perplexity and bits per byte of every exit."),
    "grade": ("grade", "Tell whether early exit pays for a model on this device."),
    "sweep": ("sweep", "Measure quality and speed of every gate at every threshold."),
    "score-tasks": ("score_tasks", "Score the tasks of lm-eval by every exit and threshold."),
    "chat": ("chat", "Chat with a model, each token in the color of its exit."),
    "generate": ("generate", "Generate text, each token in the color of its exit."),
    "generate-batch": ("generate_batch", "Complete a file of prompts in batches."),
    "serve": ("serve", "Serve models behind OpenAI's interface."),
    "repository": ("repository", "Show, extend or rebuild a server's repository of measurements."),
    "timeline": ("timeline", "Draw the performance of a server over prompts."),
    "import-hf": ("import_hf", "Import a pretrained model as a run."),
    "export-hf": ("export_hf", "Export a run as a folder that transformers opens."),
    "prepare-data": ("prepare_data", "Tokenize the text of a run in several processes."),
    "task-text": ("task_text", "Write training text of the kinds that mixed prompts are of."),
    "describe": ("describe", "Describe an experiment and what it takes, without running it."),
    "plan": ("plan", "Plan a pipelined run: time and memory of every stage."),
    "report": ("report", "Compare the curves and final figures of several runs."),
    "gpu-check": ("gpu_check.__main__", "Check and measure everything on one GPU, in stages."),
    "gpu-programs": ("gpu_programs", "Compile programs for a GPU without one, and inspect them."),
    "bench batched": ("bench_batched", "Time continuous batching against batches of `full`."),
    "bench capacity": ("bench_capacity", "Count the requests that fit beside part of a model."),
    "bench decode": ("bench_decode", "Time decoding against transformers."),
    "bench engines": ("bench_engines", "Time the engines on a trained model."),
    "bench helios": ("bench_helios", "Time a server that chooses its model against fixed models."),
    "bench kernels": ("bench_kernels", "Time the GPU kernels against XLA's operations."),
    "bench pipeline": ("bench_pipeline", "Measure what early exits cost a pipeline."),
    "bench real": ("bench_real", "Time lossless decoding of a real model, by kind of prompt."),
    "bench routers": ("bench_routers", "Compare routers with those of tide-inference."),
    "bench tasks": ("bench_tasks", "Score tasks of a real model at thresholds with a guarantee."),
    "bench serving": ("bench_serving", "Measure what the server costs, and latency by load."),
    "bench slots": ("bench_slots", "Measure what free slots of an engine cost."),
    "bench train": ("bench_train", "Time a training step against transformers."),
    "reproduce all": ("reproduce.all", "Run every reproduction and write one page of findings."),
    "reproduce convergence": ("reproduce.convergence", "EE-LLM: convergence of training losses."),
    "reproduce guarantee": ("reproduce.guarantee", "CALM: thresholds with a guarantee."),
    "reproduce helios": ("reproduce.helios", "HELIOS: tables and figures with two small models."),
    "reproduce inference": ("reproduce.inference", "EE-LLM: quality over speed of generation."),
    "reproduce mechanisms": ("reproduce.mechanisms", "Propositions and formulas of all papers."),
    "reproduce recipes": ("reproduce.recipes", "Training recipes at equal tokens."),
    "reproduce tide": ("reproduce.tide", "TIDE: tables on one small model."),
    "reproduce training-efficiency": (
        "reproduce.training_efficiency",
        "EE-LLM: training time and memory, simulated.",
    ),
}
HELP = ("help", "-h", "-help", "--help")


@closed_output.ends_quietly()
def main() -> None:
    """Run the launcher that the command line names."""
    interrupts.install()
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in HELP:
        print(f"{eejax.__doc__}\n\n{usage()}")
        return
    if arguments[0] == "--version":
        print(f"eejax {eejax.__version__}")
        return
    for words in (1, 2):
        if (name := " ".join(arguments[:words])) in COMMANDS:
            return run(name, arguments[words:])
    group = f"{arguments[0]} "
    if is_group(group) and (len(arguments) == 1 or arguments[1] in HELP):
        print(usage(group))
        return
    sys.exit(f"error: {unknown(arguments)} `eejax --help` lists all commands.")


def usage(group: str = "") -> str:
    """Describe the commands whose names begin with `group`, one a line."""
    named = {
        name.removeprefix(group): line
        for name, (_, line) in COMMANDS.items()
        if name.startswith(group)
    }
    width = max(map(len, named))
    lines = (
        f"Usage: eejax {group}COMMAND [FLAGS]",
        f"`eejax {group}COMMAND --help` describes a command and its flags.",
        "",
        "Commands:",
        *(f"  {name:{width}}  {line}" for name, line in named.items()),
    )
    return "\n".join(lines)


def is_group(group: str) -> bool:
    return any(name.startswith(group) for name in COMMANDS)


def unknown(arguments: list[str]) -> str:
    """Describe an unknown command, with the commands that may be meant."""
    words = 2 if is_group(f"{arguments[0]} ") else 1
    given = " ".join(arguments[:words])
    near = [name for name, (module, _) in COMMANDS.items() if module == given]
    near = near or difflib.get_close_matches(given, COMMANDS)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"there is no command {given!r}.{hint}"


def run(name: str, flags: list[str]) -> None:
    """Run a command's module as `python -m` does.

    `runpy.run_module` would put the module's path in the place of the name that --help shows.
    """
    spec = importlib.util.find_spec(f"eejax.experiments.{COMMANDS[name][0]}")
    module = importlib.util.module_from_spec(spec)
    module.__name__ = "__main__"
    sys.modules["__main__"] = module
    sys.argv = [f"eejax {name}", *flags]
    exec(spec.loader.get_code(spec.name), vars(module))
