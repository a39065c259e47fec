# Runs the cluster tests for e2e/test: on three clusters in three groups, and on each version of
# Kubernetes. Source this file after lib.sh, and do not run it. This file uses functions of
# e2e/test.

# with_cluster GPUS1 GPUS2 COMMAND…: creates a cluster of two nodes with these GPUs, installs
# Cleave, runs a command, and removes the cluster unless KEEP is set. The array up_options has
# additional options of `cluster up`.
up_options=()
with_cluster() {
  local first=$1 second=$2; shift 2
  driver
  if [ -z "${KEEP:-}" ]; then
    "$cluster" down
    remove_cluster=yes
  fi
  cluster_up 2 "${up_options[@]}"
  simulate node1 "$first"
  simulate node2 "$second"
  images
  install
  "$@"
  if [ -z "${KEEP:-}" ]; then
    "$cluster" down
    remove_cluster=
    "$cluster" leftovers
  fi
}

# Programs of Cleave and of the simulated hardware that a cluster needs.
cluster_binaries=(
  cleave cleave-agent cleave-mps-host cleave-supervise cleave-kubelet-relay
  cleave-client nvidia-cuda-mps-control nvidia-cuda-mps-server simgpu
)

# Builds Cleave, the simulated hardware and the program of the cluster tests. The groups run this
# program directly, because two concurrent cargo commands would wait for each other.
cluster_program=
build_cluster_tests() {
  local targets=(--test=cluster)
  if [ "$profile" = dev ]; then
    # Build the programs by the same command as the tests. Cargo then selects the same features of
    # the dependencies, and compiles each dependency once.
    targets+=(--lib "${cluster_binaries[@]/#/--bin=}")
  else
    build
  fi
  say "Building the cluster tests in the development profile${targets[2]:+, with Cleave and the simulated hardware}"
  cluster_program=$(cargo build --locked "${targets[@]}" --message-format=json-render-diagnostics |
    jq -r 'select(.reason == "compiler-artifact" and .target.name == "cluster").executable')
}

# Prints the names of all cluster tests, one per line.
list_cluster_tests() { "$cluster_program" --list --format terse | sed -n 's/: test$//p'; }

# run_cluster_tests OPTION…: runs the tests that these libtest options select.
run_cluster_tests() {
  say "Cluster tests"
  # Use the same working directory as cargo.
  (cd "$root/e2e/tests" && "$cluster_program" --test-threads=1 "$@")
}

# Modules of the second and third group of tests. The first group has all other modules. The groups
# run at the same time on separate clusters, and take about the same time. This saves time, because
# most of the time the tests wait for Kubernetes.
declare -A group_modules=(
  [second]="ending gate gate_admission health preemption quotas"
  [third]="bad_input clocks demand restarts stranded zones"
)

# Maximum number of inotify instances of a user. Linux allows 128 by default. A node uses about 15,
# and three clusters need about 230 with the nodes that tests add.
watchers_file=/proc/sys/fs/inotify/max_user_instances
watchers=512

# Raises the limit of inotify instances until this script exits. Fails if the machine does not
# permit the change.
raise_watchers() {
  local before; before=$(cat "$watchers_file")
  [ "$before" -lt "$watchers" ] || return 0
  echo "$watchers" 2>/dev/null >"$watchers_file" || return 1
  watchers_before=$before
}

