"""What the batch scripts say where there is no Slurm: dry runs, and shells that only seem to be in a job."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
QUOTED = str(ROOT).replace(" ", r"\ ")  # as bash's %q prints it


def run(script, *words, root=ROOT, cwd=ROOT, **variables):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PYTHON", "CONTAINER", "MPI"))}
    command = [str(root / script), *map(str, words)]
    return subprocess.run(command, env=kept | variables, cwd=cwd, capture_output=True, text=True, timeout=300)


def slurm_job(programs: Path, **more: str) -> dict[str, str]:
    """Variables of a job of two ranks on one node, with the stand-ins for Slurm's programs in `programs`."""
    nodes = {"SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "a", "SLURM_NODELIST": "a"}
    tasks = {"SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2", "SLURM_CPUS_ON_NODE": "2"}
    return {"SLURM_JOB_ID": "7", "PATH": f"{programs}:{os.environ['PATH']}", **nodes, **tasks, **more}


def srun_line(done):
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("  -> srun"))


SITE = ("-p", "long", "-A", "our group", "--qos=high", "-Jx", "-N2", "--exclusive")
SHOWN = r"--partition=long --account=our\ group --qos=high --job-name=x --exclusive "


@pytest.mark.parametrize(
    ("words", "variables", "printed"),
    [
        ([], {}, "--mpi=pmi2"),
        ([], {}, " --cpus-per-task=<CPUs of the node / 4> --cpu-bind=cores"),
        ([], {}, " --cpu-bind=cores --distribution=block:block"),
        (["-c9"], {}, " --cpus-per-task=9 "),
        ([], {"SLURM_CPUS_ON_NODE": "24"}, " --cpus-per-task=6 "),
        ([], {"SLURM_GPUS_PER_NODE": "h100:4"}, "4 GPUs each, for at most 2:00:00: 8 GPU-hours"),
        ([], {"SLURM_GPUS_PER_NODE": "h100:4"}, "--gpus-per-node=h100:4"),
        (SITE, {}, f"sbatch -N 2 --ntasks-per-node=4 --gpus-per-node=0 --time=2:00:00 {SHOWN}"),
    ],
)
def test_dry_runs_print_what_would_be_run(words, variables, printed):
    done = run("slurm/convert.sbatch", "--dry-run", *words, "hf-to-megatron", **variables)
    assert done.returncode == 0 and printed in done.stdout, done.stdout + done.stderr


def test_a_conversion_is_printed_with_its_quotes():
    line = srun_line(run("slurm/convert.sbatch", "--dry-run", "hf-to-megatron", "--hf", "my model"))
    assert line.endswith(rf"-m mpi4py {QUOTED}/tools/convert_hf_to_megatron.py --hf my\ model")


def test_a_dry_run_shows_its_own_layout_and_repeats_warnings_last(tmp_path):
    """16 ranks on 2 nodes; a vLLM that is on the nodes only; paths of the repository's file from another directory."""
    words = ["-N", 2, "configs/recipes/grpo-qwen2.5-7b-1n8g.yaml", "rollout.vllm.python=/no/python"]
    refused = run("slurm/train.sbatch", "--dry-run", *words, "rollout.backend=vllm", cwd=tmp_path)
    assert refused.returncode == 2 and "rollout.vllm.python = '/no/python': no such file" in refused.stderr
    done = run("slurm/train.sbatch", "--dry-run", "--elsewhere", *words, "rollout.backend=vllm", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\ncluster:\n  nodes: 2\n  ranks_per_node: 8\n" in done.stdout and "Ranks: 16 =" in done.stdout
    assert f"run_dir: {ROOT}/runs/grpo-qwen2.5-7b-1n8g\n" in done.stdout
    assert f"train {QUOTED}/configs/recipes/grpo-qwen2.5-7b-1n8g.yaml" in srun_line(done)
    last = done.stdout.rpartition("grpo-qwen2.5-7b-1n8g.yaml:\n")[2].splitlines()
    assert "warning: not on this machine: rollout.vllm.python = /no/python" in last and last[-1].startswith("Fits: ")


@pytest.mark.parametrize(("options", "is_warned"), [([], True), (["--ntasks-per-node=2", "--gpus-per-node=0"], False)])
def test_a_dry_run_warns_of_gpus_that_a_run_on_cpus_would_hold(options, is_warned):
    done = run("slurm/train.sbatch", "--dry-run", *options, "configs/quickstart.yaml", PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-5:]
    advice = "the job would hold 8 GPUs for nothing; submit it with --ntasks-per-node=RANKS --gpus-per-node=0"
    assert any(advice in line for line in last) == is_warned


IN_CONTAINER = ("-N", 1, "--ntasks-per-node=2", "configs/quickstart.yaml")


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("convert", ["--gres=gpu:8", "hf-to-megatron"], "not --gres"),
        ("convert", ["nothing"], "must be hf-to-megatron or"),
        ("train", ["nosuch.yaml"], f"nosuch.yaml is not in {ROOT}\n"),
        # With a container the configuration is checked here, and where it writes.
        ("train", [*IN_CONTAINER, "train.run_dir=/no/r"], "= '/no/r': lies in the container and is lost"),
    ],
)
def test_dry_runs_refuse_what_the_job_would(script, words, said):
    done = run(f"slurm/{script}.sbatch", "--dry-run", *words, CONTAINER="image")
    assert done.returncode == 2 and said in done.stderr and "sbatch -N" not in done.stdout


