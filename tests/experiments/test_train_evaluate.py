"""Training, tuning and evaluation as a user's commands, most of them in this process."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from endings import ended

from eejax.train.metrics import read_metrics

SMALL = [
    "--config=configs/tiny.py",
    "--config.data.max_bytes=60000",
    "--config.train.eval_batches=1",
    "--config.train.log_every=1",
]


@pytest.fixture(autouse=True)
def from_the_repository_root(repo_root, monkeypatch):
    monkeypatch.chdir(repo_root)


def run(name, *arguments):
    return ended(f"eejax.experiments.{name}", *arguments)


def launch(root, name, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", f"eejax.experiments.{name}", *arguments],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "100"},
    )


def finish(process, timeout=600):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def trained(repo_root, tmp_path_factory):
    """A run on a text of its own, which tests may add to: (its folder, what it printed)."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text").mkdir()
    for i in range(9):
        (folder / "text" / f"{i}.txt").write_text(f"to be or not to be {i}\n" * 300)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(repo_root)
        code, out, err = run("train", *made_by(folder / "run"))
    assert code == 0, err
    return folder / "run", out, err


def made_by(workdir):
    """The arguments of the run in this folder."""
    text = f"--config.data.source={workdir.parent}/text/*"
    return (*SMALL, f"--workdir={workdir}", text, "--config.train.steps=12")


def test_training_ends_with_a_table_of_the_exits(trained):
    workdir, out, err = trained
    assert out.startswith("last evaluation: step 12\n")
    assert [line.split()[0] for line in out.splitlines()[1:5]] == [
        "exit",
        "------",
        "exit_1",
        "final",
    ]
    assert "starting:" in err and "done: step 12" in err


def test_exits_are_tuned_and_the_result_is_evaluated(trained, tmp_path):
    arguments = (
        f"--base={trained[0]}",
        "--exits=1,2",
        "--head=tied",
        f"--workdir={tmp_path}",
        "--config=tune_exits",  # read anew: another test of this process may have changed it
        "--config.train.steps=6",
        "--config.train.eval_batches=1",
    )
    code, out, err = run("tune_exits", *arguments)
    assert code == 0, err
    names = [line.split()[0] for line in out.splitlines()[1:5]]
    assert names == ["exit", "------", "exit_1", "exit_2"]
    code, out, err = run("evaluate", f"--workdir={tmp_path}", "--batches=1")
    assert code == 0, err
    names = [line.split()[0] for line in out.splitlines()[1:6]]
    assert names == ["exit", "------", "exit_1", "exit_2", "final"]


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--exits=x", "--exits = 'x': must be numbers"),
        ("--exits=9", "must lie in 0..2"),
        ("--exits=1,1", "each boundary once"),
        ("--base=no/such/where", "train.base = 'no/such/where': no/such/where: no such folder"),
    ],
)
def test_tuning_what_cannot_be_tuned_is_refused(trained, tmp_path, argument, message):
    arguments = (f"--base={trained[0]}", "--exits=1", f"--workdir={tmp_path}", argument)
    one_error(run("tune_exits", *arguments), message)


def test_evaluation_agrees_with_the_run_and_prints_json_last(trained):
    workdir, _, _ = trained
    code, out, err = run("evaluate", f"--workdir={workdir}", "--batches=1")
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    recorded = read_metrics(workdir)[-1]
    assert result["step"] == 12
    for key in ("eval/loss/exit_1", "eval/loss/final", "eval/bits_per_byte/final"):
        assert result[key] == pytest.approx(recorded[key], rel=1e-6)


def test_settings_of_another_run_are_refused(trained):
    result = run("train", *made_by(trained[0]), "--config.optimizer.b2=0.9")
    one_error(result, "are of another run")
    assert "optimizer.b2: 0.95 in the checkpoint, 0.9 in the configuration" in result.err


def test_evaluation_of_text_that_changed_is_refused(trained):
    workdir, _, _ = trained
    more = workdir.parent / "text" / "9.txt"
    more.write_text("more")
    try:
        result = run("evaluate", f"--workdir={workdir}")
    finally:
        more.unlink()
    one_error(result, f"the text of {workdir} has changed since the model was trained")


def test_evaluation_of_other_text(trained, tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 50)
    workdir, _, _ = trained
    code, out, err = run("evaluate", f"--workdir={workdir}", f"--text={tmp_path}/*.txt")
    assert code == 0, err
    # Every byte and the document's end are predicted, but for the first byte.
    assert json.loads(out.splitlines()[-1])["tokens"] == 19 * 50


