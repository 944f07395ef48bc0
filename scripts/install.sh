#!/bin/sh
# Make the virtual environment VENV with Python 3.12, the pinned requirements and this package.
# Usage: scripts/install.sh VENV [PYTHON]     (called by `make install`; run from the checkout)
# Needs Python 3.12 and a package registry, nothing else; a second run changes nothing.
set -eu
venv=${1%/}
python=${2:-}
stamp=$venv/.sam3-ray
here=$(pwd -P)
say() { printf '%s\n' "$*" >&2; }
is_312() { [ "$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = 3.12 ]; }

if [ -n "$python" ]; then
    is_312 "$python" || {
        say "PYTHON=$python is not Python 3.12 ($("$python" --version 2>&1 || true))."
        say "Give a Python 3.12, or leave PYTHON out to have one looked for."
        exit 1
    }
else
    for candidate in python3.12 python3 python; do
        if is_312 "$candidate"; then python=$candidate; break; fi
    done
    [ -n "$python" ] || {
        say "Python 3.12 was not found (tried python3.12, python3, python; python3 is $(python3 --version 2>&1 || true))."
        say "Only 3.12 will do: Tenstorrent's ttnn has no wheel for anything newer."
        say "Install it (apt-get install python3.12 python3.12-venv, pyenv install 3.12, uv python install 3.12),"
        say "or say where it is: make install PYTHON=/path/to/python3.12"
        exit 1
    }
fi

clear=
if [ -L "$venv" ] && [ "$(cat "$stamp" 2>/dev/null)" != "$here" ]; then
    say "$venv is a link to $(readlink "$venv"), which 'make install' here has not made and would replace."
    say "Remove the link, or say where else: make install VENV=/path/to/another"
    exit 1
fi
if [ -e "$stamp" ]; then
    # Scripts in a virtual environment hold its path: after a move it is made again.
    [ "$(cat "$stamp")" = "$here" ] || clear=--clear
elif [ -e "$venv" ] && [ "$venv" != .venv ]; then
    say "$venv exists and was not made by 'make install', which would replace packages in it."
    say "To install beside what is there and keep its torch and ttnn: make install-into ENV=$venv"
    exit 1
fi
if [ -e "$venv" ] && ! is_312 "$venv/bin/python"; then clear=--clear; fi
say "Installing into $venv; the first time takes a few minutes ..."
"$python" -m venv $clear "$venv" || {
    say "Could not make the virtual environment $venv with $python (see above)."
    say "On Debian and Ubuntu the module is a package of its own: apt-get install python3.12-venv"
    exit 1
}

# uv installs in a tenth of pip's time and heeds no pip configuration; without it pip does the same.
# The pins are also pip's constraints: they replace a cap that the machine's pip configuration may set.
uv_pin=$(sed -n 's/^\(uv==[^ ]*\).*/\1/p' requirements.txt)
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$uv_pin" 2>/dev/null || true
# --quiet leaves out the list of packages; both still print errors.
install() {
    if "$venv/bin/python" -m uv --version >/dev/null 2>&1; then
        "$venv/bin/python" -m uv pip install --quiet --python "$venv/bin/python" "$@"
    else
        PIP_CONSTRAINT=$constraints "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
    fi
}
if [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ]; then
    constraints=requirements.txt
    install -r requirements.txt
    install --no-deps -e .
else
    constraints=
    say "The pins of requirements.txt are for x86_64 Linux; here the ranges of pyproject.toml are resolved."
    install -e '.[test]'
fi
# Compiled once here: where PYTHONDONTWRITEBYTECODE is set, every process would compile them anew.
"$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null 2>&1 || true # test files with odd syntax
printf '%s' "$here" >"$stamp"
