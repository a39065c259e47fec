//! Suggests changes that would help a waiting pod to run.
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use cleave_api::gpunode::GpuStatus;
use cleave_operator::pods::full_name;
use cleave_operator::read::Node;
use cleave_plan::ledger::{Holder, Holders, Moment, NoFit, PendingPod, Preemption, Tightest};

use super::nodes::unavailable_reason;
use super::report::NodeView;
use super::view::PodContext;

/// Maximum number of nodes in one sentence.
const MAX_NAMED_NODES: usize = 5;

impl PodContext<'_> {
    /// Returns the suggestions, one sentence each.
    pub(super) fn suggestions(&self, nodes: &[NodeView]) -> Vec<String> {
        if self.device_requests.is_empty() {
            return Vec::new();
        }
        let usable: BTreeSet<&str> =
            nodes.iter().filter(|node| node.refusal.is_none()).map(|node| node.name.as_str()).collect();
        let mut help: Vec<String> = self.suggest_removals(&usable).into_iter().collect();
        let refusing = self.unusable_nodes_by_refusal(nodes);
        help.extend(refusing.iter().map(|(refusal, nodes)| refusal_line(refusal, nodes)));
        if usable.is_empty() && !refusing.is_empty() {
            return help;
        }
        help.extend(self.missing_resource_lines(nodes, &usable));
        let fit = self.ledger.fit(self.device_requests, usable.iter().copied(), 1, &Tightest);
        if matches!(fit, Err(NoFit::TooMany | NoFit::TooFew { .. })) {
            let advice = "The pod's containers together request more than any node has, even an empty one. Add a node with more GPUs, or use fewer containers per pod.";
            help.push(advice.to_owned());
        }
        help
    }

    /// Returns the nodes that have enough free slices for the pod but refuse the pod, by reason.
    fn unusable_nodes_by_refusal<'n>(&self, nodes: &'n [NodeView]) -> BTreeMap<&'n str, Vec<&'n str>> {
        let mut refusing: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for node in nodes {
            if let Some(refusal) = &node.refusal
                && self.ledger.fit(self.device_requests, [node.name.as_str()], 1, &Tightest).is_ok()
            {
                refusing.entry(refusal).or_default().push(&node.name);
            }
        }
        refusing
    }

    /// Suggests pods to remove so that the pod fits, or returns `None` if there are no such pods.
    /// Ignores priorities: users can delete any of these pods, and some pods end by themselves.
    fn suggest_removals(&self, usable: &BTreeSet<&str>) -> Option<String> {
        let holders = self.removable_pods();
        let lowered = |holder: &Holder<'static>| Holder { priority: holder.priority.min(i32::MAX - 1), ..*holder };
        let lowered_all = |pods: &BTreeMap<String, Holder<'static>>| {
            pods.iter().map(|(name, holder)| (name.clone(), lowered(holder))).collect()
        };
        let pods = holders.pods.iter().map(|(node, pods)| (node.clone(), lowered_all(pods))).collect();
        let lower = Holders { pods, ..Holders::default() };
        let waiting = PendingPod { pod: self.name, priority: i32::MAX, device_requests: self.device_requests };
        let found = self.ledger.preempt(waiting, usable.iter().copied(), &lower, &BTreeSet::new())?;
        let gpus: BTreeSet<String> =
            found.takes.iter().map(|take| self.gpu_or_device_name(&found.node, &take.device)).collect();
        let gpus = gpus.into_iter().collect::<Vec<_>>().join(", ");
        Some(self.removal_suggestion(&found, &gpus, &holders))
    }

    fn removal_suggestion(&self, found: &Preemption, gpus: &str, holders: &Holders<'static>) -> String {
        let node = &found.node;
        if found.victims.is_empty() {
            let fits = self.ledger.fit(self.device_requests, [node.as_str()], 1, &Tightest).is_ok();
            let when = if fits { "has room now" } else { "will have room once terminating pods have exited" };
            return format!("{gpus} on {node} {when}.");
        }
        let priority = self.pod.spec.priority.unwrap_or(0);
        let describe = |victim: &String| {
            let of = holders.get(node, victim).map_or(0, |holder| holder.priority);
            let order = match of.cmp(&priority) {
                Ordering::Less => "lower",
                Ordering::Equal => "same",
                Ordering::Greater => "higher",
            };
            format!("{victim} ({order} priority)")
        };
        let victims: Vec<String> = found.victims.iter().map(describe).collect();
        format!("The pod would fit on {gpus} on {node} without these pods: {}.", victims.join(", "))
    }

    /// Returns the bound pods that can be removed to free slices. Excludes pods on cordoned or
    /// unhealthy GPUs, because slices of these GPUs remain unavailable.
    fn removable_pods(&self) -> Holders<'static> {
        let is_unavailable = |node: &str, gpu: &GpuStatus| {
            let cordons = self.live.observed.nodes.get(node).map(Node::cordons);
            unavailable_reason(gpu, &cordons.unwrap_or_default()).is_some()
        };
        let unusable: BTreeSet<(&str, &str)> = self
            .gpus()
            .filter(|(node, gpu)| is_unavailable(node, gpu))
            .flat_map(|(node, gpu)| gpu.allocations.iter().map(move |allocation| (node, allocation.pod.as_str())))
            .collect();
        let mut holders = Holders::default();
        for pod in &self.live.cluster.pods {
            let Some(node) = pod.node() else { continue };
            let name = full_name(&pod.metadata);
            if unusable.contains(&(node, name.as_str())) {
                continue;
            }
            let started = pod.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
            let holder = Holder {
                priority: pod.spec.priority.unwrap_or(0),
                started: Moment(u64::try_from(started).unwrap_or(0)),
                budget: None,
                requests: None,
                ending: pod.metadata.deletion_timestamp.is_some(),
            };
            holders.pods.entry(node.to_owned()).or_default().insert(name, holder);
        }
        holders
    }

    /// Returns a line for each requested resource that no usable node serves, or that no device of
    /// a usable node serves in the requested amount.
    fn missing_resource_lines(&self, nodes: &[NodeView], usable: &BTreeSet<&str>) -> Vec<String> {
        let resources: BTreeSet<&str> = self.device_requests.iter().map(|request| request.resource.as_str()).collect();
        resources.into_iter().filter_map(|resource| self.missing_resource_line(resource, nodes, usable)).collect()
    }

    fn missing_resource_line(&self, resource: &str, nodes: &[NodeView], usable: &BTreeSet<&str>) -> Option<String> {
        let totals = |node: &NodeView| -> Vec<u32> {
            let devices = node.gpus.iter().flat_map(|gpu| &gpu.devices);
            devices.filter(|device| device.resource == resource).map(|device| device.total).collect()
        };
        let here = nodes.iter().filter(|node| usable.contains(node.name.as_str())).flat_map(totals);
        let Some(largest) = here.max() else {
            let elsewhere = nodes.iter().any(|node| !totals(node).is_empty());
            return Some(if elsewhere {
                format!(
                    "Only nodes that refuse the pod serve {resource}. Apply a SharingPolicy that serves {resource} on other nodes."
                )
            } else {
                format!("No GPU serves {resource}. Apply a SharingPolicy that serves this resource.")
            });
        };
        let of_resource = self.device_requests.iter().filter(|request| request.resource == resource);
        let most = of_resource.map(|request| request.units.get()).max().unwrap_or(0);
        (most > largest).then(|| {
            format!(
                "A container requests {most} {resource} of one GPU, and the largest GPU has {largest}. Request at most {largest}, or apply a SharingPolicy that serves more on each GPU."
            )
        })
    }

    /// Returns how messages name a device: by the index of its GPU, or by the device's UUID if no
    /// agent reports the device.
    fn gpu_or_device_name(&self, node: &str, device: &str) -> String {
        let has = |gpu: &GpuStatus| gpu.uuid == device || gpu.slices.iter().any(|slice| slice.device == device);
        let found = self.gpus().find(|(on, gpu)| *on == node && has(gpu));
        found.map_or_else(|| device.to_owned(), |(_, gpu)| format!("GPU {}", gpu.index))
    }
}

/// Returns a sentence that names nodes that have enough free slices but refuse the pod, and the
/// reason.
fn refusal_line(refusal: &str, nodes: &[&str]) -> String {
    let named = nodes.iter().take(MAX_NAMED_NODES).copied().collect::<Vec<_>>().join(", ");
    let more = nodes.len().saturating_sub(MAX_NAMED_NODES);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let have = if nodes.len() == 1 { "has" } else { "have" };
    format!("{named}{more} {have} room, but: {refusal}.")
}