# Runs each cluster test once, on three clusters. Uses one cluster if TEST selects tests, if KEEP
# keeps the cluster, or if the limit of inotify instances cannot be raised.
cluster_tests() {
  local all group module others=() failed=()
  local -A processes=()
  if [ -n "${TEST:-}${KEEP:-}" ] || ! raise_watchers; then
    with_test_cluster run_cluster_tests ${TEST:-}
    return
  fi
  all=$(list_cluster_tests)
  say "Cluster tests in three groups; the second and third print to $(group_log '*')"
  for group in second third; do
    local modules=()
    for module in ${group_modules[$group]}; do
      grep -q "^$module::" <<<"$all" || die "no cluster test is in $module"
      modules+=("$module::")
    done
    others+=("${modules[@]/#/--skip=}")
    start "$(group_log "$group")" env CLEAVE_CLUSTER_NAME="$CLEAVE_CLUSTER_NAME-$group" e2e/test group "$cluster_program" "${modules[@]}"
    processes[$group]=$started
  done
  e2e/test group "$cluster_program" "${others[@]}" || failed+=(first)
  for group in second third; do
    finish "${processes[$group]}" "$(group_log "$group")" || failed+=("$group")
  done
  [ ${#failed[@]} = 0 ] || die "cluster tests failed in the groups ${failed[*]}"
}

# group_log GROUP: prints the path of a group's log.
group_log() { echo "${demo_dir#"$root"/}/$1-group.log"; }

# with_test_cluster COMMAND…: runs a command on a cluster with the nodes that the cluster tests
# expect.
with_test_cluster() {
  # Let these kubelets report often, because many tests wait for a node status. Nodes that tests add
  # keep the cluster's default interval.
  up_options=(--node-status node1=1,node2=2 --network-policies)
  with_cluster 4xH100-80 2xA100-40 "$@"
}

# The modules and single tests that run on each version of Kubernetes.
version_tests=(
  shares gate gate_admission admission policies operators whole_gpus upgrades agent_upgrades restarts
  demand::an_idle_gpu_changes_from_mps_to_mig_and_back_to_whole
  ending::the_admission_policy_injects_sleeps_into_containers_with_shares
  ending::the_webhook_injects_the_same_sleeps
)
# File with the results of version_tests. docs/tool generates a table from this file.
version_results=docs/data/kubernetes-versions.json

# Prints the names of the tests that version_tests selects, one per line.
select_version_tests() {
  local all entry found
  all=$(list_cluster_tests)
  for entry in "${version_tests[@]}"; do
    found=$(awk -v entry="$entry" '$0 == entry || index($0, entry "::") == 1' <<<"$all")
    [ -n "$found" ] || die "no cluster test is named $entry"
    echo "$found"
  done
}

# Prints the mechanism that adds the placement gate on this cluster: policy or webhook.
gate_mechanism() {
  if kubectl get mutatingadmissionpolicy cleave-gate >/dev/null 2>&1; then
    echo policy
  elif kubectl get mutatingwebhookconfiguration cleave-webhook >/dev/null 2>&1; then
    echo webhook
  else
    die "neither a policy nor a webhook adds the placement gate"
  fi
}

# run_version_tests COMMIT: runs each test in a separate process, and records the results.
run_version_tests() {
  local commit=$1 version gate tests test outcome
  local outcomes=$demo_dir/version-outcomes.jsonl skip_file=$demo_dir/skip-reason
  version=$(kubectl version -o json | jq -re '.serverVersion.gitVersion | ltrimstr("v")')
  gate=$(gate_mechanism)
  tests=$(select_version_tests)
  say "Cluster tests on Kubernetes $version"
  : >"$outcomes"
  for test in $tests; do
    : >"$skip_file"
    outcome=passed
    # Use the same working directory as cargo.
    (cd e2e/tests && CLEAVE_E2E_SKIP_FILE=$skip_file "$cluster_program" --test-threads=1 --exact "$test") || outcome=failed
    if [ "$outcome" = passed ] && [ -s "$skip_file" ]; then outcome=skipped; fi
    jq -cn --arg test "$test" --arg outcome "$outcome" --rawfile reason "$skip_file" '$ARGS.named' >>"$outcomes"
  done
  record_version "$version" "$gate" "$commit" "$outcomes"
  if jq -se 'any(.outcome == "failed")' "$outcomes" >/dev/null; then
    die "on Kubernetes $version failed: $(jq -rs 'map(select(.outcome == "failed").test) | join(", ")' "$outcomes")"
  fi
}

# record_version VERSION GATE COMMIT OUTCOMES: replaces the recorded results of the version. Removes
# the results of versions that the launcher no longer builds.
record_version() {
  jq -s --arg version "$1" --arg gate "$2" --arg commit "$3" --arg date "$(date -u +%F)" \
    --arg available "$("$cluster" versions)" --slurpfile earlier "$version_results" '
    def names($outcome): map(select(.outcome == $outcome).test);
    {$version, $date, $commit, $gate, passed: names("passed"), failed: names("failed"),
      skipped: map(select(.outcome == "skipped") | {test, reason})} as $record
    | $earlier[0] | map(select(.version != $version and (.version | IN($available | splits("\n")))))
    | . + [$record] | sort_by(.version | split(".") | map(tonumber))
  ' "$4" >"$version_results.new"
  mv "$version_results.new" "$version_results"
}

# Runs the version tests on each version of Kubernetes in VERSIONS. By default, runs them on all
# versions that the launcher builds.
versions() {
  # Read the commit before the tests, because recording the results changes the tree.
  local commit version failed=()
  commit=$(git describe --always --dirty --exclude '*' --abbrev=12)
  for version in ${VERSIONS:-$("$cluster" versions)}; do
    # Use a separate process: when the process exits, it removes its cluster, even after an error.
    CLEAVE_KUBERNETES=$version e2e/test version "$commit" || failed+=("$version")
  done
  say "The results are in $version_results. Run make docs to update the table in docs/how-to/install.md"
  [ ${#failed[@]} = 0 ] || die "tests failed or did not run on Kubernetes ${failed[*]}"
}