@pytest.mark.parametrize(
    ("options", "warned"),
    [(["-t3"], True), (["-t", "7:50"], True), (["-t8"], False), (["-t3", "--signal=B:USR1@60"], False)],
)
def test_a_time_limit_near_the_warning_is_reported(tmp_path, options, warned):
    words = ["--ntasks-per-node=2", "--gpus-per-node=0", "configs/quickstart.yaml"]
    root = copy_without_python(tmp_path)
    done = run("slurm/train.sbatch", "--dry-run", *options, *words, root=root, CONTAINER="image")
    assert done.returncode == 0, done.stderr
    assert ("leaves an attempt hardly any time" in done.stdout) == warned


@pytest.mark.parametrize(("options", "warned"), [([], True), (["--signal=B:USR1@900"], False)])
def test_a_signal_later_than_the_ranks_may_take_is_reported(tmp_path, options, warned):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf 'stop:\\n  warning_s: 700.0\\n'\n")
    python.chmod(0o755)
    done = run("slurm/train.sbatch", "--dry-run", *options, "configs/quickstart.yaml", PYTHON=str(python))
    assert done.returncode == 0, done.stderr
    said = "stop.warning_s = 700.0 s from Slurm's signal, which comes 240 s before the time limit"
    assert (said in done.stdout) == ("--signal=B:USR1@790" in done.stdout) == warned


def copy_without_python(folder):
    """The scripts where there is no .venv: a dry run does not take the seconds of checking a configuration."""
    for part in ("slurm", "configs"):
        shutil.copytree(ROOT / part, folder / part)
    return folder


def test_a_copy_in_a_directory_with_a_blank_and_without_python(tmp_path):
    """Names are quoted; with a container only the check of the configuration needs Python, and it is left out."""
    root = copy_without_python(tmp_path / "a b")
    config = root / "configs/quickstart.yaml"
    done = run("slurm/train.sbatch", "--dry-run", config, root=root, CONTAINER="image")
    assert done.returncode == 0, done.stderr
    assert "the configuration is not checked" in done.stdout
    assert rf"{tmp_path}/a\ b/slurm/train.sbatch" in done.stdout
    assert "--container-image=image" in srun_line(done) and " python3 -m mpi4py " in srun_line(done)


