//! Decides the next layout of each GPU. A change of a layout starts now, waits for pods, or is
//! refused. Pure.
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::gpunode::{GpuNodeSpec, GpuSpec, StepStatus};
use cleave_api::names::{STEP_DONE, STEP_IN_USE, STEP_REFUSED, STEP_WAITING};
use cleave_gpu::mps::wire::DaemonSettings;
use cleave_gpu::nvml::{Gpu, Process};

use crate::allocation::usage::SliceUsage;
use crate::gpu::hardware::Hardware;
use crate::gpu::layout::{Layout, TargetLayout, parse_slice_id, target_layout};
use crate::gpu::mig::{MigChange, in_use_message};

/// Maximum number of pods that a step's message names.
const MAX_NAMED_PODS: usize = 8;

/// The next layouts, and the steps towards the spec.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LayoutDecision {
    /// Layouts, by UUID of the GPU.
    pub layouts: BTreeMap<String, Layout>,
    /// A step for each GPU that changes now, or that does not match the spec.
    pub steps: Vec<StepStatus>,
    /// Whether the node matches the spec.
    pub applied: bool,
    /// MIG changes by UUID of the GPU, in order. Changes of devices that are known to be in use are
    /// omitted.
    pub changes: BTreeMap<String, Vec<MigChange>>,
    /// Whether processes outside of Kubernetes block a change.
    pub foreign: bool,
}

/// Restrictions on changes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChangeRules {
    /// Whether the agent must not change MIG mode.
    pub keep_mig_mode: bool,
    /// UUIDs of the GPUs that a spec has partitioned by MIG.
    pub mig_partitioned: BTreeSet<String>,
    /// Processes other than Cleave's MPS daemons and their clients, by UUID of the GPU.
    pub processes: BTreeMap<String, Vec<Process>>,
}

/// Decides the layout of each GPU independently of the other GPUs. Ignores GPUs in the spec that
/// the node does not have. Removes no served slice while `usage` is unknown.
pub fn decide_layouts(
    hardware: &Hardware,
    spec: Option<&GpuNodeSpec>,
    current: &BTreeMap<String, Layout>,
    usage: Option<&SliceUsage>,
    rules: &ChangeRules,
) -> LayoutDecision {
    let mut decision = LayoutDecision { applied: true, ..LayoutDecision::default() };
    let mut specs: BTreeMap<&str, Vec<&GpuSpec>> = BTreeMap::new();
    for gpu in spec.iter().flat_map(|spec| &spec.gpus) {
        specs.entry(gpu.uuid.as_str()).or_default().push(gpu);
    }
    for known in hardware.gpus_by_index() {
        let gpu = &known.gpu;
        let before = current.get(&gpu.uuid);
        let was_mig = !rules.keep_mig_mode && rules.mig_partitioned.contains(&gpu.uuid);
        let target = match specs.remove(gpu.uuid.as_str()).as_deref() {
            // Without a spec, keep the current layouts.
            None | Some([]) if spec.is_none() => match before {
                Some(layout) => Ok(layout.clone().into()),
                None => continue,
            },
            None | Some([]) => target_layout(None, gpu, was_mig),
            Some([one]) => target_layout(Some(one), gpu, was_mig),
            Some(_) => Err("the spec lists the GPU twice".into()),
        };
        match target {
            Ok(wanted) => decision.plan_gpu(gpu, before, wanted, usage, rules),
            Err(why) => {
                decision.add_unfinished_step("apply the spec".into(), gpu, STEP_REFUSED, why);
                decision.layouts.extend(before.map(|before| (gpu.uuid.clone(), before.clone())));
            }
        }
    }
    decision
}

