#!/bin/sh
# Makes a virtual environment and installs the pinned requirements and this package into it.
#
# usage: install.sh VENV runtime|dev|models|aot [PYTHON]
#
# Only what the pin files list, with these hashes, is fetched; the package itself is built with the pinned setuptools.
set -eu

venv=$1
kind=$2
named=${3:-}
supported="3.11 3.12"
case $kind in models | aot) supported=3.11 ;; esac
cd "$(dirname "$0")/.."

version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

if ! version=$(version_of "$venv/bin/python"); then
    python=$(sh requirements/find_python.sh "$supported" "$named") || exit 1
    version=$(version_of "$python")
    echo "Creating $venv with Python $version ($python)"
    "$python" -m venv --clear "$venv"
elif [ -n "$named" ] && [ "$(version_of "$named")" != "$version" ]; then
    echo "$venv is made with Python $version and $named is another one: make clean first, or choose VENV=path." >&2
    exit 1
fi

pair=requirements/py$(echo "$version" | tr -d .)
more=
case $kind in
runtime) pins=$pair.txt ;;
dev) pins=$pair-dev.txt ;;
aot) pins=requirements/aot.txt ;;
models)
    pins=requirements/models.txt
    more=--no-deps # requirements/models-without.in says what is left out
    ;;
*)
    echo "install.sh: the kind is runtime, dev, models or aot, not $kind" >&2
    exit 2
    ;;
esac
if [ ! -f "$pins" ]; then
    echo "$venv is Python $version, but the pinned requirements are for Python 3.11 and 3.12: make clean first." >&2
    exit 1
fi

echo "Installing $(grep -c '==' "$pins") pinned packages from $pins (once; a few minutes on a slow connection)"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --require-hashes --only-binary :all: $more -r "$pins"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
