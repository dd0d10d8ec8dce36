#!/bin/sh
# Prints the first Python that runs, that the pins support and that can make a virtual environment.
#
# usage: find_python.sh "VERSION ..." [CANDIDATE]
#
# A name on PATH proves nothing (a version manager's shim may be there for a Python that is not switched on), so every
# candidate is run. With CANDIDATE only that one is tried. On failure one sentence on stderr says what to do.

versions=$1
named=${2:-}
readable=$(echo "$versions" | sed 's/ / or /g')

# What a candidate is: "3.11 /real/path", "3.11 no-venv", "3.13 unsupported", or nothing where it does not run.
describe() {
    "$1" - "$versions" 2>/dev/null <<'PYTHON'
import sys
version = "%d.%d" % sys.version_info[:2]
verdict = sys.executable
if version not in sys.argv[1].split():
    verdict = "unsupported"
else:
    try:
        import ensurepip
        import venv
    except ImportError:
        verdict = "no-venv"
print(version + " " + verdict)
PYTHON
}

candidates() {
    if [ -n "$named" ]; then
        echo "$named"
        return
    fi
    echo python3
    for version in $versions; do
        echo "python$version"
        ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python 2>/dev/null
        ls -d "${XDG_DATA_HOME:-$HOME/.local/share}/uv/python/cpython-$version".*/bin/python3 2>/dev/null
    done
}

seen=
without_venv=
found=$(candidates)
IFS='
'
for candidate in $found; do
    answer=$(describe "$candidate")
    version=${answer%% *}
    case $answer in
    "") ;;
    *" unsupported") seen=${seen:-"$candidate is Python $version"} ;;
    *" no-venv") without_venv=${without_venv:-"$candidate (Python $version) cannot make a virtual environment"} ;;
    *)
        echo "${answer#* }"
        exit 0
        ;;
    esac
done

if [ -n "$without_venv" ]; then
    echo "$without_venv: install its venv module (Debian and Ubuntu: the package python$(echo "$without_venv" |
        sed 's/.*(Python \([0-9.]*\)).*/\1/')-venv) or name another Python $readable with PYTHON=path." >&2
elif [ -n "$seen" ]; then
    echo "$seen, but the pinned requirements are for Python $readable:" \
        "install one of them, or name it with PYTHON=path." >&2
elif [ -n "$named" ]; then
    echo "PYTHON=$named does not run: name a Python $readable." >&2
else
    echo "No Python that runs was found: install Python $readable, or name it with PYTHON=path." >&2
fi
exit 1
