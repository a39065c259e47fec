//! Counts objects on the nodes, to find objects that remain after their pods, and measures the
//! memory of Cleave's programs.
use std::collections::BTreeMap;

use anyhow::{Context, Result};
use cleave_e2e::on_node;

use crate::common::{DYNAMIC_NODE, SHARES_NODE};

/// Numbers of objects that are created and deleted together with pods, by kind and node.
pub(crate) struct ObjectCounts(BTreeMap<(&'static str, String), u64>);

/// The kind of object that is counted for all nodes together, because an operator's pod may move to
/// the other node.
const OPERATOR_CONTAINERS: &str = "operator-containers";
/// Replaces the name of a node in the count of [`OPERATOR_CONTAINERS`].
const ALL_NODES: &str = "all nodes";

/// Prints one line `KIND COUNT` for each kind of object. Each container and each sandbox has one
/// directory.
const COUNT_SCRIPT: &str = r#"
tasks=/run/containerd/io.containerd.runtime.v2.task/k8s.io
all=$(ls $tasks 2>/dev/null | wc -l)
operator=$(grep -ls '"io.kubernetes.cri.sandbox-name":"cleave-operator-' $tasks/*/config.json | wc -l)
echo clients $(grep -lz '^cleave-client' /proc/[0-9]*/cmdline 2>/dev/null | wc -l)
echo directories $(ls /run/cleave/alloc 2>/dev/null | wc -l)
echo mounts $(grep -c /run/cleave/alloc /proc/mounts)
echo containers $((all - operator))
echo operator-containers $operator
"#;

impl ObjectCounts {
    /// Counts the objects on all nodes.
    pub(crate) fn count_on_nodes() -> Result<Self> {
        let mut counts = BTreeMap::new();
        for node in [SHARES_NODE, DYNAMIC_NODE] {
            for line in on_node(node, &["sh", "-c", COUNT_SCRIPT])?.lines() {
                let (kind, count) = line.split_once(' ').with_context(|| format!("{line:?}"))?;
                let count: u64 = count.trim().parse().with_context(|| format!("{line:?}"))?;
                let node = if kind == OPERATOR_CONTAINERS { ALL_NODES } else { node };
                *counts.entry((node, kind.to_owned())).or_default() += count;
            }
        }
        Ok(Self(counts))
    }
}

/// Describes the kinds of which more objects exist than before.
pub(crate) fn remaining_objects(before: &ObjectCounts, after: &ObjectCounts) -> Vec<String> {
    let more = |(of, now): (&(&'static str, String), &u64)| {
        let was = before.0.get(of).copied().unwrap_or_default();
        (*now > was).then(|| format!("{} on {}: {was} before, {now} now", of.1, of.0))
    };
    after.0.iter().filter_map(more).collect()
}

/// Resident memory of Cleave's programs in KiB, by program and node.
pub(crate) type MemoryByProgram = BTreeMap<(&'static str, String), u64>;

/// Prints one line `PROGRAM KIB` for each process of Cleave's programs.
const MEMORY_SCRIPT: &str = r#"
for p in /proc/[0-9]*; do
  case "$(tr '\0' ' ' <$p/cmdline 2>/dev/null)" in
    "/usr/bin/cleave-agent "*) what=agent ;;
    "/usr/bin/cleave-mps-host "*) what=mps-host ;;
    "/usr/bin/cleave-kubelet-relay "*) what=kubelet-relay ;;
    "/usr/bin/cleave operator "*) what=operator ;;
    *) continue ;;
  esac
  echo "$what $(sed -n 's/^VmRSS:[^0-9]*\([0-9]*\).*/\1/p' $p/status)"
done
"#;

/// Measures the memory of Cleave's programs on all nodes. If several processes of a program run on
/// a node, the result contains the largest of these processes.
pub(crate) fn measure_memory() -> Result<MemoryByProgram> {
    let mut all = MemoryByProgram::new();
    for node in [SHARES_NODE, DYNAMIC_NODE] {
        for line in on_node(node, &["sh", "-c", MEMORY_SCRIPT])?.lines() {
            if let Some((what, kib)) = line.split_once(' ') {
                let kib: u64 = kib.trim().parse().unwrap_or_default();
                let largest = all.entry((node, what.to_owned())).or_default();
                *largest = kib.max(*largest);
            }
        }
    }
    Ok(all)
}