def test_a_container_gets_the_caches_of_models_and_kernels(tmp_path):
    """Those that ranks outside a container use, or as the variables name them; a dry run makes no folder."""
    given = {"CONTAINER": "image", "HOME": str(tmp_path), "TRITON_CACHE_DIR": "/local/triton"}
    command = "slurm/convert.sbatch", "--dry-run", "hf-to-megatron"
    line = srun_line(run(*command, HF_HOME="/models/hub", **given))
    for place in ("/models/hub", "/local/triton", f"{tmp_path}/.cache/vllm"):
        assert rf"\,{place}:{place}" in line
    names = ("HF_HOME", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME")
    own = {"HOME": str(tmp_path)} | dict.fromkeys(names, "")
    line = srun_line(run(*command, CONTAINER="image", **own))
    for place in (".cache/huggingface", ".triton/cache", ".cache/vllm"):
        assert rf"\,{tmp_path}/{place}:{tmp_path}/{place}" in line
    assert list(tmp_path.iterdir()) == []
    assert "--container" not in srun_line(run(*command, **own))


@pytest.mark.parametrize("script", ["slurm/train.sbatch", "slurm/convert.sbatch", "launch/interactive.sh"])
def test_a_job_number_alone_is_no_job(script):
    done = run(script, "configs/quickstart.yaml", SLURM_JOB_ID="7")
    assert done.returncode == 2 and "this is not a job of Slurm: unset SLURM_JOB_ID" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("MAX_STALLS", "none", "must be a number, 0 or more"), ("REQUEUE", "0", "sbatch --no-requeue")],
)
def test_a_wrong_variable_is_refused_by_name(name, value, said):
    done = run("slurm/train.sbatch", "--dry-run", "configs/quickstart.yaml", **{name: value})
    assert done.returncode == 2 and f"{name}={value} " in done.stderr and said in done.stderr


# Answers from its second call on; also the srun that sweeps, and that of the ranks, which end with wrong arguments.
SCONTROL = """#!/bin/bash
echo >>"$CALLS"
[ "$(wc -l <"$CALLS")" -gt 1 ] && printf 'JobId=7\\n   Command=%s --x\\n' "$SCRIPT"
"""


def test_a_job_whose_first_question_slurm_does_not_answer_starts(tmp_path):
    """Slurm runs a copy of the script, which finds the repository by its path in the job's record."""
    programs = {"scontrol": SCONTROL, "srun": "#!/bin/sh\nexit 2\n", "sleep": "#!/bin/sh\n"}
    shutil.copy(ROOT / "slurm/train.sbatch", tmp_path / "slurm_script")
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = slurm_job(tmp_path, SLURM_NTASKS="2", CALLS=f"{tmp_path}/calls", SCRIPT=f"{ROOT}/slurm/train.sbatch")
    done = run("slurm_script", "configs/quickstart.yaml", root=tmp_path, cwd=tmp_path, PYTHON="/bin/true", **job)
    assert "job 7 attempt 0" in done.stdout and done.returncode == 2, done.stdout + done.stderr


SRUN = """#!/bin/bash
notes="$MEGATRON_TLT_ATTEMPT"
case "$*" in *--container-mounts=*,"$notes:$notes",*) echo 2 >"$notes/exit" ;; esac
exit 137
"""