impl LayoutDecision {
    /// Adds the next layout of a GPU and its steps: the target layout, as far as the slices in use
    /// allow.
    fn plan_gpu(
        &mut self,
        gpu: &Gpu,
        before: Option<&Layout>,
        wanted: TargetLayout,
        usage: Option<&SliceUsage>,
        rules: &ChangeRules,
    ) {
        let TargetLayout { mut layout, mut changes, note } = wanted;
        if rules.keep_mig_mode
            && let Some(at) = changes.iter().position(|change| matches!(change, MigChange::Mode(_)))
        {
            let on = changes.remove(at) == MigChange::Mode(true);
            self.add_unfinished_step(describe_layout(&layout), gpu, STEP_WAITING, mig_mode_instruction(gpu, on));
            if on {
                // MIG mode remains off, so the agent cannot apply the target layout.
                self.layouts.extend(before.map(|before| (gpu.uuid.clone(), before.clone())));
                return;
            }
        }
        let mut blocked = match (usage, before) {
            (Some(usage), _) => devices_blocked_by_pods(gpu, before, &layout, &changes, usage),
            // A first layout removes nothing.
            (None, None) => BTreeMap::new(),
            (None, Some(before)) if *before == layout => BTreeMap::new(),
            (None, Some(_)) => {
                let why = "the kubelet has not reported yet which slices are in use".to_owned();
                BTreeMap::from([(gpu.uuid.clone(), why)])
            }
        };
        let foreign = devices_blocked_by_processes(gpu, before, &changes, rules);
        self.foreign |= !foreign.is_empty();
        let in_use = !foreign.is_empty() || usage.is_some() && !blocked.is_empty();
        for (device, why) in foreign {
            blocked.entry(device).or_insert(why);
        }
        if !blocked.is_empty() {
            let why: BTreeSet<&str> = blocked.values().map(String::as_str).collect();
            let why = why.into_iter().collect::<Vec<_>>().join("; ");
            self.add_unfinished_step(describe_layout(&layout), gpu, STEP_WAITING, why);
            if let Some(step) = self.steps.last_mut().filter(|_| in_use) {
                step.reason = STEP_IN_USE.into();
            }
        }
        if blocked.contains_key(&gpu.uuid) {
            self.layouts.extend(before.map(|before| (gpu.uuid.clone(), before.clone())));
            return;
        }
        // Keep only the blocked MIG instances. The other instances change.
        for device in blocked.keys() {
            layout.restore_device(device, before);
            changes.retain(|change| !matches!(change, MigChange::Destroy(instance) if instance.uuid == *device));
        }
        self.applied &= changes.is_empty();
        if blocked.is_empty() && changes.is_empty() && before != Some(&layout) {
            self.add_step(describe_layout(&layout), gpu, STEP_DONE, note);
        }
        self.layouts.insert(gpu.uuid.clone(), layout);
        if !changes.is_empty() {
            self.changes.insert(gpu.uuid.clone(), changes);
        }
    }

    /// Adds a step with a result.
    fn add_step(&mut self, action: String, gpu: &Gpu, result: &str, message: String) {
        let (gpu, result) = (gpu.uuid.clone(), result.into());
        self.steps.push(StepStatus { gpu, action, result, message, ..StepStatus::default() });
    }

    /// Adds a step that waits or is refused, and marks the spec as not applied.
    fn add_unfinished_step(&mut self, action: String, gpu: &Gpu, result: &str, message: String) {
        self.applied = false;
        self.add_step(action, gpu, result, message);
    }
}

/// Returns the instruction to an administrator to change MIG mode, because the agent must not
/// change it.
fn mig_mode_instruction(gpu: &Gpu, on: bool) -> String {
    let (is, flag) = if on { ("off", 1) } else { ("on", 0) };
    format!(
        "MIG mode is {is}, and this agent must not change MIG mode (--mig-mode never). When no program uses the GPU, run nvidia-smi -i {} -mig {flag}",
        gpu.pci
    )
}

/// Returns the summary of a layout for a step, such as `serve 10 nvidia.com/gpu-mps`.
fn describe_layout(layout: &Layout) -> String {
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for pool in &layout.pools {
        *counts.entry(&pool.resource).or_default() += u64::from(pool.count);
    }
    let parts: Vec<String> = counts.iter().map(|(resource, count)| format!("{count} {resource}")).collect();
    match parts.as_slice() {
        [] => "serve no slices".into(),
        parts => format!("serve {}", parts.join(", ")),
    }
}