/// Formats each program's memory at the start, in the middle and at the end.
pub(crate) fn format_memory_over_time(memory: &[MemoryByProgram]) -> String {
    let at = [0, memory.len() / 2, memory.len().saturating_sub(1)];
    let Some(last) = memory.last() else { return String::new() };
    let figures = |of: &(&'static str, String)| {
        let figures: Vec<String> =
            at.iter().filter_map(|&at| memory.get(at)?.get(of)).map(ToString::to_string).collect();
        format!("{} of {} {}", of.1, of.0, figures.join(" "))
    };
    last.keys().map(figures).collect::<Vec<_>>().join("; ")
}

/// Maximum growth of a program's memory in the second half of the run, in KiB. After a burst, an
/// allocator may retain this amount of memory.
const MAX_GROWTH_KIB: u64 = 4096;

/// Maximum resident memory of programs at the end of the run, in KiB.
const MEMORY_GOALS_KIB: [(&str, u64); 3] = [("agent", 12 << 10), ("mps-host", 4 << 10), ("operator", 25 << 10)];

/// Describes the programs whose memory exceeds its goal at the end of the run.
pub(crate) fn programs_above_goal(memory: &[MemoryByProgram]) -> Vec<String> {
    let Some(last) = memory.last() else { return Vec::new() };
    let above = |((node, program), now): (&(&'static str, String), &u64)| {
        let (_, goal) = MEMORY_GOALS_KIB.into_iter().find(|(name, _)| name == program)?;
        (*now > goal).then(|| format!("{program} of {node}: {now} KiB, goal {goal}"))
    };
    last.iter().filter_map(above).collect()
}

/// Describes the programs whose memory grew by more than [`MAX_GROWTH_KIB`] in the second half of
/// the run.
pub(crate) fn grown_programs(memory: &[MemoryByProgram]) -> Vec<String> {
    let (Some(middle), Some(last)) = (memory.get(memory.len() / 2), memory.last()) else { return Vec::new() };
    let more = |(of, now): (&(&'static str, String), &u64)| {
        let was = *middle.get(of)?;
        (*now > was + MAX_GROWTH_KIB)
            .then(|| format!("{} of {}: {was} KiB in the middle, {now} at the end", of.1, of.0))
    };
    last.iter().filter_map(more).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(of: &[(&'static str, &str, u64)]) -> ObjectCounts {
        ObjectCounts(of.iter().map(|(node, kind, count)| ((*node, (*kind).to_owned()), *count)).collect())
    }

    #[test]
    fn an_operator_that_moves_to_another_node_leaves_nothing_behind_and_another_container_does() {
        let before = counts(&[("node2", "containers", 4), (ALL_NODES, OPERATOR_CONTAINERS, 4)]);
        assert_eq!(remaining_objects(&before, &before), Vec::<String>::new());
        let after = counts(&[("node2", "containers", 6), (ALL_NODES, OPERATOR_CONTAINERS, 6)]);
        let expected = ["operator-containers on all nodes: 4 before, 6 now", "containers on node2: 4 before, 6 now"];
        assert_eq!(remaining_objects(&before, &after), expected);
    }

    #[test]
    fn memory_above_a_goal_at_the_end_is_reported() {
        let memory = |agent, host| {
            MemoryByProgram::from([(("node1", "agent".to_owned()), agent), (("node1", "mps-host".to_owned()), host)])
        };
        let over_time = [memory(20_000, 4096), memory(12 << 10, 4096)];
        assert_eq!(programs_above_goal(&over_time), Vec::<String>::new(), "the goal is met at the end");
        let over_time = [memory(1, 1), memory((12 << 10) + 1, 4097)];
        let expected = ["agent of node1: 12289 KiB, goal 12288", "mps-host of node1: 4097 KiB, goal 4096"];
        assert_eq!(programs_above_goal(&over_time), expected);
    }
}