@pytest.mark.parametrize("logs", ["logs", "../logs"])
def test_ranks_in_a_container_can_note_their_exit_code(tmp_path, logs):
    """The stand-in for srun writes only to what is mounted; outside the working directory and the repository."""
    here = tmp_path / "here"
    for folder in (here / "logs", tmp_path / "logs", tmp_path / "bin"):
        folder.mkdir(parents=True)
    (tmp_path / "bin/srun").write_text(SRUN)
    (tmp_path / "bin/srun").chmod(0o755)
    names = ("HF_HOME", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")
    job = slurm_job(tmp_path / "bin", **{name: f"{tmp_path}/{name}" for name in names})
    done = run("launch/interactive.sh", "configs/quickstart.yaml", cwd=here, CONTAINER="image", LOGS=logs, **job)
    assert done.returncode == 2, done.stdout + done.stderr
    assert not [*tmp_path.rglob(".megatron-tlt-exit-*")]


def in_common(script, job=""):
    """The output of shell code that uses slurm/common.sh, with `job` as the output of `scontrol show job`."""
    told = f"scontrol() {{ printf '%s\\n' '{job}'; }}; SLURM_JOB_ID=7 number=1"
    whole = f". {shlex.quote(str(ROOT))}/slurm/common.sh; {told}; {script}"
    done = subprocess.run(["bash", "-c", whole], capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def test_a_container_gets_its_image_directory_and_mounts(tmp_path):
    made = {name: f"{tmp_path}/{name}" for name in ("HF_HOME", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")}
    caches = " ".join(f"{name}={path}" for name, path in made.items())
    given = f"root='/r s' attempt=/log CONTAINER=image MOUNTS=/a:/data:ro,/b SLURM_NTASKS_PER_NODE=2 {caches}; cd /tmp"
    shown = "printf '%s\\n' \"${srun_words[@]}\" && env"
    words = in_common(f"{given}; set_srun_words; {shown}").splitlines()
    assert {"--container-image=image", "--container-workdir=/tmp", "--no-container-mount-home"} <= set(words)
    places = ",".join(f"{path}:{path}" for path in made.values())
    assert f"--container-mounts=/r s:/r s,/tmp:/tmp,/log:/log,{places},/a:/data:ro,/b" in words
    assert f"MEGATRON_TLT_MOUNTS=/r s:/tmp:/log:{':'.join(made.values())}:/data:/b" in words, "where ranks may write"
    assert {f"{name}={path}" for name, path in made.items()} <= set(words), "in the ranks' environment"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(made), "pyxis mounts what is there"


@pytest.mark.parametrize(
    ("state", "restarts", "requeued"),
    [("RUNNING", 1, "no"), ("RUNNING", 2, "yes"), ("PENDING", 1, "yes"), ("COMPLETING", 1, "no")],
)
def test_a_job_that_slurm_has_requeued_is_known(state, restarts, requeued):
    facts = f"JobId=7 JobState={state} Reason=None Restarts={restarts} StartTime=Unknown"
    assert in_common("look_at_job; is_requeued && echo yes || echo no", facts) == requeued


@pytest.mark.parametrize(
    ("times", "being_ended"),
    [
        ("StartTime=Unknown EndTime=Unknown TimeLimit=01:00:00", "yes"),  # it waits for its next start
        ("StartTime=2026-03-01T00:00:00 EndTime=2026-03-01T12:00:00 TimeLimit=23:55:00", "yes"),  # cancelled
        ("StartTime=2026-03-01T00:00:00 EndTime=2026-03-01T23:55:05 TimeLimit=23:55:00", "no"),
    ],
)
def test_a_job_that_slurm_ends_before_its_limit_is_being_ended(times, being_ended):
    facts = f"JobState=COMPLETING {times}"
    assert in_common("look_at_job; is_being_ended && echo yes || echo no", facts) == being_ended


REQUEUE = (
    "attempt=/no job_logs=/no rc=75; report_failure() { cat /no; }; sleep() { :; };"
    'is_requeued() { return 1; }; scontrol() { case "$1" in requeue) echo "$2" >&2;; *) echo JobState=RUNNING; esac; };'
)


@pytest.mark.parametrize(("variables", "job"), [("", "7"), ("SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=3;", "7_3")])
def test_a_job_is_requeued_by_its_own_name_also_where_nothing_can_be_written(variables, job):
    """The first task of an array may have the array's number, which means all of its tasks."""
    said = in_common(f"{variables} {REQUEUE} exec 3>&1; (requeue_or_exit) 2>&3 >/dev/full").splitlines()
    assert said[-1] == job


def test_a_job_that_was_submitted_so_is_not_requeued():
    script = f"{REQUEUE.replace('JobState=RUNNING', 'JobState=RUNNING Requeue=0')} (requeue_or_exit) 2>&1 || echo $?"
    *_, said, code = in_common(script).splitlines()
    assert said.endswith("submitted with --no-requeue: not requeued") and code == "75"


def test_a_training_that_cannot_go_on_is_not_requeued(tmp_path):
    """Each attempt saves its step before it ends, so none of them would count as a stall."""
    (tmp_path / "rank-00000.log").write_text("megatron-tlt: rank 0 failed in phase update, step 3: TrainingError: no\n")
    run = f"{REQUEUE.replace('attempt=/no', f'attempt={tmp_path}').replace('rc=75', 'rc=1')} (requeue_or_exit) 2>&1"
    *_, said, code = in_common(f"{run} || echo $?").splitlines()
    assert said.endswith("another attempt would end alike: not requeued") and code == "1"


SILENT = """
attempt=/no job_logs=/no rc=75; report_failure() {{ :; }}; count_stalls() {{ stalls=0; }}; sleep() {{ :; }}
scontrol() {{
    echo "$1" >>{calls}
    [ "$(wc -l <{calls})" -gt {silent} ] || return 1
    case "$1" in requeue) echo requeued ;; *) echo JobState={state} StartTime=Unknown Restarts=1 ;; esac
}}
(requeue_or_exit)
"""


@pytest.mark.parametrize(
    ("silent", "state", "words"),
    [
        (3, "RUNNING", ["requeueing", "requeued"]),
        (3, "COMPLETING", ["cancelled or preempted"]),
        (13, "RUNNING", ["Slurm does not answer", "requeueing", "requeued"]),  # twelve tries, and a requeue
    ],
)
def test_slurmctld_is_asked_again_where_it_does_not_answer(tmp_path, silent, state, words):
    """Of its first calls `silent` fail."""
    said = in_common(SILENT.format(calls=tmp_path / "calls", silent=silent, state=state)).splitlines()
    assert len(said) == len(words) and all(word in line for word, line in zip(words, said, strict=True)), said


@pytest.mark.parametrize(
    ("name", "given", "exported"),
    [
        ("SLURM_TIME_FORMAT", "relative", "standard"),  # which `date` reads
        ("SLURM_EXPORT_ENV", "NONE", "ALL"),  # sbatch --export=NONE: the ranks get what the script sets
    ],
)
def test_variables_of_slurm_that_the_scripts_rely_on(monkeypatch, name, given, exported):
    monkeypatch.setenv(name, given)
    assert in_common(f"env | grep ^{name}") == f"{name}={exported}"


def test_the_interface_between_nodes_is_logged_where_iface_is_not_set():
    script = "default_interface() { echo eth3; }; SLURM_JOB_NUM_NODES=2; IFACE=%s; set_network; env | grep ^GLOO"
    said, exported = in_common(script % "").splitlines()
    assert "network between nodes: eth3 (default route of " in said and exported == "GLOO_SOCKET_IFNAME=eth3"
    assert in_common(script % "ib0") == "GLOO_SOCKET_IFNAME=ib0"


@pytest.mark.parametrize(
    ("given", "threads"), [("SLURM_CPUS_PER_TASK=", 1), ("SLURM_CPUS_PER_TASK=8", 8), ("OMP_NUM_THREADS=2", 2)]
)
def test_a_rank_has_large_pages_and_the_threads_of_the_cpus_that_were_asked_for(monkeypatch, given, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = f"root=/r PYTHON=/bin/true; {given}; set_environment; env | grep -E '^OMP|^GLIBC' | sort"
    assert in_common(script).splitlines() == ["GLIBC_TUNABLES=glibc.malloc.hugetlb=1", f"OMP_NUM_THREADS={threads}"]


def test_a_node_with_fewer_cpus_than_the_first_sets_those_of_a_task():
    nodes = "SLURM_JOB_CPUS_PER_NODE='96(x2),64' SLURM_CPUS_ON_NODE=96 SLURM_NTASKS_PER_NODE=8"
    assert "--cpus-per-task=8" in in_common(f'{nodes}; set_srun_words; echo "${{srun_words[@]}}"').split()


@pytest.mark.parametrize(
    ("srun", "noted", "code"), [(137, "2", "2"), (0, "75", "75"), (0, "0", "0"), (1, "", "1"), (137, "0", "137")]
)
def test_the_exit_code_is_what_the_ranks_noted(srun, noted, code):
    assert in_common(f"exit_code {srun} '{noted}'") == code


def test_a_signal_that_comes_when_the_child_has_just_ended_does_not_change_its_code():
    """`wait` comes back with 138, and then the child is mostly gone, and its code with it."""
    script = "trap : USR1; (sleep 0.1; kill -USR1 $$; exit 3) & wait_for $!; echo $rc $lost $(exit_code $rc 0)"
    said = {in_common(script) for _ in range(8)}
    assert said and said <= {"1 1 0", "3 0 3"}


def test_a_signal_does_not_end_the_waiting():
    script = "trap : USR1; (sleep 0.1; kill -USR1 $$; sleep 0.3; exit 3) & wait_for $!; echo $rc $lost"
    assert in_common(script) == "3 0"