/// Returns the devices on which slices in use would change. Each device has a text that names the
/// pods that use these slices.
fn devices_blocked_by_pods(
    gpu: &Gpu,
    before: Option<&Layout>,
    after: &Layout,
    changes: &[MigChange],
    usage: &SliceUsage,
) -> BTreeMap<String, String> {
    let mut devices: BTreeSet<&str> = BTreeSet::from([gpu.uuid.as_str()]);
    devices.extend(gpu.mig.iter().flat_map(|mig| &mig.instances).map(|instance| instance.uuid.as_str()));
    devices.extend(before.iter().flat_map(|layout| &layout.pools).map(|pool| pool.device.as_str()));
    devices.remove("");
    let ends = |device: &str| {
        changes.iter().any(|change| match change {
            MigChange::Destroy(instance) => instance.uuid == device,
            MigChange::Mode(true) => gpu.uuid == device,
            MigChange::Mode(false) | MigChange::Create { .. } => false,
        })
    };
    let mut found = BTreeMap::new();
    for device in devices {
        let one = BTreeSet::from([device]);
        let mut pods: BTreeSet<&str> = BTreeSet::new();
        for (resource, id, users) in usage.slices_of_devices(&one) {
            if ends(device) || !is_slice_unchanged(before, after, resource, id) {
                pods.extend(users.iter().map(String::as_str));
            }
        }
        if !pods.is_empty() {
            let named: Vec<&str> = pods.iter().copied().take(MAX_NAMED_PODS).collect();
            let more = if pods.len() > MAX_NAMED_PODS {
                format!(" and {} more", pods.len() - MAX_NAMED_PODS)
            } else {
                String::new()
            };
            found.insert(device.to_owned(), format!("in use by {}{more}", named.join(", ")));
        }
    }
    found
}

/// Returns the served devices that the changes would remove while processes outside of Kubernetes
/// use them. Each device has a text that names the processes.
fn devices_blocked_by_processes(
    gpu: &Gpu,
    before: Option<&Layout>,
    changes: &[MigChange],
    rules: &ChangeRules,
) -> BTreeMap<String, String> {
    let processes: &[Process] = rules.processes.get(&gpu.uuid).map_or(&[], Vec::as_slice);
    let served = |device: &str| before.is_some_and(|layout| layout.pools.iter().any(|pool| pool.device == device));
    let inside = |wanted: &dyn Fn(&Process) -> bool| -> Vec<&Process> {
        processes.iter().filter(|process| wanted(process)).collect()
    };
    let mut found = BTreeMap::new();
    for change in changes {
        let (device, there) = match change {
            MigChange::Destroy(instance) => {
                (&instance.uuid, inside(&|process| process.gpu_instance == Some(instance.gpu_instance)))
            }
            MigChange::Mode(true) => (&gpu.uuid, inside(&|_| true)),
            MigChange::Mode(false) | MigChange::Create { .. } => continue,
        };
        if !there.is_empty() && served(device) {
            found.insert(device.clone(), in_use_message(&there));
        }
    }
    found
}

