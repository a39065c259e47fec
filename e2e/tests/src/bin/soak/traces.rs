//! What may be left behind on the nodes, and what the programs keep resident.
use std::collections::BTreeMap;

use anyhow::{Context, Result};
use cleave_e2e::on_node;

use crate::{CUT, SHARED};

/// Things on the nodes that come and go with pods, counted: by node and kind.
pub(crate) struct Traces(BTreeMap<(&'static str, String), u64>);

const COUNT: &str = r"
echo clients $(grep -lz '^cleave-client' /proc/[0-9]*/cmdline 2>/dev/null | wc -l)
echo folders $(ls /run/cleave/alloc 2>/dev/null | wc -l)
echo mounts $(grep -c /run/cleave/alloc /proc/mounts)
echo containers $(ls /run/containerd/io.containerd.runtime.v2.task/k8s.io 2>/dev/null | wc -l)
";

impl Traces {
    pub(crate) fn of_nodes() -> Result<Self> {
        let mut counts = BTreeMap::new();
        for node in [SHARED, CUT] {
            for line in on_node(node, &["sh", "-c", COUNT])?.lines() {
                let (kind, count) = line.split_once(' ').with_context(|| format!("{line:?}"))?;
                counts.insert((node, kind.to_owned()), count.trim().parse().with_context(|| format!("{line:?}"))?);
            }
        }
        Ok(Self(counts))
    }
}

/// What there is more of than before.
pub(crate) fn left(before: &Traces, after: &Traces) -> Vec<String> {
    let more = |(of, now): (&(&'static str, String), &u64)| {
        let was = before.0.get(of).copied().unwrap_or_default();
        (*now > was).then(|| format!("{} on {}: {was}, now {now}", of.1, of.0))
    };
    after.0.iter().filter_map(more).collect()
}

/// Resident memory in KiB of Cleave's programs, by node and program.
pub(crate) type Memory = BTreeMap<(&'static str, String), u64>;

const RESIDENT: &str = r#"
for p in /proc/[0-9]*; do
  case "$(tr '\0' ' ' <$p/cmdline 2>/dev/null)" in
    "/usr/bin/cleave-agent "*) what=agent ;;
    "/usr/bin/cleave-mps-host "*) what=mps-host ;;
    "/usr/bin/cleave operator "*) what=operator ;;
    *) continue ;;
  esac
  echo "$what $(sed -n 's/^VmRSS:[^0-9]*\([0-9]*\).*/\1/p' $p/status)"
done
"#;

pub(crate) fn memory() -> Result<Memory> {
    let mut all = Memory::new();
    for node in [SHARED, CUT] {
        for line in on_node(node, &["sh", "-c", RESIDENT])?.lines() {
            if let Some((what, kib)) = line.split_once(' ') {
                all.insert((node, what.to_owned()), kib.trim().parse().unwrap_or_default());
            }
        }
    }
    Ok(all)
}

/// Each program's figures in the course of time.
pub(crate) fn course(memory: &[Memory]) -> String {
    let at = [0, memory.len() / 2, memory.len().saturating_sub(1)];
    let Some(last) = memory.last() else { return String::new() };
    let one = |of: &(&'static str, String)| {
        let figures: Vec<String> =
            at.iter().filter_map(|&at| memory.get(at)?.get(of)).map(ToString::to_string).collect();
        format!("{} of {} {}", of.1, of.0, figures.join(" "))
    };
    last.keys().map(one).collect::<Vec<_>>().join("; ")
}

/// How much a program may be above its middle of the run at the end, KiB: what an allocator keeps
/// of a burst.
const LEEWAY: u64 = 4096;

/// Programs that need much more at the end than in the middle of the run.
pub(crate) fn grown(memory: &[Memory]) -> Vec<String> {
    let (Some(middle), Some(last)) = (memory.get(memory.len() / 2), memory.last()) else { return Vec::new() };
    let more = |(of, now): (&(&'static str, String), &u64)| {
        let was = *middle.get(of)?;
        (*now > was + LEEWAY).then(|| format!("{} of {}: {was} KiB in the middle, {now} at the end", of.1, of.0))
    };
    last.iter().filter_map(more).collect()
}
