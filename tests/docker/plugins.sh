#!/usr/bin/env bash
# Put Docker's compose and buildx plugins of the next Debian into a folder, without installing anything: this Debian has
# only a compose that cannot read current files, and no buildx. The packages' signatures are checked as apt does.
set -euo pipefail
folder=$(mkdir -p "${1:?give a folder}" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/lists/partial "$work"/cache/archives/partial
mirror=$(cat /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null |
  sed -n 's/^URIs: *//p; s/^deb \(\[[^]]*\] \)\?\([^ ]*\) .*/\2/p' | sed -n 1p) || true
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" > "$work/sources.list"
apt() {
  apt-get -qq -o APT::Sandbox::User=root -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=- \
    -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" "$@"
}
apt update
(cd "$work" && apt download docker-compose docker-buildx)
for package in "$work"/*.deb; do dpkg-deb --extract "$package" "$work/files"; done
install "$work"/files/usr/libexec/docker/cli-plugins/* "$folder"