def test_sigterm_saves_and_the_same_command_resumes(repo_root, tmp_path):
    # A schedule that does not end with the run, so that the number of steps may change.
    small = (*SMALL, "--config.optimizer.schedule=constant")
    arguments = (
        *small,
        f"--workdir={tmp_path}",
        "--config.train.steps=100000",
        "--config.train.checkpoint_every=0",
        "--config.train.eval_every=0",
    )
    process = launch(repo_root, "train", *arguments)
    deadline = time.monotonic() + 300
    while not read_metrics(tmp_path) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 128 + signal.SIGTERM, err
    (saved,) = [int(p.name) for p in (tmp_path / "checkpoints").iterdir()]
    assert f"stopped by SIGTERM after step {saved}: checkpoint saved" in err
    assert "checkpoint_manager" not in err, "Orbax chatters"
    last = f"--config.train.steps={saved + 1}"
    code, _, err = run("train", *arguments[:-3], last)
    assert code == 0 and f"resuming after step {saved}" in err, err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--config.train.batch_size=7", "--config.mesh.data=2"], "train.batch_size = 7"),
        (["--config.data.source=/nowhere/*.txt"], "/nowhere/*.txt matches no file"),
        (["--config.train.stepz=7"], "config.train.stepz: no such field. Did you mean steps?"),
        (["--config.trane.steps=7"], "config.trane: no such section. Did you mean train or tune?"),
        (["--config.train.steps=many"], "flag --config.train.steps=many: invalid literal"),
        (["--config.optimizer.clip_norm=x"], "clip_norm = 'x': must be a number or None"),
        (["--config=absent.py"], "--config = 'absent.py': no such file"),
        (["--stepz=7"], "Unknown command line flag 'stepz'"),
        (["7"], "unexpected arguments: 7"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path, arguments, message):
    one_error(run("train", *SMALL, f"--workdir={tmp_path}", *arguments), message)
    assert not (tmp_path / "checkpoints").exists()


def one_error(result, message):
    code, out, err = result
    errors = [line for line in (out + err).splitlines() if line.startswith("error:")]
    assert code == 1 and len(errors) == 1 and message in errors[0], err
    assert "Traceback" not in err


def test_a_mistake_in_a_process_of_its_own(repo_root):
    one_error(finish(launch(repo_root, "train", "--config=configs/tiny.py")), "--workdir")


@pytest.mark.parametrize(
    "text, message",
    [
        ("def get_config(:", "invalid syntax"),
        ("import absent_module", "absent_module"),
        (
            "from ml_collections import ConfigDict\n"
            "def get_config(): return ConfigDict({'train': {'steps': 1}})",
            "Let it begin from eejax.train.config.default_config()",
        ),
    ],
)
def test_a_config_file_that_cannot_be_used_is_one_clear_line(tmp_path, text, message):
    (tmp_path / "mine.py").write_text(text)
    arguments = (f"--config={tmp_path}/mine.py", "--config.mesh.data=1", f"--workdir={tmp_path}")
    one_error(run("train", *arguments), message)


def test_a_folder_that_may_not_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    result = run("train", *SMALL, f"--workdir={tmp_path}/file/run")
    one_error(result, "Not a directory")


def test_fields_that_the_file_does_not_name_can_be_set(tmp_path):
    arguments = (
        *SMALL,
        f"--workdir={tmp_path}",
        "--config.train.steps=2",
        "--config.train.remat=full",
        "--config.model.rotary.theta=500",
        "--config.optimizer.clip_norm=None",
        "--config.data.document_masks",
    )
    code, _, err = run("train", *arguments)
    assert code == 0, err
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["train"]["remat"] == "full" and saved["model"]["rotary"]["theta"] == 500
    assert saved["optimizer"]["clip_norm"] is None and saved["data"]["document_masks"] is True


def test_evaluating_nothing_says_what_to_give(tmp_path):
    code, _, err = run("evaluate", f"--workdir={tmp_path}")
    assert code == 1 and "holds no checkpoints: give the --workdir of a training run" in err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--processes=2"], "error: coordinator, process missing: "),
        (["--distributed", "--process=1"], "error: --process: must be left out with --distributed"),
        (
            ["--coordinator=localhost:9", "--processes=2", "--process=2"],
            "error: process = 2: must be the number of this process, 0 to 1",
        ),
    ],
)
def test_processes_that_cannot_be_joined_are_refused(trained, flags, message):
    code, out, err = run("evaluate", f"--workdir={trained[0]}", *flags)
    assert code == 1 and err.startswith(message) and len(err.splitlines()) == 1


def test_a_cluster_that_is_not_there_is_not_joined(repo_root, trained, monkeypatch):
    """In a process of its own: JAX looks for a cluster before its first computation alone."""
    for cluster in ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(cluster, raising=False)  # where the tests themselves run in one
    flags = (f"--workdir={trained[0]}", "--distributed")
    code, out, err = finish(launch(repo_root, "evaluate", *flags))
    message = "error: no cluster is detected (Slurm, Open MPI, Cloud TPU, or"
    assert code == 1 and err.startswith(message) and len(err.splitlines()) == 1


def test_a_cluster_is_found_by_its_variables(repo_root, trained, tmp_path, monkeypatch):
    """Two tasks as Slurm describes them, the coordinator's port made from the job's number."""
    job = str(1 + os.getpid() % 4000)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    for name, value in (("JOB_ID", job), ("STEP_NODELIST", "localhost"), ("NTASKS", "2")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    tasks = []
    for task in "01":
        monkeypatch.setenv("SLURM_PROCID", task)
        monkeypatch.setenv("SLURM_LOCALID", task)
        flags = (f"--workdir={trained[0]}", "--distributed", "--batches=1", "--batch_size=8")
        tasks.append(launch(repo_root, "evaluate", *flags))
    (code, out, err), (code2, out2, err2) = map(finish, tasks)
    assert (code, code2) == (0, 0), err + err2
    metrics = json.loads(out.splitlines()[-1])
    assert metrics["step"] == 12 and "exit_1" not in out2
    alone = run("evaluate", f"--workdir={trained[0]}", "--batches=1").out
    assert metrics == pytest.approx(json.loads(alone.splitlines()[-1]), rel=1e-5)
