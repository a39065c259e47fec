//! Checks the conditions that must hold during a history and at its end.
use std::collections::BTreeMap;

use cleave_api::placement::PLACEMENT_ANNOTATION;
use cleave_plan::affinity::HOSTNAME;
use serde_json::{Value, json};

use super::operator::{Operator, has_stranded_condition, is_replaced, units_reserved_for};
use super::pods::{Owner, require_node};
use super::scheduler::{list, node_of, text};
use super::simulation::{CreatedPod, Simulation};

/// Maximum number of seconds from the release of a pod that no node accepts until the pod is
/// recreated or gets a condition. The pod's reservation ends after 300 s, and evictions of one
/// controller are delayed by up to 600 s.
const RESCUE_DEADLINE_SECONDS: u64 = 1000;

/// Checks that no unit of a GPU is reserved twice, or reserved and used.
pub(super) fn no_units_are_reserved_twice(simulation: &Simulation) -> Result<(), String> {
    let mut units: BTreeMap<String, u32> = BTreeMap::new();
    for pod in simulation.api.pods.values() {
        for (device, reserved) in units_reserved_for(simulation, pod) {
            *units.entry(device).or_default() += reserved;
        }
    }
    for (device, reserved) in units {
        let used = simulation.used(&device);
        if used + reserved > 10 {
            return Err(format!("{device}: {used} units are used and {reserved} reserved"));
        }
    }
    Ok(())
}

/// Checks that each pod that could run is released, and is not pinned to a node where it cannot
/// run.
pub(super) fn no_runnable_pod_waits(simulation: &Simulation, operator: &Operator) -> Result<(), String> {
    for (name, pod) in &simulation.api.pods {
        let Some(original) = simulation.originals.get(text(pod, "/metadata/uid")) else { continue };
        if node_of(pod).is_some() {
            continue;
        }
        let gated = !list(pod, "/spec/schedulingGates").is_empty();
        if gated {
            check_gated(simulation, operator, name, original)?;
        } else {
            check_released(simulation, name, pod, original)?;
        }
    }
    Ok(())
}

fn check_gated(simulation: &Simulation, operator: &Operator, name: &str, original: &CreatedPod) -> Result<(), String> {
    let Some(waiting) = operator.last.waiting.get(name) else {
        return Err(format!("nothing states why {name} waits"));
    };
    // The operator does not know where a volume can be created. Whenever the scheduler does not
    // bind a controller's released pods, the operator increases the delay before their next
    // release.
    if original.has_new_volume && waiting.message.contains("This pod is released later") {
        return Ok(());
    }
    match find_runnable_node(simulation, &original.pod) {
        Some(node) => Err(format!("{name} waits, but could run on {node}: {}", waiting.message)),
        None => Ok(()),
    }
}

fn check_released(simulation: &Simulation, name: &str, pod: &Value, original: &CreatedPod) -> Result<(), String> {
    let released = simulation.released_at[text(pod, "/metadata/uid")];
    let is_reserved = !pod["metadata"]["annotations"][PLACEMENT_ANNOTATION].is_null();
    if has_stranded_condition(pod) || released + RESCUE_DEADLINE_SECONDS > simulation.now {
        return Ok(());
    }
    if is_reserved {
        return Err(format!(
            "{name} ({:?}) has been released since {released}, and no node accepts it",
            original.owner
        ));
    }
    match find_runnable_node(simulation, &original.pod) {
        Some(node) => Err(format!("{name} was released as unschedulable, but could run on {node}")),
        None => Ok(()),
    }
}

/// Returns a node on which a pod could run now. No filter of the scheduler refuses the node, and
/// its free units that are not reserved for other pods suffice.
fn find_runnable_node<'a>(simulation: &'a Simulation, pod: &Value) -> Option<&'a str> {
    let view = simulation.view();
    let mut reserved_units: BTreeMap<String, u32> = BTreeMap::new();
    for other in simulation.api.pods.values() {
        for (device, units) in units_reserved_for(simulation, other) {
            *reserved_units.entry(device).or_default() += units;
        }
    }
    let wanted: Vec<u32> = list(pod, "/spec/containers")
        .iter()
        .map(|container| container["resources"]["limits"]["nvidia.com/gpu-mps"].as_str().unwrap().parse().unwrap())
        .collect();
    simulation.api.nodes.iter().find_map(|(name, node)| {
        let gpus = simulation.gpus.iter().filter(|(_, gpu)| gpu.node == *name);
        let free: Vec<u32> = gpus
            .map(|(device, _)| simulation.free(device).saturating_sub(reserved_units.get(device).copied().unwrap_or(0)))
            .collect();
        let accepts = |pod: &Value| view.refusal(pod, node).is_none();
        (fits(&wanted, &free) && accepts(pod) && accepts(&narrowed(pod, name))).then_some(name.as_str())
    })
}

/// Returns the pod after a release that narrows the pod to a node. For such a pod, `minDomains` of
/// a spread constraint excludes nodes that the constraint would otherwise allow. See "Known limits"
/// on the page Placement.
fn narrowed(pod: &Value, node: &str) -> Value {
    let mut pod = pod.clone();
    require_node(&mut pod["spec"], json!({"key": HOSTNAME, "operator": "In", "values": [node]}));
    pod
}

/// Returns whether all requests fit together, each on one GPU.
fn fits(wanted: &[u32], free: &[u32]) -> bool {
    let Some((first, rest)) = wanted.split_first() else { return true };
    (0..free.len()).any(|gpu| {
        let mut left = free.to_vec();
        free[gpu] >= *first && {
            left[gpu] -= first;
            fits(rest, &left)
        }
    })
}

/// Checks that at most four pods of each controller were evicted since `before`. Skips controllers
/// whose pods have new volumes, and controllers that do not recreate evicted pods.
pub(super) fn no_controller_is_evicted_repeatedly(
    simulation: &Simulation,
    before: &BTreeMap<String, usize>,
) -> Result<(), String> {
    for (controller, count) in &simulation.recreations {
        let more = count - before.get(controller).copied().unwrap_or(0);
        let is_own = |original: &&CreatedPod| text(&original.pod, "/metadata/ownerReferences/0/uid") == controller;
        let Some(original) = simulation.originals.values().find(is_own) else { continue };
        // The operator does not know where a volume can be created.
        if more > 4 && is_replaced(original.owner) && !original.has_new_volume {
            return Err(format!(
                "{more} pods of {controller} ({:?}) were evicted: {}",
                Owner::ReplicaSet,
                original.pod
            ));
        }
    }
    Ok(())
}
