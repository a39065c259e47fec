//! Describes the nodes and GPUs as one pod sees them.
use std::collections::BTreeMap;

use cleave_api::cordon::Cordons;
use cleave_api::gpunode::GpuStatus;
use cleave_api::names::is_served;
use cleave_operator::pods::full_name;
use cleave_operator::read::Node;
use cleave_plan::Quantity;
use cleave_plan::ledger::DeviceUsage;
use cleave_plan::scheduling::{PODS_RESOURCE, refusal};
use cleave_plan::snapshot::Node as PlanNode;

use super::report::{Assignment, DeviceView, GpuView, NodeView, PodState};
use super::view::PodContext;

/// Free amounts by resource, in thousandths of the resource's unit.
type FreeAmounts<'a> = BTreeMap<&'a str, u64>;

impl PodContext<'_> {
    /// Returns the nodes on which Cleave manages GPUs.
    pub(super) fn node_views(&self, assignments: &[Assignment], state: PodState) -> Vec<NodeView> {
        let wanted = self.planning_pod();
        let free = self.free_amounts();
        let ours = self.live.observed.nodes.iter().filter(|(_, node)| node.has_gpu_node());
        ours.map(|(name, node)| {
            let refusal = match node.gpu_node.as_ref().map(|object| &object.0) {
                Some(Err(invalid)) => Some(format!("the GpuNode is malformed: {}", invalid.error)),
                _ => refusal(&wanted, &to_plan_node(name, node))
                    .or_else(|| shortage(free.get(name.as_str()), &wanted.requests))
                    .or_else(|| not_serving_reason(node)),
            };
            NodeView { name: name.clone(), refusal, gpus: self.gpu_views(name, node, assignments, state) }
        })
        .collect()
    }

    fn gpu_views(&self, name: &str, node: &Node, assignments: &[Assignment], state: PodState) -> Vec<GpuView> {
        let cordons = node.cordons();
        let usages = self.ledger.devices(name);
        let specs = node.object().map(|object| object.spec.gpus.as_slice()).unwrap_or_default();
        let view = |gpu: &GpuStatus| {
            let unavailable = unavailable_reason(gpu, &cordons);
            let here = || assignments.iter().filter(|assignment| assignment.node == name);
            let device = |usage| self.device_view(usage, unavailable.as_deref(), here(), state);
            let devices = usages.iter().filter(|usage| is_device_of(usage, gpu)).map(device).collect();
            let spec = specs.iter().find(|spec| spec.uuid == gpu.uuid);
            GpuView {
                index: gpu.index,
                uuid: gpu.uuid.clone(),
                model: gpu.model.clone(),
                mode: gpu.mode.clone(),
                policy: spec.and_then(|spec| spec.policy.clone()),
                unavailable,
                devices,
            }
        };
        node.reported().unwrap_or_default().iter().map(view).collect()
    }

    fn device_view<'h>(
        &self,
        usage: &DeviceUsage,
        unavailable: Option<&str>,
        assignments: impl Iterator<Item = &'h Assignment>,
        state: PodState,
    ) -> DeviceView {
        let largest = self
            .device_requests
            .iter()
            .filter(|request| request.resource == usage.resource)
            .map(|request| request.units.get())
            .max();
        let own = assignments.filter(|own| own.device == usage.device && own.resource == usage.resource);
        let own: u32 = own.map(|own| own.units).sum();
        let note = match (largest, unavailable) {
            (Some(_), _) if own > 0 => format!("{own} for this pod"),
            (_, Some(unavailable)) => unavailable.to_owned(),
            (None, _) => "not requested".to_owned(),
            _ if !state.needs_room() => String::new(),
            (Some(most), _) if most > usage.capacity => format!("too small for {most}"),
            (Some(most), _) if most > usage.free => format!("{} short of {most}", most - usage.free),
            (Some(_), _) => "has room".to_owned(),
        };
        DeviceView {
            device: usage.device.clone(),
            resource: usage.resource.clone(),
            total: usage.capacity,
            used: usage.used,
            reserved: usage.reserved,
            free: usage.free,
            note,
        }
    }

    /// Returns the free amounts, by node, of resources that Cleave does not serve. Resources that
    /// the explained pod uses count as free.
    fn free_amounts(&self) -> BTreeMap<&str, FreeAmounts<'_>> {
        let mut free: BTreeMap<&str, FreeAmounts> = BTreeMap::new();
        for (name, node) in &self.live.observed.nodes {
            let amounts = node.allocatable.iter().filter(|(resource, _)| !is_served(resource));
            let amounts = amounts.map(|(resource, amount)| (resource.as_str(), amount.milli().unwrap_or(0)));
            free.insert(name, amounts.collect());
        }
        let one = [(PODS_RESOURCE.to_owned(), Quantity::whole(1))];
        for pod in self.live.cluster.pods.iter().filter(|pod| full_name(&pod.metadata) != self.name) {
            let runs = !pod.has_ended();
            let Some(amounts) = pod.node().filter(|_| runs).and_then(|node| free.get_mut(node)) else { continue };
            for (resource, amount) in pod.spec.requests.iter().chain(one.iter().map(|(name, amount)| (name, amount))) {
                if let Some(left) = amounts.get_mut(resource.as_str()) {
                    *left = left.saturating_sub(amount.milli().unwrap_or(0));
                }
            }
        }
        free
    }
}

