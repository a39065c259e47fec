//! From what is served to what shall be: what changes now, what waits for whom, what is refused. Pure.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::gpunode::{GpuNodeSpec, GpuSpec, StepStatus};
use cleave_api::names::{STEP_DONE, STEP_REFUSED, STEP_WAITING};
use cleave_gpu::nvml::Gpu;

use crate::hardware::Hardware;
use crate::layout::{Layout, Wanted, parse_id, wanted};
use crate::usage::Usage;

/// Most pods that a step names.
const NAMED: usize = 8;

/// What the node is served as next.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Decision {
    /// Layouts by GPU.
    pub layouts: BTreeMap<String, Layout>,
    /// What was done about each GPU that is not as it was, or not as it shall be.
    pub steps: Vec<StepStatus>,
    /// The node is as the spec says.
    pub applied: bool,
}

/// Decides for each GPU by itself; a GPU of the spec that the node does not have is left out. `usage` is none while the kubelet has not said who holds what: then nothing that is served goes.
pub fn decide(
    hardware: &Hardware,
    spec: Option<&GpuNodeSpec>,
    current: &BTreeMap<String, Layout>,
    usage: Option<&Usage>,
) -> Decision {
    let mut decision = Decision { applied: true, ..Decision::default() };
    let mut specs: BTreeMap<&str, Vec<&GpuSpec>> = BTreeMap::new();
    for gpu in spec.iter().flat_map(|spec| &spec.gpus) {
        specs.entry(gpu.uuid.as_str()).or_default().push(gpu);
    }
    for known in hardware.by_index() {
        let gpu = &known.gpu;
        let before = current.get(&gpu.uuid);
        let shall = match specs.remove(gpu.uuid.as_str()).as_deref() {
            // Before the first spec nothing is known to be wanted: what is served stays.
            None | Some([]) if spec.is_none() => match before {
                Some(layout) => Ok(layout.clone().into()),
                None => continue,
            },
            None | Some([]) => wanted(None, gpu),
            Some([one]) => wanted(Some(one), gpu),
            Some(_) => Err("the spec names this GPU twice".into()),
        };
        match shall {
            Ok(Wanted { layout, missing, note }) => {
                if !missing.is_empty() {
                    decision.step(gpu, &layout, STEP_WAITING, missing.join("; "));
                    decision.applied = false;
                }
                let blockers = blockers(gpu, before, &layout, usage);
                match (before, blockers) {
                    (Some(before), _) if *before == layout => {}
                    (_, Ok(())) => decision.step(gpu, &layout, STEP_DONE, note),
                    (_, Err(why)) => {
                        decision.step(gpu, &layout, STEP_WAITING, why);
                        decision.applied = false;
                        decision.layouts.extend(before.map(|before| (gpu.uuid.clone(), before.clone())));
                        continue;
                    }
                }
                decision.layouts.insert(gpu.uuid.clone(), layout);
            }
            Err(why) => {
                decision.steps.push(StepStatus {
                    gpu: gpu.uuid.clone(),
                    action: "apply the spec".into(),
                    result: STEP_REFUSED.into(),
                    message: why,
                });
                decision.applied = false;
                decision.layouts.extend(before.map(|before| (gpu.uuid.clone(), before.clone())));
            }
        }
    }
    decision
}

impl Decision {
    fn step(&mut self, gpu: &Gpu, layout: &Layout, result: &str, message: String) {
        self.steps.push(StepStatus { gpu: gpu.uuid.clone(), action: describe(layout), result: result.into(), message });
    }
}

/// `serve 10 nvidia.com/gpu-mps`.
fn describe(layout: &Layout) -> String {
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for pool in &layout.pools {
        *counts.entry(&pool.resource).or_default() += u64::from(pool.count);
    }
    let parts: Vec<String> = counts.iter().map(|(resource, count)| format!("{count} {resource}")).collect();
    match parts.as_slice() {
        [] => "serve nothing".into(),
        parts => format!("serve {}", parts.join(", ")),
    }
}

/// Whether a slice that is served would go, or be another.
pub fn takes_away(before: &Layout, after: &Layout) -> bool {
    before.pools.iter().any(|pool| pool.ids().any(|id| !keeps(Some(before), after, &pool.resource, &id)))
}

/// Whether each slice in use would stay just what it is.
fn blockers(gpu: &Gpu, before: Option<&Layout>, after: &Layout, usage: Option<&Usage>) -> Result<(), String> {
    let Some(usage) = usage else {
        return match before {
            // Serving for the first time takes nothing away.
            None => Ok(()),
            Some(_) => Err("the kubelet has not said yet which slices are in use".into()),
        };
    };
    let mut devices: BTreeSet<&str> = BTreeSet::from([gpu.uuid.as_str()]);
    devices.extend(gpu.mig.iter().flat_map(|mig| &mig.instances).map(|instance| instance.uuid.as_str()));
    devices.extend(before.iter().flat_map(|layout| &layout.pools).map(|pool| pool.device.as_str()));
    let mut pods: BTreeSet<&str> = BTreeSet::new();
    for (resource, id, holders) in usage.of(&devices) {
        if !keeps(before, after, resource, id) {
            pods.extend(holders.iter().map(String::as_str));
        }
    }
    if pods.is_empty() {
        return Ok(());
    }
    let named: Vec<&str> = pods.iter().copied().take(NAMED).collect();
    let more = if pods.len() > NAMED { format!(" and {} more", pods.len() - NAMED) } else { String::new() };
    Err(format!("in use by {}{more}", named.join(", ")))
}