/// Returns whether a slice remains unchanged: both layouts contain the slice with the same limits,
/// and its daemon does not have to restart.
pub fn is_slice_unchanged(before: Option<&Layout>, after: &Layout, resource: &str, id: &str) -> bool {
    let Some((device, number)) = parse_slice_id(id) else { return true };
    let find = |layout: &Layout| {
        let pool = layout.pools.iter().find(|pool| pool.resource == resource && pool.contains(device, number))?;
        // Consent to advisory limits applies at once, because it changes no limit of a slice. The
        // MPS host restarts the daemon only when the daemon has no clients.
        Some((pool.kind.clone(), layout.daemons.get(device).map(DaemonSettings::without_consent)))
    };
    match (before.and_then(find), find(after)) {
        (Some(before), Some(after)) => before == after,
        // The checkpoint is lost, but an earlier agent served the slice. The slice is unchanged if
        // the new layout contains its id.
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
    use crate::allocation::usage::Allocations;
    use crate::allocation::usage::tests::{allocation, container_devices};
    use crate::gpu::hardware::{DriverState, KnownGpu};
    use crate::gpu::layout::tests::{gpu, mps_spec, timeslice_spec};

    fn hardware(uuids: &[&str]) -> Hardware {
        let known = |(index, uuid): (usize, &&str)| {
            let gpu = gpu(uuid, u32::try_from(index).unwrap());
            (
                (*uuid).to_owned(),
                KnownGpu {
                    gpu,
                    health: Health::default(),
                    instances: BTreeMap::new(),
                    observed: true,
                    processes: Vec::new(),
                    missing: false,
                },
            )
        };
        Hardware {
            driver: DriverState::Present("580".into()),
            gpus: uuids.iter().enumerate().map(known).collect(),
            ..Hardware::default()
        }
    }

    fn decide_layouts(
        hardware: &Hardware,
        spec: Option<&GpuNodeSpec>,
        current: &BTreeMap<String, Layout>,
        usage: Option<&SliceUsage>,
    ) -> LayoutDecision {
        super::decide_layouts(hardware, spec, current, usage, &ChangeRules::default())
    }

    fn spec(gpus: Vec<GpuSpec>) -> GpuNodeSpec {
        GpuNodeSpec { plan_id: "p".into(), gpus }
    }

    fn no_usage() -> SliceUsage {
        SliceUsage::default()
    }

    fn step_results(decision: &LayoutDecision) -> Vec<(&str, &str)> {
        decision.steps.iter().map(|step| (step.gpu.as_str(), step.result.as_str())).collect()
    }

    #[test]
    fn three_gpus_can_have_three_modes() {
        let hardware = hardware(&["GPU-a", "GPU-b", "GPU-c"]);
        let spec = spec(vec![mps_spec("GPU-a", 10), timeslice_spec("GPU-b", 4)]);
        let decision = decide_layouts(&hardware, Some(&spec), &BTreeMap::new(), None);
        assert!(decision.applied);
        assert_eq!(
            decision.steps.iter().map(|step| step.action.as_str()).collect::<Vec<_>>(),
            ["serve 10 nvidia.com/gpu-mps", "serve 4 nvidia.com/gpu-timeslice", "serve 1 nvidia.com/gpu"]
        );
        let again = decide_layouts(&hardware, Some(&spec), &decision.layouts, Some(&no_usage()));
        assert_eq!((again.steps, again.layouts), (vec![], decision.layouts), "nothing more to do");
    }

    #[test]
    fn a_change_waits_for_the_pods_that_use_the_gpu_and_delays_no_other_gpu() {
        let hardware = hardware(&["GPU-a", "GPU-b"]);
        let old = decide_layouts(
            &hardware,
            Some(&spec(vec![mps_spec("GPU-a", 10), mps_spec("GPU-b", 10)])),
            &BTreeMap::new(),
            None,
        );
        let new = spec(vec![mps_spec("GPU-a", 5), mps_spec("GPU-b", 5)]);
        let usage = SliceUsage::new(&[container_devices("train", &["GPU-a::3"])], &Allocations::default());
        let decision = decide_layouts(&hardware, Some(&new), &old.layouts, Some(&usage));
        assert_eq!(step_results(&decision), [("GPU-a", "Waiting"), ("GPU-b", "Done")]);
        assert_eq!(decision.steps[0].message, "in use by ns/train");
        assert_eq!(decision.steps[0].reason, STEP_IN_USE);
        assert!(!decision.applied);
        assert_eq!(decision.layouts["GPU-a"], old.layouts["GPU-a"]);
        assert_eq!(decision.layouts["GPU-b"].pools[0].count, 5);
        let freed = decide_layouts(&hardware, Some(&new), &decision.layouts, Some(&no_usage()));
        assert_eq!(step_results(&freed), [("GPU-a", "Done")]);
        assert!(freed.applied);
    }

    #[test]
    fn slices_of_a_pod_that_is_being_admitted_are_in_use() {
        let hardware = hardware(&["GPU-a"]);
        let old = decide_layouts(&hardware, Some(&spec(vec![mps_spec("GPU-a", 10)])), &BTreeMap::new(), None);
        let allocations = Allocations::restore([allocation(&["GPU-a::3"])], Instant::now());
        let decision =
            decide_layouts(&hardware, Some(&spec(vec![])), &old.layouts, Some(&SliceUsage::new(&[], &allocations)));
        assert_eq!(step_results(&decision), [("GPU-a", "Waiting")]);
        assert!(decision.steps[0].message.contains("being admitted"));
    }

    #[test]
    fn while_usage_is_unknown_no_slice_is_removed() {
        let hardware = hardware(&["GPU-a", "GPU-b"]);
        let old = decide_layouts(&hardware, Some(&spec(vec![mps_spec("GPU-a", 10)])), &BTreeMap::new(), None);
        let mut only_a = old.layouts.clone();
        only_a.remove("GPU-b");
        let decision = decide_layouts(&hardware, Some(&spec(vec![])), &only_a, None);
        assert_eq!(step_results(&decision), [("GPU-a", "Waiting"), ("GPU-b", "Done")]);
        assert_eq!(decision.layouts["GPU-a"], old.layouts["GPU-a"]);
    }

    #[test]
    fn without_a_spec_the_layouts_are_kept() {
        let hardware = hardware(&["GPU-a", "GPU-b"]);
        let old = decide_layouts(&hardware, Some(&spec(vec![mps_spec("GPU-a", 10)])), &BTreeMap::new(), None);
        let only_a = BTreeMap::from([("GPU-a".to_owned(), old.layouts["GPU-a"].clone())]);
        let decision = decide_layouts(&hardware, None, &only_a, Some(&no_usage()));
        assert_eq!(decision.layouts, only_a);
        assert!(decision.steps.is_empty());
    }

    #[test]
    fn after_a_lost_checkpoint_slices_in_use_are_kept_if_the_spec_has_them_and_block_a_change_otherwise() {
        let hardware = hardware(&["GPU-a"]);
        let usage = SliceUsage::new(&[container_devices("p", &["GPU-a::3"])], &Allocations::default());
        let same = decide_layouts(&hardware, Some(&spec(vec![mps_spec("GPU-a", 10)])), &BTreeMap::new(), Some(&usage));
        assert_eq!(step_results(&same), [("GPU-a", "Done")]);
        let other = decide_layouts(&hardware, Some(&spec(vec![])), &BTreeMap::new(), Some(&usage));
        assert_eq!(step_results(&other), [("GPU-a", "Waiting")]);
        assert!(other.layouts.is_empty());
    }

    #[test]
    fn adding_another_resource_waits_for_no_pod() {
        let hardware = hardware(&["GPU-a"]);
        let mut part = mps_spec("GPU-a", 4);
        let old = decide_layouts(&hardware, Some(&spec(vec![part.clone()])), &BTreeMap::new(), None);
        let slices = &mut part.partition.mps.as_mut().unwrap().slices;
        let mut more = slices[0].clone();
        more.resource = "nvidia.com/gpu-10gb".into();
        slices.push(more);
        let usage = SliceUsage::new(&[container_devices("p", &["GPU-a::3"])], &Allocations::default());
        let decision = decide_layouts(&hardware, Some(&spec(vec![part])), &old.layouts, Some(&usage));
        assert_eq!(step_results(&decision), [("GPU-a", "Done")]);
    }

    #[test]
    fn an_impossible_spec_is_refused_and_the_layout_is_kept() {
        let hardware = hardware(&["GPU-a"]);
        let old = decide_layouts(&hardware, Some(&spec(vec![mps_spec("GPU-a", 10)])), &BTreeMap::new(), None);
        let bad = spec(vec![mps_spec("GPU-a", 49), mps_spec("GPU-x", 10)]);
        let decision = decide_layouts(&hardware, Some(&bad), &old.layouts, Some(&no_usage()));
        assert_eq!(step_results(&decision), [("GPU-a", "Refused")], "GPU-x is not on this node");
        assert_eq!(decision.layouts, old.layouts);
        let twice = spec(vec![mps_spec("GPU-a", 10), mps_spec("GPU-a", 5)]);
        assert!(
            decide_layouts(&hardware, Some(&twice), &old.layouts, Some(&no_usage())).steps[0].message.contains("twice")
        );
    }

    proptest! {
        /// No spec changes a slice in use, and a repeated decision changes no layout.
        #[test]
        fn a_slice_in_use_is_never_removed(
            units in 1_u32..48, next in 0_u32..50, used in prop::collection::btree_set(0_u32..48, 0..4), sliced: bool,
        ) {
            let hardware = hardware(&["GPU-a"]);
            let old = decide_layouts(&hardware, Some(&spec(vec![mps_spec("GPU-a", units)])), &BTreeMap::new(), None).layouts;
            let ids: Vec<String> = used.iter().filter(|&&n| n < units).map(|n| format!("GPU-a::{n}")).collect();
            let row = container_devices("p", &ids.iter().map(String::as_str).collect::<Vec<_>>());
            let usage = SliceUsage::new(&[row], &Allocations::default());
            let new = spec(vec![if sliced { timeslice_spec("GPU-a", next) } else { mps_spec("GPU-a", next) }]);
            let decision = decide_layouts(&hardware, Some(&new), &old, Some(&usage));
            if !ids.is_empty() {
                prop_assert_eq!(&decision.layouts, &old);
            }
            let again = decide_layouts(&hardware, Some(&new), &decision.layouts, Some(&usage));
            prop_assert_eq!(&again.layouts, &decision.layouts);
            prop_assert!(again.steps.iter().all(|step| step.result != "Done"));
        }
    }
}