/// Returns why no new pod can use a GPU now. Returns `None` if the GPU is usable.
pub(super) fn unavailable_reason(gpu: &GpuStatus, cordons: &Cordons) -> Option<String> {
    if let Some(reason) = cordons.0.get(&gpu.uuid) {
        return Some(if reason.is_empty() { "cordoned".to_owned() } else { format!("cordoned: {reason}") });
    }
    let why = if gpu.health.message.is_empty() { &gpu.health.reason } else { &gpu.health.message };
    (!gpu.health.healthy).then(|| if why.is_empty() { "unhealthy".to_owned() } else { format!("unhealthy: {why}") })
}

/// Returns why Cleave serves no GPUs on a node. Returns `None` if Cleave serves the node's GPUs.
fn not_serving_reason(node: &Node) -> Option<String> {
    match node.agent {
        None => Some("no Cleave agent runs on the node".to_owned()),
        Some(agent) if !agent.ready => Some("the agent is not ready".to_owned()),
        Some(_) if node.reported().is_none() => Some("the agent has not reported the node's GPUs".to_owned()),
        Some(_) => None,
    }
}

/// Returns the input of planning for a node, without its GPUs.
fn to_plan_node(name: &str, node: &Node) -> PlanNode {
    PlanNode {
        name: name.to_owned(),
        labels: node.labels.clone(),
        taints: node.taints.clone(),
        unschedulable: node.unschedulable,
        allocatable: node.allocatable.clone(),
        ..PlanNode::default()
    }
}

/// Returns a message about the first resource, apart from GPUs, that is insufficient on a node.
/// Returns `None` if all resources are sufficient.
fn shortage(free: Option<&FreeAmounts>, requests: &BTreeMap<String, Quantity>) -> Option<String> {
    let free = |resource: &str| free.and_then(|free| free.get(resource)).copied();
    let amount = |milli: u64| if milli.is_multiple_of(1000) { (milli / 1000).to_string() } else { format!("{milli}m") };
    if free(PODS_RESOURCE).is_some_and(|left| left < 1000) {
        return Some("the node runs its maximum number of pods".to_owned());
    }
    requests.iter().filter(|(resource, _)| !is_served(resource)).find_map(|(resource, wanted)| {
        let (wanted, left) = (wanted.milli().unwrap_or(0), free(resource).unwrap_or(0));
        (wanted > left).then(|| format!("not enough {resource}: {} requested, {} free", amount(wanted), amount(left)))
    })
}

/// Returns whether a device is the GPU, or a part of the GPU's current or planned partition.
fn is_device_of(usage: &DeviceUsage, gpu: &GpuStatus) -> bool {
    usage.device.starts_with(&gpu.uuid) || gpu.slices.iter().any(|slice| slice.device == usage.device)
}
