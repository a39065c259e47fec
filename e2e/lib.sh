# Functions for e2e/demo and other scripts that create a local cluster with Cleave from a clean
# checkout. Source this file, and do not run it. All functions are idempotent, and do not repeat
# builds.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CARGO_TERM_COLOR=${CARGO_TERM_COLOR:-never}
# The name of the local cluster. The launcher also reads this variable. Each cluster has its own
# directory.
export CLEAVE_CLUSTER_NAME=${CLEAVE_CLUSTER_NAME:-cleave}
demo_dir=$root/target/demo
[ "$CLEAVE_CLUSTER_NAME" = cleave ] || demo_dir+=-$CLEAVE_CLUSTER_NAME
driver_dir=$demo_dir/driver
cluster=$root/e2e/cluster/cluster
namespace=cleave-system
# With CLEAVE_PROFILE=dev, builds are faster and programs are slower. Do not use this profile for
# measurements.
profile=${CLEAVE_PROFILE:-release}
programs=$root/target/$([ "$profile" = dev ] && echo debug || echo "$profile")

# Prints a heading, with the seconds since the start of the script.
say() { printf '\n\033[1m==> %s\033[0m (%d s)\n' "$*" "$SECONDS"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# The chart to install, and the program cleave. `release` is the directory of a release, or empty
# without a release.
chart=$root/charts/cleave
cleave=$programs/cleave
release=

# use_release [VERSION]: makes the functions below use the image, the chart and the program of a
# release that `make release` built. Without VERSION, they use the newest release. The functions
# then build only the simulated hardware and the test programs.
use_release() {
  local checksums
  checksums=$(ls -t "$root"/target/release-${1:-*}/SHA256SUMS 2>/dev/null | head -1 || true)
  [ -n "$checksums" ] || die "no release ${1:+$1 }in target: run make release VERSION=${1:-x.y.z}"
  release=$(dirname "$checksums")
  release_version=${release##*/release-}
  say "Using release $release_version from ${release#"$root"/}"
  (cd "$release" && sha256sum --check --quiet SHA256SUMS) || die "$release has changed since it was built: run make release again"
  chart=$release/cleave-$release_version.tgz
  mkdir -p "$demo_dir"
  tar -xzf "$release/cleave-$release_version-linux-amd64.tar.gz" -C "$demo_dir"
  cleave=$demo_dir/cleave-$release_version-linux-amd64/cleave
}

# Installs the Debian packages that the builds need. e2e/cluster/cluster installs the packages that
# the cluster needs.
prerequisites() {
  [ "$(id -u)" = 0 ] || die "root access is required, because the script starts a kubelet and containerd"
  command -v cargo >/dev/null || die "cargo is not on the PATH: install Rust (1.89 or newer)"
  command -v go >/dev/null || die "go is not on the PATH: install Go (1.26 or newer)"
  local missing=()
  command -v cc >/dev/null || missing+=(gcc libc6-dev)
  command -v jq >/dev/null || missing+=(jq)
  [ -x /bin/busybox ] && ! ldd /bin/busybox >/dev/null 2>&1 || missing+=(busybox-static)
  if [ ${#missing[@]} -gt 0 ]; then
    say "Installing ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
  fi
}

# Builds the simulated hardware and the test programs. Also builds Cleave, unless a release is used.
build() {
  local product=(-p cleave)
  [ -z "$release" ] || product=()
  say "Building ${product:+Cleave and }the simulated hardware"
  (cd "$root" && cargo build --profile "$profile" --locked "${product[@]}" -p simgpu -p sim-nvml -p sim-mps -p sim-clock -p cleave-client)
}

# Copies the simulated driver to the directory that nodes mount as /opt/simgpu.
driver() {
  mkdir -p "$driver_dir/lib" "$driver_dir/bin"
  # Rename instead of overwriting, because running programs must keep the old file.
  put() { cp "$1" "$2.new" && chmod 755 "$2.new" && mv "$2.new" "$2"; }
  put "$programs/libnvidia_ml.so" "$driver_dir/lib/libnvidia-ml.so.1"
  put "$programs/nvidia-cuda-mps-control" "$driver_dir/bin/nvidia-cuda-mps-control"
  put "$programs/nvidia-cuda-mps-server" "$driver_dir/bin/nvidia-cuda-mps-server"
  put "$programs/simgpu" "$driver_dir/bin/simgpu"
}

# image TAG OPTION…: builds an image, and imports it on all nodes.
image() {
  local tag=$1 tar=$demo_dir/$(basename "$1" | tr : -).tar; shift
  "$cluster" image build --tag "$tag" "$@" -o "$tar"
  import_image "$tar"
}

# import_image TAR: imports an image on all nodes, unless they already have the image.
import_image() {
  local imported; imported=$demo_dir/$(basename "$1").imported
  local sum; sum=$(sha256sum <"$1")
  local started; started=$("$cluster" status 2>/dev/null | awk '/containerd/ {print $0}')
  if [ "$(cat "$imported" 2>/dev/null)" != "$sum $started" ]; then
    "$cluster" image import "$1"
    echo "$sum $started" >"$imported"
  fi
}

images() {
  say "Building and importing the images"
  if [ -n "$release" ]; then import_image "$release/cleave-$release_version-image.tar"; fi
  # Programs of the development profile have several hundred megabytes of debug information, which
  # each node would unpack.
  local programs=$programs program
  if [ "$profile" = dev ]; then
    mkdir -p "$demo_dir/stripped"
    for program in cleave cleave-agent cleave-mps-host cleave-supervise cleave-kubelet-relay cleave-client libsim_clock.so; do
      strip -o "$demo_dir/stripped/$program" "$programs/$program"
    done
    programs=$demo_dir/stripped
  fi
  # Both tags have the same programs. Upgrade tests replace `dev` with `next`.
  local tag tags=(dev next)
  [ -z "$release" ] || tags=()
  for tag in "${tags[@]}"; do
    image localhost/cleave:$tag --ldd --dir /tmp:1777 --add "$programs/cleave:/usr/bin/cleave:755" --add "$programs/cleave-agent:/usr/bin/cleave-agent:755" \
      --add "$programs/cleave-mps-host:/usr/bin/cleave-mps-host:755" --add "$programs/cleave-supervise:/usr/bin/cleave-supervise:755" \
      --add "$programs/cleave-kubelet-relay:/usr/bin/cleave-kubelet-relay:755" \
      --add "$programs/libsim_clock.so:/usr/lib/libsim_clock.so:755" --entrypoint /usr/bin/cleave --label "tag=$tag"
  done
  image localhost/cleave-client:dev --ldd --shell --dir /tmp:1777 --add "$programs/cleave-client:/usr/bin/cleave-client:755" --entrypoint /usr/bin/cleave-client
}

# cluster_up NODES OPTION…: starts the cluster, and writes $demo_dir/env.
cluster_up() {
  local nodes=$1; shift
  say "Starting Kubernetes"
  "$cluster" up --nodes "$nodes" --driver-root "$driver_dir" "$@"
  { "$cluster" env; printf 'export CLEAVE_E2E_DRIVER=%q\n' "$driver_dir"; } >"$demo_dir/env"
  # shellcheck source=/dev/null
  . "$demo_dir/env"
}

# simulate NODE GPUS: creates a node's simulated GPUs, unless the node already has GPUs.
simulate() {
  "$cluster" exec-node "$1" sh -c "[ -e /var/lib/simgpu/machine.json ] || /opt/simgpu/bin/simgpu init --machine $1 --gpus $2 >/dev/null"
}

# Prints the machine's address in the cluster's network. The API server's proxy connects from this
# address.
machine_address() { kubectl config view --output jsonpath='{.clusters[0].cluster.server}' | sed 's|https://\(.*\):.*|\1|'; }

# Installs the chart. The values of e2e/values.yaml set a host path for the driver, as on nodes
# without a container toolkit.
install() {
  say "Installing Cleave${release:+ $release_version} by Helm"
  if [ -n "$release" ]; then set -- --set "image.tag=$release_version" "$@"; fi
  # Allow the machine's address, because tests query agents through the API server's proxy.
  set -- --set "networkPolicy.metricsFrom[1].ipBlock.cidr=$(machine_address)/32" "$@"
  helm upgrade --install cleave "$chart" --namespace "$namespace" --create-namespace \
    --values "$root/e2e/values.yaml" --wait --timeout 3m "$@" >"$demo_dir/helm.log" || { cat "$demo_dir/helm.log"; kubectl -n "$namespace" get pods -o wide; die "helm failed"; }
  kubectl -n "$namespace" get pods
}
