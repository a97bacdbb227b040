#!/usr/bin/env bash
# The fast tests on every stack that eejax supports, each in an environment of its own.
#
#   tests/stacks.sh [--skip-missing] [NAME ...]     all stacks, unless some are named
#
# `make env` makes a stack's environment, .venv-stacks/NAME. Its Python is $PYTHON_3_11 ($PYTHON_3_12,
# $PYTHON_3_13) if that is set, else python3.11 of the PATH, else the newest 3.11 of pyenv. A stack whose Python is
# missing is skipped, and the exit status is then 1, or with --skip-missing that of the others.
# JOBS (2) is the number of workers, TESTS what to run in place of the fast tests.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# name, Python, constraints
STACKS=(
  "jax0.10 3.11 constraints.txt"
  "jax0.11 3.12 constraints-jax0.11.txt"
  "newest 3.13 constraints-newest.txt"
)

# Every room, by files that use JAX or a library beside it. Left out are tests of plain Python, and
# those that repeat at length what these show: experiments, simulators, workers, large sweeps.
FAST=(
  tests/models tests/losses tests/sharding tests/checkpoint/test_files.py
  tests/checkpoint/test_manager.py tests/checkpoint/test_model.py
  tests/kernels
  tests/inference/test_engine.py tests/inference/test_engines.py tests/inference/test_batched.py
  tests/inference/test_scheduler.py tests/inference/test_sampling.py
  tests/inference/test_speculative.py tests/inference/test_pipelined.py
  tests/inference/test_prefill.py tests/inference/test_propagate.py tests/inference/test_sharded.py
  tests/inference/test_cheap_heads.py tests/inference/test_lookup.py
  tests/pipeline/test_runner.py tests/pipeline/test_filled_runner.py
  tests/train/test_step.py tests/train/test_loop.py tests/train/test_optimizer.py
  tests/train/test_mesh_steps.py tests/train/test_multihost.py
  tests/data/test_loader.py tests/data/test_workers.py tests/data/test_prefetch.py
  tests/calibration/test_routers.py tests/interop/test_flax.py
  tests/serving/test_http.py tests/serving/test_service.py tests/serving/test_protocol.py
  tests/experiments/test_train_evaluate.py tests/test_imports.py
)

read -ra tests <<<"${TESTS:-${FAST[*]}}"

# The first of the candidates that starts and is of the version: a python3.11 of the PATH may be
# pyenv's shim, which starts nothing where that version is not chosen.
find_python() {
  local version=$1 variable=PYTHON_${1/./_} python
  local candidates=("${!variable:-python$version}")
  if [[ -z ${!variable:-} ]]; then
    mapfile -t -O 1 candidates < <(ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python 2>/dev/null | sort -rV)
  fi
  for python in "${candidates[@]}"; do
    "$python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null || continue
    echo "$python"
    return
  done
  return 1
}

run_stack() {
  local name=$1 version=$2 constraints=$3 python venv=.venv-stacks/$1
  python=$(find_python "$version") || return 3
  make --no-print-directory env VENV="$venv" PYTHON="$python" CONSTRAINTS="$constraints" || return 1
  "$venv/bin/python" -P -c '
from importlib.metadata import version
names = "jax", "jaxlib", "jax-triton", "triton", "flax", "numpy"
print(*(f"{name} {version(name)}" for name in names), sep=", ")'
  XLA_FLAGS=--xla_backend_optimization_level=0 \
    "$venv/bin/python" -P -m pytest -q -n "${JOBS:-2}" --dist loadfile --durations=20 "${tests[@]}"
}

skip_missing=
[[ ${1:-} == --skip-missing ]] && skip_missing=1 && shift
wanted=" ${*:-} " told=() status=0
for name in "$@"; do
  printf '%s\n' "${STACKS[@]}" | cut -d' ' -f1 | grep -Fxq -- "$name" || {
    echo "there is no stack $name; there are: $(printf '%s\n' "${STACKS[@]}" | cut -d' ' -f1 | xargs)" >&2
    exit 2
  }
done
for stack in "${STACKS[@]}"; do
  read -r name version constraints <<<"$stack"
  [[ $wanted == *[a-z]* && $wanted != *" $name "* ]] && continue
  echo "== $name: Python $version, $constraints"
  start=$SECONDS
  run_stack "$name" "$version" "$constraints"
  case $? in
    0) result="passed in $((SECONDS - start)) s" ;;
    3)
      result="skipped: there is no Python $version. Install it (pyenv install $version, or your system's"
      result+=" python$version and python$version-venv), or set PYTHON_${version/./_} to its path."
      [[ -n $skip_missing ]] || status=1
      ;;
    *) result="FAILED after $((SECONDS - start)) s" status=1 ;;
  esac
  told+=("$name (Python $version): $result")
done
printf '%s\n' "" "${told[@]}"
exit $status
