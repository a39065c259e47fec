# Sourced by base and std: downloads Debian packages through a private apt. The machine's own apt
# configuration, package lists and installed packages do not change.
#
# DEBIAN_MIRROR names the mirror. Without DEBIAN_MIRROR, the first Debian mirror of the machine's
# apt is used.

cache=${CLEAVE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cleave}
debian_dir=$cache/release-apt
debian_options=(
  -o "Dir::State=$debian_dir" -o "Dir::State::status=$debian_dir/status" -o "Dir::Cache=$debian_dir"
  -o "Dir::Etc::sourcelist=$debian_dir/sources.list" -o "Dir::Etc::sourceparts=$debian_dir/none"
  -o "Dir::Etc::preferences=$debian_dir/none/preferences" -o "Dir::Etc::preferencesparts=$debian_dir/none"
  -o APT::Architecture=amd64 -o APT::Architectures=amd64,arm64 -o Acquire::Languages=none -o APT::Sandbox::User=root
)

# debian_update SUITE…: downloads the package lists of these suites. bookworm includes its updates.
debian_update() {
  local mirror keyring=/usr/share/keyrings/debian-archive-keyring.gpg suite
  command -v apt-get >/dev/null || die "apt-get is not on the PATH: releases are built on Debian or Ubuntu"
  [ -e "$keyring" ] || die "$keyring is missing: apt-get install debian-archive-keyring"
  mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' | grep -m1 '/debian/$' || true)}
  [ -n "$mirror" ] || die "no Debian mirror in this machine's apt sources: set DEBIAN_MIRROR to the URL of one"
  mirror=${mirror%/}
  mkdir -p "$debian_dir"/{none,lists/partial,archives/partial}
  touch "$debian_dir/status"
  for suite; do
    echo "deb [signed-by=$keyring] $mirror $suite main"
    if [ "$suite" = bookworm ]; then
      echo "deb [signed-by=$keyring] $mirror bookworm-updates main"
      echo "deb [signed-by=$keyring] $mirror-security bookworm-security main"
    fi
  done >"$debian_dir/sources.list"
  apt-get "${debian_options[@]}" -qq update >"$debian_dir/update.log" 2>&1 ||
    { cat "$debian_dir/update.log" >&2; die "failed to read the package lists of $mirror"; }
}

# debian_download DIR PACKAGE…: downloads packages, named as for `apt-get install`, to a directory.
debian_download() {
  local dir=$1; shift
  mkdir -p "$dir"
  (cd "$dir" && apt-get "${debian_options[@]}" -qq download "$@" >"$debian_dir/download.log" 2>&1) ||
    { cat "$debian_dir/download.log" >&2; return 1; }
}
