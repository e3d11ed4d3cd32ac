#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The texts of the second corpus of examples/pretraining/README.md: Debian 12's documentation and the
# sources of Python packages, at fixed versions.
#
#     examples/pretraining/texts.sh texts/
#
# Needs Debian's apt and dpkg, unzip and pip, and no rights. What Debian has replaced by a newer version
# is kept on snapshot.debian.org.
set -euo pipefail

DEBIAN="
    debian-reference-en=2.100
    git-doc=1:2.39.5-0+deb12u3
    linux-doc-6.1=6.1.192-2
    manpages=6.03-2
    manpages-dev=6.03-2
    perl-doc=5.36.0-7+deb12u4
    postgresql-doc-15=15.20-0+deb12u1
    python3.11-doc=3.11.2-6+deb12u9
    r-doc-html=4.2.2.20221110-2"
PYTHON="
    accelerate==1.15.0 fonttools==4.68.0 matplotlib==3.11.2 mypy==2.4.1 networkx==3.6.1 numpy==2.4.6
    Pygments==2.21.0 sympy==1.14.0 transformers==5.23.0"
WHEELS="--only-binary=:all: --python-version 3.12 --implementation cp
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64
    --platform manylinux2014_x86_64"

out=$(realpath -m "${1:?usage: texts.sh FOLDER}")
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
mkdir -p "$out/debian" "$out/python" "$packages/deb" "$packages/whl"

(cd "$packages/deb" && apt-get download -q $DEBIAN)
for file in "$packages"/deb/*.deb; do
    name=$(basename "$file")
    dpkg-deb --extract "$file" "$out/debian/${name%%_*}"
done
rm -r "$out"/debian/linux-doc-6.1/usr/share/doc/linux-doc-6.1/html  # its sources are beside it
# What is text: manual pages and much else come compressed.
find "$out/debian" -type f -name '*.gz' -exec gunzip --force {} +
find "$out/debian" \( -type l -o -type f -regextype posix-extended \
    ! -regex '.*\.(html|txt|rst|yaml|pod|[1-8](perl|pm|const|type)?)' \) -delete

python3 -m pip download --quiet --no-deps $WHEELS --dest "$packages/whl" $PYTHON
for file in "$packages"/whl/*.whl; do
    name=$(basename "$file")
    unzip -q -o "$file" '*.py' -d "$out/python/${name%%-*}"
done
