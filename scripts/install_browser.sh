#!/bin/sh
# Chromium from the system's packages, where it is not there yet; the tests of the page drive it.
set -eu
for name in chromium chromium-browser; do
    if command -v "$name" >/dev/null 2>&1; then exit 0; fi
done
command -v apt-get >/dev/null 2>&1 || {
    echo "No Chromium, and no apt-get to install it with: install Chromium by your system's means." >&2
    exit 1
}
as_root=
[ "$(id -u)" = 0 ] || as_root='sudo -n'
$as_root apt-get update -qq
DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends chromium
