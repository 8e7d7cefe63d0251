# Makes or updates .venv in the root of the repository. Sourced by the other scripts, which then find:
#   root  the root of the repository
#   bin   .venv/bin
# Where packages come from is pip's own business (pip.conf, PIP_INDEX_URL, PIP_EXTRA_INDEX_URL).
# shellcheck shell=bash

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
bin=$root/.venv/bin

say() { printf '%s\n' "$*" >&2; }

# The first Python that is new enough and can make environments. A name on PATH may be a shim that runs nothing: try it.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.14 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    say "No Python 3.11 or newer with the modules venv and ensurepip found."
    say "Tried: ${PYTHON:+$PYTHON, }python3, python3.13, python3.12, python3.11, python3.14, python."
    say "Install one (Debian and Ubuntu: apt install python3 python3-venv), or name one: PYTHON=/path/to/python $0"
    return 1
}

# Everything the installation depends on; the path, because an environment cannot be moved.
fingerprint() {
    printf '%s\n' "$root"
    cat "$root/setup.cfg" "$root/pyproject.toml" "$root/constraints.txt"
    grep '^__version__' "$root/delta/__init__.py"
}

make_venv() {
    local stamp=$root/.venv/delta-installed python
    if [[ -f $stamp ]] && "$bin/python" -c '' 2>/dev/null && [[ $(fingerprint) == "$(<"$stamp")" ]]; then
        return
    fi
    if ! { "$bin/python" -m pip --version && [[ ! -f $stamp || $(head -n 1 "$stamp") == "$root" ]]; } >/dev/null 2>&1; then
        python=$(find_python) || return
        say "Making $root/.venv with $("$python" --version)"
        "$python" -m venv --clear "$root/.venv" || return
    fi
    rm -f "$stamp"
    say "Installing into $root/.venv: torch is large, the first time can take minutes"
    local install=("$bin/python" -m pip install --no-input --disable-pip-version-check
        -c "$root/constraints.txt" -e "$root[test,dev]")
    # -qq: errors only
    "${install[@]}" -qq || {
        say "The installation failed, see above. The next call tries again; for every detail: ${install[*]@Q}"
        return 1
    }
    fingerprint >"$stamp"
}

# Two scripts started at the same time: one makes the environment, the other waits for it.
if command -v flock >/dev/null; then
    (flock 9 && make_venv) 9>"$root/.venv.lock" || exit
else
    make_venv || exit
fi