/// A slice stays itself if it is there afterwards, with the same limits, under a daemon that need not start anew.
fn keeps(before: Option<&Layout>, after: &Layout, resource: &str, id: &str) -> bool {
    let Some((device, number)) = parse_id(id) else { return true };
    let find = |layout: &Layout| {
        let pool = layout.pools.iter().find(|pool| pool.resource == resource && pool.holds(device, number))?;
        Some((pool.kind.clone(), layout.daemons.get(device).cloned()))
    };
    match (before.and_then(find), find(after)) {
        (Some(before), Some(after)) => before == after,
        // Served by an earlier agent whose checkpoint is lost: it can only be the same.
        (None, Some(_)) => true,
        (_, None) => false,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use cleave_api::gpunode::Health;
    use proptest::prelude::*;

    use super::*;
    use crate::hardware::{Driver, KnownGpu};
    use crate::layout::tests::{gpu, mps_spec, sliced_spec};
    use crate::usage::Allocations;
    use crate::usage::tests::{allocation, held};

    fn hardware(uuids: &[&str]) -> Hardware {
        let known = |(index, uuid): (usize, &&str)| {
            let gpu = gpu(uuid, u32::try_from(index).unwrap());
            ((*uuid).to_owned(), KnownGpu { gpu, health: Health::default() })
        };
        Hardware { driver: Driver::Present("580".into()), gpus: uuids.iter().enumerate().map(known).collect() }
    }

    fn spec(gpus: Vec<GpuSpec>) -> GpuNodeSpec {
        GpuNodeSpec { plan_id: "p".into(), gpus, reservations: Vec::new() }
    }

    fn nobody() -> Usage {
        Usage::default()
    }

    fn results(decision: &Decision) -> Vec<(&str, &str)> {
        decision.steps.iter().map(|step| (step.gpu.as_str(), step.result.as_str())).collect()
    }

    #[test]
    fn three_gpus_have_three_modes_at_once() {
        let hardware = hardware(&["GPU-a", "GPU-b", "GPU-c"]);
        let spec = spec(vec![mps_spec("GPU-a", 10), sliced_spec("GPU-b", 4)]);
        let decision = decide(&hardware, Some(&spec), &BTreeMap::new(), None);
        assert!(decision.applied);
        assert_eq!(
            decision.steps.iter().map(|step| step.action.as_str()).collect::<Vec<_>>(),
            ["serve 10 nvidia.com/gpu-mps", "serve 4 nvidia.com/gpu-timeslice", "serve 1 nvidia.com/gpu"]
        );
        let again = decide(&hardware, Some(&spec), &decision.layouts, Some(&nobody()));
        assert_eq!((again.steps, again.layouts), (vec![], decision.layouts), "nothing more to do");
    }

    #[test]
    fn a_change_waits_for_its_pods_and_names_them_and_holds_nothing_else_up() {
        let hardware = hardware(&["GPU-a", "GPU-b"]);
        let old =
            decide(&hardware, Some(&spec(vec![mps_spec("GPU-a", 10), mps_spec("GPU-b", 10)])), &BTreeMap::new(), None);
        let new = spec(vec![mps_spec("GPU-a", 5), mps_spec("GPU-b", 5)]);
        let usage = Usage::new(&[held("train", &["GPU-a::3"])], &Allocations::default());
        let decision = decide(&hardware, Some(&new), &old.layouts, Some(&usage));
        assert_eq!(results(&decision), [("GPU-a", "Waiting"), ("GPU-b", "Done")]);
        assert_eq!(decision.steps[0].message, "in use by ns/train");
        assert!(!decision.applied);
        assert_eq!(decision.layouts["GPU-a"], old.layouts["GPU-a"]);
        assert_eq!(decision.layouts["GPU-b"].pools[0].count, 5);
        let freed = decide(&hardware, Some(&new), &decision.layouts, Some(&nobody()));
        assert_eq!(results(&freed), [("GPU-a", "Done")]);
        assert!(freed.applied);
    }

    #[test]
    fn a_pod_that_is_being_admitted_holds_its_slices() {
        let hardware = hardware(&["GPU-a"]);
        let old = decide(&hardware, Some(&spec(vec![mps_spec("GPU-a", 10)])), &BTreeMap::new(), None);
        let allocations = Allocations::remembering([allocation(&["GPU-a::3"])], Instant::now());
        let decision = decide(&hardware, Some(&spec(vec![])), &old.layouts, Some(&Usage::new(&[], &allocations)));
        assert_eq!(results(&decision), [("GPU-a", "Waiting")]);
        assert!(decision.steps[0].message.contains("being admitted"));
    }

    #[test]
    fn without_the_kubelets_word_nothing_that_is_served_goes() {
        let hardware = hardware(&["GPU-a", "GPU-b"]);
        let old = decide(&hardware, Some(&spec(vec![mps_spec("GPU-a", 10)])), &BTreeMap::new(), None);
        let mut only_a = old.layouts.clone();
        only_a.remove("GPU-b");
        let decision = decide(&hardware, Some(&spec(vec![])), &only_a, None);
        assert_eq!(results(&decision), [("GPU-a", "Waiting"), ("GPU-b", "Done")]);
        assert_eq!(decision.layouts["GPU-a"], old.layouts["GPU-a"]);
    }

    #[test]
    fn before_the_first_spec_only_what_was_served_is() {
        let hardware = hardware(&["GPU-a", "GPU-b"]);
        let old = decide(&hardware, Some(&spec(vec![mps_spec("GPU-a", 10)])), &BTreeMap::new(), None);
        let only_a = BTreeMap::from([("GPU-a".to_owned(), old.layouts["GPU-a"].clone())]);
        let decision = decide(&hardware, None, &only_a, Some(&nobody()));
        assert_eq!(decision.layouts, only_a);
        assert!(decision.steps.is_empty());
    }

    #[test]
    fn slices_of_a_lost_checkpoint_stay_if_the_spec_still_has_them_and_block_if_not() {
        let hardware = hardware(&["GPU-a"]);
        let usage = Usage::new(&[held("p", &["GPU-a::3"])], &Allocations::default());
        let same = decide(&hardware, Some(&spec(vec![mps_spec("GPU-a", 10)])), &BTreeMap::new(), Some(&usage));
        assert_eq!(results(&same), [("GPU-a", "Done")]);
        let other = decide(&hardware, Some(&spec(vec![])), &BTreeMap::new(), Some(&usage));
        assert_eq!(results(&other), [("GPU-a", "Waiting")]);
        assert!(other.layouts.is_empty());
    }

    #[test]
    fn more_slices_of_another_resource_disturb_nobody() {
        let hardware = hardware(&["GPU-a"]);
        let mut part = mps_spec("GPU-a", 4);
        let old = decide(&hardware, Some(&spec(vec![part.clone()])), &BTreeMap::new(), None);
        let slices = &mut part.partition.mps.as_mut().unwrap().slices;
        let mut more = slices[0].clone();
        more.resource = "nvidia.com/gpu-10gb".into();
        slices.push(more);
        let usage = Usage::new(&[held("p", &["GPU-a::3"])], &Allocations::default());
        let decision = decide(&hardware, Some(&spec(vec![part])), &old.layouts, Some(&usage));
        assert_eq!(results(&decision), [("GPU-a", "Done")]);
    }

    #[test]
    fn what_cannot_be_is_refused_and_what_was_served_stays() {
        let hardware = hardware(&["GPU-a"]);
        let old = decide(&hardware, Some(&spec(vec![mps_spec("GPU-a", 10)])), &BTreeMap::new(), None);
        let bad = spec(vec![mps_spec("GPU-a", 49), mps_spec("GPU-x", 10)]);
        let decision = decide(&hardware, Some(&bad), &old.layouts, Some(&nobody()));
        assert_eq!(results(&decision), [("GPU-a", "Refused")], "GPU-x is not this node's");
        assert_eq!(decision.layouts, old.layouts);
        let twice = spec(vec![mps_spec("GPU-a", 10), mps_spec("GPU-a", 5)]);
        assert!(decide(&hardware, Some(&twice), &old.layouts, Some(&nobody())).steps[0].message.contains("twice"));
    }

    proptest! {
        /// Whatever the spec becomes: a slice in use stays itself, and a second look changes nothing.
        #[test]
        fn a_slice_in_use_is_never_taken(
            units in 1_u32..48, next in 0_u32..50, used in prop::collection::btree_set(0_u32..48, 0..4), sliced: bool,
        ) {
            let hardware = hardware(&["GPU-a"]);
            let old = decide(&hardware, Some(&spec(vec![mps_spec("GPU-a", units)])), &BTreeMap::new(), None).layouts;
            let ids: Vec<String> = used.iter().filter(|&&n| n < units).map(|n| format!("GPU-a::{n}")).collect();
            let row = held("p", &ids.iter().map(String::as_str).collect::<Vec<_>>());
            let usage = Usage::new(&[row], &Allocations::default());
            let new = spec(vec![if sliced { sliced_spec("GPU-a", next) } else { mps_spec("GPU-a", next) }]);
            let decision = decide(&hardware, Some(&new), &old, Some(&usage));
            if !ids.is_empty() {
                prop_assert_eq!(&decision.layouts, &old);
            }
            let again = decide(&hardware, Some(&new), &decision.layouts, Some(&usage));
            prop_assert_eq!(&again.layouts, &decision.layouts);
            prop_assert!(again.steps.iter().all(|step| step.result != "Done"));
        }
    }
}
