//! Counts objects on the nodes, to find leftover ones, and measures the memory of Cleave's
//! programs.
use std::collections::BTreeMap;

use anyhow::{Context, Result};
use cleave_e2e::on_node;

use crate::common::{DYNAMIC_NODE, SHARES_NODE};

/// Counts of objects that are created and deleted with pods, by node and kind.
pub(crate) struct ObjectCounts(BTreeMap<(&'static str, String), u64>);

/// Prints one line `KIND COUNT` for each kind of object.
const COUNT_SCRIPT: &str = r"
echo clients $(grep -lz '^cleave-client' /proc/[0-9]*/cmdline 2>/dev/null | wc -l)
echo directories $(ls /run/cleave/alloc 2>/dev/null | wc -l)
echo mounts $(grep -c /run/cleave/alloc /proc/mounts)
echo containers $(ls /run/containerd/io.containerd.runtime.v2.task/k8s.io 2>/dev/null | wc -l)
";

impl ObjectCounts {
    /// Counts the objects on all nodes.
    pub(crate) fn count_on_nodes() -> Result<Self> {
        let mut counts = BTreeMap::new();
        for node in [SHARES_NODE, DYNAMIC_NODE] {
            for line in on_node(node, &["sh", "-c", COUNT_SCRIPT])?.lines() {
                let (kind, count) = line.split_once(' ').with_context(|| format!("{line:?}"))?;
                counts.insert((node, kind.to_owned()), count.trim().parse().with_context(|| format!("{line:?}"))?);
            }
        }
        Ok(Self(counts))
    }
}

/// Describes the kinds with more objects than before.
pub(crate) fn remaining_objects(before: &ObjectCounts, after: &ObjectCounts) -> Vec<String> {
    let more = |(of, now): (&(&'static str, String), &u64)| {
        let was = before.0.get(of).copied().unwrap_or_default();
        (*now > was).then(|| format!("{} on {}: {was} before, {now} now", of.1, of.0))
    };
    after.0.iter().filter_map(more).collect()
}

/// Resident memory of Cleave's programs in KiB, by node and program.
pub(crate) type Memory = BTreeMap<(&'static str, String), u64>;

/// Prints one line `PROGRAM KIB` for each program.
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

/// Measures the memory of Cleave's programs on all nodes.
pub(crate) fn measure_memory() -> Result<Memory> {
    let mut all = Memory::new();
    for node in [SHARES_NODE, DYNAMIC_NODE] {
        for line in on_node(node, &["sh", "-c", MEMORY_SCRIPT])?.lines() {
            if let Some((what, kib)) = line.split_once(' ') {
                all.insert((node, what.to_owned()), kib.trim().parse().unwrap_or_default());
            }
        }
    }
    Ok(all)
}

/// Formats each program's memory at the start, in the middle and at the end.
pub(crate) fn format_memory_over_time(memory: &[Memory]) -> String {
    let at = [0, memory.len() / 2, memory.len().saturating_sub(1)];
    let Some(last) = memory.last() else { return String::new() };
    let figures = |of: &(&'static str, String)| {
        let figures: Vec<String> =
            at.iter().filter_map(|&at| memory.get(at)?.get(of)).map(ToString::to_string).collect();
        format!("{} of {} {}", of.1, of.0, figures.join(" "))
    };
    last.keys().map(figures).collect::<Vec<_>>().join("; ")
}

/// Maximum growth of a program's memory in the second half of the run, in KiB. An allocator may
/// retain this much after a burst.
const MAX_GROWTH_KIB: u64 = 4096;

/// Describes the programs whose memory grew by more than [`MAX_GROWTH_KIB`] in the second half of
/// the run.
pub(crate) fn grown_programs(memory: &[Memory]) -> Vec<String> {
    let (Some(middle), Some(last)) = (memory.get(memory.len() / 2), memory.last()) else { return Vec::new() };
    let more = |(of, now): (&(&'static str, String), &u64)| {
        let was = *middle.get(of)?;
        (*now > was + MAX_GROWTH_KIB)
            .then(|| format!("{} of {}: {was} KiB in the middle, {now} at the end", of.1, of.0))
    };
    last.iter().filter_map(more).collect()
}
